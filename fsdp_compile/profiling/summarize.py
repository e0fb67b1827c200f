"""Sum up recorded steps in numbers: exposed communication, overlap, and each collective beside its plan.

    communication   a link is busy      |--------|   |-----|
    waiting         nothing computes           |=|   |==|
    exposed         all of the waiting  overlap: the share of communication during which nothing waits

Seconds are those of one step, the mean of the recorded ones. A collective that a rank began early also waits for the
other ranks. So its time is that of the rank that came last, and its exposed time that of the rank that waited longest.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from .record import common, length, union
from .summary import OfCollective, OfRank, Summary, Total
from .traces import Ran, Trace, read_folder


def summarize(folder: str | Path) -> Summary:
    """Return the summary of all ranks whose traces are in a folder; ValueError where there are none."""
    return summary_of(read_folder(folder), Path(folder))


def summary_of(traces: Sequence[Trace], folder: Path) -> Summary:
    first = traces[0]
    collectives = tuple(_collectives(traces))
    takes = [(one.seconds * one.count, one.planned_s * one.count) for one in collectives if one.planned_s is not None]
    return Summary(
        folder=folder,
        num_steps=len(first.steps),
        world_size=first.world_size,
        hardware=first.hardware.name,
        ranks=tuple(map(_of_rank, traces)),
        collectives=collectives,
        takes=_total(takes),
        waits=_waits(traces),
        graphs=_graphs(traces),
    )


def _of_rank(trace: Trace) -> OfRank:
    num_steps = max(len(trace.steps), 1)
    busy = union((one.start_s, one.end_s) for one in trace.collectives)
    waited = union(interval for one in trace.collectives for interval in one.waited)
    communication = length(busy)
    return OfRank(
        rank=trace.rank,
        step_s=length(trace.steps) / num_steps,
        communication_s=communication / num_steps,
        exposed_s=length(waited) / num_steps,
        overlap=1 - length(common(busy, waited)) / communication if communication else 1.0,
    )


def _collectives(traces: Sequence[Trace]) -> Iterable[OfCollective]:
    num_steps = max(len(traces[0].steps), 1)
    for runs in together(traces):
        one = runs[0][0][1]
        yield OfCollective(
            name=one.name,
            kind=one.kind,
            stage=one.stage,
            parameters=one.parameters,
            num_bytes=one.num_bytes,
            num_ranks=len(one.ranks),
            count=max(Counter(rank for run in runs for rank, _ in run).values()) / num_steps,
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


def _waits(traces: Sequence[Trace]) -> Total | None:
    """Return the planned waits of one step, and their measured times, on the rank that waits longest."""
    totals = []
    for trace in traces:
        num_steps = max(len(trace.steps), 1)
        known = [one for one in trace.collectives if one.planned_exposed_s is not None]
        planned = [(one.exposed_s, one.planned_exposed_s or 0.0) for one in known]
        if planned:
            totals.append(Total(sum(took for took, _ in planned) / num_steps, sum(s for _, s in planned) / num_steps))
    return max(totals, key=lambda one: one.measured_s, default=None)


def _graphs(traces: Sequence[Trace]) -> Total | None:
    """Return the time of one step's graphs on the slowest rank, among ranks on which all graphs were planned."""
    totals = []
    for trace in traces:
        calls = [(call.seconds, call.planned_s) for call in trace.calls if call.planned_s is not None]
        num_steps = max(len(trace.steps), 1)
        if calls and len(calls) == len(trace.calls):
            totals.append(Total(sum(took for took, _ in calls) / num_steps, sum(s for _, s in calls) / num_steps))
    return max(totals, key=lambda one: one.measured_s, default=None)


def _total(pairs: Sequence[tuple[float, float]]) -> Total | None:
    return Total(sum(took for took, _ in pairs), sum(planned for _, planned in pairs)) if pairs else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None
