"""Use a plan that somebody edited in the place of ours; it is refused if it does not fit the graph.

    ours        gather 0  layers.0.up      gather 1  layers.0.down
    given       gather 0  layers.0.up layers.0.down                     one bucket
                keep      head.weight                                   and one gather less in backward
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx

from .. import _torch_compat as compat
from ..ir.nodes import copied
from ..ir.plan import Bucket, Plan
from ..ir.provenance import Marker, find_reduces, find_unshards, whole_of
from .activations import activations_of, matrices_of
from .buckets import gather_key, reduce_key
from .planner import as_the_whole, only, plan_keeping
from .schedule import bucket_of
from .slices import offers_slice, slice_these


def fitted(given: Plan, graph: fx.Graph) -> Plan:
    """Return the given plan for this joint graph, with what it leaves open filled in; ValueError if it does not fit."""
    if given.stage != "joint" or given.forward is None or given.backward is None:
        raise ValueError(f"a plan of a {given.stage} graph was given. The plan of a step is that of the joint graph.")
    if given.gathers or given.reduces or given.order:
        raise ValueError(
            "the given plan has gathers, reduces or an order of its own, and those of a step are in its `forward` and "
            "`backward`: edit them there."
        )
    if compat.partitioner_has_a_budget(graph):
        raise ValueError(
            "a plan was given, and torch's activation_memory_budget is set: what the partitioner computes again to "
            "meet that is in no plan. Leave one of them out."
        )
    _require_lookahead(given.lookahead, given.forward.lookahead, given.backward.lookahead)
    unshards = find_unshards(_with_slices(graph, given.slices))
    gathered = {one.fqn: one for one in unshards if whole_of(one.node) is None}
    _require_known("keep", given.keep, gathered, "keeps {}, which the graph does not gather")
    named, reduced = {one.node: one.fqn for one in unshards}, {one.fqn: one for one in find_reduces(graph)}
    reduces_less = len(reduced) < len(_fqns(given.backward.reduces))  # under no_sync: its backward reads less, too
    possible = activations_of(graph)
    if reduces_less:
        given = dataclasses.replace(given, recompute=tuple(name for name in given.recompute if name in possible))
    nothing = "computes again what is computed with {}, none of which stays within its unit until the next product"
    _require_known("recompute", given.recompute, possible, nothing)
    matrices = sorted({one.fqn for one in matrices_of(graph).values()}) if given.offload else []
    no_matrix = "has activations of {} on the host, and forward computes nothing with a matrix of that name"
    _require_known("offload", given.offload, matrices, no_matrix)
    ours = plan_keeping(graph, given.keep, given.recompute, given.slices, given.lookahead, given.offload)
    assert given.forward is not None and given.backward is not None
    assert ours.forward is not None and ours.backward is not None
    gathered_again = gathered | {one.fqn: one for one in (as_the_whole(one, named) for one in unshards)}
    read_again = {*_fqns(ours.backward.gathers)} if reduces_less else {*gathered_again} - {*given.keep}
    read = [one for fqn, one in gathered_again.items() if fqn in read_again]
    backward = only(given.backward, read, list(reduced.values()))
    if given.recompute:
        backward = _with_what_computing_again_needs(backward, ours.backward)
    return dataclasses.replace(
        ours,
        forward=_fitted_half(given.forward, ours.forward, gathered, reduced),
        backward=_fitted_half(backward, ours.backward, gathered_again, reduced),
    )


def _require_lookahead(of_step: int, of_forward: int, of_backward: int) -> None:
    said = f"the given plan has lookahead={of_step}, {of_forward} in forward and {of_backward} in backward."
    if min(of_step, of_forward, of_backward) < 1:
        raise ValueError(f"{said} A gather is launched at least one unit ahead of its use: give 1 or more.")
    if not of_step == of_forward == of_backward:
        raise ValueError(
            f"{said} Give all three the same, and leave `order` of forward and backward empty to have gathers launched "
            "so far ahead."
        )


def _with_slices(graph: fx.Graph, fqns: Collection[str]) -> fx.Graph:
    if not fqns:
        return graph
    offering = {one.fqn for one in find_unshards(graph) if offers_slice(one.node)}
    if not offering.issuperset(fqns):
        raise ValueError(
            f"the given plan keeps slices of {', '.join(sorted({*fqns} - offering))}, and the ranks that share a "
            "parameter have no groups for that. They do where configure(model, memory_budget=..., profile=...) was "
            "called first, on several nodes with as many ranks each as the profile says. Or take them out of `slices`."
        )
    sliced = copied(graph)
    slice_these(sliced, fqns)
    return sliced


def _with_what_computing_again_needs(given: Plan, ours: Plan) -> Plan:
    """Add the parameters that only recomputation reads, such as biases.

    Each joins the bucket that has a parameter of its bucket in our plan, or gets a bucket of its own.
    """
    present = {*_fqns(given.gathers)}
    gathers, order = list(given.gathers), given.order
    for bucket in ours.gathers:
        lacking = tuple(fqn for fqn in bucket.fqns if fqn not in present)
        if not lacking:
            continue
        host = next((place for place, one in enumerate(gathers) if {*one.fqns} & {*bucket.fqns}), None)
        if host is None:
            gathers.append(dataclasses.replace(bucket, fqns=lacking))
            order = ()
        else:
            gathers[host] = dataclasses.replace(gathers[host], fqns=(*gathers[host].fqns, *lacking))
    return dataclasses.replace(given, gathers=tuple(gathers), order=order)


def _fitted_half(given: Plan, ours: Plan, gathered: Mapping[str, Marker], reduced: Mapping[str, Marker]) -> Plan:
    _require_equal(f"gathers in {given.stage}", _fqns(given.gathers), _fqns(ours.gathers))
    _require_equal(f"reduces in {given.stage}", _fqns(given.reduces), _fqns(ours.reduces))
    plan = dataclasses.replace(
        given,
        gathers=_buckets("gather", given.gathers, gathered),
        reduces=_buckets("reduce", given.reduces, reduced),
    )
    launches = [(kind, index) for kind in ("gather", "reduce") for index in range(len(plan.buckets(kind)))]
    if not plan.order:
        return dataclasses.replace(plan, order=tuple(sorted(launches, key=lambda one: _turn(one, plan, ours))))
    if sorted(plan.order) != sorted(launches):
        raise ValueError(
            f"the order of the given {given.stage} plan, {list(plan.order)}, does not name each of its buckets once. "
            "Leave it empty to have the buckets launched where ours launch what is in them."
        )
    return plan


def _turn(launch: tuple[str, int], given: Plan, ours: Plan) -> tuple[int, int]:
    """Return the turn in which our plan gathers the first parameter of a given bucket, or reduces the last one."""
    kind, index = launch
    fqns = {*given.buckets(kind)[index].fqns}
    turns = [ours.turn(kind, place) for place, one in enumerate(ours.buckets(kind)) if fqns & {*one.fqns}]
    return (min(turns) if kind == "gather" else max(turns)), index


def _buckets(kind: str, given: Sequence[Bucket], markers: Mapping[str, Marker]) -> tuple[Bucket, ...]:
    key = gather_key if kind == "gather" else reduce_key
    for bucket in given:
        if len({key(markers[fqn].spec) for fqn in bucket.fqns}) != 1:
            raise ValueError(
                f"the given plan has {', '.join(bucket.fqns) or 'nothing'} in one bucket. What shares a bucket travels "
                "in one dtype, in one process group, and is divided alike: put them into buckets of their own."
            )
    return tuple(bucket_of(kind, bucket.unit, [markers[fqn] for fqn in bucket.fqns]) for bucket in given)


def _fqns(buckets: Iterable[Bucket]) -> list[str]:
    return [fqn for bucket in buckets for fqn in bucket.fqns]


def _require_equal(what: str, given: Iterable[str], needed: Iterable[str]) -> None:
    given_times, needed_times = Counter(given), Counter(needed)
    if given_times != needed_times:
        raise ValueError(
            f"the given plan does not fit this graph, which {what} each of its parameters once: too many are "
            f"{sorted((given_times - needed_times).elements())}, and there should be "
            f"{sorted((needed_times - given_times).elements())}. Make it from report.joint.plan of the same model."
        )


def _require_known(field: str, asked: Iterable[str], possible: Iterable[str], said: str) -> None:
    """Raise for names that a field of a plan cannot have here; ``said`` tells what a plan that has them asks for."""
    possible = list(possible)
    unknown = sorted({*asked} - {*possible})
    if unknown:
        raise ValueError(
            f"the given plan {said.format(', '.join(unknown))}. Take it out of `{field}`; here that can have "
            f"{', '.join(possible) or 'nothing'}."
        )
