"""What a node of a graph is, and what leads to it or from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from .. import _torch_compat as compat
from .views import CASTS


def is_size(node: fx.Node) -> bool:
    """Whether a node computes a number."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_elementwise(node: fx.Node) -> bool:
    """Whether an operation computes each element of its result from one of each argument, or is none at all."""
    return compat.has_tag(node.target, torch.Tag.pointwise) or compat.may_alias(node.target) or node.target in CASTS


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
