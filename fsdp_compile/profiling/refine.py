"""Make a hardware profile from a measured run: its collectives and matrix products replace the estimates.

    traces        collectives of each process group, by kind and size; products of matrices, by dtype
    fit           seconds = latency + bytes on the wire / bandwidth, least squares, as `fsdp-compile calibrate` does
    profile       the profile that the run was planned by, with the figures that were measured

The time of a collective is that of the rank that came last. The median of all runs of one size counts, or of only those
that had the wires to themselves, where there are any. Matrix products likewise: only those beside no collective count,
where there are any, and collectives cost the time by which the other products are slower than these.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..passes import HardwareProfile
from ..passes.cost.profiles import Fit, Link
from ..passes.cost.roofline import Group, bytes_on_link
from ..tools.calibrate import fit_line, measured_link
from ..tools.measure import slowdown_share
from ..tools.tables import Rows
from .record import Interval, union
from .summary import together
from .traces import Trace, read_folder

_LEAST_SHARE = 0.02  # of the time in products; sizes that take less say little of what large products reach
_DOUBTFUL = 1.0  # how far a fit may be off, as a share of a size's time


@dataclass(frozen=True)
class Fitted:
    """One kind of collective over one dimension of a mesh.

    The process groups of a dimension have one size and one number of ranks on each node, so one Group stands for all.
    """

    dimension: Group
    kind: str
    fit: Fit
    points: tuple[tuple[float, float], ...]  # bytes on the wire, seconds

    @property
    def error(self) -> float:
        """The largest error of the fit, as a share of a size's time."""
        return max(abs((self.fit.latency_s + sent / self.fit.bytes_per_s) / took - 1) for sent, took in self.points)


@dataclass(frozen=True)
class Refined:
    """A profile, and what it is made of."""

    profile: HardwareProfile
    base: HardwareProfile
    fitted: tuple[Fitted, ...]
    flops: dict[str, float]


def refine(folder: str | Path, name: str | None = None) -> Refined:
    """Refine a profile with the traces in a folder; ValueError where these have no collective and no product."""
    traces = read_folder(folder)
    base, backend = traces[0].hardware, traces[0].backend
    if len({trace.hardware for trace in traces}) > 1:
        raise ValueError(f"{folder}: its ranks were planned by different profiles. Give all the same --hardware.")
    fitted = tuple(_fits(traces, backend or base.backend))
    flops, slowed = _products(traces)
    if not fitted and not flops:
        raise ValueError(
            f"{folder}: no collective and no product of matrices is recorded in it, so there is nothing to refine. "
            "Profile a step that trains on two ranks at least."
        )
    profile = dataclasses.replace(
        base,
        name=name or f"{base.name}, refined",
        backend=backend if backend in ("gloo", "nccl") else base.backend,
        ranks_per_node=_ranks_per_node(traces),
        inside=_link(base.inside, [one for one in fitted if not one.dimension.spans_nodes], slowed),
        between=_link(base.between, [one for one in fitted if one.dimension.spans_nodes], slowed),
        flops={**{dtype: value * base.matmul_efficiency for dtype, value in base.flops.items()}, **flops},
        matmul_efficiency=1.0,
    )
    return Refined(profile, base, fitted, flops)


