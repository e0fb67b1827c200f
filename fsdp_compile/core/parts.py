"""Which part of a tensor each rank has: one table, equal on all ranks, from shapes and placements alone.

    8 rows on (dp 2, tp 2), (_StridedShard(0), Shard(0)): tp cuts them, and dp cuts each part again

    rank 0, at (0, 0)    rows 0 1             rank 1, at (0, 1)    rows 4 5
    rank 2, at (1, 0)    rows 2 3             rank 3, at (1, 1)    rows 6 7
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat import dtensors, process_groups, subclasses
from ..passes.wire.layout import ShardLayout
from .shared import shared

Part = tuple[slice, ...]


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, whether it is sharded or not."""
    return dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def inside(local: Tensor) -> Tensor:
    """Return the tensor of the same shape and dtype inside one of a subclass, if it has that alone."""
    tensors = subclasses.plain_tensors_in(local)
    if len(tensors) == 1 and tensors[0].shape == local.shape and tensors[0].dtype == local.dtype:
        return tensors[0]
    return local


def cut_dims(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """Return the dimensions of the mesh over which a tensor is cut."""
    return [dim for dim, one in enumerate(placements) if not isinstance(one, Replicate) and mesh.size(dim) > 1]


def part_at(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, at: Sequence[int]) -> Part:
    """Return which part of a tensor of this shape the rank at these coordinates of the mesh has."""
    ranges = [range(length) for length in shape]
    # A strided shard cuts what later dimensions of the mesh have cut before.
    strided = [dim for dim, one in enumerate(placements) if isinstance(one, dtensors.StridedShard)]
    for dim in [dim for dim in range(len(at)) if dim not in strided] + strided[::-1]:
        placement: Any = placements[dim]
        if not isinstance(placement, Replicate):
            cut = ranges[placement.dim]
            start, stop = ShardLayout((len(cut),), 0, mesh.size(dim)).span(at[dim])
            ranges[placement.dim] = cut[start:stop]
    return tuple(slice(one.start, one.stop) for one in ranges)


def part_here(tensor: Tensor) -> Part:
    """Return which part of a tensor this rank has; all of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, length) for length in tensor.shape)
    at = tensor.device_mesh.get_coordinate()
    assert at is not None, "ranks beside the mesh have no part"
    return part_at(tensor.device_mesh, tensor.placements, tensor.shape, at)


class Parts(dict[int, Part]):
    """Parts that make up a whole, by rank; equal tensors share it, since with 1,000 ranks it takes 10 ms to make."""


@shared
def parts_of_whole(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, rank: int) -> Parts:
    """Return the parts of the replica of a tensor that ``rank`` is in."""
    ranks = ranks_beside(rank, mesh, cut_dims(mesh, placements))
    return Parts((rank, part_at(mesh, placements, shape, at)) for rank, at in ranks.items())


@torch.no_grad()
def write_part(tensor: Tensor, value: Tensor, first_row: int = 0) -> None:
    """Write what this rank has of ``tensor`` from ``value``: the whole, rows of it from ``first_row`` on, or a part.

    Values that are there already are not written: a backward that is still to come may have saved the tensor.
    """
    local, mine, theirs = local_of(tensor), part_here(tensor), part_here(value)
    if first_row:
        theirs = slice(first_row, first_row + theirs[0].stop), *theirs[1:]
    both = tuple(slice(max(one.start, other.start), min(one.stop, other.stop)) for one, other in zip(mine, theirs))
    if any(one.start >= one.stop for one in both):
        return
    plain = inside(local)
    into, given = _cut(plain, mine, both), _cut(local_of(value), theirs, both)
    is_alike = type(into) is Tensor and (into.dtype, into.device) == (given.dtype, given.device)
    if is_alike and torch.equal(into, given):
        return
    into.copy_(given)
    if plain is not local:
        torch.autograd.graph.increment_version(local)  # that of the tensor inside rose


def _cut(held: Tensor, part: Part, wanted: Part) -> Tensor:
    """Return the wanted part of the whole, of a tensor that is ``part`` of it."""
    if part == wanted:
        return held
    return held[tuple(slice(one.start - of.start, one.stop - of.start) for one, of in zip(wanted, part))]


def group_over(mesh: DeviceMesh, dims: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of the ranks that are where this one is on all other dimensions of the mesh; all call this."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    return process_groups.group_for("parts", sorted(ranks_beside(dist.get_rank(), mesh, dims)))


def ranks_beside(rank: int, mesh: DeviceMesh, dims: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the ranks that differ from ``rank`` in these dimensions of the mesh alone, with their coordinates."""
    ranks = mesh.mesh  # it is computed each time: 0.5 ms (2.15)
    [at] = (ranks == rank).nonzero().tolist()
    ways = itertools.product(*(range(size) if dim in dims else [at[dim]] for dim, size in enumerate(ranks.shape)))
    return {int(ranks[one]): one for one in ways}
