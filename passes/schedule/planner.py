"""Chooses the plan of a step from its joint graph: what is gathered again, what travels together, in which order.

    joint graph                          plan
    b1 = unshard(...)                    forward    gather 0  w0 b0      read first
    b0, w0 = unshard(...), ...                      gather 1  w1 b1
    y  = addmm(b0, x, t(w0))
    w1 = unshard(...)
    z  = addmm(b1, y, t(w1))
    ...                                  backward   gather 0  w1 b1
    gy = mm(gz, w1)                                 gather 1  w0 b0      one unit ahead
    r1 = reduce_grad(mm(t(gz), y))                  reduce 0  w1 b1
    ...                                             reduce 1  w0 b0

Where a marker stands says nothing: Inductor moves what has no place of its own, in inference graphs before our passes
see them. What computes with a parameter has its place, and so has what computes its gradient. And what the partitioner
makes of the joint graph says nothing either: the graphs that are cut from it execute what was planned here. A graph
that was cut from none (evaluation, compiled autograd) is planned for itself, by the same rules; a step that is one
graph as if it had been cut between its phases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter

import torch
from torch import fx

from .. import _torch_compat as compat
from ..ir import markers
from ..ir.emit import copied
from ..ir.meta import STEP
from ..ir.phases import is_backward, phase_of
from ..ir.plan import Bucket, Plan
from ..ir.provenance import Marker, by_unit, find_reduces, find_unshards, reduce_nodes, units_around, unshard_nodes
from ..ir.views import passes_on
from ..wire.spec import ParamSpec
from .activations import compute_again
from .buckets import gather_buckets, reduce_buckets
from .neighbours import with_neighbours
from .slices import keep_slice, slice_these, whole_of
from .structure import Structure, structure_of

# Where a bucket is to be launched: a place in a graph, and what tells two of one place apart.
Place = tuple[int, tuple[int | str, ...]]


def plan_joint(graph: fx.Graph, lookahead: int = 1) -> Plan:
    """The plan of a step: keep or regather each parameter, as its unit was told, and every launch of both graphs.

    Gathers are launched ``lookahead`` units before the one that they are of.
    """
    unshards, reduces = find_unshards(graph), find_reduces(graph)
    structure = structure_of(graph)
    place = {node: index for index, node in enumerate(graph.nodes)}
    kept = {one.node for one in unshards if not one.spec.regather and one.node not in structure.of_weights}
    plan = Plan(
        stage="joint",
        regather=tuple(one.fqn for one in unshards if one.node not in kept and whole_of(one.node) is None),
        again=tuple(one.fqn for one in unshards if one.node in structure.again),
        keep=tuple(one.fqn for one in unshards if one.node in kept),
        lookahead=lookahead,
    )
    if compat.partitioner_has_a_budget(graph):
        return plan  # it may compute anything again: each graph is planned as it comes
    return dataclasses.replace(
        plan,
        forward=_plan(
            "forward",
            [one for one in unshards if one.node in structure.in_forward],
            [],
            lambda one: (_first_read(one.node, place),),
            lambda one: 0,
            lookahead=lookahead,
        ),
        backward=_plan_backward(graph, structure, unshards, reduces, place, lookahead),
    )


def plan_keeping(
    graph: fx.Graph,
    kept: Collection[str],
    recompute: Collection[str] = (),
    sliced: Collection[str] = (),
    lookahead: int = 1,
) -> Plan:
    """The plan of a step that keeps these parameters, and regathers all others, whatever their units were told.

    What is computed with those in ``recompute`` is computed again in backward. The graph is told so; slices of those in
    ``sliced`` are for ``chosen_slices`` to cut.
    """
    compute_again(graph, recompute)
    for one in find_unshards(graph):
        one.node.update_kwarg("regather", one.fqn not in kept)
    if sliced:
        graph = copied(graph)
        slice_these(graph, sliced)
    plan = plan_joint(graph, lookahead)
    return dataclasses.replace(plan, recompute=tuple(sorted(recompute)), slices=tuple(sorted(sliced)))


def _plan_backward(
    graph: fx.Graph,
    structure: Structure,
    unshards: Sequence[Marker],
    reduces: Sequence[Marker],
    place: Mapping[fx.Node, int],
    lookahead: int,
) -> Plan:
    named = {marker.node: marker.fqn for marker in unshards}
    again = [as_the_whole(one, named) for one in unshards if one.node in structure.again]
    found = {one.unit for one in unshards if one.node not in structure.of_weights}
    kept: dict[str, int] = {}
    for one in reduces:
        if one.unit in found:  # its first gradient, as where it is first read may depend on a batch of none or one
            kept[one.unit] = min(place[one.node], kept.get(one.unit, place[one.node]))
    return _plan(
        "backward",
        again,
        reduces,
        lambda one: structure.again[one.node],
        lambda one: place[one.node],  # autograd's order; what stands before it may depend on a batch of one
        kept=kept,
        lookahead=lookahead,
    )


def plan_whole(graph: fx.Graph) -> Plan:
    """The plan of a step that is one graph: its phases one after another, each planned like a graph of its own."""
    unshards, reduces = find_unshards(graph), find_reduces(graph)
    place = {node: index for index, node in enumerate(graph.nodes)}
    needed = {one.node: _first_read(one.node, place) for one in unshards}
    first = {(phase_of(one.node), one.shard): one for one in unshards if not is_backward(phase_of(one.node))}
    plan = Plan(
        stage="whole",
        regather=tuple(one.fqn for one in first.values() if one.spec.regather),
        again=tuple(_read_before(one, first).fqn for one in unshards if is_backward(phase_of(one.node))),
        keep=tuple(one.fqn for one in first.values() if not one.spec.regather),
    )
    for phase in sorted({phase_of(one.node) for one in (*unshards, *reduces)}):
        gathers = [one for one in unshards if phase_of(one.node) == phase]
        reductions = [one for one in reduces if phase_of(one.node) == phase]
        one_phase = _plan(
            "whole", gathers, reductions, lambda one: (needed[one.node],), lambda one: place[one.node], phase
        )
        offsets = {"gather": len(plan.gathers), "reduce": len(plan.reduces)}
        plan = dataclasses.replace(
            plan,
            gathers=plan.gathers + one_phase.gathers,
            reduces=plan.reduces + one_phase.reduces,
            order=plan.order + tuple((kind, offsets[kind] + index) for kind, index in one_phase.order),
        )
    return plan


def _read_before(again: Marker, first: Mapping[tuple[int, fx.Node], Marker]) -> Marker:
    """Of a gather in backward, the one of the same weight in the forward before it; itself where there is none."""
    whole = whole_of(again.node)
    shard = again.shard if whole is None else whole.args[0]
    return first.get((phase_of(again.node) - 1, shard), again)  # type: ignore[arg-type]


def plan_graph(graph: fx.Graph, stage: str) -> Plan:
    """The plan of a forward, backward or inference graph: what the joint graph's says, where it was cut from one."""
    unshards, reduces = find_unshards(graph), find_reduces(graph)
    step = step_of(graph)
    planned = None
    if step is not None:
        planned = {"forward": step.forward, "backward": step.backward, "whole": step}.get(stage)
    if planned is not None:
        return _present(planned, unshards, reduces)
    place = {node: index for index, node in enumerate(graph.nodes)}
    return _plan(
        stage, unshards, reduces, lambda one: (_first_read(one.node, place),), lambda one: _computed(one.shard, place)
    )