def _ranks_per_node(traces: Sequence[Trace]) -> int:
    """Return the ranks of a node as seen; with traces missing, or one node only, as planned if the traces fit that."""
    seen = Counter(trace.host for trace in traces)
    most, planned = max(seen.values()), traces[0].hardware.ranks_per_node
    if len(seen) > 1 and len(traces) == traces[0].world_size:
        return most
    places = {(trace.host, trace.rank // planned) for trace in traces}
    may_be = len(places) == len(seen) == len({place for _, place in places})
    return max(most, planned) if may_be else most


def _fits(traces: Sequence[Trace], backend: str) -> Iterable[Fitted]:
    """Yield the fits in the order of dimensions and kinds."""
    per_node = _ranks_per_node(traces)
    # A rank without a trace is on the node of the ranks next to it: nodes are filled one after the other.
    node_of = {trace.rank // per_node: trace.host for trace in traces}
    hosts = {trace.rank: trace.host for trace in traces}
    busy = {trace.rank: [(one.start_s, one.end_s) for one in trace.collectives] for trace in traces}
    took: dict[tuple[Group, str, int], list[tuple[bool, float]]] = defaultdict(list)
    for runs in together(traces):
        for run in runs:
            rank, one = min(run, key=lambda each: each[1].seconds)
            if len(one.ranks) < 2 or not one.is_recorded or one.seconds <= 0:
                continue
            known = Counter(
                hosts.get(member) or node_of.get(member // per_node, str(member // per_node)) for member in one.ranks
            )
            dimension = Group(len(one.ranks), max(known.values()))
            is_alone = _num_beside((one.start_s, one.end_s), busy[rank]) == 1  # that is itself
            took[dimension, one.kind, one.num_bytes].append((is_alone, one.seconds))
    points: dict[tuple[Group, str], list[tuple[float, float]]] = defaultdict(list)
    for (dimension, kind, num_bytes), runs_of_size in took.items():
        alone = [seconds for is_alone, seconds in runs_of_size if is_alone]
        seconds = statistics.median(alone or [seconds for _, seconds in runs_of_size])
        points[dimension, kind].append((bytes_on_link(kind, num_bytes, dimension, backend), seconds))
    base = traces[0].hardware
    for (dimension, kind), found in sorted(points.items(), key=lambda one: (one[0][0].num_ranks, one[0][1])):
        known_s = (base.between if dimension.spans_nodes else base.inside).latency_s
        yield Fitted(dimension, kind, _fit(found, known_s), tuple(sorted(found)))


def _fit(points: Sequence[tuple[float, float]], known_s: float) -> Fit:
    """Fit a line to what one kind of collective took; ``known_s`` is the latency that the run was planned by."""
    smallest_s = min(points)[1]
    if len(points) == 1:  # cannot tell latency from bandwidth: latency stays, if it leaves time for the bytes
        return fit_line(points, min(known_s, smallest_s / 2))
    fit = fit_line(points)
    # A latency of 0 means that the largest sizes bent the line: then latency is at least the smallest size's time.
    return fit if fit.latency_s else fit_line(points, smallest_s)


def _link(base: Link, fitted: Sequence[Fitted], slowed: float | None) -> Link:
    """Return the link with what was measured on the largest groups; the rest stays as it was."""
    if not fitted:
        return base
    largest = max((one.dimension for one in fitted), key=lambda one: (one.num_ranks, one.ranks_per_node))
    fits = {one.kind: one.fit for one in fitted if one.dimension == largest}
    return measured_link(
        fits,
        largest,
        bytes_per_s=statistics.median(fit.bytes_per_s for fit in fits.values()),
        slows_compute=base.slows_compute if slowed is None else slowed,
    )


def _products(traces: Sequence[Trace]) -> tuple[dict[str, float], float | None]:
    """Return FLOP/s by dtype of the slowest rank, and the share that collectives cost; None where that is not known."""
    rates: dict[str, list[float]] = defaultdict(list)
    slowed: list[tuple[float, float]] = []  # seconds beside collectives, and what these products take alone
    for trace in traces:
        busy = union((one.start_s, one.end_s) for one in trace.collectives)
        by_size: dict[tuple[str, float], dict[bool, list[float]]] = defaultdict(lambda: {True: [], False: []})
        for product in trace.products:
            seconds = product.interval[1] - product.interval[0]
            if seconds > 0:
                is_beside = _num_beside(product.interval, busy) > 0
                by_size[product.dtype, product.flops][is_beside].append(seconds)
        total = sum(sum(times[True]) + sum(times[False]) for times in by_size.values())
        work: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (dtype, flops), times in by_size.items():
            best = times[False] or times[True]
            if sum(times[True]) + sum(times[False]) < _LEAST_SHARE * total:
                continue
            name = "tf32" if dtype == "float32" and trace.allows_tf32 and trace.device == "cuda" else dtype
            work[name][0] += flops * len(best)
            work[name][1] += sum(best)
            if times[False]:
                alone = statistics.median(times[False])
                slowed += [(seconds, alone) for seconds in times[True]]
        for name, (flops, seconds) in work.items():
            rates[name].append(flops / seconds)
    beside_s = sum(seconds for seconds, _ in slowed)
    lost = 1 - sum(alone for _, alone in slowed) / beside_s if beside_s else None
    share = None if lost is None else slowdown_share(lost)
    return {name: min(found) for name, found in sorted(rates.items())}, share


def _num_beside(interval: Interval, others: Sequence[Interval]) -> int:
    """Return how many of the others overlap with an interval."""
    return sum(start < interval[1] and end > interval[0] for start, end in others)


def doubts_of(refined: Refined) -> list[str]:
    """Return a warning for each fit that is far off, with what to do."""
    return [
        f"{one.kind} of {one.dimension}: the fit is off by {one.error:.0%} of what one size took, so what is "
        "planned by it will be off as well. Profile again on a machine that does nothing else, with more steps "
        "(--active) and units of more sizes; or measure it idle, with `fsdp-compile calibrate`."
        for one in refined.fitted
        if one.error > _DOUBTFUL
    ]


def table_of(refined: Refined) -> Rows:
    """Return a table of the fits and how far off they are."""
    rows = [
        [
            one.kind,
            str(one.dimension),
            f"{one.fit.latency_s * 1e3:.3f} ms",
            f"{one.fit.bytes_per_s / 1e9:,.2f} GB/s",
            str(len(one.points)),
            f"{one.error:.0%}",
        ]
        for one in refined.fitted
    ]
    for dtype, rate in refined.flops.items():
        rows.append([f"products, {dtype}", "", "", f"{rate / 1e9:,.1f} GFLOP/s", "", ""])
    return Rows(
        title=f"Measured, and {refined.base.name!r} for all else",
        heads=("", "where", "latency", "reaches", "sizes", "error"),
        cells=rows,
        below="error: the most that the fit is off, of a size's time",
        num_names=2,
    )
