"""Replace markers by collectives, one for each bucket.

    w0 = unshard(s0)                 packed = pack([s0, s1], dtype)
    w1 = unshard(s1)                 launch = all_gather_into_tensor(packed)
                                     wait   = wait_tensor(launch)
                                     w0, w1 = copied(slices of wait)

    r0 = reduce_grad(g0)             packed = pack([g0, g1], dtype)
    r1 = reduce_grad(g1)             launch = reduce_scatter_tensor(packed)
                                     wait   = wait_tensor(launch)
                                     r0, r1 = slices of wait / divisor

                                     with replicas, wait goes into all_reduce and another wait first

    of offloaded shards              launch = gather_offloaded([s0, s1], ...)
                                     r0, r1 = slices of to_host(wait / divisor)
                                     ...
                                     wait_for_copies(all to_host)            at the end of the graph that returns them

    of offloaded activations         launch_to_host, launch_to_device, and a wait for each (away.py)

    of parameters that may stay      launch = gather_once(packed, owners=[s0], key)     sends nothing if they are here

The plan says which parameters share a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import _torch_compat as compat
from .._torch_compat import kernels as kernels_compat
from ..ir import markers
from ..ir.aliases import base_of, is_free
from ..ir.meta import GRADIENT_OF, PARAMETER, ROLE, STEP, Role
from ..ir.nodes import VIEWS, closure, emit, readers_of, views_of
from ..ir.plan import Bucket, Plan, num_launches
from ..ir.provenance import Marker, find_reduces, find_unshards
from ..wire import lower
from ..wire.collectives import is_wait, once
from ..wire.copies import to_host, wait_for_copies
from ..wire.ledger import Member, note
from ..wire.spec import with_part
from .away import launch_copies

aten = torch.ops.aten

# Inductor removes a ``clone`` that has the original's strides, whatever is later written to either of the two.
_COPY = aten.lift_fresh_copy.default


def insert(graph: fx.Graph, plan: Plan) -> int:
    """Lower every marker of the graph into the plan's buckets; return how many collectives the graph has now."""
    unshards = {marker.fqn: marker for marker in find_unshards(graph)}
    reduces = {marker.fqn: marker for marker in find_reduces(graph)}
    position = {node: index for index, node in enumerate(graph.nodes)}
    written = {base_of(one) for node in graph.nodes for one in compat.written_by(node)}
    owners = _owners(unshards.values())
    num_launched = 0
    for index, bucket in enumerate(plan.gathers):
        members = [unshards.pop(fqn) for fqn in bucket.fqns]
        anchor = min((marker.node for marker in members), key=position.__getitem__)
        specs = [marker.spec for marker in members]
        call = _emitter(graph, anchor, _role("gather", index, plan, members), _step(members))
        shards = [marker.shard for marker in members]
        if len(shards) == 1 and base_of(shards[0]) in written:  # by an optimizer, perhaps during the gather
            shards = [call(_COPY, shards[0])]
        launched = lower.launch_gather(call, shards, specs)
        fulls = lower.finish_gather(call, launched, specs)
        if isinstance(launched, fx.Node) and _may_stay(graph, plan.stage, members, owners):
            _look_first(launched, members, owners, _stays(plan.stage, bucket, members))
        for marker, full in zip(members, fulls):
            full.meta[PARAMETER] = marker.fqn
        _replace(graph, members, fulls)
        _erase_unread(graph, fulls)
        num_launched += num_launches(bucket)
    for index, bucket in enumerate(plan.reduces):
        members = [reduces.pop(fqn) for fqn in bucket.fqns]
        _assert_independent(members, bucket)
        anchor = max((marker.node for marker in members), key=position.__getitem__)
        specs = [marker.spec for marker in members]
        for marker in members:
            marker.shard.meta[GRADIENT_OF] = marker.fqn
        call = _emitter(graph, anchor, _role("reduce", index, plan, members), _step(members))
        grads = [marker.shard for marker in members]
        if len(grads) == 1 and _may_be_overwritten(grads[0], members[0].node):
            grads = [call(_COPY, grads[0])]
        reduced = lower.finish_reduce(call, lower.launch_reduce(call, grads, specs), specs)
        _replace(graph, members, reduced)
        num_launched += num_launches(bucket)
    for node in graph.find_nodes(op="call_function", target=markers.keep_slice):
        _cut(graph, node)
    launch_copies(graph, plan)
    _wait_at_the_end(graph, plan)
    assert not unshards and not reduces, f"markers that the plan leaves out: {[*unshards, *reduces]}"
    compat.sort_topologically(graph)
    return num_launched


