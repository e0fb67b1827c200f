"""Lower a marker to pack, collective, wait, unpack. Each program is written once, and run eagerly or put into a graph.

    gather   shards -> cast -> pad, or pack -> all_gather_into_tensor -> wait -> [split] -> reorder, unpad -> full
             or        all_gather_members -> wait -> ..., where the parts of each member lie together
             or        gather_offloaded -> wait -> ..., which copies to the device first, and is all of these in one
    reduce   grads  -> pad, reorder -> cast, or pack -> reduce_scatter_tensor -> wait
                    -> [all_reduce over the replicas -> wait] -> divide -> [to_host] -> [split], unpad
             or        all_to_all_single -> wait -> sum_of_parts, which divides as well
             or        reduce_scatter_members -> wait -> ..., of gradients that need neither a cast nor a pack

The functions take ``call(op, *args)``: ``run`` executes the op, the insert pass's emitter adds a node instead. So
both paths put the same bytes on the wire in the same order. ``pack`` casts as well. ``note`` records each launch; a
graph has a list of all its launches instead (announce.py), so the emitter leaves ``note`` out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import _torch_compat as compat
from .._torch_compat import kernels as kernels_compat
from . import streams
from .collectives import KIND_OF, all_gather_members, all_gather_of, c10d, reduce_scatter_members, wait, wait_tensor
from .copies import TAKE_FROM_HOST, let_inductor_see_copies, to_device, to_host
from .layout import ShardLayout, places_of_members, sends_members
from .ledger import note
from .packing import Packing, copied, pack
from .spec import ParamSpec, define_op
from .sums import sum_of_parts

aten = torch.ops.aten

Call = Callable[..., Any]


def run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Execute ``op`` now: this is the ``call`` with which the programs below run eagerly."""
    if op is wait_tensor:
        return wait(*args)
    if op in KIND_OF:
        return compat.call_below_autograd(op, *args, **kwargs)
    return op(*args, **kwargs)


def launch_gather(call: Call, shards: Sequence[Any], specs: Sequence[ParamSpec]) -> Any:
    """Pack one bucket of local shards and start its all-gather; specs agree on dtype and group."""
    dims, lengths = [spec.dim for spec in specs], [spec.layout.chunk for spec in specs]
    first = specs[0]
    how = Packing(dims, lengths, first.dtype, first.device, first.backend, first.num_shards, first.group)
    if how.num_shards > 1:
        call(note, "all_gather", specs, how.group, shards[0])
        if how.device:
            return call(gather_offloaded, shards, *how)
    return send(call, shards, how)


def send(call: Call, shards: Sequence[Any], how: Packing) -> Any:
    """Copy, cast, pad and pack local shards, and start their all-gather; of one rank, return what would be sent."""
    # Offloaded shards are copied to the device as they are stored, each by itself: a cast or a cat before that would be
    # work for the CPU, which has a tenth of the device's bandwidth and may be busy launching.
    here = [call(to_device, shard, how.device) if how.device else shard for shard in shards]
    packs = len(shards) > 1 and how.num_shards > 1  # what does not travel is not packed
    by_member = packs and sends_members(how.backend)
    if by_member:  # a cast writes to other memory, so it may as well write to a bucket, in one kernel
        packs = any(_value(shard).dtype != how.dtype for shard in here)
    cast = here
    if not packs or not _pack_casts(here, how.dtype):
        cast = [as_sent(call, _cast(call, shard, how.dtype)) for shard in here]
    parts = [_pad(call, shard, dim, length) for shard, dim, length in zip(cast, how.dims, how.lengths)]
    if how.num_shards == 1:
        return parts
    packed = call(pack, parts, 1, _wire_dtype(how.dtype)) if packs else parts[0]
    if by_member:
        members = [*_members(call, packed, [_value(part).shape for part in parts])] if packs else parts
        return call(all_gather_members, members, how.num_shards, how.group)
    return call(all_gather_of(how.backend), packed, how.num_shards, how.group)


def launch_beside(call: Call, shards: Sequence[Any], *sent: Any) -> Any:
    """Execute ``gather_offloaded``, each of its ops by ``call``, on the stream TO_DEVICE (streams.py)."""
    how = Packing(*sent)
    with streams.Aside(streams.accelerator.beside(streams.TO_DEVICE, torch.device(how.device))) as work:
        launched = send(call, shards, how)
    for one in launched if isinstance(launched, list) else [launched]:
        streams.launched(one, work)
    return launched


def _gather_offloaded_kernel(shards: Sequence[torch.Tensor], *sent: Any) -> torch.Tensor:
    launched: torch.Tensor = launch_beside(run, shards, *sent)
    return launched


