"""Keep or regather: tell the partitioner what becomes of each gathered parameter, and of what reads it.

    joint graph                          after
    w, g = unshard(...), unshard(...)    w, g = ...                     # recompute=MUST_RECOMPUTE
    v = mul(w, mask)                     v = mul(w, mask)               # recompute=MUST_RECOMPUTE
    y = mm(x, v)                         y = mm(x, v)                   # recompute=MUST_SAVE, if backward reads it
    ...                                  ...
    gx = mm(gy, t(v))                    (backward gathers w again; the shard is what is saved)
    rg = reduce_grad(gg)                 rg = reduce_grad(gg, [g])      (and g, whether or not it comes to be read)
    return gx                            return beside(gx, [g])         (where nothing is reduced)

A slice that stands for a parameter until backward is saved. An untagged gather would be left to min-cut, which saves
collectives' results: ZeRO-2's memory by accident. It saves what is made of a gather as well (a cast, a mask laid over
it), which is as large: that is tagged like the gather. structure.py says what is tagged, and why. Last, activations
that the plan has on the host are sent there (away.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_compat as compat
from ..ir import markers
from ..ir.effects import read_what_is_written
from ..ir.meta import SHARED, SHARED_NAME, STEP, tag
from ..ir.nodes import closure, emit, tangents_of, views_of
from ..ir.plan import Plan
from ..ir.provenance import Marker, find_reduces, find_unshards, reduce_nodes, unshard_nodes
from ..schedule.structure import Structure, made_of_weights, structure_of
from .away import may_be_away, send_away


def keep(graph: fx.Graph, plan: Plan) -> int:
    """Tag every unshard marker, and what reads weights, as the plan says; return how many markers were tagged."""
    unshards = find_unshards(graph)
    structure, offloaded = structure_of(graph), may_be_away(graph, plan)
    for node in structure.of_weights:
        tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    for node in structure.beside:
        if "recompute" in node.meta:  # by activation checkpointing; else it would be saved for a region above its own
            tag(node, node.meta["recompute"])
    if not compat.partitioner_has_a_budget(graph):  # else what it computes again is not for us to forbid
        for node in structure.saved:
            tag(node, CheckpointPolicy.MUST_SAVE)
        for node in structure.late:
            tag(node, CheckpointPolicy.MUST_RECOMPUTE, region=0)
        _have_backward_gather(graph, structure)
    for marker in unshards:
        kept = marker.fqn in plan.keep
        tag(marker.node, CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE)
        if marker.spec.stays:
            for node in closure([marker.node], views_of):
                node.meta[SHARED] = True
                compat.rename(node, f"{SHARED_NAME}{node.name}")
    _save_shards_made_here(graph, unshards)
    follow(graph, plan)
    for node in graph.find_nodes(op="call_function", target=markers.keep_slice):
        tag(node, CheckpointPolicy.MUST_SAVE)
    send_away(graph, offloaded)
    return len(unshards)


def _save_shards_made_here(graph: fx.Graph, unshards: Iterable[Marker]) -> None:
    """Save what forward made of a shard that it writes to: made again of what is there by then it would be another."""
    changed = read_what_is_written(graph, saved=())
    for marker in unshards:
        if marker.shard.op != "placeholder" and marker.shard in changed:
            tag(marker.shard, CheckpointPolicy.MUST_SAVE)


def make_again(graph: fx.Graph, taken: list[fx.Node]) -> None:
    """Tag likewise what a graph makes of full parameters that it takes, which its caller gathers again for backward."""
    if taken:
        made, _ = made_of_weights(graph, set(taken), closure(tangents_of(graph), lambda node: node.users))
        for node in made:
            if node.op != "placeholder":
                tag(node, CheckpointPolicy.MUST_RECOMPUTE)


def follow(graph: fx.Graph, plan: Plan) -> int:
    """Write the plan of the step on all markers, for whoever lowers them; return how many these are."""
    found = (*unshard_nodes(graph), *reduce_nodes(graph))
    plan_id = plan.id  # a hash of all of it
    for node in found:
        node.meta[STEP] = plan
        markers.change_spec(node, step=plan_id)
    return len(found)


def let_go(graph: fx.Graph) -> None:
    """In a graph that was cut, take back what ``keep`` gave gradients to read: the gathers are there."""
    for node in reduce_nodes(graph):
        node.args = node.args[:1]
    for node in graph.find_nodes(op="call_function", target=markers.beside):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)


def _have_backward_gather(graph: fx.Graph, structure: Structure) -> None:
    """Let reductions read the gathers that backward may need, and may not: each its own, where it has one."""
    reduces = find_reduces(graph)
    for one in reduces:
        if one.node not in structure.fed:  # without elements, zeros: the partitioner might reduce them in forward
            compat.keep_in_backward(one.node)
    if not reduces:
        _have_a_gradient_read(graph, structure)
        return
    own = {marker.fqn: marker.node for marker in reduces}
    place = {node: index for index, node in enumerate(graph.nodes)}
    given: dict[fx.Node, list[fx.Node]] = {}
    for marker in find_unshards(graph):
        if marker.node in structure.again and marker.node not in structure.read:
            reduction = own.get(marker.fqn)
            if reduction is None:
                needed = structure.again[marker.node].place
                reduction = next((one.node for one in reduces if place[one.node] >= needed), reduces[-1].node)
            given.setdefault(reduction, []).append(marker.node)
    for node, gathers in given.items():
        node.args = (node.args[0], gathers)


def _have_a_gradient_read(graph: fx.Graph, structure: Structure) -> None:
    """The same in a graph without reductions, where frozen weights stand between an input and its gradient."""
    gathers = [node for node in structure.again if node not in structure.read]
    returned = [node for node in graph.output_node().all_input_nodes if node in structure.fed]
    if not gathers or not returned:
        return
    last = max(returned, key=list(graph.nodes).index)
    with graph.inserting_before(graph.output_node()):
        held = emit(graph, markers.beside, last, gathers)
    held.meta = {key: value for key, value in last.meta.items() if key != "recompute"} | {"val": held.meta["val"]}
    graph.output_node().replace_input_with(last, held)
