"""What a read gives inside an eager forward, and the autograd nodes that lead back to the call.

    inputs -> [_Inputs] -> forward -> outputs          backward reaches the outputs: enter_backward
    shard ----[_Read]----^ a read                      _Read's backward: the last one to run reduces, and leaves
                                                       _Inputs' backward: leave_backward, where _Read comes too early
                                                       for what is frozen; without them, the end of the backward

Reading is an autograd function, so repeated calls and unused parameters are autograd's own business. Each parameter has
a node of its own, as it would without us: what splits a backward in two, as zero-bubble pipelines do, looks for them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dynamo
from ..core.containers import map_tensors, tensors_in
from . import backward
from .routed import Routed
from .running import Call, Recording


def read(call: Call, fqn: str) -> Any:
    """The gathered parameter; None for one whose place the user gave to something else."""
    call.was_read = True
    call.gathered.wait()
    index = call.gathered.index.get(fqn)
    if index is None:
        return None
    shard = call.gathered.shards[index]
    recorded = _is_recorded(shard)
    call.read_frozen |= not recorded and torch.is_grad_enabled()
    if (index, recorded) not in call.tensors:
        full = _Read.apply(_recording(call), index, _leaf(shard)) if recorded else call.gathered.full(index)
        _have_read(call, index, recorded, full)
    return call.tensors[index, recorded]


def read_all(call: Call) -> list[Tensor]:
    """Every gathered parameter, as a plain tensor, for a graph that runs inside the call.

    They have one node: the graph has one as well, whose backward is through with all of them at once. And a parameter
    that the graph did not take has its part in that backward, or its unit would wait for it to the end.
    """
    call.was_read = True
    fulls, shards = call.gathered.wait(), call.gathered.shards
    recorded = [_is_recorded(shard) for shard in shards]
    call.read_frozen |= not all(recorded) and torch.is_grad_enabled()
    new = [index for index in range(len(shards)) if recorded[index] and (index, True) not in call.plain]
    if new:
        outputs = _ReadAll.apply(_recording(call), new, *[_leaf(shards[index]) for index in new])
        for index, full in zip(new, outputs):
            _have_read(call, index, True, full)
    given = [
        call.plain[index, True] if recorded[index] else param.carry(fulls[index])
        for index, param in enumerate(call.gathered.params)
    ]
    for full in given:
        dynamo.mark_free_to_save(full)  # its storage is emptied; that of a cast would not be
    return given


def _is_recorded(shard: DTensor) -> bool:
    # Parameters are constants to torch.func.
    return shard.requires_grad and torch.is_grad_enabled() and not autograd.in_functorch()


def _have_read(call: Call, index: int, recorded: bool, full: Tensor) -> None:
    call.plain[index, recorded] = full
    call.tensors[index, recorded] = call.gathered.params[index].as_read(full)


def _recording(call: Call) -> Recording:
    recording = None if call.recording is None else call.recording()
    if recording is None:
        recording = Recording(call)
        call.recording = weakref.ref(recording)
    return recording


def _leaf(shard: DTensor) -> Tensor:
    """What autograd is told that a gathered parameter comes from: the shard.

    A shard with post-accumulate hooks has a leaf in its place: autograd would run them although no gradient comes to
    it, and the reduction runs them when there is one.
    """
    return shard.detach().requires_grad_() if autograd.has_post_accumulate_grad_hooks(shard) else shard


class _Read(torch.autograd.Function):
    """A shard to the full parameter, which is gathered already; backward hands the gradient in."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, index: int, shard: DTensor) -> Tensor:
        ctx.recording, ctx.index = recording, index
        ctx.set_materialize_grads(False)
        autograd.take_gradients_as_produced(ctx)
        gathered = recording.call.gathered
        if isinstance(gathered, Routed) and index not in recording.read:
            gathered.route.expect(gathered, index)
        recording.read.add(index)
        return gathered.full(index).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        leaf, _ = ctx.next_functions[-1]
        return None, None, backward.arrive(ctx.recording, ctx.index, grad, leaf)


class _ReadAll(torch.autograd.Function):
    """The same for all that a graph may read."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, indices: list[int], *shards: DTensor) -> tuple[Tensor, ...]:
        ctx.recording, ctx.indices = recording, indices
        ctx.set_materialize_grads(False)
        recording.read.update(indices)
        fulls = recording.call.gathered.wait()
        return tuple(fulls[index].detach() for index in indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        leaves = [leaf for leaf, _ in ctx.next_functions]
        arrived = zip(ctx.indices, grads, leaves, strict=True)
        return None, None, *[backward.arrive(ctx.recording, index, grad, leaf) for index, grad, leaf in arrived]


class _Inputs(torch.autograd.Function):
    """The inputs of a unit, as they are; backward through them is the end of the unit's backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        backward.leave_backward(ctx.call)
        return (None, *grads)


dynamo.leave_all_to_python(_Read.backward, _ReadAll.backward, _Inputs.backward)


def end_at_inputs(call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs of a forward; of a unit that is partly frozen, passed through a node that ends its backward."""
    some_frozen = any(not shard.requires_grad for shard in call.gathered.shards)
    if not some_frozen or not torch.is_grad_enabled() or autograd.in_functorch():
        return args, kwargs  # gradients tell of all that backward reads
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    call.ends_at_inputs = True
    passed = dict(zip(map(id, inputs), _Inputs.apply(call, *inputs)))
    return map_tensors((args, kwargs), lambda tensor: passed.get(id(tensor), tensor))