def _gather_offloaded_fake(shards: Sequence[torch.Tensor], *sent: Any) -> torch.Tensor:
    launched: torch.Tensor = send(lambda op, *args: op(*args), shards, Packing(*sent))
    return launched


# One op, since what Inductor generates for the copies and casts would run on the current stream. As all copies between
# the host and the device it cannot be part of a CUDA graph.
gather_offloaded = define_op(
    "gather_offloaded(Tensor[] shards, int[] dims, int[] lengths, ScalarType dtype, str device, str backend, "
    "int group_size, str group_name) -> Tensor",
    _gather_offloaded_kernel,
    _gather_offloaded_fake,
    (torch.Tag.cudagraph_unsafe,),
)
KIND_OF[gather_offloaded] = "all_gather"
TAKE_FROM_HOST.add(gather_offloaded)


def let_inductor_see_offloaded() -> None:
    """Tell Inductor that ``gather_offloaded`` launches, and that copies go on when their ops have returned."""
    kernels_compat.lower_as_collective(gather_offloaded)
    let_inductor_see_copies()


def finish_gather(call: Call, gathered: Any, specs: Sequence[ParamSpec]) -> list[Any]:
    """Wait for a bucket's all-gather and cut it into full parameters."""
    layouts, num_shards = [_gathered_as(spec).layout for spec in specs], specs[0].num_shards
    parts: Iterable[Any] = gathered
    if num_shards > 1:
        gathered = call(wait_tensor, gathered)
        parts = [gathered]
        if len(specs) > 1:
            parts = _parts_of_members(call, gathered, layouts, specs[0].backend)
    fulls = [_unpadded(call, part, layout) for part, layout in zip(parts, layouts)]
    return [_as_read(call, full, spec.dtype) for full, spec in zip(fulls, specs)]


def _parts_of_members(call: Call, gathered: Any, layouts: Sequence[ShardLayout], backend: str) -> Iterable[Any]:
    """Cut what a bucket's gather brought into its members: all ranks' parts of each."""
    num_shards = layouts[0].num_shards
    if not sends_members(backend):
        num_elements = sum(layout.padded_numel for layout in layouts)
        sizes = [layout.padded_size for layout in layouts]
        return _members(call, call(aten.view.default, gathered, [num_shards, num_elements]), sizes, num_shards)
    if isinstance(gathered, list):  # eagerly, each member has memory of its own
        return gathered
    lengths = [layout.padded_numel * num_shards for layout in layouts]
    places = places_of_members(lengths, _value(gathered).itemsize)
    return [call(aten.slice.Tensor, gathered, 0, at, at + length) for at, length in zip(places, lengths)]


def _members(call: Call, bucket: Any, sizes: Iterable[Sequence[int]], *num_ranks: int) -> Iterator[Any]:
    """Cut a bucket into its members, which stand end to end: in one rank's part, or in each row of all ranks' parts."""
    offset = 0
    for size in sizes:
        end = offset + math.prod(size)
        piece = call(aten.slice.Tensor, bucket, len(num_ranks), offset, end)
        yield call(aten.view.default, piece, [*num_ranks, *size])
        offset = end


def launch_reduce(call: Call, grads: Sequence[Any], specs: Sequence[ParamSpec]) -> Any:
    """Pack one bucket of full gradients and start its reduction; specs agree on reduce dtype, divisors and group."""
    by_member = _reduces_by_member(specs)
    packs = len(specs) > 1 and not by_member
    if not packs or specs[0].predivide != 1.0 or not _pack_casts(grads, specs[0].reduce_dtype):
        grads = [as_real(call, _cast(call, grad, spec.reduce_dtype)) for grad, spec in zip(grads, specs)]
    named, specs = specs, [_reduced_as(spec) for spec in specs]
    first = specs[0]
    parts = [_ranks_first(call, _divided(call, grad, first.predivide), spec.layout) for grad, spec in zip(grads, specs)]
    if packs:
        packed = call(pack, parts, first.num_shards, first.reduce_dtype)
    else:
        laid_out = [_laid_out(call, part, spec.layout) for part, spec in zip(parts, specs)]
        packed = laid_out[0]
    if first.num_shards == 1:
        return packed
    call(note, first.reduction, named, first.group)
    if by_member:
        return call(reduce_scatter_members, laid_out, first.reduce_op, first.num_shards, first.group)
    if first.reduction == "all_to_all":
        splits = [_rows(specs)] * first.num_shards
        return call(c10d.all_to_all_single.default, packed, splits, splits, first.group)
    return call(c10d.reduce_scatter_tensor.default, packed, first.reduce_op, first.num_shards, first.group)


