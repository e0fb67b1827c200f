"""Puts full parameters in the shards' places inside a block, for code that looks at them or writes to them.

    with full_params(model):        module.weight: the DTensor shard --gather--> a plain parameter
        ...                         what is written to it           --own part--> the shard, at the end

Parameters are gathered in the dtype in which they are stored, not in that of a forward. Every rank takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .._torch_compat import autograd, dtensors, process_groups, subclasses
from ..core.param import ShardedParam
from ..core.spec import stored_spec
from ..core.unit import Unit, unit_of, units_in
from ..eager.running import running
from ..passes.schedule.buckets import gather_buckets
from ..passes.wire import lower
from .fitting import mark_unwritten


def gathered_together(
    parts: Sequence[tuple[ShardedParam, Tensor]], keep: Callable[[ShardedParam, Tensor], Any] = lambda _, full: full
) -> list[Any]:
    """Return whole tensors, of which every rank passes its local parts: copies on the device of the mesh.

    Small ones share an all-gather, as in a forward. If there is no memory for all of them at a time, pass a ``keep``
    that returns less than the full parameter.
    """
    fulls: list[Any] = [None] * len(parts)
    specs = [stored_spec(param, local.dtype, index) for index, (param, local) in enumerate(parts)]
    for bucket in gather_buckets(specs):
        sent = [parts[index][1].detach().to(parts[index][0].mesh.device) for index in bucket]
        in_bucket = [specs[index] for index in bucket]
        came = lower.finish_gather(lower.run, lower.launch_gather(lower.run, sent, in_bucket), in_bucket)
        for index, full in zip(bucket, came, strict=True):
            param, local = parts[index]
            shares = param.layout.num_shards == 1 and subclasses.share_storage(full, local)
            shares = shares or (len(bucket) > 1 and full.untyped_storage().nbytes() > full.nbytes)
            fulls[index] = keep(param, full.clone() if shares else full.contiguous())
    return fulls


def part_of(param: ShardedParam, full: Tensor) -> Tensor:
    """Return this rank's part of a full tensor."""
    start, stop = param.layout.span(param.mesh.rank)
    return full.narrow(param.layout.dim, start, stop - start)


@torch.no_grad()
def shard_of(param: ShardedParam, full: Tensor, dtype: torch.dtype | None = None) -> DTensor:
    """Return a DTensor like the shard with this rank's part of a full tensor."""
    if param.dtensor is not None:
        mesh, placements = param.dtensor.mesh, param.dtensor.placements
        full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return like_shard(param, part_of(param, full).clone(), dtype)


def like_shard(param: ShardedParam, local: Tensor, dtype: torch.dtype | None = None) -> DTensor:
    """Return a DTensor like the shard with ``local`` in it, on the shard's device and in its dtype or ``dtype``."""
    shard: DTensor = param.param
    return dtensors.dtensor_like(shard, local.to(dtensors.local_tensor(shard).device, dtype or shard.dtype))


def require_idle(units: Iterable[Unit], doing: str) -> None:
    """Raise if a forward or a backward of these units runs."""
    for unit in units:
        if autograd.backward_task() is not None or running(unit).iteration.depth:
            raise AssertionError(f"Cannot {doing} during forward/backward, as of {unit.name}. Do it between steps.")


def require_shards(units: Iterable[Unit]) -> None:
    """Raise if full parameters are in the shards' places already."""
    for unit in units:
        for param in unit.params:
            if param.is_full:
                raise AssertionError(
                    f"{unit.name}: {param.fqn} is full already, by an outer full_params. Leave that first, or do "
                    "without this one."
                )


# The tensors whose gradients must not be clipped while full parameters are there, by id, with the reason.
_NOT_TO_CLIP: dict[int, tuple[_Swapped, str]] = {}


def require_lasting_grads(params: Iterable[Tensor]) -> None:
    """Raise if full parameters are in the shards' places, and clipping these gradients would have no effect."""
    for param in params:
        if id(param) in _NOT_TO_CLIP:
            one, why = _NOT_TO_CLIP[id(param)]
            raise RuntimeError(
                f"clip_grad_norm_: {one.name} is a full parameter now, by full_params or summon_full_params, {why}. "
                "Leave that block first."
            )


def _said_of_grads(
    swapped: list[_Swapped], writeback: bool, rank0_only: bool, with_grads: bool
) -> dict[int, tuple[_Swapped, str]]:
    """Return the entries of ``_NOT_TO_CLIP`` while these full parameters are there."""
    said: dict[int, tuple[_Swapped, str]] = {}
    for one in swapped:
        if rank0_only or not with_grads:
            said[id(one.full)] = one, "without the gradient that the shard has"
        elif not writeback:
            said[id(one.full)] = one, "and writeback=False: its gradient goes with it"
        if rank0_only:
            said[id(one.shard)] = one, "on one rank alone"
        elif with_grads and writeback:
            said[id(one.shard)] = one, "and its gradient will be the shard's"
    return said


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
    try:
        require_idle(units, "manually unshard parameters")
        require_shards(units)
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
    without_values: Collection[ShardedParam] = (),
) -> Iterator[None]:
    """Register full parameters in the place of the units' shards; those ``without_values`` are not gathered."""
    owners = {param: unit for unit in units for param in unit.params}
    if with_grads:
        _require_grads_everywhere(owners)
    swapped: list[_Swapped] = []
    said: dict[int, tuple[_Swapped, str]] = {}
    try:
        for unit in units:
            for param in unit.params:
                param.require_shard()
            fulls = _full_parameters(unit, offload_to_cpu, with_grads, without_values)
            for param, full in zip(unit.params, fulls, strict=True):
                swapped.append(_Swapped(unit, param, param.param, full, with_grads))
                param.is_full = True
                if not rank0_only or _is_first(param):
                    for slot in param.slots:
                        slot.register(full)
        said = _said_of_grads(swapped, writeback, rank0_only, with_grads)
        _NOT_TO_CLIP.update(said)
        try:
            yield
        finally:  # an error in the block does not undo what was written before it
            for one in swapped:  # before any is written to: gradients of a bucket share one version count
                one.look()
            for one in swapped:
                one.keep(writeback, with_grads)
            if writeback:
                _require_nothing_stepped(swapped)
    finally:
        for known in said:
            _NOT_TO_CLIP.pop(known, None)
        for one in swapped:
            one.param.is_full = False
            for slot in one.param.slots:
                slot.register(one.shard)


