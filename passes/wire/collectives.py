"""The collectives that a lowered marker launches, and how to recognise them in a graph.

    group's backend     gather                                     of a bucket with several members
    gloo                fsdpc::all_gather_into_tensor              the same
    any other           _c10d_functional::all_gather_into_tensor   fsdpc::all_gather_members; reduce_scatter_members

torch's functional all-gather reaches gloo as a coalesced one, and two of those in flight corrupt the heap: a loop of
launches and waits dies within some thousand turns (torch 2.11 and 2.15). Overlap needs several in flight, so on gloo an
op of our own launches the plain all-gather, which is sound, into a new tensor. All else is the same: the work is
registered for that tensor, ``wait_tensor`` waits for it, and Inductor treats both ops alike.

``all_gather_members`` and ``reduce_scatter_members`` start one collective for each member of a bucket, in one launch.
So each parameter arrives contiguous and need not be copied out of the bucket, and no gradient is copied into one:

    one all-gather         [a0 | b0], [a1 | b1]        ->  [a0 | b0 | a1 | b1]     a is copied: [a0 | a1]
    member by member       [a0], [b0], [a1], [b1]      ->  [a0 | a1 | b0 | b1]     a is a view

``gather_once`` and ``gather_members_once`` are the two gathers for buckets that may stay for later launches (kept.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch_compat as compat
from .._torch_compat import kernels as kernels_compat
from . import kept, streams
from .layout import places_of_members
from .ledger import ledger
from .spec import define_op

c10d = torch.ops._c10d_functional


def _gathered(input: Tensor, group_size: int, group_name: str) -> Tensor:
    del group_name
    return input.new_empty((group_size * input.shape[0], *input.shape[1:]))


def _all_gather_kernel(input: Tensor, group_size: int, group_name: str) -> Tensor:
    out = _gathered(input, group_size, group_name)
    compat.call_below_autograd(
        c10d.all_gather_into_tensor_out.default, input.contiguous(), group_size, group_name, out=out
    )
    return out


gloo_all_gather = define_op(
    "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor", _all_gather_kernel, _gathered
)


def _members_gathered(shards: Sequence[Tensor], group_size: int, group_name: str) -> Tensor:
    del group_name
    lengths = [shard.numel() * group_size for shard in shards]
    return shards[0].new_empty(places_of_members(lengths, shards[0].itemsize)[-1])


def _all_gather_members_kernel(shards: Sequence[Tensor], group_size: int, group_name: str) -> Tensor:
    out = _members_gathered(shards, group_size, group_name)
    lengths = [shard.numel() * group_size for shard in shards]
    places = places_of_members(lengths, out.itemsize)
    outs = [out[at : at + length] for at, length in zip(places, lengths)]
    _all_gather_members_out_kernel(shards, group_size, group_name, outs)
    return out


def _all_gather_members_out_kernel(
    shards: Sequence[Tensor], group_size: int, group_name: str, outs: Sequence[Tensor]
) -> None:
    shards = [shard.contiguous().view(-1) for shard in shards]
    if not compat.gather_at_once(outs, shards, group_name):
        for out, shard in zip(outs, shards):
            gather = c10d.all_gather_into_tensor_out.default
            compat.call_below_autograd(gather, shard, group_size, group_name, out=out)


def _once(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that runs this one only if the bucket is not here."""

    def kernel(sent: Any, group_size: int, group_name: str, owners: Sequence[Tensor], key: str, stays: bool) -> Tensor:
        out = kept.take(owners, key, stays)
        if out is None:
            out = gather(sent, group_size, group_name)
            if stays:
                kept.keep_bucket(owners, key, out)
        return out.detach()

    return kernel


