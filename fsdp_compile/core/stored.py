"""The mesh and the placements with which a shard is stored, and what a read of the parameter gives.

    before fully_shard                        stored, dp shards (dp, dp_shard after a Replicate() where dp replicates)
    a tensor                                  on dp            (Shard(d),)
    a DTensor on tp, (Shard(d),)              on (dp, tp)      (_StridedShard(d, split_factor=tp), Shard(d))
    a DTensor on tp, (any other p,)           on (dp, tp)      (Shard(d), p)
    a DTensor on the mesh of dp_mesh_dims     on that mesh     as it was, with one of the above at the shard dimension

Of a DTensor the local tensor is cut: tensor parallelism first, then data parallelism, which is what ``_StridedShard``
says. Reads give what was there before: a tensor, or a DTensor on its own mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat import dtensors, dynamo
from .mesh import ShardMesh, SpmdMesh
from .shared import shared


@dataclass(frozen=True)
class ReadAs:
    """The DTensor that a parameter was before fully_shard, and is again when it is read."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    # Dimensions of the mesh over which the unit's own reduction sums gradients; on the others the gradient gets the
    # parameter's placements first.
    reduced_dims: tuple[int, ...]
    # Names of the mesh's process groups, compared as well: meshes of the same ranks are equal, after a restart too.
    groups: tuple[str, ...]

    def wrap(self, local: Tensor) -> DTensor:
        """Return the DTensor whose local tensor is ``local``."""
        return wrapper(self)(local, self.mesh)

    def gradient_placements(self, produced: Sequence[Placement]) -> list[Placement]:
        """Return the placements to give a gradient with placements ``produced`` before its local part is reduced."""
        kept = set(self.reduced_dims)
        return [produced[dim] if dim in kept else asked for dim, asked in enumerate(self.placements)]


def read_as(full: nn.Parameter, mesh: ShardMesh) -> ReadAs | None:
    """Return the DTensor that reads give in place of the gathered local tensor; None if they give that tensor."""
    if not isinstance(full, DTensor):
        return None
    whole = full.device_mesh
    groups = tuple(whole.get_group(dim).group_name for dim in range(whole.ndim))
    return ReadAs(
        mesh=whole if whole.mesh_dim_names is None else _copy_of(whole, groups),
        placements=tuple(full.placements),
        shape=full.shape,
        stride=full.stride(),
        reduced_dims=() if mesh.spmd is None else mesh.spmd.dims,
        groups=groups,
    )


@shared
def _copy_of(mesh: DeviceMesh, groups: tuple[str, ...]) -> DeviceMesh:
    """Return one mesh for all parameters on it, which is never the user's own object.

    Dynamo guards on the identity of objects. A user may slice ``mesh["tp"]`` anew for every block, and with these
    objects equal blocks would be different graphs.
    """
    del groups
    return dtensors.concatenate_meshes([mesh])


