"""Which ranks a parameter is spread over: the mesh that the user gave, read as roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .passes.layout import reduction_of


@dataclass(frozen=True)
class ShardMesh:
    """A 1-D mesh whose ranks each hold one shard."""

    mesh: DeviceMesh
    device: torch.device
    group: str
    backend: str
    num_shards: int
    rank: int

    @property
    def default_reduction(self) -> str:
        return reduction_of(self.backend)


def shard_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> ShardMesh:
    """The mesh to shard over: the one given, or all ranks on this machine's accelerator."""
    _validate_dims(mesh, dp_mesh_dims)
    if mesh is None:
        mesh = _world_mesh()
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1-D mesh (sharding) or a 2-D mesh (replication and sharding), but got {mesh.ndim} "
            f"dimensions: {mesh}. Slice the mesh by dimension name, or pass dp_mesh_dims."
        )
    if mesh.ndim == 2:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"A 2-D mesh needs dimension names to say which dimension replicates and which shards, but {mesh} has "
                "none. Pass mesh_dim_names=('replicate', 'shard') to init_device_mesh."
            )
        raise NotImplementedError(
            f"mesh={mesh} replicates and shards (HSDP), which fsdp_compile does not do yet. Pass a 1-D mesh."
        )
    group = mesh.get_group()
    return ShardMesh(
        mesh=mesh,
        device=_device(mesh.device_type),
        group=group.group_name,
        backend=_backend(group, mesh.device_type),
        num_shards=mesh.size(),
        rank=mesh.get_local_rank(),
    )


def _validate_dims(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> None:
    if dp_mesh_dims is None:
        return
    shard, replicate = getattr(dp_mesh_dims, "shard", None), getattr(dp_mesh_dims, "replicate", None)
    if shard is None and replicate is None:
        raise ValueError("dp_mesh_dims names neither a shard nor a replicate dimension. Name at least one.")
    names = None if mesh is None else mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"dp_mesh_dims={dp_mesh_dims} needs a mesh with dimension names, but got mesh={mesh}.")
    asked = [
        name for dims in (shard, replicate) if dims is not None for name in ([dims] if isinstance(dims, str) else dims)
    ]
    for name in asked:
        if name not in names:
            raise ValueError(f"dp_mesh_dims names the dimension {name!r}, but the mesh has only {names}.")
    raise NotImplementedError(
        f"dp_mesh_dims={dp_mesh_dims}: meshes that hold other dimensions than the sharded one are not supported yet. "
        "Pass the 1-D slice mesh[dim_name] as mesh."
    )


def _names(dims: Any) -> tuple[str, ...]:
    return () if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)


def _world_mesh() -> DeviceMesh:
    accelerator = torch.accelerator.current_accelerator()
    device_type = "cpu" if accelerator is None or not torch.accelerator.is_available() else accelerator.type
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _backend(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves ``device_type`` in ``group``; "cpu:gloo,cuda:nccl" names one for each."""
    config = dist.get_backend_config(group)
    for entry in config.split(","):
        kind, _, name = entry.partition(":")
        if name and kind == device_type:
            return name
    return str(dist.get_backend(group))