def _reduces_by_member(specs: Sequence[ParamSpec]) -> bool:
    """Whether gradients are sent from where they are: a cast writes them to other memory, so it may as well pack them.

    The specs tell and not the gradients, since all ranks have to do the same.
    """
    first = specs[0]
    if len(specs) == 1 or first.num_shards == 1 or first.reduction != "reduce_scatter":
        return False
    return sends_members(first.backend) and all(spec.dtype == spec.reduce_dtype for spec in specs)


def finish_reduce(call: Call, pending: Any, specs: Sequence[ParamSpec]) -> list[Any]:
    """Wait for a bucket's reduction and cut it into gradients of the local shards.

    A caller that can run something else while the replicas are reduced calls the two steps itself.
    """
    return finish_all_reduce(call, launch_all_reduce(call, pending, specs), specs)


def launch_all_reduce(call: Call, pending: Any, specs: Sequence[ParamSpec]) -> Any:
    """With replicas, wait for the reduction over the shards and start the all-reduce over the replicas."""
    first = specs[0]
    if first.num_replicas == 1:
        return pending
    over_shards = _finish_over_shards(call, pending, [_reduced_as(spec) for spec in specs], divisor=1.0)
    call(note, "all_reduce", specs, first.replicate_group)
    return call(c10d.all_reduce.default, over_shards, first.reduce_op, first.replicate_group)


def finish_all_reduce(call: Call, pending: Any, specs: Sequence[ParamSpec]) -> list[Any]:
    """Wait for what ``launch_all_reduce`` left in flight; return the gradients of the local shards."""
    sent = [_reduced_as(spec) for spec in specs]
    first = sent[0]
    if first.num_replicas == 1:
        pending = _finish_over_shards(call, pending, sent, first.postdivide)
    else:
        pending = _divided(call, call(wait_tensor, pending), first.postdivide)
    if first.device:
        # The bucket is copied at once, in the dtype of the gradients: only views are left to do on the CPU.
        pending = call(to_host, _cast(call, pending, first.grad_dtype), first.pinned)
    pieces = [pending]
    if len(specs) > 1:
        pieces = [*_members(call, call(aten.view.default, pending, [-1]), [one.layout.padded_size for one in sent])]
    reduced = []
    for piece, spec in zip(pieces, sent):
        if spec.local_length != spec.layout.chunk:
            piece = call(aten.slice.Tensor, piece, spec.dim, 0, spec.local_length)
        reduced.append(_cast(call, piece, spec.grad_dtype))
    return [
        call(aten.view_as_complex.default, grad) if spec.reduce_dtype.is_complex else grad
        for grad, spec in zip(reduced, specs)
    ]


def _finish_over_shards(call: Call, pending: Any, specs: Sequence[ParamSpec], divisor: float) -> Any:
    """Wait for the reduction that ``launch_reduce`` started; return this rank's part, divided."""
    first = specs[0]
    if first.num_shards == 1:
        return _divided(call, pending, divisor)
    pending = call(wait_tensor, pending)
    if first.reduction == "all_to_all":
        return call(sum_of_parts, pending, first.num_shards, divisor)
    return _divided(call, pending, divisor)


def _divided(call: Call, tensor: Any, divisor: float) -> Any:
    return tensor if divisor == 1.0 else call(aten.div.Tensor, tensor, divisor)


def _rows(specs: Sequence[ParamSpec]) -> int:
    """Return the length of one rank's part of a packed reduction along its first dimension."""
    return specs[0].layout.padded_size[0] if len(specs) == 1 else sum(spec.layout.padded_numel for spec in specs)


def _cast(call: Call, tensor: Any, dtype: torch.dtype) -> Any:
    if _value(tensor).dtype == dtype:
        return tensor
    return call(torch.ops.prims.convert_element_type.default, tensor, dtype)


def _travels_as_bytes(dtype: torch.dtype) -> bool:
    """Whether a dtype is an eight-bit float: not every backend knows these, nor every op that packs."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _pack_casts(tensors: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether ``pack`` can cast these tensors as well: neither they nor ``dtype`` travel as another dtype."""
    dtypes = {dtype, *(_value(tensor).dtype for tensor in tensors)}
    return not any(one.is_complex or _travels_as_bytes(one) for one in dtypes)


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    if _travels_as_bytes(dtype):
        return torch.uint8
    return dtype.to_real() if dtype.is_complex else dtype


def as_sent(call: Call, tensor: Any) -> Any:
    """View a tensor in a dtype that every backend sends."""
    if _travels_as_bytes(_value(tensor).dtype):
        return call(aten.view.dtype, tensor, torch.uint8)
    return as_real(call, tensor)


