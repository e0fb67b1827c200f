"""The edges of a compiled graph: plain tensors in the place of sharded parameters, to which the gradients go.

    forward      shards --_Edges--> edges, made once      graph(edges) -> output
    backward     output -> graph -> plain gradients of the edges -> _Edges' backward -> the shards'

AOTAutograd would take DTensors apart and put them together again on every step, in Python, for 14 microseconds a
parameter. An edge is the shard's local tensor, with a path of autograd's to the shard: hooks, ``autograd.grad``,
``backward(inputs=...)`` and freezing are autograd's business, as in eager code. Where gradients do not look like the
local tensor, graphs take that as well, and the edge is the accumulator's leaf, which costs no memory.

The edges of a unit that graphs take have one node, for a node costs 4 microseconds. Autograd runs tensor hooks of all
that a node leads to, gradient or not: a shard that somebody put a hook on has a node of its own. Which leaves a hook
that is registered between a forward and its backward, on a parameter that only another graph of the unit reads: it runs
with None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._eager_backward import is_watched
from ._reduction import accumulate

if TYPE_CHECKING:
    from ._accumulate import Accumulator
    from ._group import ParamGroup
    from ._param import Mode, ShardedParam


def join_edges(group: ParamGroup) -> None:
    """Have one node for the edges of a unit that graphs take, and one each for shards that somebody's hooks are on."""
    for param in group.params:
        param.is_hooked = any(compat.hooks_of(param.shard))
    accumulators = _with_edges(group)
    make_edges([one for one in accumulators if _joins(one.param)])
    _part([one for one in accumulators if not _joins(one.param)])
    group.has_joined_edges = True


def part_edges(group: ParamGroup) -> None:
    """Have a node for each edge of a unit, so that one can go without the others."""
    if group.has_joined_edges:
        _part(_with_edges(group))
        group.has_joined_edges = False


def _part(accumulators: Sequence[Accumulator]) -> None:
    for one in accumulators:
        edge: Any = one.edge
        if len(edge.grad_fn.shards) > 1:
            make_edges([one])


def _joins(param: ShardedParam) -> bool:
    shard = param.shard
    return param.is_traced and shard.requires_grad and not param.is_hooked and not shard.is_inference()


def _with_edges(group: ParamGroup) -> list[Accumulator]:
    """Those of the mode that the unit is in, or comes back to; edges of the mode that it has left go."""
    now: Mode = "resume" if group.has_accumulated else "reduce"
    for param in group.params:
        for mode, accumulator in param.accumulators.items():
            if mode != now and accumulator.edge is not None:
                accumulator.forget_edge()
    accumulators = [param.accumulators[now] for param in group.params if now in param.accumulators]
    return [one for one in accumulators if one.edge is not None]


def make_edges(accumulators: Sequence[Accumulator]) -> None:
    """New edges for the shards that these have, frozen or not, by one node.

    It keeps the shards' ``AccumulateGrad`` alive, so ``swap_tensors`` refuses the shards as long as an edge lives.
    """
    if not accumulators:
        return
    shards: Any = [one.shard for one in accumulators]
    frozen = [shard for shard in shards if not shard.requires_grad]
    try:
        for shard in frozen:  # which may be thawed, and its AccumulateGrad goes by what it is then
            shard.requires_grad_(True)
        with torch.enable_grad(), torch.inference_mode(False):
            edges = _Edges.apply([_look_of(one) for one in accumulators], *shards)
    finally:
        for shard in frozen:
            shard.requires_grad_(False)
    node = edges[0].grad_fn
    node.leaves = [leaf for leaf, _ in node.next_functions]
    for one, edge in zip(accumulators, edges, strict=True):
        one.have_edge(edge)


def _look_of(accumulator: Accumulator) -> Tensor:
    """What an edge is to look like: the local tensor, where gradients look like it."""
    local, leaf = accumulator.local, accumulator.leaf
    assert local is not None and leaf is not None
    is_like = type(local) is Tensor and local.dtype == leaf.dtype and not local.is_inference()
    accumulator.param.takes = "edge" if is_like else "both"
    return local if is_like else leaf


class _Edges(torch.autograd.Function):
    """Sharded parameters to their edges; backward makes plain gradients the shards'.

    It saves no tensors, so backward may run any number of times.
    """

    @staticmethod
    def forward(ctx: Any, likes: list[Tensor], *shards: DTensor) -> tuple[Tensor, ...]:
        ctx.shards = shards
        ctx.are_beside = [shard.device == like.device for shard, like in zip(shards, likes, strict=True)]
        ctx.set_materialize_grads(False)
        return tuple(like.detach() for like in likes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        through_autograd: list[DTensor | None] = [None]  # that of the likes
        with compat.quick_attributes():
            for shard, leaf, is_beside, grad in zip(ctx.shards, ctx.leaves, ctx.are_beside, grads, strict=True):
                through_autograd.append(None)
                if grad is None or not shard.requires_grad:
                    continue
                if compat.has_post_accumulate_grad_hooks(shard) or is_watched(shard, leaf):
                    through_autograd[-1] = compat.dtensor_like(shard, grad)
                # What AccumulateGrad does, without the detour over operations on DTensors: 9 microseconds.
                elif is_beside and shard.grad is None:
                    shard.grad = compat.dtensor_like(shard, grad)
                else:
                    accumulate(shard, grad)
        return tuple(through_autograd)


compat.leave_all_to_python(_Edges.backward)
