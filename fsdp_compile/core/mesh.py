"""The ranks that a parameter is sharded and replicated over, as read from the user's mesh.

    mesh                                    the ranks                        a plain parameter is stored as
    1-D                                     shard it                         (Shard(d),)
    2-D, dims (replicate, shard)            shard it, in each replica        (Replicate(), Shard(d))
    1-D given to replicate()                all hold it                      (Replicate(),)
    any, with dp_mesh_dims                  as the named dims say            a DTensor on that mesh already
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from .._torch_compat import dtensors, fsdp2, process_groups
from ..passes import HardwareProfile


@dataclass(frozen=True)
class SpmdMesh:
    """The whole mesh, on which parameters are DTensors already, and the names of its data-parallel dimensions."""

    mesh: DeviceMesh
    shard: tuple[str, ...]  # names, in the order of the mesh
    replicate: tuple[str, ...]
    flat_shard: DeviceMesh | None  # the dimensions in ``shard`` flattened into one

    @property
    def names(self) -> tuple[str, ...]:
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names

    @property
    def dims(self) -> tuple[int, ...]:
        """Indices of the data-parallel dimensions in the mesh."""
        return tuple(self.names.index(name) for name in (*self.shard, *self.replicate))


@dataclass(frozen=True)
class ShardMesh:
    """The ranks of a parameter: ``num_shards`` ranks hold a shard each, ``num_replicas`` ranks hold the same shard."""

    mesh: DeviceMesh
    device: torch.device
    backend: str
    group: str = ""  # name of the process group that the parameter is sharded over; empty when it is not
    num_shards: int = 1
    rank: int = 0  # this rank in that group
    replicate_group: str = ""  # name of the process group whose ranks hold the same shard; empty when none do
    num_replicas: int = 1
    spmd: SpmdMesh | None = None

    @property
    def over_shards(self) -> DeviceMesh:
        """The mesh of the ranks that the parameter is sharded over."""
        if self.spmd is not None and self.spmd.flat_shard is not None:
            return self.spmd.flat_shard
        if self.spmd is not None or self.mesh.ndim == 1:
            return self.mesh
        if self.mesh.mesh_dim_names is None:
            return DeviceMesh.from_group(self.mesh.get_group(1), self.mesh.device_type)
        return self.mesh[self.mesh.mesh_dim_names[1]]  # the first one replicates


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` may return: a placement (None: the default) on a mesh of the parameter's own."""

    placement: Shard | None
    mesh: DeviceMesh


def shard_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any = None) -> ShardMesh:
    """Return the ranks to shard over: those of ``mesh``, or all ranks, on this machine's accelerator if it has one."""
    if dp_mesh_dims is not None:
        return _spmd_mesh(mesh, dp_mesh_dims)
    if mesh is None:
        mesh = _world_mesh()
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}, of {mesh.ndim} dimensions. Slice it by "
            "dimension name, or pass dp_mesh_dims to say which dimensions shard and which replicate."
        )
    if mesh.ndim == 2:
        if mesh.mesh_dim_names is None:
            raise AssertionError(  # FSDP2's type
                f"Please init the 2D mesh for HSDP with mesh_dim_names specified: {mesh} has none. Pass "
                "mesh_dim_names=('replicate', 'shard') to init_device_mesh; the first replicates."
            )
        return hybrid_mesh(mesh)
    return _with_roles(mesh, shard=mesh.get_group())


def hybrid_mesh(mesh: DeviceMesh) -> ShardMesh:
    """Read a mesh of two dimensions, with names or without: the first replicates, the second shards."""
    return _with_roles(mesh, shard=mesh.get_group(1), replicate=mesh.get_group(0))


def replicate_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any = None) -> ShardMesh:
    """Return the ranks that each hold every parameter: those of ``mesh``, or all ranks."""
    if dp_mesh_dims is not None:
        target = _spmd_mesh(mesh, dp_mesh_dims)
        if target.group:
            raise ValueError(
                f"replicate() with dp_mesh_dims requires replicate-only dims, but got {dp_mesh_dims}. Leave out shard, "
                "or call fully_shard."
            )
        return target
    if mesh is None:
        mesh = _world_mesh()
    if mesh.ndim != 1:
        raise ValueError(
            f"replicate expects a 1D DeviceMesh but got {mesh}, of {mesh.ndim} dimensions. Slice it by dimension name, "
            "or call fully_shard with it."
        )
    return _with_roles(mesh, replicate=mesh.get_group())


