"""Reads of parameters inside an eager forward, and the autograd nodes that report to its ``Call`` in backward.

    inputs -> [_Inputs] -> forward -> outputs          backward reaches the outputs: enter_backward
    shard ----[_Read]----^ a read                      _Read's backward: the last one to run reduces, and leaves
                                                       _Inputs' backward: leave_backward. Frozen parameters have no
                                                       _Read, and may be read until then; without _Inputs, the end of
                                                       backward frees

A read is an autograd function, so autograd itself handles repeated calls and unused parameters. Each parameter has a
node of its own, as it would without FSDP: zero-bubble pipelines, which split a backward in two, look for these nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from .._torch_compat import autograd, dynamo, subclasses
from ..core.containers import map_tensors, tensors_in
from . import backward
from .gathered import Bucket
from .running import Call, Recording, Running, Visit


def gather(call: Call, buckets: Sequence[Bucket]) -> None:
    """Gather those of the buckets that a forward has not gathered yet, and launch the buckets that come next."""
    buckets = [bucket for bucket in buckets if not call.reached.issuperset(bucket)]
    if not buckets:
        return
    call.reached.update(index for bucket in buckets for index in bucket)
    coming: list[Visit] = []
    if call in call.run.calls and autograd.backward_task() is None:
        coming = call.run.iteration.come_to(call, buckets)
    call.gathered.wait(buckets)
    for visit in () if call.unit.settings.forward_prefetch else coming:
        prefetch(visit.run, visit)


def prefetch(target: Running, visit: Visit | None = None) -> None:
    """Launch the gathers of a unit whose forward comes next, or those of one visit to it; it may not run this time."""
    gathered = target.gathered if target.calls else target.current()  # a forward may have replaced some by others
    if gathered is None or (visit is not None and visit.gathered() is not gathered):
        return  # the visit's buckets are those of parameters that the unit had then
    target.iteration.touched.setdefault(target)
    if not target.calls:
        gathered.free_if_stale()
    gathered.launch(None if visit is None else visit.buckets)


def read_gathered(call: Call, fqn: str) -> Any:
    """Return the gathered parameter; None if the user put something else in its place."""
    call.was_read = True
    index = call.gathered.index.get(fqn)
    if index is None:
        return None
    if index not in call.reached:
        some = [call.gathered.buckets[call.gathered.bucket_of[index]]]
        gather(call, some if call.unit.comes_in_parts else call.gathered.buckets)
    shard = call.gathered.shards[index]
    recorded, has_grad = _is_recorded(call, shard), torch.is_grad_enabled()
    call.read_frozen |= call.records and not (recorded and has_grad)
    call.looks_up_again |= index in call.gathered.tables and autograd.checkpointed_region() > 0
    full = call.gathered.full(index)
    if not call.has_read(index, recorded, full):
        given = call.given[index]() if index in call.given else None
        if given is not None and recorded and subclasses.share_storage(given, full):
            full = given
        elif recorded:
            (full,) = autograd.apply_recorded(_Read, _recording(call), [index], _leaf(shard))
        _have_read(call, index, recorded, full)
    if recorded and has_grad and call.recording is not None and (recording := call.recording()) is not None:
        recording.read.add(index)
    return call.tensors[index, recorded]


def read_all(call: Call) -> list[Tensor]:
    """Return every gathered parameter, as reads give it, for a graph that runs inside the call.

    They share one autograd node, since the graph has one node too, whose backward finishes with all of them at once.
    So a parameter that the graph did not use takes part as well; else its unit would wait for it until backward ends.
    """
    call.was_read = True
    gather(call, call.gathered.buckets)
    call.looks_up_again |= autograd.checkpointed_region() > 0
    fulls, shards = call.gathered.wait(), call.gathered.shards
    recorded = [_is_recorded(call, shard) for shard in shards]
    call.read_frozen |= not all(recorded) and torch.is_grad_enabled()
    new = [index for index in range(len(shards)) if recorded[index] and not call.has_read(index, True, fulls[index])]
    if new:
        recording = _recording(call)
        recording.read.update(new)
        for index, full in zip(new, _Read.apply(recording, new, *[_leaf(shards[index]) for index in new])):
            _have_read(call, index, True, full)
    given = [
        call.tensors[index, True] if recorded[index] else param.as_read(fulls[index])
        for index, param in enumerate(call.gathered.params)
    ]
    for index, full in enumerate(given):
        if index not in call.gathered.tables:
            dynamo.mark_free_to_save(full)  # its storage is freed; that of a cast would not be
    return given


def _is_recorded(call: Call, shard: DTensor) -> bool:
    """Whether autograd records a read, so that a gradient comes.

    It also does if the forward reads under ``no_grad`` or inside a transform: the tensor may be used elsewhere, too.
    """
    return shard.requires_grad and (call.records or autograd.records_now())


def _have_read(call: Call, index: int, recorded: bool, full: Tensor) -> None:
    read = call.tensors[index, recorded] = call.gathered.params[index].as_read(full)
    if recorded and read is full:
        call.given[index] = TensorWeakRef(full)


def _recording(call: Call) -> Recording:
    recording = None if call.recording is None else call.recording()
    if recording is None:
        recording = Recording(call)
        call.recording = weakref.ref(recording)
    return recording


def _leaf(shard: DTensor) -> Tensor:
    """Return the tensor from which, for autograd, a gathered parameter comes: the shard.

    For a shard with post-accumulate hooks it is another leaf. Autograd would run the hooks although it brings the shard
    no gradient; the reduction runs them when the gradient is there.
    """
    return shard.detach().requires_grad_() if autograd.post_accumulate_grad_hooks(shard) else shard


class _Read(torch.autograd.Function):
    """Maps shards to full parameters, which are gathered already; backward passes the gradients to ``arrive``."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, indices: list[int], *shards: DTensor) -> tuple[Tensor, ...]:
        ctx.recording, ctx.indices = recording, indices
        ctx.set_materialize_grads(False)
        autograd.take_gradients_as_produced(ctx, len(indices))
        fulls = recording.call.gathered.fulls
        return tuple(fulls[index].detach() for index in indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        leaves = [leaf for leaf, _ in ctx.next_functions]
        arrived = zip(ctx.indices, grads, leaves, strict=True)
        return None, None, *[backward.arrive(ctx.recording, index, grad, leaf) for index, grad, leaf in arrived]


class _Inputs(torch.autograd.Function):
    """Passes a unit's inputs on unchanged; its backward ends the unit's backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        backward.leave_backward(ctx.call)
        return (None, *grads)


dynamo.leave_all_to_python(_Read.backward, _Inputs.backward)


def end_at_inputs(call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the inputs of a forward; for a partly frozen unit, they pass through a node that ends its backward."""
    some_frozen = any(not shard.requires_grad for shard in call.gathered.shards)
    if not some_frozen or not torch.is_grad_enabled() or autograd.in_functorch():
        return args, kwargs  # gradients tell when backward has read everything
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    call.ends_at_inputs = True
    passed = dict(zip(map(id, inputs), _Inputs.apply(call, *inputs)))
    return map_tensors((args, kwargs), lambda tensor: passed.get(id(tensor), tensor))
