"""Puts full parameters in the shards' places inside a block, for code that looks at them or writes to them.

    with full_params(model):        module.weight: the DTensor shard --gather--> a plain parameter
        ...                         what is written to it           --own part--> the shard, at the end

Parameters are gathered in the dtype in which they are stored, not in that of a forward. Every rank takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .._torch_compat import autograd, dtensors, process_groups
from ..core.param import ShardedParam
from ..core.parts import local_of, write_part
from ..core.unit import Unit, unit_of, units_in
from ..eager.running import running
from .exchange import gathered


def require_idle(units: Iterable[Unit], doing: str) -> None:
    """Raise if a forward or a backward of these units runs."""
    for unit in units:
        if autograd.backward_task() is not None or running(unit).iteration.depth:
            raise RuntimeError(f"Cannot {doing} during forward/backward, as of {unit.name}. Do it between steps.")


def require_shards(units: Iterable[Unit], doing: str) -> None:
    """Raise inside a forward, a backward, or where anything else is in the shards' places."""
    require_idle(units, doing)
    for unit in units:
        for param in unit.params:
            if param.is_full:
                raise RuntimeError(
                    f"{unit.name}: cannot {doing} while {param.fqn} is a full parameter. Do it outside of full_params "
                    "and summon_full_params."
                )
            param.require_shard()


# The tensors whose gradients must not be clipped while full parameters are there, by id: their names, and why.
_NOT_TO_CLIP: dict[int, tuple[str, str]] = {}


def require_lasting_grads(params: Iterable[Tensor]) -> None:
    """Raise if full parameters are in the shards' places, and clipping these gradients would have no effect."""
    for param in params:
        if id(param) in _NOT_TO_CLIP:
            name, why = _NOT_TO_CLIP[id(param)]
            raise RuntimeError(
                f"clip_grad_norm_: {name} is a full parameter now, by full_params or summon_full_params, {why}. "
                "Leave that block first."
            )


def _said_of_grads(
    swapped: list[_Swapped], writeback: bool, rank0_only: bool, with_grads: bool
) -> dict[int, tuple[str, str]]:
    """Return the entries of ``_NOT_TO_CLIP`` while these full parameters are there."""
    of_shard = "on one rank alone" if rank0_only else ""
    of_full = "without the gradient that the shard has"
    if with_grads and not rank0_only:
        of_shard = "and its gradient will be the shard's" if writeback else ""
        of_full = "" if writeback else "and writeback=False: its gradient goes with it"
    said = [(tensor, one.name, why) for one in swapped for tensor, why in ((one.full, of_full), (one.shard, of_shard))]
    return {id(tensor): (name, why) for tensor, name, why in said if why}


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
    """Put full parameters in the place of the shards in ``model``; with ``writeback``, what is written to them is kept.

    With **recurse**, those of units inside ``model`` are full as well; without, only those of the unit of ``model``.
    With **rank0_only**, all but the first rank of a mesh (of each replica) keep their shards, so nothing can be
    written. With **offload_to_cpu**, the full parameters are copies on the CPU. With **with_grads**, ``.grad`` is full,
    too, and what is written to it is kept. Every rank enters and leaves the block. A forward may run inside; a backward
    raises, since no gradient would reach a shard. With ``writeback``, the block also raises if an optimizer that was
    made outside steps inside, since its step would be lost; with gradients, if it calls ``zero_grad``, too.
    ``clip_grad_norm_`` raises where it would not reach the shards' gradients.
    """
    units = units_in(model) if recurse else [unit for unit in (unit_of(model),) if unit is not None]
    if not units:
        raise ValueError(f"full_params: {type(model).__name__} was not given to fully_shard. Shard it first.")
    if writeback and rank0_only:
        raise ValueError(
            "full_params(writeback=True, rank0_only=True): other ranks would not have what rank 0 writes. Pass "
            "writeback=False, or leave out rank0_only."
        )
    require_shards(units, "manually unshard parameters")
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
    """Register full parameters in the place of the units' shards."""
    owners = {param: unit for unit in units for param in unit.params}
    if with_grads:
        _require_grads_everywhere(owners)
    for param in owners:
        param.require_shard()
    fulls = _full_parameters(owners, offload_to_cpu, with_grads)
    swapped = [_Swapped(owners[param], param, full, with_grads) for param, full in fulls.items()]
    said = _said_of_grads(swapped, writeback, rank0_only, with_grads)
    with in_place_of_shards(fulls, rank0_only):
        _NOT_TO_CLIP.update(said)
        try:
            yield
        finally:  # an error in the block does not undo what was written before it
            for known in said:
                _NOT_TO_CLIP.pop(known, None)
            # Before any is written to: gradients of a bucket share one version count.
            stepped = [one for one in swapped if one.stepped]
            for one in swapped:
                one.keep(writeback and one not in stepped)
            if writeback:
                _require_nothing_stepped(stepped)


