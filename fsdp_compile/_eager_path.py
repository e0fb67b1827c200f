"""The eager path: the same parameters through hooks instead of a graph, for debugging and for what did not compile.

    begin_forward     gather the unit's buckets; reads of its parameters give the gathered tensors
    end_forward       free their storage (or keep it); hook the outputs
    backward reaches the outputs    gather again into the same storage, which the saved tensors alias
    all gradients are there         reduce them in buckets, give the shards their part, free

Gathering is an autograd function whose backward is the reduction, so unused parameters, repeated calls and
accumulation are autograd's own business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._group import ParamGroup
from .passes import ParamSpec, lower
from .passes.markers import require_data
from .passes.planner import gather_buckets, reduce_buckets

if TYPE_CHECKING:
    from ._state import UnitState

READS = "_fsdp_compile_reads"


class GatheredCall:
    """The gathered parameters of one forward call of one unit."""

    def __init__(self, group: ParamGroup, specs: list[ParamSpec], locals_: list[Tensor]) -> None:
        self.group = group
        self.specs = specs
        self.locals = [local.detach() for local in locals_]
        # With one rank, what is gathered may be the shard itself: its storage is not ours to free.
        self.freeable = group.mesh.num_shards > 1
        self.freed_bytes: list[int] | None = None
        self.gathered = self._gather()
        self.tensors: dict[str, Tensor] = {}  # by FQN: what reads see

    def _gather(self) -> list[Tensor]:
        fulls: dict[int, Tensor] = {}
        in_flight = []
        for bucket in gather_buckets(self.specs):
            specs = [self.specs[index] for index in bucket]
            launched = lower.launch_gather(lower.run, [self.locals[index] for index in bucket], specs)
            in_flight.append((bucket, specs, launched))
        for bucket, specs, launched in in_flight:
            fulls.update(zip(bucket, lower.finish_gather(lower.run, launched, specs)))
        return [fulls[index] for index in range(len(self.specs))]

    def free(self) -> None:
        if self.freeable and self.freed_bytes is None:
            storages = [full.untyped_storage() for full in self.gathered]
            self.freed_bytes = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)

    def refill(self) -> None:
        """Gather again into the storages that autograd's saved tensors alias."""
        if self.freed_bytes is None:
            return
        with torch.no_grad():
            again = self._gather()
            for full, num_bytes, new in zip(self.gathered, self.freed_bytes, again):
                full.untyped_storage().resize_(num_bytes)
                full.data.copy_(new)  # .data: no new version for autograd, the value is the one that was saved
        self.freed_bytes = None

    def reduce(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the local shards from those of the full parameters; None stays None."""
        present = [index for index, grad in enumerate(grads) if grad is not None]
        specs = [self.specs[index] for index in present]
        reduced: list[Tensor | None] = [None] * len(grads)
        in_flight = []
        for bucket in reduce_buckets(specs):
            members = [present[index] for index in bucket]
            member_specs = [self.specs[index] for index in members]
            full_grads = [grads[index] for index in members]
            in_flight.append((members, member_specs, lower.launch_reduce(lower.run, full_grads, member_specs)))
        for members, member_specs, launched in in_flight:
            for index, grad in zip(members, lower.finish_reduce(lower.run, launched, member_specs)):
                reduced[index] = grad
        return reduced


class _Gather(torch.autograd.Function):
    """Shards to full parameters; backward reduces."""

    @staticmethod
    def forward(ctx: Any, call: GatheredCall, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(full.view_as(full) for full in call.gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        wanted = tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[1:]))
        reduced = ctx.call.reduce(wanted)
        if all(ctx.needs_input_grad[1:]):
            # A frozen parameter may still be read by what is left of backward; the end of backward frees it.
            ctx.call.free()
        return (None, *reduced)


def begin_forward(state: UnitState) -> None:
    """Gather the unit for an eager forward."""
    group = state.group
    if not group.params:
        return
    if compat.in_backward() and state.calls and state.calls[-1].freed_bytes is None:
        state.calls.append(state.calls[-1])  # activation checkpointing recomputes: backward has gathered already
        return
    shards, params = [], []
    for param in group.params:
        value = param.param
        if isinstance(value, DTensor):
            require_data(param.fqn, value)
            shards.append(value.to_local())
            params.append(param)
    specs = [group.spec_of(param) for param in params]
    call = GatheredCall(group, specs, shards)
    tensors = _Gather.apply(call, *shards)
    call.tensors = {param.fqn: tensor for param, tensor in zip(params, tensors)}
    state.calls.append(call)


def end_forward(state: UnitState, output: Any) -> Any:
    """Free or keep what the unit gathered, and be told when backward reaches it."""
    if not state.calls:
        return output
    call = state.calls.pop()
    if compat.in_backward():
        return output  # recomputed for backward, which frees it at its end
    outputs = [
        leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not outputs or not torch.is_grad_enabled():
        call.free()
        call.tensors.clear()
        return output
    if state.group.regather:
        call.free()

    def before_backward(grad: Tensor) -> None:
        call.refill()
        if call not in state.calls:
            state.calls.append(call)  # for checkpointing that recomputes this unit
            compat.at_end_of_backward(lambda: _end_backward(state))

    for tensor in outputs:
        tensor.register_hook(before_backward)
    return output


def _end_backward(state: UnitState) -> None:
    for call in state.calls:
        call.free()
    state.calls.clear()
    state.in_forward = False


def eager_read(module: nn.Module, name: str, param: Any) -> Any:
    """An eager read: the gathered parameter inside a forward, the sharded one outside."""
    if not isinstance(param, DTensor):
        return param
    sharded, owner, reader = module.__dict__[READS][name]
    if owner.calls and owner.calls[-1].freed_bytes is None and (owner.in_forward or compat.in_backward()):
        gathered = owner.calls[-1].tensors.get(sharded.fqn)
        if gathered is not None:
            return gathered
    if owner.in_forward or reader.in_forward:
        # A compiled forward is running around this read, or another unit's (tied parameters): gather just this one.
        require_data(sharded.fqn, param)
        spec = owner.group.spec_of(sharded)
        return torch.ops.fsdpc.unshard(param.to_local(), **spec.kwargs())
    return param
