"""Merge all gathers of one use of a parameter, and all of its reductions, however often it is read.

    joint graph                              after
    w1 = unshard(shard)                      w  = unshard(shard)
    w2 = unshard(shard)                      ...
    ...                                      g  = g1 + g2
    r1 = reduce_grad(g1)                     r  = reduce_grad(g)
    r2 = reduce_grad(g2)
    r  = r1 + r2

The markers of two uses (calls.py) are different, so each use keeps its own gather and reduction; r is then the sum of
theirs. AOTAutograd's own common-subexpression pass keeps apart what only forward uses, and never moves a sum through an
op.
In a graph with several phases (phases.py), each phase has its own gather and its own reduction.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from ..ir import markers
from ..ir.phases import lifetime, phase_of
from ..ir.plan import Plan
from ..ir.provenance import unshard_nodes

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
        key = (node.args, node.kwargs["spec"], lifetime(node))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            num_merged += 1
    return num_merged


def _merge_reductions(graph: fx.Graph) -> int:
    num_merged = 0
    for total in [node for node in graph.nodes if _is_sum(node) and not _is_term(node)]:
        terms, sums = _terms_of(total)
        alike: dict[object, list[fx.Node]] = {}
        for place, term in enumerate(terms):
            alike.setdefault(_what_it_reduces(term) or place, []).append(term)
        if len(alike) == len(terms):
            continue
        left = [some[0] if len(some) == 1 else _reduced_once(graph, some) for some in alike.values()]
        result = left[0]
        with graph.inserting_before(total):
            for one in left[1:]:
                result = _add(graph, result, one)
        total.replace_all_uses_with(result)
        for node in (*sums, *terms, *(grad for term in terms for grad in term.all_input_nodes)):
            if not node.users and node.target in (*_ADDS, markers.reduce_grad, markers.resume):
                graph.erase_node(node)
        num_merged += len(terms) - len(alike)
    return num_merged


def _is_sum(node: fx.Node) -> bool:
    return node.target in _ADDS and not node.kwargs and all(isinstance(one, fx.Node) for one in node.args)


def _is_term(node: fx.Node) -> bool:
    """Whether nothing but another sum reads a sum."""
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _terms_of(total: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the terms of a sum, and all sums that it consists of, each before those inside it.

    A sum that only another sum reads is no term: its own terms count.
    """
    terms, sums = [], [total]
    stack = [*reversed(total.args)]
    while stack:
        node = stack.pop()
        assert isinstance(node, fx.Node)
        if _is_sum(node) and _is_term(node):
            sums.append(node)
            stack += reversed(node.args)
        else:
            terms.append(node)
    return terms, sums


def _what_it_reduces(term: fx.Node) -> tuple[object, ...] | None:
    """Return what two reductions share that may become one: parameter, use, phase and ticket. None for other terms."""
    if term.target is not markers.reduce_grad or len(term.users) != 1:
        return None
    return term.kwargs["spec"], phase_of(term), _ticket(term.args[0])


def _ticket(grad: object) -> object:
    return grad.args[1] if isinstance(grad, fx.Node) and grad.target is markers.resume else None


def _reduced_once(graph: fx.Graph, reductions: list[fx.Node]) -> fx.Node:
    """Sum the gradients and reduce the sum, where the last one of them is there; a ticket of theirs is taken once."""
    first, last = reductions[0], max(reductions)
    grads: list[fx.Node] = [one.args[0] for one in reductions]  # type: ignore[misc]
    ticket, like = _ticket(grads[0]), dict(grads[0].meta)
    if ticket is not None:
        grads = [grad.args[0] for grad in grads]  # type: ignore[misc]
    with graph.inserting_before(last):
        summed = functools.reduce(functools.partial(_add, graph), grads)
        if ticket is not None:
            summed = graph.call_function(markers.resume, (summed, ticket))  # type: ignore[arg-type]
            summed.meta = like
        reduced = graph.call_function(first.target, (summed,), dict(first.kwargs))  # type: ignore[arg-type]
    reduced.meta = dict(first.meta)
    return reduced


def _add(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    summed = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    summed.meta = dict(left.meta)
    return summed
