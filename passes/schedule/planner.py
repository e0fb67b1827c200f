"""Make the plan of a step from its joint graph: find which parameters it uses and where; ``schedule`` has the rules.

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
from dataclasses import dataclass

from torch import fx

from .. import _torch_compat as compat
from ..ir import markers
from ..ir.aliases import is_free
from ..ir.meta import STEP
from ..ir.nodes import copied, passes_on, source_of
from ..ir.phases import is_backward, phase_of
from ..ir.plan import Bucket, Plan
from ..ir.provenance import Marker, find_reduces, find_unshards, reduce_nodes, unshard_nodes, whole_of
from ..wire.spec import ParamSpec
from .activations import compute_again
from .schedule import SentParam, launches
from .slices import slice_these
from .structure import structure_of
from .uses import UsedParam, first_read


def plan_joint(graph: fx.Graph, lookahead: int = 1) -> Plan:
    """The plan of a step: keep or regather each parameter, as its unit was told, and every launch of both graphs.

    Gathers are launched ``lookahead`` units before the one that they are of.
    """
    uses = uses_of(graph)
    if compat.partitioner_has_a_budget(graph):  # it may compute anything again: each graph is planned as it comes
        return dataclasses.replace(uses.becomes, lookahead=lookahead)
    return uses.plan(lookahead)


@dataclass(frozen=True)
class StepUses:
    """What a step uses of its parameters, and what becomes of these: its launches are planned by nothing else."""

    becomes: Plan  # without launches
    forward: tuple[UsedParam, ...]
    again: tuple[UsedParam, ...]  # in backward
    reduces: tuple[UsedParam, ...]
    found: frozenset[str]  # units that backward finds gathered, whole or in part
    sources: frozenset[str]  # parameters of which other tensors are computed: kept, these or those are saved

    def plan(self, lookahead: int) -> Plan:
        """Return the plan of the step."""
        first: dict[str, int] = {}
        for one in self.reduces:
            if one.unit in self.found:  # its first gradient, as where it is first read may depend on a batch of none
                first[one.unit] = min(one.place[0], first.get(one.unit, one.place[0]))
        backward = launches("backward", self.again, self.reduces, backwards=True, kept=first, lookahead=lookahead)
        forward = launches("forward", self.forward, [], lookahead=lookahead)
        return dataclasses.replace(self.becomes, lookahead=lookahead, forward=forward, backward=backward)


def uses_of(graph: fx.Graph) -> StepUses:
    """Find what the step of a joint graph uses of its parameters, which are kept or gathered again as markers say."""
    unshards, reduces = find_unshards(graph), find_reduces(graph)
    structure = structure_of(graph)
    place = {node: index for index, node in enumerate(graph.nodes)}
    kept = {one.node for one in unshards if not one.spec.regather and one.node not in structure.of_weights}
    plan = Plan(
        stage="joint",
        again=tuple(one.fqn for one in unshards if one.node in structure.again),
        keep=tuple(one.fqn for one in unshards if one.node in kept),
    )
    in_forward = [one for one in unshards if one.node in structure.in_forward]
    named = {marker.node: marker.fqn for marker in unshards}
    gathered = set(named.values())
    again = [as_the_whole(one, named) for one in unshards if one.node in structure.again]
    return StepUses(
        plan,
        forward=tuple(_uses(in_forward, lambda one: first_read(one, place))),
        again=tuple(UsedParam(one.unit, one.fqn, one.spec, structure.again[one.node]) for one in again),
        # Autograd's order; what stands before it may depend on a batch of one.
        reduces=tuple(_uses(reduces, place.__getitem__)),
        # A kept weight has one gather, of its first use; later uses have reductions alone.
        found=frozenset(one.unit for one in unshards if one.node not in structure.of_weights).union(
            one.unit for one in reduces if one.spec.use > 1 and one.fqn not in gathered
        ),
        sources=frozenset(
            named[one]
            for node, weights in structure.of_weights.items()
            if node.target is not markers.unshard and not is_free(node)
            for one in weights
        ),
    )


def plan_keeping(
    graph: fx.Graph,
    kept: Collection[str],
    recompute: Collection[str] = (),
    sliced: Collection[str] = (),
    lookahead: int = 1,
    offload: Collection[str] = (),
) -> Plan:
    """The plan of a step that keeps these parameters, and regathers all others, whatever their units were told."""
    return uses_keeping(graph, kept, recompute, sliced, offload).plan(lookahead)


def uses_keeping(
    graph: fx.Graph,
    kept: Collection[str],
    recompute: Collection[str] = (),
    sliced: Collection[str] = (),
    offload: Collection[str] = (),
) -> StepUses:
    """The uses of such a step.

    What is computed with those in ``recompute`` is computed again in backward. The graph is told so; slices of those in
    ``sliced`` are for ``chosen_slices`` to cut.
    """
    compute_again(graph, recompute)
    for one in find_unshards(graph):
        stays = one.spec.stays and "kept"  # it is counted for all of the step
        markers.change_spec(one.node, regather=one.fqn not in kept, stays=stays)
    if sliced:
        graph = copied(graph)
        slice_these(graph, sliced)
    uses = uses_of(graph)
    becomes = dataclasses.replace(
        uses.becomes,
        recompute=tuple(sorted(recompute)),
        slices=tuple(sorted(sliced)),
        offload=tuple(sorted(offload)),
    )
    return dataclasses.replace(uses, becomes=becomes)


def plan_whole(graph: fx.Graph) -> Plan:
    """The plan of a step that is one graph: its phases one after another, each planned like a graph of its own."""
    unshards, reduces = find_unshards(graph), find_reduces(graph)
    place = {node: index for index, node in enumerate(graph.nodes)}
    needed = {one.node: first_read(one.node, place) for one in unshards}
    first = {(phase_of(one.node), one.shard): one for one in unshards if not is_backward(phase_of(one.node))}
    plan = Plan(
        stage="whole",
        again=tuple(_read_before(one, first).fqn for one in unshards if is_backward(phase_of(one.node))),
        keep=tuple(one.fqn for one in first.values() if not one.spec.regather),
    )
    for phase in sorted({phase_of(one.node) for one in (*unshards, *reduces)}):
        gathers = [one for one in unshards if phase_of(one.node) == phase]
        reductions = [one for one in reduces if phase_of(one.node) == phase]
        one_phase = launches(
            "whole",
            _uses(gathers, needed.__getitem__),
            _uses(reductions, place.__getitem__),
            backwards=is_backward(phase),
            phase=phase,
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
    # Views and casts of a gradient may stand anywhere behind the place where it is computed.
    return launches(
        stage,
        _uses(unshards, lambda one: first_read(one, place)),
        [UsedParam(one.unit, one.fqn, one.spec, (place[source_of(one.shard, passes_on)],)) for one in reduces],
        backwards=stage == "backward",
    )


def _uses(found: Sequence[Marker], place_of: Callable[[fx.Node], int]) -> list[UsedParam]:
    return [UsedParam(one.unit, one.fqn, one.spec, (place_of(one.node),)) for one in found]


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


def only(plan: Plan, unshards: Sequence[SentParam], reduces: Sequence[SentParam]) -> Plan:
    """The plan with nothing but these in its buckets."""
    gathers, kept_gathers = _those_present(plan.gathers, unshards, lambda spec: spec.gather_bytes)
    reductions, kept_reductions = _those_present(plan.reduces, reduces, lambda spec: spec.reduce_bytes)
    places = {"gather": kept_gathers, "reduce": kept_reductions}
    order = tuple((kind, places[kind][index]) for kind, index in plan.order if index in places[kind])
    return dataclasses.replace(plan, gathers=gathers, reduces=reductions, order=order)


def _those_present(
    buckets: Sequence[Bucket], found: Sequence[SentParam], num_bytes: Callable[[ParamSpec], int]
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