def _as_gathered(fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda sent, group_size, group_name, owners, key, stays: fake(sent, group_size, group_name)


# ``owners`` are shards, one of each unit in the bucket; ``key`` names the bucket among theirs; ``stays`` says that
# forward or backward, whichever launches this, ends without freeing it. A CUDA graph would replay the launch.
_ONCE = "int group_size, str group_name, Tensor[] owners, str key, bool stays) -> Tensor"
_TAGS = (torch.Tag.cudagraph_unsafe,)
gather_once = define_op(
    f"gather_once(Tensor input, {_ONCE}", _once(_all_gather_kernel), _as_gathered(_gathered), _TAGS
)
gather_members_once = define_op(
    f"gather_members_once(Tensor[] shards, {_ONCE}",
    _once(_all_gather_members_kernel),
    _as_gathered(_members_gathered),
    _TAGS,
)


def _members_reduced(grads: Sequence[Tensor], reduce_op: str, group_size: int, group_name: str) -> Tensor:
    del reduce_op, group_name
    return grads[0].new_empty(sum(grad.numel() for grad in grads) // group_size)


def _reduce_scatter_members_kernel(grads: Sequence[Tensor], reduce_op: str, group_size: int, group_name: str) -> Tensor:
    out = _members_reduced(grads, reduce_op, group_size, group_name)
    flat = [grad.view(-1) for grad in grads]
    outs = out.split([grad.numel() // group_size for grad in flat])
    if not compat.reduce_at_once(outs, flat, reduce_op, group_name):
        for one, grad in zip(outs, flat):
            reduce = c10d.reduce_scatter_tensor_out.default
            compat.call_below_autograd(reduce, grad, reduce_op, group_size, group_name, out=one)
    return out


all_gather_members = define_op(
    "all_gather_members(Tensor[] shards, int group_size, str group_name) -> Tensor",
    _all_gather_members_kernel,
    _members_gathered,
)

# The same into tensors that exist already; ``wait_tensor`` of each of them waits for it.
all_gather_members_out = define_op(
    "all_gather_members_out(Tensor[] shards, int group_size, str group_name, Tensor(a!)[] outs) -> ()",
    _all_gather_members_out_kernel,
)
reduce_scatter_members = define_op(
    "reduce_scatter_members(Tensor[] grads, str reduce_op, int group_size, str group_name) -> Tensor",
    _reduce_scatter_members_kernel,
    _members_reduced,
)


def wait(launched: Tensor) -> Tensor:
    """Wait for what was launched into this tensor, and return it."""
    ledger.wait(compat.call_below_autograd, c10d.wait_tensor.default, launched)
    streams.join(launched)
    return launched


# torch's op of this name, which can also say why it failed. It takes less time, since it has no autograd formula.
wait_tensor = define_op("wait_tensor(Tensor(a) launched) -> Tensor(a)", wait, lambda launched: launched)
compat.leave_all_to_python(wait)


# The name of each launch; two ops with one name look the same to other ranks. lower.py adds ``gather_offloaded``.
KIND_OF: dict[Any, str] = {
    gloo_all_gather: "all_gather",
    all_gather_members: "all_gather",
    gather_once: "all_gather",
    gather_members_once: "all_gather",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    reduce_scatter_members: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
    c10d.all_reduce.default: "all_reduce",
}


def all_gather_of(backend: str) -> compat.OpOverload:
    """Return the all-gather to launch in a group of this backend."""
    return gloo_all_gather if backend == "gloo" else c10d.all_gather_into_tensor.default


def once(gather: Any) -> compat.OpOverload:
    """Return the op to launch in place of a gather whose bucket may stay."""
    return gather_members_once if gather is all_gather_members else gather_once


def is_launch(node: fx.Node) -> bool:
    return node.target in KIND_OF


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a launch, ours or a user's."""
    return node.target in (wait_tensor, c10d.wait_tensor.default)


def let_inductor_see_collectives() -> None:
    """Tell Inductor which of our ops launch and wait: what a launch sends lives until its wait, and none is dropped."""
    kernels_compat.lower_as_wait(wait_tensor)
    kernels_compat.lower_as_collective(gloo_all_gather)
    kernels_compat.lower_as_collective(all_gather_members)
    kernels_compat.lower_as_collective(reduce_scatter_members)
    kernels_compat.lower_as_collective(gather_once, may_outlive=True)
    kernels_compat.lower_as_collective(gather_members_once, may_outlive=True)
