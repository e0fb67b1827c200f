"""Sum up recorded steps: exposed communication, overlap, and each collective beside its plan, as data and as tables.

    communication   a link is busy      |--------|   |-----|
    waiting         nothing computes           |=|   |==|
    exposed         all of the waiting  overlap: the share of communication during which nothing waits

Seconds are those of one step, the mean of the recorded ones. A collective that a rank began early also waits for the
other ranks. So its time is that of the rank that came last, and its exposed time that of the rank that waited longest.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..tools.tables import WIDTH, Rows, format_bytes, on_one_line, plural
from .listen import EAGER
from .record import length, union, without
from .traces import Ran, Trace, read_folder

if TYPE_CHECKING:  # else it is imported in functions, because most programs never print a table
    from rich.console import RenderableType

_WORST = 5
_OF_RANKS = ("rank", "step", "communication", "exposed", "of the step", "overlap")
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

        console = Console(width=WIDTH, color_system=None)
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
    return Rows(title, _OF_RANKS, rows, num_names=0)


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
    heads = ("collective", "in", "bytes", "took", "planned", "exposed", "planned")
    return Rows(title, heads, rows, num_names=2)


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
    return Rows(title, ("", "measured", "planned", "ratio"), rows, below)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _named(ranks: Sequence[int]) -> str:
    first, *others = map(str, ranks)
    return f"rank {first}" if not others else f"ranks {', '.join([first, *others[:-1]])} and {others[-1]}"


def summarize(folder: str | Path) -> Summary:
    """Return the summary of all ranks whose traces are in a folder; ValueError where there are none."""
    traces = read_folder(folder)
    first = traces[0]
    collectives = tuple(_collectives(traces))
    takes = [(one.seconds * one.count, one.planned_s * one.count) for one in collectives if one.planned_s is not None]
    return Summary(
        folder=Path(folder),
        num_steps=len(first.steps),
        world_size=first.world_size,
        hardware=first.hardware.name,
        ranks=tuple(map(_of_rank, traces)),
        collectives=collectives,
        takes=_total(takes, num_steps=1),
        waits=_largest(traces, _waits),
        graphs=_largest(traces, _graphs),
    )


def _of_rank(trace: Trace) -> OfRank:
    busy = union((one.start_s, one.end_s) for one in trace.collectives)
    waited = union(interval for one in trace.collectives for interval in one.waited)
    communication = length(busy)
    hidden = sum(length(without(one, waited)) for one in busy)
    return OfRank(
        rank=trace.rank,
        step_s=length(trace.steps) / trace.num_steps,
        communication_s=communication / trace.num_steps,
        exposed_s=length(waited) / trace.num_steps,
        overlap=hidden / communication if communication else 1.0,
    )


def _collectives(traces: Sequence[Trace]) -> Iterable[OfCollective]:
    for runs in together(traces):
        one = runs[0][0][1]
        yield OfCollective(
            name=one.name,
            kind=one.kind,
            stage=one.stage,
            parameters=one.parameters,
            num_bytes=one.num_bytes,
            num_ranks=len(one.ranks),
            count=max(Counter(rank for run in runs for rank, _ in run).values()) / traces[0].num_steps,
            seconds=statistics.mean(min(each.seconds for _, each in run) for run in runs),
            exposed_s=statistics.mean(max(each.exposed_s for _, each in run) for run in runs),
            planned_s=_mean([each.planned_s for run in runs for _, each in run]),
            planned_exposed_s=_mean([each.planned_exposed_s for run in runs for _, each in run]),
        )


def together(traces: Sequence[Trace]) -> list[list[list[tuple[int, Ran]]]]:
    """Return for each collective its runs, and for each run what the ranks of its group recorded, as (rank, record).

    Ranks of a group launch the same collectives in the same order: the n-th of a name in a step is the n-th on all.
    """
    found: dict[tuple[object, ...], dict[tuple[object, ...], list[tuple[int, Ran]]]]
    found = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        seen: dict[tuple[object, ...], int] = defaultdict(int)
        for one in trace.collectives:
            turn = one.step, one.identity
            # Ranks of other groups run a different collective of the same name.
            found[one.identity][one.step, one.ranks, seen[turn]].append((trace.rank, one))
            seen[turn] += 1
    return [list(runs.values()) for runs in found.values()]


def _waits(trace: Trace) -> list[tuple[float, float]]:
    """Return the exposed seconds, measured and planned, of each run of a collective whose wait was planned."""
    return [(one.exposed_s, one.planned_exposed_s) for one in trace.collectives if one.planned_exposed_s is not None]


def _graphs(trace: Trace) -> list[tuple[float, float]]:
    """Return the seconds of each call of a graph, measured and planned; none where a graph was not planned."""
    calls = [(call.seconds, call.planned_s) for call in trace.calls if call.planned_s is not None]
    return calls if len(calls) == len(trace.calls) else []


def _largest(traces: Sequence[Trace], planned: Callable[[Trace], list[tuple[float, float]]]) -> Total | None:
    """Return the total of one step on the rank on which it took longest."""
    totals = [_total(planned(trace), trace.num_steps) for trace in traces]
    return max(filter(None, totals), key=lambda one: one.measured_s, default=None)


def _total(pairs: Sequence[tuple[float, float]], num_steps: int) -> Total | None:
    if not pairs:
        return None
    return Total(sum(took for took, _ in pairs) / num_steps, sum(planned for _, planned in pairs) / num_steps)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None
