"""What recorded steps took, as data, and as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..tools.tables import format_bytes, on_one_line, plural

if TYPE_CHECKING:  # and in functions, for most programs never print one
    from rich.console import RenderableType
    from rich.table import Table

_WORST = 5
_WIDTH = 110
EAGER = "eager"  # in the place of a graph's stage
_NOT_SEEN = "the graphs had been compiled before the profile began, or came from a cache"


@dataclass(frozen=True)
class OfRank:
    """One rank's step."""

    rank: int
    step_s: float
    communication_s: float  # at least one collective was on the wire
    exposed_s: float  # computation waited for one
    overlap: float  # share of communication beside which there was computation; 1 where there was none to hide


@dataclass(frozen=True)
class OfCollective:
    """The same collective of all ranks and steps."""

    name: str
    kind: str
    stage: str
    parameters: tuple[str, ...]
    num_bytes: int
    num_ranks: int
    count: float  # in a step
    seconds: float  # of one
    exposed_s: float  # of one
    planned_s: float | None
    planned_exposed_s: float | None


@dataclass(frozen=True)
class Total:
    """Measured beside planned, of what was planned."""

    measured_s: float
    planned_s: float


@dataclass(frozen=True)
class Summary:
    """Of a run, from the traces of its ranks."""

    folder: Path
    num_steps: int
    world_size: int
    hardware: str  # the profile that was planned by
    ranks: tuple[OfRank, ...]
    collectives: tuple[OfCollective, ...]  # in the order of launch

    # Of all collectives in a step, of waiting for them, and of the graphs that they are in; None without a plan.
    takes: Total | None
    waits: Total | None
    graphs: Total | None

    @property
    def step_s(self) -> float:
        """Of the slowest rank."""
        return max(one.step_s for one in self.ranks)

    @property
    def exposed_s(self) -> float:
        """Of the rank that waits longest."""
        return max(one.exposed_s for one in self.ranks)

    @property
    def overlap(self) -> float:
        """Of the rank that hides least."""
        return min(one.overlap for one in self.ranks)

    @property
    def worst(self) -> tuple[OfCollective, ...]:
        """At most five: those that are waited for longest in a step."""
        waited_for = [one for one in self.collectives if one.exposed_s > 0]
        return tuple(sorted(waited_for, key=lambda one: -one.exposed_s * one.count)[:_WORST])

    def all_collectives(self) -> Table:
        """Every collective, in the order of launch."""
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


def _ranks(summary: Summary) -> Table:
    table = _empty(f"{plural(summary.world_size, 'rank')}, mean of {plural(summary.num_steps, 'step')}, in ms")
    for name in ("rank", "step", "communication", "exposed", "of the step", "overlap"):
        table.add_column(name, justify="right")
    for one in summary.ranks:
        share = one.exposed_s / one.step_s if one.step_s else 0.0
        cells = [_ms(one.step_s), _ms(one.communication_s), _ms(one.exposed_s), f"{share:.0%}", f"{one.overlap:.0%}"]
        table.add_row(str(one.rank), *cells)
    return table


def _table(title: str, collectives: Sequence[OfCollective]) -> Table:
    from rich.text import Text

    table = _empty(title)
    table.add_column("collective", overflow="fold")
    for name in ("in", "bytes", "took", "planned", "exposed", "planned"):
        table.add_column(name, justify="left" if name == "in" else "right", no_wrap=True)
    for one in collectives:
        table.add_row(
            Text(on_one_line(one.name)),
            one.stage or "-",
            format_bytes(one.num_bytes) + ("" if one.count == 1 else f" x{one.count:g}"),
            _ms(one.seconds),
            _ms(one.planned_s),
            _ms(one.exposed_s),
            _ms(one.planned_exposed_s),
        )
    return table


def _totals(summary: Summary) -> Table:
    table = _empty(f"Measured beside planned on {summary.hardware!r}, in a step, in ms")
    for name in ("", "measured", "planned", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    rows: tuple[tuple[str, Total | None], ...] = (
        ("collectives, one after the other", summary.takes),
        ("waiting for them", summary.waits),
        ("forward and backward graph", summary.graphs),
    )
    for name, total in rows:
        if total is not None:
            ratio = f"{total.measured_s / total.planned_s:.2f}" if total.planned_s else "-"
            table.add_row(name, _ms(total.measured_s), _ms(total.planned_s), ratio)
    if summary.waits is None:
        stages = {one.stage for one in summary.collectives}
        why = "the eager path has no plan" if stages <= {EAGER, ""} else _NOT_SEEN
        table.caption, table.caption_justify = f"No waiting was planned: {why}.", "left"
    return table


def _empty(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _named(ranks: Sequence[int]) -> str:
    first, *others = map(str, ranks)
    return f"rank {first}" if not others else f"ranks {', '.join([first, *others[:-1]])} and {others[-1]}"
