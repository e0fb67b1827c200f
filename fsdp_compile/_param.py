"""One sharded parameter: from the full tensor that a module was built with to the DTensor that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from . import _torch_compat as compat
from ._mesh import ShardMesh
from .passes.layout import ShardLayout

# Stamped on the parameters that a model was built with, so that a weight tied across fully_shard calls is known again.
STAMP = "_fsdp_compile_sharded"


@dataclass(frozen=True)
class Slot:
    """One place in a module tree where a parameter is registered; tied parameters have several."""

    module: nn.Module
    name: str

    @property
    def param(self) -> Any:
        return self.module._parameters.get(self.name)

    def register(self, param: nn.Parameter) -> None:
        self.module._parameters[self.name] = param


@dataclass(eq=False)
class ShardedParam:
    """A parameter, where it is registered, and how it is cut."""

    fqn: str  # relative to the module given to fully_shard
    order: int  # place in its group
    slots: list[Slot]
    layout: ShardLayout
    mesh: ShardMesh
    shard: nn.Parameter = field(repr=False)
    grad_dtype: torch.dtype | None = None  # what the user asked for, where it is not the parameter's own

    @property
    def param(self) -> Any:
        """What is registered now: the shard, or what the user put there since."""
        return self.slots[0].param


def layout_of(fqn: str, full: nn.Parameter, mesh: ShardMesh, placement_fn: Callable[..., Any] | None) -> ShardLayout:
    """How ``full`` will be cut; raises for what cannot be cut so."""
    layout = ShardLayout(tuple(full.shape), _shard_dim(fqn, full, placement_fn), mesh.num_shards)
    _validate(fqn, full, layout)
    return layout


def shard_param(fqn: str, order: int, slots: list[Slot], layout: ShardLayout, mesh: ShardMesh) -> ShardedParam:
    """Replace the full parameter in its slots by this rank's shard of it."""
    full = slots[0].param
    start, stop = layout.span(mesh.rank)
    with torch.no_grad():
        local = full.detach().narrow(layout.dim, start, stop - start).clone(memory_format=torch.contiguous_format)
        dtensor = DTensor.from_local(
            local, mesh.mesh, [Shard(layout.dim)], run_check=False, shape=full.shape, stride=full.stride()
        )
    shard = nn.Parameter(dtensor, requires_grad=full.requires_grad)
    asked = compat.get_grad_dtype(full)
    grad_dtype = asked if asked != full.dtype else None
    compat.restore_grad_dtype(shard, grad_dtype)
    sharded = ShardedParam(fqn, order, slots, layout, mesh, shard, grad_dtype)
    setattr(full, STAMP, sharded)
    for slot in slots:
        slot.register(shard)
    return sharded


def _shard_dim(fqn: str, full: nn.Parameter, placement_fn: Callable[..., Any] | None) -> int:
    placement = None if placement_fn is None else placement_fn(full)
    if placement is None:
        return 0
    if type(placement).__name__ == "ShardPlacementResult":
        raise NotImplementedError(
            f"{fqn}: shard_placement_fn returned a ShardPlacementResult; a mesh of its own for a parameter is not "
            "supported yet. Return a Shard."
        )
    if not isinstance(placement, Shard):
        raise ValueError(
            f"{fqn}: shard_placement_fn returned {placement!r}. Return Shard(dim), or None for the default Shard(0)."
        )
    dim = placement.dim + full.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < full.ndim:
        dims = "only dim 0" if full.ndim == 1 else f"dims 0 to {full.ndim - 1}"
        raise ValueError(
            f"{fqn} has shape {tuple(full.shape)}: shard_placement_fn returned {placement!r} for it, but it has {dims}."
            " Return Shard(0), or None for the default, for such parameters."
        )
    return dim


def _validate(fqn: str, full: nn.Parameter, layout: ShardLayout) -> None:
    if not full.is_contiguous():
        raise NotImplementedError(
            f"{fqn} is not contiguous (shape {tuple(full.shape)}, stride {tuple(full.stride())}). Assign "
            "nn.Parameter(param.contiguous()) before fully_shard."
        )
    if layout.dim != 0 and not layout.even:
        raise NotImplementedError(
            f"{fqn} has shape {tuple(full.shape)}: dim {layout.dim} does not divide evenly over {layout.num_shards} "
            "ranks. Uneven shards are supported on dim 0 only: return Shard(0) for it, or pad the parameter."
        )