def stored_on(fqn: str, full: nn.Parameter, dim: int, mesh: ShardMesh) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements of the shard of ``full``, cut on ``dim``."""
    if mesh.spmd is not None:
        return _on_whole_mesh(fqn, full, dim, mesh.spmd)
    replicas = (Replicate(),) if mesh.replicate_group else ()
    if not isinstance(full, DTensor):
        return mesh.mesh, (*replicas, Shard(dim)) if mesh.group else replicas
    model = full.device_mesh
    if len(full.placements) > 2:
        raise NotImplementedError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP, not {full.placements}, which {fqn} has. Give it a mesh of one "
            "or two dimensions."
        )
    if mesh.mesh.mesh_dim_names is None or model.mesh_dim_names is None:
        raise ValueError(
            f"{fqn} is a DTensor on {model}: to combine it with fully_shard's mesh {mesh.mesh}, both need dimension "
            "names. Slice both by name from one mesh: init_device_mesh(..., mesh_dim_names=('dp', 'tp'))."
        )
    try:
        both = dtensors.concatenate_meshes([mesh.mesh, model])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{fqn} is a DTensor on {model}, which cannot be combined with fully_shard's mesh {mesh.mesh}: {error}. "
            "Slice both from one mesh, by different dimension names, and pass the data-parallel slice as mesh."
        ) from error
    later = [(placement, model.size(place)) for place, placement in enumerate(full.placements)]
    ours = (_cut(dim, later),) if mesh.group else ()
    return both, (*replicas, *ours, *full.placements)


def _on_whole_mesh(
    fqn: str, full: nn.Parameter, dim: int, spmd: SpmdMesh
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the same on the mesh of dp_mesh_dims; several dimensions to shard over are flattened into one."""
    if not isinstance(full, DTensor):
        raise ValueError(
            f"When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh, and {fqn} is a "
            "plain tensor. Call distribute_module or parallelize_module with that mesh before fully_shard."
        )
    if full.device_mesh != spmd.mesh:
        raise ValueError(
            f"{fqn}: Expected param's DTensor mesh to be the same mesh passed to fully_shard with dp_mesh_dims, "
            f"{spmd.mesh}, but it is {full.device_mesh}. Distribute the model on the mesh that fully_shard gets."
        )
    for place in spmd.dims:
        if not isinstance(full.placements[place], Replicate):
            role = "shard" if spmd.names[place] in spmd.shard else "replicate"
            raise ValueError(
                f"{fqn}: Expected Replicate() on DP {role} dim {spmd.names[place]!r} of its mesh but got "
                f"{full.placements[place]}. Distribute it with Replicate() there: fully_shard does the sharding."
            )
    if not spmd.shard:
        return spmd.mesh, tuple(full.placements)
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    for name, placement in zip(spmd.names, full.placements):
        if name == spmd.shard[0]:
            first = spmd.names.index(name)
            later = [other for other in range(first + 1, len(spmd.names)) if spmd.names[other] not in spmd.shard]
            assert spmd.flat_shard is not None
            meshes.append(spmd.flat_shard)
            placements.append(_cut(dim, [(full.placements[other], spmd.mesh.size(other)) for other in later]))
        elif name not in spmd.shard:
            meshes.append(spmd.mesh[name])
            placements.append(placement)
    mesh = spmd.mesh if len(spmd.shard) == 1 else dtensors.concatenate_meshes(meshes)
    return mesh, tuple(placements)


def _cut(dim: int, later: Sequence[tuple[Placement, int]]) -> Placement:
    """Return the placement that cuts ``dim`` after mesh dimensions of these placements and sizes have cut it."""
    num_shards = 1
    for placement, size in later:
        is_strided = isinstance(placement, dtensors.StridedShard) and placement.dim == dim
        if placement.is_shard(dim) or is_strided:
            num_shards *= size
    return Shard(dim) if num_shards == 1 else dtensors.StridedShard(dim, split_factor=num_shards)


@shared
def wrapper(target: ReadAs) -> Callable[[Tensor, DeviceMesh | None], DTensor]:
    """Return a differentiable function from local tensor to DTensor, which Dynamo puts into graphs as it is.

    DTensor.from_local would sum gradients over the data-parallel dimensions as well, which the reduction does. Where a
    mesh is an input of graphs (torch 2.15), the DTensors of a graph must be made with that input.
    """

    def wrap(local: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
        return _Wrap.apply(local, target, target.mesh if mesh is None else mesh)

    return torch.compiler.allow_in_graph(wrap)


class _Wrap(torch.autograd.Function):
    """Make a DTensor of a local tensor; backward gives the gradient the placements that its reduction expects."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, target: ReadAs, mesh: DeviceMesh) -> DTensor:
        ctx.target = target
        ctx.set_materialize_grads(False)
        return DTensor.from_local(
            local, mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        placements = ctx.target.gradient_placements(grad.placements)
        if list(grad.placements) != placements:
            grad = grad.redistribute(placements=placements)
        return grad.to_local(), None, None


dynamo.leave_all_to_python(_Wrap.backward)
