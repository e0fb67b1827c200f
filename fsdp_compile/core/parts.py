"""Which part of a DTensor each rank of its mesh holds: one table, equal on all ranks, from shapes and placements alone.

    8 rows on (dp 2, tp 2), (_StridedShard(0), Shard(0)): tp cuts them, and dp cuts each part again

    rank 0, at (0, 0)    rows 0 1             rank 1, at (0, 1)    rows 4 5
    rank 2, at (1, 0)    rows 2 3             rank 3, at (1, 1)    rows 6 7
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .._torch_compat import dtensors, process_groups
from ..passes.wire.layout import ShardLayout

Part = tuple[slice, ...]


def cut_dims(tensor: DTensor) -> list[int]:
    """Return the dimensions of the mesh over which the tensor is cut."""
    mesh = tensor.device_mesh
    return [
        dim for dim, one in enumerate(tensor.placements) if not isinstance(one, Replicate) and mesh.size(dim) > 1
    ]


def holders(tensor: DTensor, rank: int) -> list[int]:
    """Return the ranks whose parts make up the whole, of the replica that ``rank`` is in."""
    return _ranks_beside(rank, tensor.device_mesh, cut_dims(tensor))


def part_at(tensor: DTensor, at: Sequence[int]) -> Part:
    """Return which part of the tensor the rank at these coordinates of its mesh holds."""
    ranges = [range(length) for length in tensor.shape]
    # A strided shard cuts what later dimensions of the mesh have cut before.
    strided = [dim for dim, one in enumerate(tensor.placements) if isinstance(one, dtensors.StridedShard)]
    for dim in [dim for dim in range(len(at)) if dim not in strided] + strided[::-1]:
        placement = tensor.placements[dim]
        if isinstance(placement, Replicate):
            continue
        cut = ranges[placement.dim]  # type: ignore[attr-defined]
        start, stop = ShardLayout((len(cut),), 0, tensor.device_mesh.size(dim)).span(at[dim])
        ranges[placement.dim] = cut[start:stop]  # type: ignore[attr-defined]
    return tuple(slice(one.start, one.stop) for one in ranges)


def coordinate_of(mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    [found] = (mesh.mesh == rank).nonzero().tolist()
    return tuple(found)


def group_over(mesh: DeviceMesh, dims: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of the ranks that are where this one is on all other dimensions of the mesh; all call this."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    return process_groups.group_for("parts", sorted(_ranks_beside(dist.get_rank(), mesh, dims)))


def _ranks_beside(rank: int, mesh: DeviceMesh, dims: Sequence[int]) -> list[int]:
    """Return the ranks whose coordinates differ from those of ``rank`` in these dimensions of the mesh alone."""
    at = coordinate_of(mesh, rank)
    ranks = mesh.mesh[tuple(slice(None) if dim in dims else place for dim, place in enumerate(at))]
    found: list[int] = ranks.flatten().tolist()
    return found
