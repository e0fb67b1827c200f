"""Pack a bucket with one op of ours, and copy each parameter out of it with another.

    pack      a [4, 3], b [2, 3], for 2 ranks      ->  [ a's rows 0, 1 | b's row 0 | a's rows 2, 3 | b's row 1 ]
    copied    [2, 6], every other row of a bucket  ->  the same in memory of its own

Inductor does not generate these kernels: it would make new ones for each bucket of other sizes, a second of the first
step each, and would also make new ones of what it fuses with them, such as the norm beside a copy. No work would be
saved: shards are in memory before they are packed, and so are most gradients, as they and their readers are products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._torch_compat import kernels as kernels_compat
from .spec import define_op


class Packing(NamedTuple):
    """How a bucket of local shards is sent."""

    dims: Sequence[int]  # of each member: the dimension that is cut,
    lengths: Sequence[int]  # and to what length a shorter shard is padded there
    dtype: torch.dtype
    device: str  # that offloaded shards are copied to; empty for others
    backend: str
    num_shards: int
    group: str


def let_inductor_call_copies() -> None:
    """Have Inductor call ``clone`` for ``copied``, without a way through Python."""
    kernels_compat.lower_as_call(copied, torch.ops.aten.clone.default, memory_format=torch.contiguous_format)


def _bucket(parts: Sequence[Tensor], num_ranks: int, dtype: torch.dtype) -> Tensor:
    del num_ranks
    return parts[0].new_empty(sum(part.numel() for part in parts), dtype=dtype)


def _pack_kernel(parts: Sequence[Tensor], num_ranks: int, dtype: torch.dtype) -> Tensor:
    if all(part.dtype == dtype and part.is_contiguous() for part in parts):
        # This takes a third of the time of the code below.
        return torch.cat([part.view(num_ranks, -1) for part in parts], 1).view(-1)
    bucket = _bucket(parts, num_ranks, dtype)
    by_rank = [part.unflatten(0, (num_ranks, -1)) for part in parts]
    lengths = [part.numel() // num_ranks for part in parts]
    places = bucket.view(num_ranks, -1).split(lengths, 1)
    compat.foreach_copy([place.view(part.shape) for place, part in zip(places, by_rank)], by_rank)
    return bucket


def _copied(view: Tensor) -> Tensor:
    return view.clone(memory_format=torch.contiguous_format)


pack = define_op("pack(Tensor[] parts, int num_ranks, ScalarType dtype) -> Tensor", _pack_kernel, _bucket)
copied = define_op("copied(Tensor view) -> Tensor", _copied)
