"""Gradients that compiled backwards hold back, and take again.

    hold      graph -> full gradient -> [_Held] -> held.pending          nothing reaches the edge, or the shard
    resume    graph -> full gradient -> ticket: + held.pending -> reduce-scatter -> edge

A tensor that a graph takes for its gradient leads to the shard's edge, by a node of its own. So autograd runs this node
when, and only when, the shard is to have a gradient: ``backward(inputs=...)`` and ``autograd.grad`` decide that.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import autograd, dynamo
from ..core import grads
from ..core.param import ShardedParam
from ..core.unit import Unit
from ..passes.ir.markers import ticket_holders

Look = tuple[tuple[int, ...], torch.dtype, torch.device]

_numbers = itertools.count()


def has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def holding(unit: Unit, param: ShardedParam, known: Tensor | None, look: Look, is_partial: bool) -> Tensor | None:
    """Return a tensor for a graph to take, which holds back the gradient that autograd brings it.

    It is one zero, expanded. It is ``known`` if that still fits, and None for a dtype without gradients.
    """
    size, dtype, device = look
    if known is not None and (tuple(known.shape), known.dtype, known.device) == look:
        return known
    if not has_gradients(dtype):
        return None
    with torch.inference_mode(False), torch.enable_grad():
        zero = torch.zeros((), dtype=dtype, device=device).requires_grad_()  # a shard that is no leaf has no edge
        made = _Held.apply(zero.expand(size), None if param.sink is None else param.sink.edge)
    made.grad_fn.hold = _holder(unit, param, is_partial)
    return made  # type: ignore[no-any-return]


class _Held(torch.autograd.Function):
    """An identity that gives no gradient to the edge behind it: its backward holds the gradient back."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, edge: Tensor | None) -> Tensor:
        return like.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        return None, ctx.hold(grad)


dynamo.leave_all_to_python(_Held.backward)


def _holder(unit: Unit, param: ShardedParam, is_partial: bool) -> Callable[[Tensor], Tensor | None]:
    owner, of = weakref.ref(unit), weakref.ref(param)
    node = None if param.sink is None else param.sink.node

    @torch.compiler.disable(reason=f"the gradient of {param.fqn} is held back")
    def hold(grad: Tensor) -> Tensor | None:
        unit, param = owner(), of()
        if unit is None or param is None:
            return None
        for_edge = _hold(unit, param, grad, is_partial)
        if node is not None and autograd.uses_compiled_autograd() and param.sink.node is node:
            param.sink.renew_nodes(unit)
        return for_edge

    return hold


def _hold(unit: Unit, param: ShardedParam, grad: Tensor, is_partial: bool) -> Tensor | None:
    """Have a gradient wait; or reduce and return it, if somebody asked autograd for that of the shard."""
    if _is_asked_for(param):
        if autograd.accumulates(_leaf_of(param)) is False or is_partial:
            return None  # ``inputs`` has others; or it is a partial sum, which nobody can use
        return torch.ops.fsdpc.reduce_grad(grad, spec=param.sink.spec.text)  # type: ignore[no-any-return]
    in_one_graph = autograd.in_compiled_autograd()
    if not in_one_graph:
        unit.ends.at_end(unit)  # first: it drops what a backward that raised held back
    held, fqn = unit.accumulation.held, param.fqn
    waiting = held.partials if is_partial else held.pending
    held.note(fqn, fqn in waiting)
    with torch.no_grad():
        if fqn in waiting:
            waiting[fqn].add_(grad)
        else:
            waiting[fqn] = grad.clone(memory_format=torch.contiguous_format)
    if in_one_graph:
        unit.ends.now(unit)
    return None


def ticket(unit: Unit, param: ShardedParam) -> Tensor:
    """Return a number by which the op ``resume`` finds the gradient of a parameter that waits."""
    number, fqn = next(_numbers), param.fqn
    owner, of = weakref.ref(unit), weakref.ref(param)

    def take(grad: Tensor) -> Tensor:
        unit = owner()
        if unit is not None:
            unit.ends.at_end(unit)
            held = None if _is_asked_for(of()) else _held_back(unit, fqn)
            if held is not None:
                return held.add_(grad)
        return grad.clone(memory_format=torch.contiguous_format)

    ticket_holders[number] = take
    weakref.finalize(unit, ticket_holders.pop, number, None)
    return torch.tensor(number, device="cpu")  # read in backward, where a copy from a GPU would wait


def _is_asked_for(param: ShardedParam | None) -> bool:
    """Whether ``autograd.grad`` returns the gradient, so that its caller gets that of this backward alone."""
    if param is None or not autograd.backward_has_an_end():  # in a graph autograd runs no node
        return False
    leaf, shard = _leaf_of(param), param.shard
    return leaf is not None and grads.is_asked_for(shard, leaf)  # type: ignore[arg-type]


def _leaf_of(param: ShardedParam) -> Any:
    """Return the ``AccumulateGrad`` of the shard that the parameter's edge leads to; None without one."""
    node = None if param.sink is None else param.sink.node
    return None if node is None else node.leaf_of.get(id(param.shard))


def _held_back(unit: Unit, fqn: str) -> Tensor | None:
    """Return the gradient that waits, to be added to one that is about to be reduced; None without one."""
    accumulation = unit.accumulation
    if accumulation.sync:
        unit.ends.note_reduction(unit)
        return accumulation.held.take(fqn) if fqn in accumulation.held.pending else None
    return None
