"""Full parameters in the shards' places, for as long as somebody wants to look at them or write to them.

    with full_params(model):        module.weight: the DTensor shard --gather--> a plain parameter
        ...                         what is written to it           --own part--> the shard, at the end

What is gathered is as it is stored, whatever precision a forward computes in. Every rank comes to it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from .._torch_compat import autograd, dtensors, process_groups
from ..core.param import ShardedParam
from ..core.unit import Unit, unit_of, units_in
from ..eager.running import running
from ..passes.collectives import all_gather_of, c10d


def gathered(param: ShardedParam, local: Tensor) -> Tensor:
    """A copy of all of what every rank has its ``local`` part of, on the device of the parameter's mesh."""
    layout, mesh = param.layout, param.mesh
    local = local.detach().to(mesh.device)
    if not mesh.group:
        return local.clone()
    start, stop = layout.span(mesh.rank)
    padding = [0] * (2 * (local.ndim - layout.dim - 1)) + [0, layout.chunk - (stop - start)]
    # Parts are put behind one another on dim 0, whatever dim they were cut on.
    part = F.pad(local, padding).unsqueeze(0).contiguous()
    parts = c10d.wait_tensor(all_gather_of(mesh.backend)(part, layout.num_shards, mesh.group))
    return torch.cat(parts.unbind(0), layout.dim).narrow(layout.dim, 0, layout.size[layout.dim]).contiguous()


def part_of(param: ShardedParam, full: Tensor) -> Tensor:
    """This rank's part of a full tensor."""
    start, stop = param.layout.span(param.mesh.rank)
    return full.narrow(param.layout.dim, start, stop - start)


@torch.no_grad()
def shard_of(param: ShardedParam, full: Tensor, dtype: torch.dtype | None = None) -> DTensor:
    """A DTensor like the shard with this rank's part of a full tensor."""
    if param.dtensor is not None:
        mesh, placements = param.dtensor.mesh, param.dtensor.placements
        full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return like_shard(param, part_of(param, full).clone(), dtype)


def like_shard(param: ShardedParam, local: Tensor, dtype: torch.dtype | None = None) -> DTensor:
    """A DTensor like the shard with another local tensor in it, where the shard's is, in its dtype or a given one."""
    shard: DTensor = param.param
    return dtensors.dtensor_like(shard, local.to(dtensors.local_tensor(shard).device, dtype or shard.dtype))


def require_idle(units: Iterable[Unit], doing: str) -> None:
    """Raise where a forward or a backward of these units runs."""
    for unit in units:
        if autograd.backward_task() is not None or running(unit).iteration.depth:
            raise AssertionError(f"{unit.name}: cannot {doing} inside a forward or a backward. Do it between steps.")


@contextmanager
def full_params(
    model: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Have full parameters in the place of the shards in ``model``; what is written to them is kept, if ``writeback``.

    **recurse** also those of units inside it; without, those that ``model`` was itself given to ``fully_shard`` for.
    **rank0_only** all but the first rank of a mesh (of each replica) keep their shards, so nothing can be written.
    **offload_to_cpu** they are copies on the CPU. **with_grads** ``.grad`` is full, too, and what is written to it is
    kept. Every rank enters and leaves it.
    """
    units = units_in(model) if recurse else [unit for unit in (unit_of(model),) if unit is not None]
    if not units:
        raise ValueError(f"full_params: {type(model).__name__} was not given to fully_shard. Shard it first.")
    if writeback and rank0_only:
        raise ValueError(
            "full_params(writeback=True, rank0_only=True): other ranks would not have what rank 0 writes. Pass "
            "writeback=False, or leave out rank0_only."
        )
    try:
        require_idle(units, "have full parameters")
    except AssertionError as error:
        raise RuntimeError(*error.args) from None
    with swapped_in(units, writeback, rank0_only, offload_to_cpu, with_grads):
        yield


@contextmanager
def swapped_in(
    units: list[Unit],
    writeback: bool,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Have full parameters registered in the place of the units' shards."""
    owners = {param: unit for unit in units for param in unit.params}
    swapped = []
    try:
        for param in owners:
            swapped.append((param, param.param))
            full = _full_parameter(param, offload_to_cpu, with_grads)
            if not rank0_only or _is_first(param):
                for slot in param.slots:
                    slot.register(full)
        try:
            yield
        finally:  # an error in the block does not undo what was written before it
            for param, shard in swapped:
                if shard.requires_grad != param.param.requires_grad:
                    shard.requires_grad_(param.param.requires_grad)
                if writeback:
                    _require_shape(owners[param], param, shard, param.param)
                    _write_back(param, shard, param.param, with_grads)
    finally:
        for param, shard in swapped:
            for slot in param.slots:
                slot.register(shard)


def _is_first(param: ShardedParam) -> bool:
    """Whether this rank is the first of those that share a parameter out, or, where none do, that hold it."""
    mesh = param.mesh
    if mesh.group or not mesh.replicate_group:
        return mesh.rank == 0
    return process_groups.group_ranks(mesh.replicate_group)[0] == dist.get_rank()


def _full_parameter(param: ShardedParam, offload_to_cpu: bool, with_grads: bool) -> nn.Parameter:
    shard = param.param
    full = nn.Parameter(_as_seen(param, shard, offload_to_cpu), requires_grad=shard.requires_grad)
    if with_grads and shard.grad is not None:
        autograd.restore_grad_dtype(full, shard.grad.dtype)
        full.grad = _as_seen(param, shard.grad, offload_to_cpu)
    return full


@torch.no_grad()
def _as_seen(param: ShardedParam, shard: Tensor, offload_to_cpu: bool) -> Tensor:
    full: Tensor = param.as_read(gathered(param, dtensors.local_tensor(shard)))  # type: ignore[arg-type]
    return full.cpu() if offload_to_cpu else full


def _require_shape(unit: Unit, param: ShardedParam, shard: Tensor, full: Tensor) -> None:
    if full.shape != shard.shape:
        raise RuntimeError(
            f"{unit.name}: {param.fqn} has shape {tuple(shard.shape)}, but while full parameters were there, one of "
            f"shape {tuple(full.shape)} took its place. Write into the parameter, and keep its shape."
        )


@torch.no_grad()
def _write_back(param: ShardedParam, shard: nn.Parameter, full: Tensor, with_grads: bool) -> None:
    _write(param, shard, full)
    if not with_grads:
        return
    if full.grad is None:
        shard.grad = None
        return
    if shard.grad is None:
        local = dtensors.local_tensor(shard)  # type: ignore[arg-type]
        shard.grad = dtensors.dtensor_like(shard, torch.empty_like(local, dtype=full.grad.dtype))  # type: ignore[arg-type]
    _write(param, shard.grad, full.grad)


def _write(param: ShardedParam, shard: Tensor, full: Tensor) -> None:
    """Copy this rank's part into the shard."""
    local = full.to_local() if param.dtensor is not None else full  # type: ignore[attr-defined]
    dtensors.local_tensor(shard).copy_(part_of(param, local))  # type: ignore[arg-type]
