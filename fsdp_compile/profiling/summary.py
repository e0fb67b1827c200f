"""The summary of recorded steps, as data and as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..tools.tables import format_bytes, on_one_line, plural
from .printed import Column, Rows

if TYPE_CHECKING:  # else it is imported in functions, because most programs never print a table
    from rich.console import RenderableType

_WORST = 5
_WIDTH = 110
_OF_RANKS = ("rank", "step", "communication", "exposed", "of the step", "overlap")
EAGER = "eager"  # takes the place of a graph's stage
_NOT_SEEN = (
    "the graphs had been compiled before the profile began, or came from a cache; run it anew with "
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, which reads none"
)


@dataclass(frozen=True)
class OfRank:
    """One rank's step."""

    rank: int
    step_s: float
    communication_s: float  # while at least one collective was on the wire
    exposed_s: float  # while computation waited for one
    overlap: float  # share of communication during which nothing waited; 1 where there was none to hide


@dataclass(frozen=True)
class OfCollective:
    """One collective, over all ranks and steps."""

    name: str
    kind: str
    stage: str
    parameters: tuple[str, ...]
    num_bytes: int
    num_ranks: int
    count: float  # in a step
    seconds: float  # of one run
    exposed_s: float  # of one run
    planned_s: float | None
    planned_exposed_s: float | None


@dataclass(frozen=True)
class Total:
    """Measured and planned seconds of everything that was planned."""

    measured_s: float
    planned_s: float


@dataclass(frozen=True)
class Summary:
    """The summary of a run, from the traces of its ranks."""

    folder: Path
    num_steps: int
    world_size: int
    hardware: str  # the profile that the run was planned by
    ranks: tuple[OfRank, ...]
    collectives: tuple[OfCollective, ...]  # in the order of launch

    # Totals of a step's collectives, of the waits for them, and of the graphs that they are in; None without a plan.
    takes: Total | None
    waits: Total | None
    graphs: Total | None

    @property
    def step_s(self) -> float:
        """The seconds of a step on the slowest rank."""
        return max(one.step_s for one in self.ranks)

    @property
    def exposed_s(self) -> float:
        """The exposed seconds of the rank that waits longest."""
        return max(one.exposed_s for one in self.ranks)

    @property
    def overlap(self) -> float:
        """The overlap of the rank that hides least."""
        return min(one.overlap for one in self.ranks)

    @property
    def worst(self) -> tuple[OfCollective, ...]:
        """The collectives that are waited for longest in a step, at most five."""
        waited_for = [one for one in self.collectives if one.exposed_s > 0]
        return tuple(sorted(waited_for, key=lambda one: -one.exposed_s * one.count)[:_WORST])

    def all_collectives(self) -> Rows:
        """Return a table of every collective, in the order of launch."""
        return _table("Collectives in the order of launch; of one, in ms", self.collectives)

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*_parts(self))

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=_WIDTH, color_system=None)
        with console.capture() as printed:
            console.print(self)
        return printed.get().rstrip("\n")


def _parts(summary: Summary) -> Iterator[RenderableType]:
    from rich.text import Text

    yield _ranks(summary)
    missing = sorted(set(range(summary.world_size)) - {one.rank for one in summary.ranks})
    if missing:
        yield Text(f"Without {_named(missing)}, whose traces are not in {summary.folder}.")
    if summary.worst:
        yield _table("Waited for longest in a step; of one, in ms", summary.worst)
    elif summary.collectives:
        yield Text("No collective is waited for: all are hidden behind computation.")
    else:
        yield Text("No collective ran in the recorded steps.")
    if any(one.planned_s is not None for one in summary.collectives):
        yield _totals(summary)
    elif summary.collectives:
        yield Text("Nothing was planned: these collectives are of no module that fsdp_compile shards.")


def _ranks(summary: Summary) -> Rows:
    title = f"{plural(summary.world_size, 'rank')}, mean of {plural(summary.num_steps, 'step')}, in ms"
    rows = []
    for one in summary.ranks:
        share = one.exposed_s / one.step_s if one.step_s else 0.0
        cells = [_ms(one.step_s), _ms(one.communication_s), _ms(one.exposed_s), f"{share:.0%}", f"{one.overlap:.0%}"]
        rows.append([str(one.rank), *cells])
    return Rows(title, [Column(name) for name in _OF_RANKS], rows)


def _table(title: str, collectives: Sequence[OfCollective]) -> Rows:
    rows = [
        [
            on_one_line(one.name),
            one.stage or "-",
            format_bytes(one.num_bytes) + ("" if one.count == 1 else f" x{one.count:g}"),
            _ms(one.seconds),
            _ms(one.planned_s),
            _ms(one.exposed_s),
            _ms(one.planned_exposed_s),
        ]
        for one in collectives
    ]
    names = [Column("collective", is_number=False), Column("in", is_number=False)]
    return Rows(title, [*names, *map(Column, ("bytes", "took", "planned", "exposed", "planned"))], rows)


def _totals(summary: Summary) -> Rows:
    given: tuple[tuple[str, Total | None], ...] = (
        ("collectives, one after the other", summary.takes),
        ("waiting for them", summary.waits),
        ("forward and backward graph", summary.graphs),
    )
    rows = []
    for name, total in given:
        if total is not None:
            ratio = f"{total.measured_s / total.planned_s:.2f}" if total.planned_s else "-"
            rows.append([name, _ms(total.measured_s), _ms(total.planned_s), ratio])
    below = ""
    if summary.waits is None:
        stages = {one.stage for one in summary.collectives}
        below = f"No waiting was planned: {'the eager path has no plan' if stages <= {EAGER, ''} else _NOT_SEEN}."
    title = f"Measured beside planned on {summary.hardware!r}, in a step, in ms"
    columns = [Column("", is_number=False), *map(Column, ("measured", "planned", "ratio"))]
    return Rows(title, columns, rows, below)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _named(ranks: Sequence[int]) -> str:
    first, *others = map(str, ranks)
    return f"rank {first}" if not others else f"ranks {', '.join([first, *others[:-1]])} and {others[-1]}"
