"""FSDP2 and the composable API: the objects, and the states that torch looks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import DeviceMesh

# Torch's objects as they were when this package was imported: when they are used, the names may be ours (adopt).
TORCH_FULLY_SHARD: Any = torch_fsdp.fully_shard
TORCH_REPLICATE: Any = torch_replicate  # of _composable.replicate_with_fsdp: 2.11 to 2.15
TORCH_REGISTER_FORWARD_METHOD: Any = torch_fsdp.register_fsdp_forward_method
TORCH_SHARE_COMM_CTX: Any = torch_fsdp.share_comm_ctx
TORCH_FSDP_MODULE: type = torch_fsdp.FSDPModule
UNSHARD_HANDLE: type = torch_fsdp.UnshardHandle


# Seen in 2.15, not in 2.11.
GRADIENT_REDUCTION_HANDLE: type = getattr(torch_fsdp, "GradientReductionHandle", object)


def register_fsdp2_state(module: nn.Module, view: object) -> None:
    """Put ``view`` where ``torch.distributed.fsdp.fully_shard.state(module)`` looks, and have torch know it as sharded.

    ``_composable.contract``: ``STATE_KEY``, a dict in the module by undecorated function, and ``REGISTRY_KEY``, a dict
    by the function's name, from which composable DDP knows what to leave alone: 2.11 to 2.15.
    """
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[TORCH_FULLY_SHARD.__wrapped__] = view
    if TORCH_REPLICATE.__wrapped__ in states:  # the module is a copy of a replicated one
        states[TORCH_REPLICATE.__wrapped__] = view
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def fsdp2_state(module: nn.Module) -> Any:
    """Return what ``torch.distributed.fsdp.fully_shard.state(module)`` returns; None for modules that are no unit.

    Torch's function writes an empty dict into a module that has no state.
    """
    return module.__dict__.get(STATE_KEY, {}).get(TORCH_FULLY_SHARD.__wrapped__)


def register_replicate_state(module: nn.Module) -> None:
    """Put what ``register_fsdp2_state`` registered where FSDP2's ``replicate.state(module)`` looks, too."""
    module.__dict__[STATE_KEY][TORCH_REPLICATE.__wrapped__] = fsdp2_state(module)


def replicate_state(module: nn.Module) -> Any:
    """Return what FSDP2's ``replicate.state(module)`` returns; None for modules that are not replicated."""
    return module.__dict__.get(STATE_KEY, {}).get(TORCH_REPLICATE.__wrapped__)


def composed_by(module: nn.Module) -> frozenset[str]:
    """Names of torch's functions (``fully_shard``, ``replicate``) that were applied to the module itself."""
    return frozenset(module.__dict__.get(REGISTRY_KEY, {}))


@dataclass
class _MeshDims:
    """Which named dimensions of a whole mesh are data parallel: sharded over, or replicated over."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims. Name a dimension."
            )


# torch.distributed.fsdp has it since some version after 2.11; seen in 2.15.
DataParallelMeshDims: Any = getattr(torch_fsdp, "DataParallelMeshDims", _MeshDims)


class PlacementResult(NamedTuple):
    """What torch's ShardPlacementResult contains."""

    placement: Any
    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None
    mesh_dims: Any
    whole_mesh: DeviceMesh | None


def placement_result(returned: Any) -> PlacementResult | None:
    """Read a ``ShardPlacementResult`` (``fsdp._fully_shard._fsdp_common``, seen in 2.15); None for anything else."""
    info = getattr(returned, "mesh_info", None)
    if info is None:
        return None
    return PlacementResult(
        returned.placement,
        info.mesh,
        getattr(info, "shard_mesh_dim", None),
        getattr(info, "replicate_mesh_dim", None),
        getattr(info, "dp_mesh_dims", None),
        getattr(info, "spmd_mesh", None),
    )