def step_of(graph: fx.Graph) -> Plan | None:
    """The plan of the step, where the markers say one."""
    return next((node.meta[STEP] for node in (*unshard_nodes(graph), *reduce_nodes(graph)) if STEP in node.meta), None)


def as_the_whole(marker: Marker, named: dict[fx.Node, str]) -> Marker:
    """A marker that gathers slices of a parameter by the parameter's name: in backward it stands alone."""
    whole = whole_of(marker.node)
    return marker if whole is None else dataclasses.replace(marker, fqn=named[whole])


def _present(planned: Plan, unshards: Sequence[Marker], reduces: Sequence[Marker]) -> Plan:
    """The plan without what is not in the graph; raises for what is in the graph and not in the plan."""
    more = {one.fqn for one in unshards} - {fqn for bucket in planned.gathers for fqn in bucket.fqns}
    if more:
        raise RuntimeError(
            f"the {planned.stage} graph gathers {', '.join(sorted(more))}, which the plan of the step does not: a pass "
            "or a partitioner that was set beside fsdp_compile computes again what reads it. Ranks with batches of "
            "other sizes may not, and then hang. Take that pass away, or call "
            "module.set_reshard_after_forward(False) on the unit."
        )
    return only(planned, unshards, reduces)


def only(plan: Plan, unshards: Sequence[Marker], reduces: Sequence[Marker]) -> Plan:
    """The plan with nothing but these in its buckets."""
    gathers, kept_gathers = _those_present(plan.gathers, unshards, lambda spec: spec.gather_bytes)
    reductions, kept_reductions = _those_present(plan.reduces, reduces, lambda spec: spec.reduce_bytes)
    places = {"gather": kept_gathers, "reduce": kept_reductions}
    order = tuple((kind, places[kind][index]) for kind, index in plan.order if index in places[kind])
    return dataclasses.replace(plan, gathers=gathers, reduces=reductions, order=order)


