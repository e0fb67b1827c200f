"""The eager path: the same parameters through autograd instead of a graph, for debugging and what did not compile.

    begin_forward     a GatheredCall, empty: nothing is gathered until something reads
    first read        the unit's buckets are gathered; reads give the gathered tensors
    end_forward       free their storage (or keep it); hook the outputs
    backward reaches the outputs    gather again into the same storage, which the saved tensors alias
    all gradients are there         reduce them in buckets, give the shards their part, free

Gathering is an autograd function whose backward is the reduction, so unused parameters, repeated calls and
accumulation are autograd's own business. A unit whose forward was compiled reads through markers and never fills its
call, so an eager wrapper around a compiled forward costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._cast import tensors_in
from .passes import ParamSpec, lower
from .passes.markers import require_data
from .passes.planner import gather_buckets, reduce_buckets

if TYPE_CHECKING:
    from ._param import ShardedParam
    from ._state import UnitState

READS = "_fsdp_compile_reads"


class GatheredCall:
    """The gathered parameters of one forward call of one unit."""

    def __init__(self, state: UnitState) -> None:
        self._group = state.group
        self._specs: list[ParamSpec] = []
        self._index: dict[str, int] = {}
        self._shards: list[DTensor] = []
        self._gathered: list[Tensor] = []
        self._freed_bytes: list[int] | None = None
        # What reads see, by whether autograd was recording; autograd's nodes refer to the call, so not for longer than
        # a forward runs.
        self._tensors: dict[bool, list[Tensor]] = {}
        # The backward that reached the outputs of this forward.
        self.backward_task: int | None = None
        # Storages that an output of the module shares: the user's from then on.
        self._given_away: set[int] = set()

    @property
    def filled(self) -> bool:
        return bool(self._gathered) and self._freed_bytes is None

    def read(self, fqn: str) -> Tensor | None:
        """The gathered parameter; None for one whose place the user gave to something else."""
        if not self._gathered:
            self._fill()
        self.refill()
        if fqn not in self._index:
            return None
        recording = torch.is_grad_enabled() and any(shard.requires_grad for shard in self._shards)
        if recording not in self._tensors:
            self._tensors[recording] = self._recorded() if recording else self._gathered
        return self._tensors[recording][self._index[fqn]]

    def forget_reads(self) -> None:
        """Let go of the tensors that reads saw; whoever needs one holds it."""
        self._tensors.clear()

    def give_away(self, tensors: list[Tensor]) -> None:
        """Never free what ``tensors``, outputs of the module, share storage with."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._given_away |= {full.untyped_storage().data_ptr() for full in self._gathered} & addresses

    def free(self) -> None:
        """Give the storages back; tensors that alias them stay valid objects."""
        # With one rank, what is gathered may be the shard itself: not ours to free.
        if self.filled and self._group.mesh.num_shards > 1:
            storages = [full.untyped_storage() for full in self._gathered]
            self._freed_bytes = [storage.nbytes() for storage in storages]
            for storage in storages:
                if storage.data_ptr() not in self._given_away:
                    storage.resize_(0)

    def refill(self) -> None:
        """Gather again into the storages that autograd's saved tensors alias."""
        if self._freed_bytes is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            for full, num_bytes, again in zip(self._gathered, self._freed_bytes, self._gather()):
                if full.untyped_storage().nbytes() != num_bytes:
                    full.untyped_storage().resize_(num_bytes)
                    full.data.copy_(again)  # .data: no new version for autograd, the value is the one that was saved
        self._freed_bytes = None

    def reduce(self, trainable: list[int], grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the local shards from those of the full parameters; None stays None."""
        present = [(index, grad) for index, grad in zip(trainable, grads) if grad is not None]
        reduced: dict[int, Tensor] = {}
        in_flight = []
        for bucket in reduce_buckets([self._specs[index] for index, _ in present]):
            members = [present[place][0] for place in bucket]
            specs = [self._specs[index] for index in members]
            in_flight.append((members, specs, lower.launch_reduce(lower.run, [present[p][1] for p in bucket], specs)))
        for members, specs, launched in in_flight:
            reduced.update(zip(members, lower.finish_reduce(lower.run, launched, specs)))
        return [reduced.get(index) for index in trainable]

    def _fill(self) -> None:
        for param in self._group.params:
            shard = param.param
            if isinstance(shard, DTensor):
                require_data(param.fqn, shard)
                self._index[param.fqn] = len(self._shards)
                self._shards.append(shard)
                self._specs.append(self._group.spec_of(param))
        with torch.inference_mode(False), torch.no_grad():  # a later read may be recorded
            self._gathered = self._gather()

    def _gather(self) -> list[Tensor]:
        shards = [shard.to_local().detach() for shard in self._shards]
        fulls: dict[int, Tensor] = {}
        in_flight = []
        for bucket in gather_buckets(self._specs):
            specs = [self._specs[index] for index in bucket]
            in_flight.append(
                (bucket, specs, lower.launch_gather(lower.run, [shards[index] for index in bucket], specs))
            )
        for bucket, specs, launched in in_flight:
            fulls.update(zip(bucket, lower.finish_gather(lower.run, launched, specs)))
        return [fulls[index] for index in range(len(shards))]

    def _recorded(self) -> list[Tensor]:
        """The gathered parameters with the reduction as their autograd rule; frozen ones take no part."""
        trainable = [index for index, shard in enumerate(self._shards) if shard.requires_grad]
        tensors = list(self._gathered)
        outputs = _Gather.apply(self, trainable, *[self._shards[index].to_local() for index in trainable])
        for index, tensor in zip(trainable, outputs):
            tensors[index] = tensor
        return tensors


class _Gather(torch.autograd.Function):
    """Shards to full parameters, which the call holds already; backward reduces."""

    @staticmethod
    def forward(ctx: Any, call: GatheredCall, trainable: list[int], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.trainable = call, trainable
        ctx.set_materialize_grads(False)
        return tuple(call._gathered[index].view_as(call._gathered[index]) for index in trainable)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: GatheredCall = ctx.call
        reduced = call.reduce(ctx.trainable, grads)
        # What is left of backward may still read a frozen parameter, or all of them when this is a backward inside
        # another one (reentrant checkpointing); then the end of backward frees.
        if len(ctx.trainable) == len(call._shards) and call.backward_task == compat.backward_task():
            call.free()
        return (None, None, *reduced)


def begin_forward(state: UnitState) -> GatheredCall:
    """A place for what this eager forward will gather."""
    recomputing = compat.backward_task() is not None
    call = _call_in_backward(state)
    if call is None or not call.filled:
        call = GatheredCall(state)
        if recomputing:
            _free_at_end_of_backward(call)
    if not recomputing and state.backward_call is not None:
        state.backward_call.free()  # left by a backward that raised
        state.backward_call = None
    state.calls.append(call)
    return call


def abandon_forward(state: UnitState, call: GatheredCall) -> None:
    """The forward raised: an error, or checkpointing that has recomputed enough."""
    state.calls.remove(call)
    if compat.backward_task() is None:
        call.forget_reads()
        call.free()


def end_forward(state: UnitState, call: GatheredCall, output: Any) -> Any:
    """Free or keep what the unit gathered, and be told when backward reaches it."""
    state.calls.remove(call)
    call.forget_reads()
    if not call.filled or compat.backward_task() is not None:
        return output  # recomputed for backward: its end frees it
    tensors = tensors_in(output)
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    call.give_away(tensors)
    if state.group.regather or not outputs or not torch.is_grad_enabled():
        call.free()

    def before_backward(grad: Tensor) -> None:
        call.refill()
        task = compat.backward_task()
        if call.backward_task != task:
            call.backward_task = task
            _free_at_end_of_backward(call)
        state.backward_call, state.backward_task = call, task

    for tensor in outputs:
        tensor.register_hook(before_backward)
    return output


def eager_read(module: nn.Module, name: str, param: Any) -> Any:
    """An eager read: the gathered parameter inside a forward, the sharded one outside."""
    if not isinstance(param, DTensor):
        return param
    read: tuple[ShardedParam, UnitState, UnitState] = module.__dict__[READS][name]
    sharded, owner, reader = read
    # Without a forward that runs, checkpointing inside the unit may be recomputing a part of one for backward.
    call = owner.calls[-1] if owner.calls else _call_in_backward(owner)
    if call is not None:
        gathered = call.read(sharded.fqn)
        return param if gathered is None else gathered
    if owner.runs_forward or reader.runs_forward:
        # A compiled forward is running around this read, or only another unit's: gather just this one.
        require_data(sharded.fqn, param)
        return torch.ops.fsdpc.unshard(param.to_local(), **owner.group.spec_of(sharded).kwargs())
    return param


def _call_in_backward(state: UnitState) -> GatheredCall | None:
    """The forward call that the running backward has reached, if it has reached this unit."""
    task = compat.backward_task()
    return state.backward_call if task is not None and task == state.backward_task else None


def _free_at_end_of_backward(call: GatheredCall) -> None:
    def free() -> None:
        call.forget_reads()
        call.free()

    compat.at_end_of_backward(free)
