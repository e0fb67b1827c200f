"""Merge all gathers of a parameter into one, and all of its reductions, however often it is read.

    joint graph                              after
    w1 = unshard(shard)                      w  = unshard(shard)
    w2 = unshard(shard)                      ...
    ...                                      g  = g1 + g2
    r1 = reduce_grad(g1)                     r  = reduce_grad(g)
    r2 = reduce_grad(g2)
    r  = r1 + r2

AOTAutograd's own common-subexpression pass keeps apart what only forward uses, and never moves a sum through an op.
In a graph with several phases (phases.py), each phase has its own gather and its own reduction.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ir import markers
from ..ir.phases import lifetime, phase_of
from ..ir.plan import Plan
from ..ir.provenance import reduce_nodes, unshard_nodes

_ADDS = (torch.ops.aten.add.Tensor,)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def merge(graph: fx.Graph, plan: Plan) -> int:
    """Merge repeated markers of one parameter; return how many went away."""
    del plan  # to merge equal markers is no decision
    _drop_identity_views(graph)
    return _merge_gathers(graph) + _merge_reductions(graph)


def _drop_identity_views(graph: fx.Graph) -> None:
    """Drop views of the same size beside markers: DTensor's ``to_local``, on both ways, and ``detach``."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.target not in _VIEWS:
            continue
        source = node.args[0]
        at_marker = source.target is markers.reduce_grad or any(user.target is markers.unshard for user in node.users)
        if at_marker and source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _merge_gathers(graph: fx.Graph) -> int:
    first: dict[tuple[object, ...], fx.Node] = {}
    num_merged = 0
    for node in unshard_nodes(graph):
        key = (node.args, repr(sorted(node.kwargs.items())), lifetime(node))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            num_merged += 1
    return num_merged


def _merge_reductions(graph: fx.Graph) -> int:
    num_merged = 0
    pending = list(reduce_nodes(graph))
    while pending:
        left = pending.pop()
        total = _only_user(left)
        if total is None or total.target not in _ADDS or total.kwargs:
            continue
        right = total.args[1] if total.args[0] is left else total.args[0]
        if not isinstance(right, fx.Node) or right is left or right.target is not left.target:
            continue
        if _only_user(right) is not total or right.kwargs != left.kwargs or phase_of(right) != phase_of(left):
            continue
        grads = [total.args[0].args[0], total.args[1].args[0]]  # type: ignore[union-attr]
        with graph.inserting_before(total):
            summed = _sum(graph, *grads)  # type: ignore[arg-type]
            reduced = graph.call_function(left.target, (summed,), dict(left.kwargs))  # type: ignore[arg-type]
            reduced.meta = dict(left.meta)
        total.replace_all_uses_with(reduced)
        graph.erase_node(total)
        graph.erase_node(left)
        graph.erase_node(right)
        for grad in grads:
            if grad.target is markers.resume and not grad.users:  # type: ignore[union-attr]
                graph.erase_node(grad)  # type: ignore[arg-type]
        pending = [node for node in pending if node is not right] + [reduced]
        num_merged += 1
    return num_merged


def _sum(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    """Add two gradients; if both resume the same ticket, the sum does so once."""
    if left.target is right.target is markers.resume and left.args[1] is right.args[1]:
        summed = _sum(graph, left.args[0], right.args[0])  # type: ignore[arg-type]
        resumed = graph.call_function(markers.resume, (summed, left.args[1]))
        resumed.meta = dict(left.meta)
        return resumed
    summed = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    summed.meta = dict(left.meta)
    return summed


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