class _Swapped:
    """A shard, and the full parameter in its place."""

    def __init__(
        self, unit: Unit, param: ShardedParam, shard: nn.Parameter, full: nn.Parameter, with_grads: bool
    ) -> None:
        self.stepped = False
        self.unit, self.param, self.shard, self.full = unit, param, shard, full
        self.grad = shard.grad if with_grads else None  # held, so that no other gradient has its id
        self.with_grads = with_grads
        self.version = self._version()

    def _version(self) -> tuple[int, ...]:
        """Return how often the shard and its local tensor were written to: an optimizer's step counts for the DTensor.

        With gradients, return the same of these: an optimizer's ``zero_grad`` drops them, or writes zeros.
        """
        held: list[Any] = [self.shard]
        if self.with_grads and self.shard.grad is not None:
            held.append(self.shard.grad)
        same_grad = self.grad is (self.shard.grad if self.with_grads else None)
        return same_grad, *(version for tensor in held for version in dtensors.versions_of(tensor))

    @property
    def name(self) -> str:
        return f"{self.unit.name}: {self.param.fqn}"

    def look(self) -> None:
        """Note whether the shard was itself written to."""
        self.stepped = self._version() != self.version

    def keep(self, writeback: bool, with_grads: bool) -> None:
        """Write the full parameter back to the shard, unless the shard was itself written to."""
        full = self._registered()
        if full is self.shard:  # another rank has the full one
            return
        if self.shard.requires_grad != full.requires_grad:
            self.shard.requires_grad_(full.requires_grad)
        if writeback and not self.stepped:
            self._require_shape("", full)
            if with_grads and full.grad is not None:
                self._require_shape(".grad", full.grad)
            _write_back(self.param, self.shard, full, with_grads)

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


def _require_nothing_stepped(swapped: list[_Swapped]) -> None:
    stepped = [one.name for one in swapped if one.stepped]
    if stepped:
        what = "shard or its gradient" if any(one.with_grads for one in swapped) else "shard"
        raise RuntimeError(
            f"{', '.join(stepped[:3])}{', ...' if len(stepped) > 3 else ''}: the {what} was written to while full "
            "parameters were there, by an optimizer perhaps, so what was written to them is left out. Step outside of "
            "full_params, and call zero_grad there, or pass writeback=False."
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
    unit: Unit, offload_to_cpu: bool, with_grads: bool, without_values: Collection[ShardedParam]
) -> list[nn.Parameter]:
    shards = [(param, param.param) for param in unit.params]
    seen_of = {param: param.as_read(_empty(param)) for param in unit.params if param in without_values}
    left = [(param, shard) for param, shard in shards if param not in seen_of]
    seen_of.update(zip((param for param, _ in left), _as_seen(left, offload_to_cpu), strict=True))
    fulls = [nn.Parameter(seen_of[param], requires_grad=shard.requires_grad) for param, shard in shards]
    trained = [index for index, (_, shard) in enumerate(shards) if with_grads and shard.grad is not None]
    grads = [(shards[index][0], shards[index][1].grad) for index in trained]
    for index, grad in zip(trained, _as_seen(grads, offload_to_cpu), strict=True):
        autograd.restore_grad_dtype(fulls[index], grad.dtype)
        fulls[index].grad = grad
    for param, full in zip(unit.params, fulls, strict=True):
        if full.requires_grad:
            full.register_post_accumulate_grad_hook(_refuses(unit, param))
    return fulls


def _empty(param: ShardedParam) -> Tensor:
    full = torch.empty(param.layout.size, dtype=param.param.dtype, device=param.mesh.device)
    mark_unwritten(full)
    return full


def _refuses(unit: Unit, param: ShardedParam) -> Callable[[Tensor], None]:
    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            f"{unit.name}: {param.fqn}: backward of a forward that ran inside full_params, where no gradient reaches a "
            "shard. Run both outside."
        )

    return refuse


@torch.no_grad()
def _as_seen(shards: Sequence[tuple[ShardedParam, Any]], offload_to_cpu: bool) -> list[Tensor]:
    fulls = gathered_together([(param, dtensors.local_tensor(shard)) for param, shard in shards])
    seen = [param.as_read(full) for (param, _), full in zip(shards, fulls, strict=True)]
    return [one.cpu() for one in seen] if offload_to_cpu else seen


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
    local = full
    if param.dtensor is not None:  # the user may have put a plain tensor in its place
        if not isinstance(full, DTensor):
            full = distribute_tensor(full.detach(), param.dtensor.mesh, param.dtensor.placements, src_data_rank=None)
        local = full.to_local()
    kept, part = dtensors.local_tensor(shard), part_of(param, local)  # type: ignore[arg-type]
    # Values that did not change are not written back: a backward that is still to come may have saved the shard.
    if type(kept) is not Tensor or kept.device != part.device or not torch.equal(kept, part):
        kept.copy_(part)