def _as_read(call: Call, tensor: Any, dtype: torch.dtype) -> Any:
    """Undo ``as_sent``."""
    if _travels_as_bytes(dtype):
        return call(aten.view.dtype, tensor, dtype)
    return call(aten.view_as_complex.default, tensor) if dtype.is_complex else tensor


def as_real(call: Call, tensor: Any) -> Any:
    """View a complex tensor as pairs of real numbers: not every backend sends or reduces complex numbers."""
    if not _value(tensor).dtype.is_complex:
        return tensor
    # A tensor may be conjugate by a bit, and not in memory; Inductor's code may set the bit where its graph has none.
    return call(aten.view_as_real.default, call(aten.resolve_conj.default, tensor))


def _gathered_as(spec: ParamSpec) -> ParamSpec:
    """Return the spec of what is packed and gathered: a complex number travels as two real ones."""
    if not spec.dtype.is_complex:
        return spec
    return dataclasses.replace(spec, size=(*spec.size, 2), dtype=spec.dtype.to_real())


def _reduced_as(spec: ParamSpec) -> ParamSpec:
    """Return the spec of what is packed and reduced, likewise."""
    if not spec.reduce_dtype.is_complex:
        return spec
    real = spec.reduce_dtype.to_real()
    return dataclasses.replace(spec, size=(*spec.size, 2), reduce_dtype=real, grad_dtype=spec.grad_dtype.to_real())


def _value(tensor: Any) -> torch.Tensor:
    """Return the tensor itself, or the fake tensor of a graph node."""
    return tensor if isinstance(tensor, torch.Tensor) else tensor.meta["val"]


def _pad(call: Call, tensor: Any, dim: int, length: int) -> Any:
    """Append zeros to ``tensor`` along ``dim`` up to ``length``."""
    missing = length - _value(tensor).shape[dim]
    if missing == 0:
        return tensor
    behind = [0, 0] * (_value(tensor).ndim - 1 - dim) + [0, missing]  # last dimension first
    return call(aten.constant_pad_nd.default, tensor, behind, 0)


def _unpadded(call: Call, gathered: Any, layout: ShardLayout) -> Any:
    """Return the full parameter from parts ``[num_shards, *part]`` in a bucket, or from the result of its own gather.

    It is contiguous, as any parameter is. A kernel that reads it with a bucket's strides would round otherwise, and
    Inductor would not fuse that kernel as it does in the unsharded model.
    """
    if layout.num_shards == 1:
        return call(aten.reshape.default, gathered, list(layout.size))
    padded = list(layout.size)
    padded[layout.dim] = layout.chunk * layout.num_shards
    if layout.dim != 0:
        # [ranks, *part] -> the ranks' axis in front of dim -> merged with it
        ndim = len(layout.size)
        parts = call(aten.view.default, gathered, [layout.num_shards, *layout.padded_size])
        order = [*range(1, layout.dim + 1), 0, *range(layout.dim + 1, ndim + 1)]
        gathered = call(copied, call(aten.permute.default, parts, order))
    elif not _value(gathered).is_contiguous():
        gathered = call(copied, gathered)
    if list(_value(gathered).shape) != padded:
        gathered = call(aten.view.default, gathered, padded)
    if layout.even:
        return gathered
    return call(aten.slice.Tensor, gathered, layout.dim, 0, layout.size[layout.dim])


def _ranks_first(call: Call, grad: Any, layout: ShardLayout) -> Any:
    """Return a full gradient as one part per rank, in rank order; a view, except for padding: packing copies it."""
    grad = _pad(call, grad, layout.dim, layout.chunk * layout.num_shards)
    if layout.dim == 0:
        return grad
    split = [*layout.size[: layout.dim], layout.num_shards, layout.chunk, *layout.size[layout.dim + 1 :]]
    parts = call(aten.reshape.default, grad, split)
    order = [layout.dim, *range(layout.dim), *range(layout.dim + 1, len(split))]
    return call(aten.permute.default, parts, order)


def _laid_out(call: Call, parts: Any, layout: ShardLayout) -> Any:
    """Lay out the result of ``_ranks_first`` to travel alone: ``[num_shards * part[0], ...]``, as a gather returns."""
    if not _value(parts).is_contiguous():
        parts = call(aten.clone.default, parts, memory_format=torch.contiguous_format)
    if layout.dim == 0:
        return parts
    return call(aten.reshape.default, parts, [layout.num_shards * layout.padded_size[0], *layout.padded_size[1:]])