@contextmanager
def in_place_of_shards(fulls: Mapping[ShardedParam, nn.Parameter], rank0_only: bool = False) -> Iterator[None]:
    """Register full parameters in the place of their shards, and the shards again after the block."""
    shards = {param: param.param for param in fulls}
    try:
        for param, full in fulls.items():
            param.is_full = True
            if not rank0_only or _is_first(param):
                for slot in param.slots:
                    slot.register(full)
        yield
    finally:
        for param, shard in shards.items():
            param.is_full = False
            for slot in param.slots:
                slot.register(shard)


class _Swapped:
    """A shard, and the full parameter in its place."""

    def __init__(self, unit: Unit, param: ShardedParam, full: nn.Parameter, with_grads: bool) -> None:
        self.name = f"{unit.name}: {param.fqn}"
        self.param, self.shard, self.full, self.with_grads = param, param.param, full, with_grads
        self.grad = self.shard.grad if with_grads else None  # held, so that no other gradient has its id
        self.version = self._version()

    def _version(self) -> tuple[int, ...]:
        """Return how often the shard and its local tensor were written to: an optimizer's step counts for the DTensor.

        With gradients, return the same of these: an optimizer's ``zero_grad`` drops them, or writes zeros.
        """
        grad = self.shard.grad if self.with_grads else None
        held: list[Any] = [self.shard] if grad is None else [self.shard, grad]
        return id(grad), *(version for tensor in held for version in dtensors.versions_of(tensor))

    @property
    def stepped(self) -> bool:
        """Whether the shard, or its gradient, was itself written to."""
        return self._version() != self.version

    @torch.no_grad()
    def keep(self, writeback: bool) -> None:
        """Give the shard what the full parameter has; with ``writeback``, the values, too."""
        full = self._registered()
        if full is self.shard:  # another rank has the full one
            return
        if self.shard.requires_grad != full.requires_grad:
            self.shard.requires_grad_(full.requires_grad)
        if not writeback:
            return
        grad = full.grad if self.with_grads else None
        self._require_shape("", full)
        if grad is not None:
            self._require_shape(".grad", grad)
        write_part(self.shard, full)
        if grad is None:
            self.shard.grad = None if self.with_grads else self.shard.grad
            return
        shard: Any = self.shard
        if shard.grad is None:
            shard.grad = dtensors.dtensor_like(shard, torch.empty_like(local_of(shard), dtype=grad.dtype))
        write_part(shard.grad, grad)

    def _require_shape(self, what: str, full: Tensor) -> None:
        if full.shape != self.shard.shape:
            raise RuntimeError(
                f"{self.name}{what} has shape {tuple(self.shard.shape)}, but while full parameters were there, one of "
                f"shape {tuple(full.shape)} took its place. Write into the parameter, and keep its shape."
            )

    def _registered(self) -> nn.Parameter:
        """Return the full parameter, or what was put in its place."""
        now = [slot.param for slot in self.param.slots]
        if any(one is None for one in now):
            raise RuntimeError(
                f"{self.name} was taken away while full parameters were there. Shards stay: write to the parameter, or "
                "delete it before fully_shard."
            )
        put = {id(one): one for one in now if one is not self.full}
        if len(put) > 1:
            raise NotImplementedError(  # FSDP1's type
                f"Changing shared parameters is not supported: {self.name} is tied, and while full parameters were "
                "there, each place got another one. Write into the parameter, or put the same one everywhere."
            )
        return next(iter(put.values()), self.full)


