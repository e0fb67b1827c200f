"""What a node of a graph is, and what leads to it or from it; new nodes, and copies of graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from .. import _torch_compat as compat

aten = torch.ops.aten

# Ops that pass a tensor on in another dtype, or as it is and in part.
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
VIEWS = (
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.alias.default,
    aten.detach.default,
)
# They read only as many elements of their first argument as they return.
LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default)


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the gradients of results that a graph takes: all that depends on them is backward."""
    return [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]


def is_size(node: fx.Node) -> bool:
    """Whether a node computes a number."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_elementwise(node: fx.Node) -> bool:
    """Whether an operation computes each element of its result from one of each argument, or is none at all."""
    return compat.has_tag(node.target, torch.Tag.pointwise) or compat.may_alias(node.target) or node.target in CASTS


def passes_on(node: fx.Node) -> bool:
    """Whether a node is a view or a cast, which passes on the value of its first input."""
    return node.target in VIEWS or node.target in CASTS


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return compat.has_tag(node.target, torch.Tag.nondeterministic_seeded)


def can_be_done_again(node: fx.Node) -> bool:
    """Whether an operation gives the same once more, and nothing else happens."""
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, compat.OpOverload)
        and not node.is_impure()
        and not is_random(node)
        and "unbacked_bindings" not in node.meta
    )


def closure(starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """What steps lead to from some nodes, these included, but for the graph's output."""
    reached = set(starts)
    work = list(reached)
    while work:
        for node in step(work.pop()):
            if node not in reached and node.op != "output":
                reached.add(node)
                work.append(node)
    return reached


def readers_of(node: fx.Node, through: Callable[[fx.Node], object]) -> Iterator[fx.Node]:
    """Yield what reads a node, or what passes the node on: readers of which ``through`` is true are looked through."""
    work = [node]
    while work:
        for user in work.pop().users:
            if through(user):
                work.append(user)
            else:
                yield user


def source_of(node: fx.Node, through: Callable[[fx.Node], object]) -> fx.Node:
    """Return the node itself or, if ``through`` is true of it, what it passes on."""
    while through(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def emit(graph: fx.Graph, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of ``op`` where the graph inserts now; its value is the op's result on fake arguments."""
    node = graph.call_function(op, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
    with compat.fake_mode_of(fake_args):
        node.meta["val"] = op(*fake_args, **fake_kwargs)
    return node


def views_of(node: fx.Node) -> list[fx.Node]:
    """Return the users of a node whose results may share its memory."""
    return [user for user in node.users if compat.may_alias(user.target)]


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy with the nodes' names and metadata; constants stay in the module that owns the graph."""
    copy = fx.Graph(graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    return copy
