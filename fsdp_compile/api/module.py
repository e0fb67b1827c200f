"""FSDPModule: what ``fully_shard`` adds to a module's class, the methods that a user calls."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from .._torch_compat import autograd, process_groups
from ..core.accumulation import Held
from ..core.unit import Unit, unit_of, units_in
from ..eager.backward import reduce_left_over
from ..eager.reduction import Traffic
from ..eager.running import Use, recover, running
from ..graph.sink import follow_mode
from ..passes._torch_compat import group_ranks
from ..passes.wire import streams
from .classes import ShardedModule, refresh
from .compiled import stand_before
from .fsdp2_view import FSDP2View, GradientReductionHandle, Managed, UnshardHandle

_FSDP2: Any = torch_fsdp.FSDPModule  # its methods' types are not ours


class FSDPModule(ShardedModule, _FSDP2):
    """The methods of a module that ``fully_shard`` was applied to: FSDP2's, by name and meaning.

    It derives from FSDP2's class only so that ``isinstance(module, FSDPModule)`` holds: no method of torch's is
    inherited.
    """

    _is_fsdp_managed_module = Managed()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile this module's forward in place, as ``nn.Module`` does."""
        super().compile(*args, **kwargs)
        stand_before(self)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; eager reads return the full ones until ``reshard`` or the end of a forward."""
        run = running(_unit(self))
        gathered = run.current()
        gathered.free_if_stale()
        gathered.launch()
        run.iteration.touched.setdefault(run)
        if run.held_use is None:
            run.held_use = Use(run, gathered)
            run.held_use.records = True
        if async_op:
            return UnshardHandle(gathered)
        gathered.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters."""
        run = running(_unit(self))
        if run.held_use is not None:
            run.held_use.forget_reads()
            run.held_use = None
        if autograd.backward_task() is None and run.iteration.pending_handle is None:
            run.iteration.traffic.finish()
        run.free()

    def reset_iter_state(self) -> None:
        """Drop collectives in flight and all gradients after an exception in a step, so that a new step can begin."""
        root = _require_root(self, "reset_iter_state")
        recover(root)
        for unit in root.inside():
            unit.accumulation.held = Held()
            for param in unit.params:
                if param.param is not None:
                    param.param.grad = None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, recurse: bool = True) -> None:
        """Reduce gradients in backward (True), or add full gradients up until a backward that does (False)."""
        for unit in _units(self, recurse):
            set_sync(unit, bool(requires_gradient_sync))

    def set_requires_all_reduce(self, requires_all_reduce: bool, recurse: bool = True) -> None:
        """On a mesh with replicas: sum gradients over them in backward (True), or for now only over shards (False)."""
        for unit in _units(self, recurse):
            set_all_reduce(unit, bool(requires_all_reduce))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Leave reductions in flight at the end of a backward that another one follows (False).

        Eager only: a compiled backward waits for its own reductions.
        """
        unit = _unit(self)
        running(unit).iteration.is_last_backward = unit.settings.is_last_backward = bool(is_last_backward)
        unit.watch.say_unheeded()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Gather parameters again in backward (True), or keep them from forward to backward (False)."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {reshard_after_forward!r}. Pass one.")
        params = [param for unit in _units(self, recurse) for param in unit.params]
        if params and not any(param.mesh.group for param in params):
            raise AssertionError(  # FSDP2's type
                f"{_unit(self).name}: set_reshard_after_forward has nothing to do where all parameters are "
                "replicated, as nothing is gathered. Call it on modules that fully_shard shards."
            )
        for unit in _units(self, recurse):
            known = unit.settings.reshard_after_forward, unit.post_forward
            if known != (reshard_after_forward, None):  # else what is gathered may stay
                unit.settings.reshard_after_forward, unit.post_forward = reshard_after_forward, None
                refresh(unit)

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Keep gathered parameters from one backward to the next forward (False), as long as no shard is written to."""
        for unit in _units(self, recurse):
            unit.settings.reshard_after_backward = bool(reshard_after_backward)
            if not reshard_after_backward and unit.settings.stays != "always":
                unit.settings.stays = "always"
                unit.num_set_ups += 1  # for graphs; what the eager path has gathered may be in use
                unit.watch.specs = None
            unit.watch.say_unheeded()

    def set_unshard_in_backward(self, unshard_in_backward: bool, recurse: bool = False) -> None:
        """Do not gather again in backward (False): for units whose backward reads no parameter, like an embedding."""
        _set(_units(self, recurse), unshard_in_backward=bool(unshard_in_backward))

    def set_keep_unsharded_storage(self, keep: bool, recurse: bool = True) -> None:
        """Keep the memory of gathered parameters when they are freed: their addresses stay, at the price of memory."""
        _set(_units(self, recurse), keep_storage=bool(keep))

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Launch the gathers of ``modules`` when this one's forward begins, instead of that of the next in order."""
        _set([_unit(self)], forward_prefetch=_sharded(modules, "set_modules_to_forward_prefetch"))

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Launch the gathers of ``modules`` when this one's backward begins, instead of that of the next in order."""
        _set([_unit(self)], backward_prefetch=_sharded(modules, "set_modules_to_backward_prefetch"))

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather with ``comm``: it has ``allocate(size, dtype=, device=)``, and is called with ``(output, input, group,
        async_op)``. Eager only.
        """
        _set_comms(self, "set_custom_all_gather", all_gather=_require_comm(comm, "set_custom_all_gather"))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce with ``comm``: it has ``allocate``, and is called with ``(output, input, group, op, async_op)``.

        Eager only.
        """
        _set_comms(self, "set_custom_reduce_scatter", reduce_scatter=_require_comm(comm, "set_custom_reduce_scatter"))

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` on each bucket of summed gradients, in place, before they are divided and cast. Eager only."""
        unit = _unit(self)
        if hook is None and stream is not None:
            raise AssertionError("all reduce hook stream is specified but hook itself is missing. Pass both.")
        if hook is not None and not callable(hook):
            raise TypeError(f"set_all_reduce_hook takes a function of a tensor, but got {type(hook).__name__}.")
        if stream is not None and any(param.mesh.num_replicas > 1 for param in unit.params):
            raise ValueError(f"stream cannot be set when using native HSDP, as {unit.name} does. Leave it out.")
        _set_comms(self, "set_all_reduce_hook", all_reduce_hook=hook, all_reduce_hook_stream=stream)

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next gathers wait for ``event`` as well; unlike FSDP2's, they still wait for what is queued here."""
        if _unit(self).mesh.device.type == "cpu":
            return  # nothing is queued there: a step that was called is done
        # Gathers, eager and compiled, are queued behind the current stream, so it is enough that this stream waits.
        streams.accelerator.wait(streams.accelerator.current(_unit(self).mesh.device), event)

    def set_gradient_divide_factor(self, factor: float, recurse: bool = False) -> None:
        """Divide summed gradients by ``factor`` instead of by the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            raise ValueError(f"set_gradient_divide_factor takes a positive number, but got {factor!r}.")
        _set(_units(self, recurse), divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        warnings.warn(
            "set_reduce_scatter_divide_factor has a new name: set_gradient_divide_factor.",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool, recurse: bool = False) -> None:
        """Have collectives compute only sums, and divide outside of them."""
        _set(_units(self, recurse), force_sum=bool(enable))

    def set_reduce_scatter_unused_params(self, enable: bool, recurse: bool = True) -> None:
        """Give parameters that a backward did not use a gradient of zeros, so that all ranks reduce alike."""
        _set(_units(self, recurse), reduce_unused=bool(enable))

    def set_reduce_scatter_max_input_buffers(self, num_buffers: int, recurse: bool = True) -> None:
        """Set how many units' reductions may be in flight; the largest number asked for under a root holds."""
        if isinstance(num_buffers, bool) or not isinstance(num_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {num_buffers!r}. Pass a number from 1 on.")
        if num_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {num_buffers}. Pass at least 1.")
        _set(_units(self, recurse), max_reductions=num_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, recurse: bool = True) -> None:
        """Reduce in process groups of their own, so that a reduction does not queue behind a gather; all ranks call it.

        The groups are made for every set of ranks that shards, in one order on all ranks.
        """
        units = _units(self, recurse)
        names = {param.mesh.group for unit in units for param in unit.params} if enable else set()
        _set(units, reduce_groups={name: process_groups.twin_group(name) for name in sorted(names, key=group_ranks)})

    def set_manual_backward_finalization(self, enable: bool) -> None:
        """Leave the end of a backward to ``finalize_backward`` (True): for schedules of many micro-batches.

        A compiled backward ends by itself: ``finalize_backward`` is for units that run eagerly.
        """
        root = _require_root(self, "set_manual_backward_finalization")
        iteration = running(root).iteration
        if autograd.backward_task() is not None:
            raise RuntimeError("set_manual_backward_finalization cannot change mode during backward. Call it after.")
        if iteration.manual_finalization and not enable and iteration.touched:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode after backward starts, until it is finalized. "
                "Call finalize_backward() first."
            )
        iteration.manual_finalization = bool(enable)

    def finalize_backward(self, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since the last finalization: reduce what is left, free, and wait, or return a handle."""
        root = _require_root(self, "finalize_backward")
        iteration = running(root).iteration
        if iteration.pending_handle is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before finalizing backward again. Call wait()."
            )
        if autograd.backward_task() is not None:
            raise RuntimeError("finalize_backward must be called after backward completes. Call it then.")
        if not iteration.manual_finalization:
            raise RuntimeError(
                "finalize_backward requires manual backward finalization: each backward finalizes itself otherwise. "
                "Call set_manual_backward_finalization(True) before forward."
            )
        for unit in root.inside():
            if not unit.accumulation.all_reduce:
                raise RuntimeError(
                    f"{unit.name}: manual backward finalization requires all-reduce, and its gradients are summed over "
                    "the shards alone. Call set_requires_all_reduce(True) before the last backward."
                )
        reduce_left_over(root)
        for run in iteration.touched:  # others may be waiting for their backward
            if run.gathered is not None and not run.unit.keeps:
                run.gathered.free()
        for unit in root.inside():
            if not unit.keeps:
                unit.keeper.free()
        iteration.touched.clear()
        if async_op:
            iteration.pending_handle = handle = GradientReductionHandle(root)
            return handle
        iteration.traffic.finish()
        return None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Gather into memory of the process group's allocator, if it has one (NCCL); all ranks call it. Eager only."""
        pool_of = process_groups.group_pool if enable else None
        _set_pools(_unit(self), "set_allocate_memory_from_process_group", pool_of)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather into symmetric memory (GPUs); all ranks call this, and gather eagerly. Reductions never use it."""
        pool_of = functools.partial(process_groups.symmetric_pool, backend=backend)
        _set_pools(_unit(self), "set_symm_mem", pool_of)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for FSDP2's callers: every gather here is asynchronous on the current stream already."""
        del async_op

    def _get_fsdp_state(self) -> FSDP2View:
        """Return what FSDP2's callers expect under this name."""
        return FSDP2View(_unit(self))


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


def _units(module: Any, recurse: bool) -> list[Unit]:
    return units_in(module) if recurse else [_unit(module)]


def _set(units: list[Unit], **settings: Any) -> None:
    """Change settings of units, and have their reads follow."""
    for unit in units:
        for name, value in settings.items():
            setattr(unit.settings, name, value)
        refresh(unit)


def _require_root(module: Any, method: str) -> Unit:
    unit = _unit(module)
    if unit.outer is not None:
        raise RuntimeError(f"{method} must be called on the root, {unit.root.name}. {unit.name} is inside of it.")
    return unit


def _set_pools(unit: Unit, method: str, pool_of: Callable[[str, torch.device], process_groups.Pool] | None) -> None:
    """Have a unit gather into memory of these pools; None: of the caching allocator."""
    custom, device = unit.settings.comms.custom or "", unit.mesh.device
    if custom.startswith("set_custom_"):
        kind = custom.removeprefix("set_custom_").replace("_", " ")
        raise AssertionError(f"{unit.name}: cannot call {method}() when {kind} comm is custom. Leave out {custom}.")
    groups = sorted({param.mesh.group for param in unit.params} - {""}, key=group_ranks)
    unit.settings.comms.pools = {} if pool_of is None else {group: pool_of(group, device) for group in groups}
    refresh(unit)


def _set_comms(module: Any, method: str, **comms: Any) -> None:
    """Change collectives of a unit, which must be on one mesh, and have its reads follow."""
    unit = _unit(module)
    groups = {param.mesh.group for param in unit.params}
    if len(groups) > 1:
        raise ValueError(
            f"{method} is not supported with multiple param groups, and {unit.name} has one for each of its "
            f"{len(groups)} meshes (shard_placement_fn). Shard the modules of each mesh by themselves."
        )
    for name, value in comms.items():
        setattr(unit.settings.comms, name, value)
    refresh(unit)


def _require_comm(comm: Any, method: str) -> Any:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(f"{method} takes an object with allocate() and __call__(), but got {type(comm).__name__}.")
    return comm


def _sharded(modules: Any, method: str) -> list[Unit]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"{method} takes a list of modules, but got {type(modules).__name__}.")
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            what = "list of FSDPModules" if method == "share_comm_ctx" else "FSDPModule"
            raise ValueError(f"{method}: Expects {what} but got {type(module).__name__}. Call fully_shard first.")
        units.append(unit)
    return units


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Let several roots, such as a pipeline's chunks on one rank, count their reductions in flight together.

    Eager only: the order of a graph's reductions is planned.
    """
    roots = [unit.root for unit in _sharded(list(modules), "share_comm_ctx")]
    traffic = Traffic()
    for root in roots:
        running(root).iteration.traffic = traffic


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards in this context add gradients up and send nothing; the first one after it reduces the sum.

    with no_sync(model):
        for batch in batches[:-1]:
            model(batch).sum().backward()
    model(batches[-1]).sum().backward()
    """
    units = units_in(model)
    if not units:
        raise ValueError(f"no_sync got a {type(model).__name__} without sharded modules. Call fully_shard first.")
    before = [(unit, unit.accumulation.sync) for unit in units]
    try:
        for unit, _ in before:
            set_sync(unit, False)
        yield
    finally:
        for unit, sync in before:
            set_sync(unit, sync)


def set_sync(unit: Unit, sync: bool) -> None:
    """Set whether backward reduces the unit's gradients, or holds them back."""
    unit.accumulation.sync = sync
    unit.accumulation.may_hold |= not sync
    follow_mode(unit)


def set_all_reduce(unit: Unit, all_reduce: bool) -> None:
    """Set whether backward sums gradients over the replicas, or holds back their sums over the shards."""
    unit.accumulation.all_reduce = all_reduce
    unit.accumulation.may_hold_partials |= not all_reduce
    follow_mode(unit)