def _those_present(
    buckets: Sequence[Bucket], found: Sequence[Marker], num_bytes: Callable[[ParamSpec], int]
) -> tuple[tuple[Bucket, ...], dict[int, int]]:
    """The buckets less what was not found, and where each bucket that is left was and is."""
    specs = {one.fqn: one.spec for one in found}
    left: list[Bucket] = []
    place: dict[int, int] = {}
    for index, bucket in enumerate(buckets):
        fqns = tuple(fqn for fqn in bucket.fqns if fqn in specs)
        if fqns:
            place[index] = len(left)
            left.append(dataclasses.replace(bucket, fqns=fqns, num_bytes=sum(num_bytes(specs[fqn]) for fqn in fqns)))
    return tuple(left), place


def _plan(
    stage: str,
    unshards: Sequence[Marker],
    reduces: Sequence[Marker],
    read_at: Callable[[Marker], tuple[int, ...]],
    computed_at: Callable[[Marker], int],
    phase: int = 0,
    kept: Mapping[str, int] | None = None,
    lookahead: int = 1,
) -> Plan:
    """``kept`` says where the graph has the first gradient of each unit that it finds gathered."""
    backwards = stage == "backward" or is_backward(phase)
    gathers = _placed_gathers(unshards, lambda one: (read_at(one)[0], (*read_at(one)[1:], *_tie(one))), backwards)
    reductions = _placed_reductions(reduces, lambda one: (computed_at(one), _tie(one)))
    plan = Plan(
        stage=stage,
        gathers=tuple(dataclasses.replace(bucket, phase=phase) for _, bucket in gathers),
        reduces=tuple(dataclasses.replace(bucket, phase=phase) for _, bucket in reductions),
        lookahead=lookahead,
    )
    gathered = {one.unit for one in unshards}
    found = [place for unit, place in (kept or {}).items() if unit not in gathered]
    order = _order(gathers, [place for place, _ in reductions], sorted(found), plan.lookahead)
    return dataclasses.replace(plan, order=order)


def _order(
    gathers: Sequence[tuple[int, Bucket]], computed: Sequence[int], found: Sequence[int], lookahead: int
) -> tuple[tuple[str, int], ...]:
    """Every launch in one order: a unit's gathers where the unit before it begins, reductions where they are ready.

    ``found`` says where units begin that are gathered already.
    """
    begins: list[int] = []  # of each unit in turn: where it is first read
    turns: list[int] = []  # of each gather
    for index, (place, bucket) in enumerate(gathers):
        if index == 0 or bucket.unit != gathers[index - 1][1].unit:
            begins.append(place)
        turns.append(len(begins) - 1)

    def launched_at(turn: int) -> int:
        before = sorted([*begins[:turn], *(place for place in found[1:] if place < begins[turn])])
        # With the graph begins what it reads first.
        first = turn == 0 and len(before) < lookahead
        return -1 if first else before[max(0, len(before) - lookahead)]

    events = [(launched_at(turn), 0, "gather", index) for index, turn in enumerate(turns)]
    events += [(place, 1, "reduce", index) for index, place in enumerate(computed)]
    return tuple((kind, index) for _, _, kind, index in sorted(events))


