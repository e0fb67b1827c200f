"""The edge of a compiled graph: a plain tensor in the place of a sharded parameter, to which the gradient goes.

    forward      shard --_Edge--> edge, made once       graph(shard's local tensor, edge) -> output
    backward     output -> graph -> a plain gradient of the edge -> _Edge's backward -> the shard's

AOTAutograd would take DTensors apart and put them together again on every step, in Python, for 14 microseconds a
parameter. An edge is one zero seen everywhere, so it costs no memory, and an autograd node of its own leads from it to
the shard: hooks, ``autograd.grad``, ``backward(inputs=...)`` and freezing are autograd's business, as in eager code.
A node for each parameter, and not one for all: autograd runs the hooks of all that a node leads to, gradient or not.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._eager_backward import is_watched
from ._reduction import accumulate


def edge_of(shard: Any, like: Tensor) -> Tensor | None:
    """A new edge of ``like``'s size, dtype and device for a parameter, frozen or not; None for what is no shard.

    Its node keeps the shard's ``AccumulateGrad`` alive, so ``swap_tensors`` refuses the shard as long as it lives.
    """
    if not isinstance(shard, DTensor) or not shard.is_leaf:
        return None
    trains = shard.requires_grad
    shard.requires_grad_(True)  # a frozen one may be thawed, and its AccumulateGrad goes by what it is then
    try:
        with torch.enable_grad(), torch.inference_mode(False):
            edge = cast(Tensor, _Edge.apply(shard, like.detach()))
    finally:
        shard.requires_grad_(trains)
    node: Any = edge.grad_fn
    node.leaf = node.next_functions[0][0]
    return edge


class _Edge(torch.autograd.Function):
    """A sharded parameter to its edge; backward makes the plain gradient the shard's.

    It saves no tensors, so backward may run any number of times.
    """

    @staticmethod
    def forward(ctx: Any, shard: DTensor, like: Tensor) -> Tensor:
        ctx.shard, ctx.is_beside = shard, shard.device == like.device
        ctx.set_materialize_grads(False)
        return like.new_zeros(()).expand_as(like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None]:
        shard = ctx.shard
        if grad is None or not shard.requires_grad:
            return None, None
        if compat.has_post_accumulate_grad_hooks(shard) or is_watched(shard, ctx.leaf):
            return compat.dtensor_like(shard, grad), None
        # What AccumulateGrad does, without the detour over operations on DTensors, which takes 9 microseconds.
        if ctx.is_beside and shard.grad is None:
            shard.grad = compat.dtensor_like(shard, grad)
        else:
            accumulate(shard, grad)
        return None, None