def _role(kind: str, index: int, plan: Plan, members: Sequence[Marker]) -> Role:
    bucket = plan.buckets(kind)[index]
    named = tuple(Member(one.unit, with_part(one.spec.fqn, one.spec.part)) for one in members)
    units: dict[str, list[int]] = {}
    for place, one in enumerate(members):
        units.setdefault(one.unit, []).append(place)
    everywhere = {place for place, one in enumerate(members) if one.spec.layout.is_everywhere}
    shown = tuple(next((one for one in places if one in everywhere), places[0]) for places in units.values())
    return Role(
        kind,
        index,
        bucket.unit,
        plan.turn(kind, index),
        named,
        shown,
        step=members[0].spec.step,
        phase=bucket.phase,
        num_bytes=bucket.num_bytes,
    )


def _owners(unshards: Iterable[Marker]) -> dict[str, fx.Node]:
    """Return an input of the graph for each unit that tells whose launches these are: a shard that no rank lacks."""
    owners: dict[str, fx.Node] = {}
    for one in unshards:
        if one.shard.op == "placeholder" and one.spec.layout.is_everywhere:
            owners.setdefault(one.unit, one.shard)
    return owners


def _may_stay(graph: fx.Graph, stage: str, members: Sequence[Marker], owners: Mapping[str, fx.Node]) -> bool:
    """Whether a bucket may be used by later launches: nobody but readers gets it, and it is known whose it is."""
    if stage == "whole" or not all(one.spec.stays and one.unit in owners for one in members):
        return False
    outputs: Any = graph.output_node().args[0]
    returned = outputs[: kernels_compat.num_returned()] if stage == "forward" else outputs
    for one in members:
        views = closure([one.node], views_of)
        if one.shard.op != "placeholder" or any(node in views for node in returned):
            return False
        if any(kernels_compat.may_be_in_place(user) for node in views for user in node.users):
            return False
    return True


def _stays(stage: str, bucket: Bucket, members: Sequence[Marker]) -> bool:
    """Whether a gathered bucket lives until backward ends, where its unit's settings say whether it is freed."""
    if stage == "backward":
        return all(one.spec.stays == "always" for one in members)
    step = _step(members)
    return stage == "forward" and step is not None and {*bucket.fqns} <= {*step.keep}


def _look_first(launch: fx.Node, members: Sequence[Marker], owners: Mapping[str, fx.Node], stays: bool) -> None:
    """Have a launch return its bucket if it is here."""
    units = list(dict.fromkeys(one.unit for one in members))
    names = (f"{units.index(one.unit)}:{with_part(one.spec.fqn, one.spec.part)}" for one in members)
    key = " ".join([str(members[0].spec.dtype), *names])
    own = {one.unit: one.shard for one in reversed(members) if one.spec.layout.is_everywhere}
    launch.target = once(launch.target)
    launch.args = (*launch.args, [own.get(unit, owners[unit]) for unit in units], key, stays)


def _may_be_overwritten(grad: fx.Node, marker: fx.Node) -> bool:
    """Whether Inductor may write into a gradient that is sent without a copy: it does not see how long that is read."""
    reached = closure([base_of(grad)], lambda node: [user for user in node.users if is_free(user)])
    return any(kernels_compat.may_be_in_place(user) for node in reached for user in node.users if user is not marker)


