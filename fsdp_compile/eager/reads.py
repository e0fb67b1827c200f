"""Reads of parameters inside an eager forward, and the autograd nodes that report to its ``Use`` in backward.

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
from .running import Recording, Running, Use, Visit


def gather(use: Use, buckets: Sequence[Bucket]) -> None:
    """Gather those of the buckets that a forward has not gathered yet, and launch the buckets that come next."""
    buckets = [bucket for bucket in buckets if not use.reached.issuperset(bucket)]
    if not buckets:
        return
    use.reached.update(index for bucket in buckets for index in bucket)
    coming: list[Visit] = []
    if use in use.run.uses and autograd.backward_task() is None:
        coming = use.run.iteration.come_to(use, buckets)
    use.gathered.wait(buckets)
    for visit in () if use.unit.settings.forward_prefetch else coming:
        prefetch(visit.run, visit)


def prefetch(target: Running, visit: Visit | None = None) -> None:
    """Launch the gathers of a unit whose forward comes next, or those of one visit to it; it may not run this time."""
    gathered = target.gathered if target.uses else target.current()  # a forward may have replaced some by others
    if gathered is None or (visit is not None and visit.gathered() is not gathered):
        return  # the visit's buckets are those of parameters that the unit had then
    target.iteration.touched.setdefault(target)
    if not target.uses:
        gathered.free_if_stale()
    gathered.launch(None if visit is None else visit.buckets)


def read_gathered(use: Use, fqn: str) -> Any:
    """Return the gathered parameter; None if the user put something else in its place."""
    use.was_read = True
    index = use.gathered.index.get(fqn)
    if index is None:
        return None
    if index not in use.reached:
        some = [use.gathered.buckets[use.gathered.bucket_of[index]]]
        gather(use, some if use.unit.comes_in_parts else use.gathered.buckets)
    shard = use.gathered.shards[index]
    recorded, has_grad = _is_recorded(use, shard), torch.is_grad_enabled()
    use.read_frozen |= use.records and not (recorded and has_grad)
    use.looks_up_again |= index in use.gathered.tables and autograd.checkpointed_region() > 0
    full = use.gathered.full(index)
    if not use.has_read(index, recorded, full):
        given = use.given[index]() if index in use.given else None
        if given is not None and recorded and subclasses.share_storage(given, full):
            full = given
        elif recorded:
            (full,) = autograd.apply_recorded(_Read, _recording(use), [index], _leaf(shard))
        _have_read(use, index, recorded, full)
    if recorded and has_grad and use.recording is not None and (recording := use.recording()) is not None:
        recording.read.add(index)
    return use.tensors[index, recorded]


def read_all(use: Use) -> list[Tensor]:
    """Return every gathered parameter, as reads give it, for a graph that runs inside the forward.

    They share one autograd node, since the graph has one node too, whose backward finishes with all of them at once.
    So a parameter that the graph did not use takes part as well; else its unit would wait for it until backward ends.
    """
    use.was_read = True
    gather(use, use.gathered.buckets)
    use.looks_up_again |= autograd.checkpointed_region() > 0
    fulls, shards = use.gathered.wait(), use.gathered.shards
    recorded = [_is_recorded(use, shard) for shard in shards]
    use.read_frozen |= not all(recorded) and torch.is_grad_enabled()
    new = [index for index in range(len(shards)) if recorded[index] and not use.has_read(index, True, fulls[index])]
    if new:
        recording = _recording(use)
        recording.read.update(new)
        for index, full in zip(new, _Read.apply(recording, new, *[_leaf(shards[index]) for index in new])):
            _have_read(use, index, True, full)
    given = [
        use.tensors[index, True] if recorded[index] else param.as_read(fulls[index])
        for index, param in enumerate(use.gathered.params)
    ]
    for index, full in enumerate(given):
        if index not in use.gathered.tables:
            dynamo.mark_free_to_save(full)  # its storage is freed; that of a cast would not be
    return given


def _is_recorded(use: Use, shard: DTensor) -> bool:
    """Whether autograd records a read, so that a gradient comes.

    It also does if the forward reads under ``no_grad`` or inside a transform: the tensor may be used elsewhere, too.
    """
    return shard.requires_grad and (use.records or autograd.records_now())


def _have_read(use: Use, index: int, recorded: bool, full: Tensor) -> None:
    read = use.tensors[index, recorded] = use.gathered.params[index].as_read(full)
    if recorded and read is full:
        use.given[index] = TensorWeakRef(full)


def _recording(use: Use) -> Recording:
    recording = None if use.recording is None else use.recording()
    if recording is None:
        recording = Recording(use)
        use.recording = weakref.ref(recording)
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
        fulls = recording.use.gathered.fulls
        return tuple(fulls[index].detach() for index in indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        leaves = [leaf for leaf, _ in ctx.next_functions]
        arrived = zip(ctx.indices, grads, leaves, strict=True)
        return None, None, *[backward.arrive(ctx.recording, index, grad, leaf) for index, grad, leaf in arrived]


class _Inputs(torch.autograd.Function):
    """Passes a unit's inputs on unchanged; its backward ends the unit's backward."""

    @staticmethod
    def forward(ctx: Any, use: Use, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        backward.leave_backward(ctx.use)
        return (None, *grads)


dynamo.leave_all_to_python(_Read.backward, _Inputs.backward)


def end_at_inputs(use: Use, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the inputs of a forward; for a partly frozen unit, they pass through a node that ends its backward."""
    some_frozen = any(not shard.requires_grad for shard in use.gathered.shards)
    if not some_frozen or not torch.is_grad_enabled() or autograd.in_functorch():
        return args, kwargs  # gradients tell when backward has read everything
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    use.ends_at_inputs = True
    passed = dict(zip(map(id, inputs), _Inputs.apply(use, *inputs)))
    return map_tensors((args, kwargs), lambda tensor: passed.get(id(tensor), tensor))