def _require_nothing_stepped(stepped: list[_Swapped]) -> None:
    if stepped:
        names = [one.name for one in stepped[:3]] + ["..."] * (len(stepped) > 3)
        raise RuntimeError(
            f"{', '.join(names)}: the {'shard or its gradient' if stepped[0].with_grads else 'shard'} was written to "
            "while full parameters were there, by an optimizer perhaps, so what was written to them is left out. Step "
            "outside of full_params, and call zero_grad there, or pass writeback=False."
        )


def _require_grads_everywhere(owners: dict[ShardedParam, Unit]) -> None:
    """Raise on every rank if only some ranks have the gradient of a parameter: it cannot be gathered."""
    by_group: dict[str, list[ShardedParam]] = {}
    for param in owners:
        if param.mesh.group:
            by_group.setdefault(param.mesh.group, []).append(param)
    for group, params in by_group.items():
        counts = torch.tensor([param.param.grad is not None for param in params], dtype=torch.int32)
        counts = counts.to(params[0].mesh.device)
        dist.all_reduce(counts, group=process_groups.process_group(group))
        for param, count in zip(params, counts.tolist()):
            if 0 < count < param.layout.num_shards:
                raise RuntimeError(
                    f"Only some but not all ranks have a gradient: of {owners[param].name}: {param.fqn}, {count} of "
                    f"{param.layout.num_shards}, so there is no full one. Run backward on every rank, or set it to "
                    "zeros where it is None."
                )


def _is_first(param: ShardedParam) -> bool:
    """Whether this rank is the first of those that shard a parameter, or that hold it, if it is not sharded."""
    mesh = param.mesh
    if mesh.group or not mesh.replicate_group:
        return mesh.rank == 0
    return process_groups.group_ranks(mesh.replicate_group)[0] == dist.get_rank()


def _full_parameters(
    owners: Mapping[ShardedParam, Unit], offload_to_cpu: bool, with_grads: bool
) -> dict[ShardedParam, nn.Parameter]:
    shards = {param: param.param for param in owners}
    seen = _as_seen(shards, offload_to_cpu)
    fulls = {param: nn.Parameter(seen[param], shard.requires_grad) for param, shard in shards.items()}
    trained = {param: shard.grad for param, shard in shards.items() if with_grads and shard.grad is not None}
    for param, grad in _as_seen(trained, offload_to_cpu).items():
        autograd.restore_grad_dtype(fulls[param], grad.dtype)
        fulls[param].grad = grad
    for param, full in fulls.items():
        if full.requires_grad:
            full.register_post_accumulate_grad_hook(_refuses(owners[param], param))
    return fulls


def _refuses(unit: Unit, param: ShardedParam) -> Callable[[Tensor], None]:
    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            f"{unit.name}: {param.fqn}: backward of a forward that ran inside full_params, where no gradient reaches a "
            "shard. Run both outside."
        )

    return refuse


@torch.no_grad()
def _as_seen(shards: Mapping[ShardedParam, Any], offload_to_cpu: bool) -> dict[ShardedParam, Tensor]:
    """Return what reads of parameters give, gathered from tensors that are sharded as they are."""
    gathering = gathered([(param.fqn, _over_shards(param, shard)) for param, shard in shards.items()])
    return {
        param: param.as_read(full).to("cpu" if offload_to_cpu else full.device)
        for param, full in zip(shards, gathering, strict=True)
    }


def _over_shards(param: ShardedParam, shard: DTensor) -> Tensor:
    """Return a tensor that is sharded over the ranks that ``fully_shard`` cut its parameter for, and no others."""
    if param.dtensor is None:
        return shard
    local, size = dtensors.local_tensor(shard), torch.Size(param.layout.size)
    if not param.mesh.group:
        return local.to(param.mesh.device)
    stride = torch.empty(size, device="meta").stride()
    return dtensors.dtensor_of(local, param.mesh.over_shards, (Shard(param.layout.dim),), size, stride)