def placement_and_mesh(fqn: str, returned: Any, default: ShardMesh) -> tuple[Any, ShardMesh]:
    """Read what ``shard_placement_fn`` returned for one parameter as a placement and the parameter's ranks."""
    if isinstance(returned, ShardPlacementResult):
        return returned.placement, _own_mesh(fqn, shard_mesh(returned.mesh), default)
    theirs = fsdp2.placement_result(returned)
    if theirs is None:
        return returned, default
    if theirs.shard_dim is None:
        raise ValueError(
            f"{fqn}: shard_placement_fn returned a mesh without a dimension to shard over: {theirs.mesh}. Return an "
            "FSDPMeshInfo or an HSDPMeshInfo in the ShardPlacementResult."
        )
    if theirs.mesh_dims is not None:
        return theirs.placement, _own_mesh(fqn, shard_mesh(theirs.whole_mesh, theirs.mesh_dims), default)
    replicate = None if theirs.replicate_dim is None else theirs.mesh.get_group(theirs.replicate_dim)
    its_mesh = _with_roles(theirs.mesh, shard=theirs.mesh.get_group(theirs.shard_dim), replicate=replicate)
    return theirs.placement, _own_mesh(fqn, its_mesh, default)


def inner_mesh(mesh: ShardMesh, size: int) -> ShardMesh:
    """Divide the shard group into groups of ``size`` neighbours, and return this rank's group.

    Every rank of the shard group calls this with the same ``size``; it waits for the ranks of the new group.
    """
    ranks = process_groups.group_ranks(mesh.group)
    start = ranks.index(dist.get_rank()) // size * size
    group = process_groups.group_for("slices", ranks[start : start + size])
    return _with_roles(DeviceMesh.from_group(group, mesh.mesh.device_type), shard=group)


def ranks_of_a_node(mesh: ShardMesh, profile: HardwareProfile) -> int:
    """Return how many neighbours in the shard group share a node; 1 unless that number is the same on every node."""
    ranks = process_groups.group_ranks(mesh.group) if mesh.group else ()
    nodes = [rank // profile.ranks_per_node for rank in ranks]
    size = Counter(nodes).get(nodes[0], 1) if nodes else 1
    together = all(len({*nodes[start : start + size]}) == 1 for start in range(0, len(nodes), size))
    return size if together and len(nodes) % size == 0 else 1


def _own_mesh(fqn: str, mesh: ShardMesh, default: ShardMesh) -> ShardMesh:
    if mesh.device.type != default.device.type:
        raise ValueError(
            f"{fqn}: shard_placement_fn returned a mesh of {mesh.device.type} for it, but its unit's mesh is of "
            f"{default.device.type}. Use meshes of one device type."
        )
    return mesh


def _with_roles(
    mesh: DeviceMesh,
    shard: dist.ProcessGroup | None = None,
    replicate: dist.ProcessGroup | None = None,
    spmd: SpmdMesh | None = None,
) -> ShardMesh:
    some = shard if shard is not None else replicate
    assert some is not None
    return ShardMesh(
        mesh=mesh,
        device=device_of_type(mesh.device_type),
        backend=process_groups.backend_of(some, mesh.device_type),
        group="" if shard is None else shard.group_name,
        num_shards=1 if shard is None else shard.size(),
        rank=0 if shard is None else shard.rank(),
        replicate_group="" if replicate is None else replicate.group_name,
        num_replicas=1 if replicate is None else replicate.size(),
        spmd=spmd,
    )


def _spmd_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> ShardMesh:
    if not hasattr(dp_mesh_dims, "shard") or not hasattr(dp_mesh_dims, "replicate"):
        raise TypeError(
            f"dp_mesh_dims is {dp_mesh_dims!r}. Pass DataParallelMeshDims(shard=..., replicate=...), with names of the "
            "mesh's dimensions."
        )
    shard, replicate = _names(dp_mesh_dims.shard), _names(dp_mesh_dims.replicate)
    if not shard and not replicate:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims. Name a dimension.")
    names = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or names is None:
        raise ValueError(
            f"mesh must have mesh_dim_names when dp_mesh_dims is provided ({dp_mesh_dims}), but is {mesh}. Pass "
            "mesh_dim_names to init_device_mesh."
        )
    for name in (*shard, *replicate):
        if name not in names:
            raise ValueError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}. Name these in dp_mesh_dims."
            )
        if (*shard, *replicate).count(name) > 1:
            raise ValueError(f"dp_mesh_dims={dp_mesh_dims} names the dimension {name!r} twice.")
    shard, replicate = (tuple(sorted(some, key=names.index)) for some in (shard, replicate))
    flat_shard, flat_replicate = _flat(mesh, shard), _flat(mesh, replicate)
    return _with_roles(
        mesh,
        shard=None if flat_shard is None else flat_shard.get_group(),
        replicate=None if flat_replicate is None else flat_replicate.get_group(),
        spmd=SpmdMesh(mesh, shard, replicate, flat_shard),
    )


def _flat(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """Return the named dimensions as one; several are flattened into one, which takes a new process group."""
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else dtensors.flatten_mesh(mesh, tuple(names))


def _names(dims: Any) -> tuple[str, ...]:
    return () if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)


def device_type_here() -> str:
    """Return the type of this machine's accelerator; that of the CPU without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def _world_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device_type_here(), (dist.get_world_size(),))


def device_of_type(device_type: str) -> torch.device:
    """Return the device of a type that this process uses."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