def gather_bucket(unit: str, members: Sequence[Marker]) -> Bucket:
    """What travels in one all-gather."""
    spec = members[0].spec
    return _bucket(unit, members, spec.dtype, [one.spec.gather_bytes for one in members], num_replicas=1)


def reduce_bucket(unit: str, members: Sequence[Marker]) -> Bucket:
    """What travels in one reduction."""
    spec = members[0].spec
    sizes = [one.spec.reduce_bytes for one in members]
    return _bucket(unit, members, spec.reduce_dtype, sizes, num_replicas=spec.num_replicas)


def _bucket(
    unit: str, members: Sequence[Marker], dtype: torch.dtype, sizes: Sequence[int], num_replicas: int
) -> Bucket:
    return Bucket(
        unit=unit,
        fqns=tuple(one.fqn for one in members),
        dtype=str(dtype).removeprefix("torch."),
        num_bytes=sum(sizes),
        num_ranks=members[0].spec.num_shards,
        num_replicas=num_replicas,
    )


def _placed_gathers(
    found: Sequence[Marker], read_at: Callable[[Marker], Place], backwards: bool
) -> list[tuple[int, Bucket]]:
    """Return the gathers in the order of launch, each with the place in the graph that it is for.

    A unit is gathered as a whole where it, or a unit inside it, is first read, as on the eager path, where that is the
    begin of its forward. But a model's root comes in parts in forward, each where it is read.
    """
    units = by_unit(with_neighbours(found, read_at, small_end=0))
    around = units_around(units)
    first = {unit: min(map(read_at, members)) for unit, members in units.items()}
    begins = dict(first)  # of each unit, with the units inside it
    for unit, outer in around.items():
        begins.update((one, min(begins[one], first[unit])) for one in outer)
    has_inner = {one for outer in around.values() for one in outer}
    placed: list[tuple[Place, int, int, Bucket]] = []
    for unit, members in units.items():
        in_parts = not backwards and unit in has_inner and not around[unit]
        for number, indices in enumerate(gather_buckets([one.spec for one in members])):
            chosen = [members[index] for index in indices]
            place = min(map(read_at, chosen)) if in_parts else begins[unit]
            placed.append((place, len(around[unit]), -number if backwards else number, gather_bucket(unit, chosen)))
    return [(place, bucket) for (place, _), *_, bucket in sorted(placed, key=lambda one: one[:3])]


def _placed_reductions(found: Sequence[Marker], computed_at: Callable[[Marker], Place]) -> list[tuple[int, Bucket]]:
    """Return the reductions in the order of launch, each with the place in the graph where its gradients are there.

    A unit's buckets have their own order, so a reduction waits for those before it.
    """
    placed: list[tuple[Place, Bucket]] = []
    for unit, members in by_unit(with_neighbours(found, computed_at, small_end=-1)).items():
        ready: Place = (0, ())
        for indices in reversed(reduce_buckets([one.spec for one in members])):
            chosen = [members[index] for index in indices]
            ready = max(ready, *map(computed_at, chosen))
            placed.append((ready, reduce_bucket(unit, chosen)))
    return [(place, bucket) for (place, _), bucket in sorted(placed, key=itemgetter(0))]


def _first_read(gathered: fx.Node, place: Mapping[fx.Node, int]) -> int:
    """Where a graph first computes with a parameter, looking through views and casts; its end when it never does."""
    first, work = len(place), [gathered]
    while work:
        for user in work.pop().users:
            if passes_on(user) or user.target in (keep_slice, markers.unshard):
                work.append(user)
            else:
                first = min(first, place[user])
    return first


def _computed(grad: fx.Node, place: Mapping[fx.Node, int]) -> int:
    """Where a graph has computed a gradient but for views and casts, which may stand anywhere behind that."""
    while passes_on(grad) and isinstance(grad.args[0], fx.Node):
        grad = grad.args[0]
    return place[grad]


def _tie(marker: Marker) -> tuple[int, str]:
    """The order of what one node reads, or computes."""
    return marker.spec.order, marker.fqn
