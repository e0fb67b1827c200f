"""Choose the device, and the mesh for ``fully_shard``: from a process group, a pair of groups, or a mesh.

    sharding_strategy       groups given                 mesh                            made by
    FULL_SHARD              none | one | 1-D mesh        1-D                             fully_shard
    SHARD_GRAD_OP           the same                     1-D, kept gathered              fully_shard
    NO_SHARD                the same                     1-D                             replicate
    HYBRID_SHARD            none | (shard, replicate)    2-D: replicate over nodes,      fully_shard
    _HYBRID_SHARD_ZERO2       | 2-D mesh                 shard inside one                fully_shard
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from .._torch_compat.fsdp1 import HYBRID_SHARD_ZERO2
from ..core.mesh import device_of_type, device_type_here

HYBRID = (ShardingStrategy.HYBRID_SHARD, HYBRID_SHARD_ZERO2)
KEEPS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, HYBRID_SHARD_ZERO2)


def device_for(device_id: Any, devices: set[torch.device], mesh: DeviceMesh | None) -> torch.device:
    """Return the device to compute on: by ``device_id``, the mesh, the parameters, or this machine's accelerator."""
    if len({one for one in devices if one.type != "cpu"}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"FSDP only supports single device modules but got params on {names}. Move it to one of them."
        )
    if len(devices) > 1 and device_id is None:
        raise RuntimeError(
            "To support a module with both CPU and GPU params, please pass in device_id argument, where it is to be "
            "moved."
        )
    there = next((one for one in devices if one.type != "cpu"), None)
    if device_id is not None:
        asked = _device_of(device_id)
        if there is not None and there != asked:
            raise ValueError(
                f"Inconsistent compute device and `device_id`: {there} vs {asked}. Pass the device that the module is "
                "on."
            )
        return asked
    if mesh is not None and mesh.device_type == "cpu":
        return torch.device("cpu")
    return device_of_type(device_type_here()) if there is None else there


def _device_of(device_id: Any) -> torch.device:
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise TypeError(f"device_id is {device_id!r}. Pass a torch.device, its name, or the number of an accelerator.")
    if isinstance(device_id, int):
        if device_type_here() == "cpu":
            raise ValueError(f"device_id={device_id}: this machine has no accelerator. Pass torch.device('cpu').")
        return torch.device(device_type_here(), device_id)
    device = torch.device(device_id)
    return device_of_type(device.type) if device.type == "cpu" or device.index is None else device


def mesh_for(
    strategy: ShardingStrategy,
    process_group: Any,
    mesh: DeviceMesh | None,
    device: torch.device,
    wraps_by_hand: bool,
) -> DeviceMesh:
    """Return the mesh to shard over, or to replicate over."""
    if process_group is not None and mesh is not None:
        raise ValueError("Cannot pass both process_group and device_mesh at the same time. Pass one.")
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized. Call torch.distributed.init_process_group() before FSDP."
        )
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(f"device_mesh is of {mesh.device_type}, but the module is to compute on {device}.")
    if strategy in HYBRID:
        return _mesh_of_two(strategy, process_group, mesh, device.type, wraps_by_hand)
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"{strategy} takes a 1-D device_mesh, but got {mesh.ndim} dimensions: {mesh}. Slice it by dimension "
                "name, or pass ShardingStrategy.HYBRID_SHARD to replicate over the first and shard over the second."
            )
        return mesh
    if process_group is None:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"{strategy} takes one process group, but got a {type(process_group).__name__}.")
    return DeviceMesh.from_group(process_group, device.type)


def _mesh_of_two(
    strategy: ShardingStrategy, process_group: Any, mesh: DeviceMesh | None, device_type: str, wraps_by_hand: bool
) -> DeviceMesh:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ValueError(
                f"Expected device_mesh to have ndim=2 but got {mesh.ndim}. For {strategy} pass one (replicate, shard)."
            )
        return mesh
    if process_group is None:
        if wraps_by_hand:
            raise ValueError(
                f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh. "
                "Pass a pair (shard, replicate) or a 2-D device_mesh, the same for all wrapped modules, or "
                "auto_wrap_policy."
            )
        return _mesh_of_nodes(device_type)
    is_pair = isinstance(process_group, tuple) and len(process_group) == 2
    if not is_pair or not all(isinstance(one, dist.ProcessGroup) for one in process_group):
        raise ValueError(
            "Expected process_group to be passed in as either None or a pair of process groups but got "
            f"{type(process_group).__name__}. For {strategy} pass (shard, replicate)."
        )
    shard, replicate = process_group
    rows: list[Any] = [None] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    return DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )


def _mesh_of_nodes(device_type: str) -> DeviceMesh:
    """Return a mesh that shards inside a node and replicates over nodes.

    torchrun says how many ranks a node has. Without it, that is one for each accelerator, and all ranks on the CPU.
    """
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not per_node:
        per_node = world if device_type == "cpu" else torch.accelerator.device_count()
    per_node = min(per_node, world)
    if world % per_node:
        raise ValueError(f"{world} ranks do not divide into nodes of {per_node}. Pass a 2-D device_mesh.")
    return init_device_mesh(device_type, (world // per_node, per_node), mesh_dim_names=("replicate", "shard"))