def _wait_at_the_end(graph: fx.Graph, plan: Plan) -> None:
    """Wait for copies to the CPU once, at the end; a copy that the graph reads, as an optimizer does, waits itself."""
    copies = [node for node in graph.find_nodes(op="call_function", target=to_host) if not _is_read(node)]
    for copy in copies:
        copy.kwargs = {"wait": False}
    if copies:
        call = _emitter(graph, graph.output_node(), Role("end", 0, plan.stage, len(plan.order)))
        call(wait_for_copies, copies, str(copies[0].args[0].meta["val"].device))  # type: ignore[union-attr]


def _is_read(node: fx.Node) -> bool:
    """Whether a node of the graph reads a tensor, and not only the graph's caller."""
    return any(user.op != "output" for user in readers_of(node, lambda one: one.target in VIEWS))


def _cut(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a ``keep_slice`` by a copy that Inductor generates, so that the whole parameter need not live on."""
    full, dim, start, length = node.args
    with graph.inserting_before(node):
        view = emit(graph, aten.slice.Tensor, full, dim, start, start + length)  # type: ignore[operator]
        copy = emit(graph, _COPY, view)
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy)
    graph.erase_node(node)


def _step(members: Sequence[Marker]) -> Plan | None:
    """Return the plan of the step, if the markers carry one."""
    return members[0].node.meta.get(STEP)


def _emitter(graph: fx.Graph, anchor: fx.Node, role: Role, step: Plan | None = None) -> lower.Call:
    """Return a ``call`` for lower.py's programs that adds nodes before ``anchor``, with role and plan in their meta."""

    def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node | None:
        if op is note:
            return None
        with graph.inserting_before(anchor):
            node = emit(graph, op, *args, **kwargs)
        node.meta[ROLE] = role
        if step is not None:
            node.meta[STEP] = step
        return node

    return call


def _replace(graph: fx.Graph, members: Iterable[Marker], results: Iterable[fx.Node]) -> None:
    for marker, result in zip(members, results):
        if result is marker.shard or _aliases(result, marker.shard):
            # One shard, no cast: the result is the parameter itself. Nodes may read it, the graph may not return it.
            _copy_before_outputs(graph, marker.node, result)
        if result is not marker.shard and "nn_module_stack" in marker.node.meta:
            result.meta["nn_module_stack"] = marker.node.meta["nn_module_stack"]
        marker.node.replace_all_uses_with(result)
        graph.erase_node(marker.node)


def _erase_unread(graph: fx.Graph, fulls: Iterable[fx.Node]) -> None:
    """Erase the unpacking of parameters that only other ranks may read: it would hold their bucket to the end."""
    for full in fulls:
        node: Any = full
        while node.op == "call_function" and not node.users and not is_wait(node):
            source = node.args[0]
            graph.erase_node(node)
            node = source


def _aliases(result: fx.Node, source: fx.Node) -> bool:
    node: Any = result
    while node is not source and isinstance(node, fx.Node) and compat.may_alias(node.target):
        node = node.args[0]
    return node is source


def _copy_before_outputs(graph: fx.Graph, marker: fx.Node, result: fx.Node) -> None:
    output = graph.output_node()
    views = closure([marker], views_of)
    copies = {}
    for node in (one for one in output.all_input_nodes if one in views):
        source = result if node is marker else node
        with graph.inserting_before(output):
            copies[node] = graph.call_function(_COPY, (source,))
        copies[node].meta = {"val": node.meta["val"]}
    if copies:
        output.args = fx.map_arg(output.args, lambda used: copies.get(used, used))


def _assert_independent(members: list[Marker], bucket: Bucket) -> None:
    """Assert that no member's gradient depends on another member's reduced gradient: they could not share a bucket."""
    nodes = {marker.node for marker in members}
    reached = closure((user for node in nodes for user in node.users), lambda node: node.users)
    assert not reached & nodes, f"the gradients of {bucket.fqns} depend on each other"
