"""FSDPModule: what ``fully_shard`` adds to a module's class, the methods that a user calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from . import _torch_compat as compat
from ._accumulate import set_all_reduce, set_sync
from ._call import Call
from ._classes import ShardedModule, refresh
from ._eager_backward import end_backward, reduce_left_over
from ._fsdp2_view import FSDP2View
from ._gathered import gathered_of
from ._handles import GradientReductionHandle, UnshardHandle
from ._reduction import Traffic
from ._state import UnitState, as_given, as_taken, eager_forward, state_of, states_in
from .passes._torch_compat import group_ranks

if TYPE_CHECKING:
    _FSDP2 = object  # its methods' types are not ours
else:
    _FSDP2 = torch_fsdp.FSDPModule



class FSDPModule(ShardedModule, _FSDP2):
    """The methods of a module that ``fully_shard`` was applied to, FSDP2's by name and meaning.

    It is FSDP2's class by name alone, so that code which asks ``isinstance(module, FSDPModule)`` finds what it looks
    for: no method of torch's is inherited.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; until ``reshard``, or the end of a forward, eager reads give the full ones."""
        state = _state(self)
        gathered = gathered_of(state)
        gathered.free_if_stale()
        gathered.launch()
        state.iteration.touched.setdefault(state)
        if state.held_call is None:
            state.held_call = Call(state, gathered)
        if async_op:
            return UnshardHandle(gathered)
        gathered.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters."""
        state = _state(self)
        if state.held_call is not None:
            state.held_call.forget_reads()
            state.held_call = None
        if compat.backward_task() is None and state.iteration.pending_handle is None:
            state.iteration.traffic.finish()
        if state.gathered is not None:
            state.gathered.free()

    def reset_iter_state(self) -> None:
        """After an exception in a forward or backward: drop what is in flight, all gradients, and start a step anew."""
        state = _require_root(self, "reset_iter_state")
        state.recover()
        for unit in state.units():
            for param in unit.group.params:
                if param.param is not None:
                    param.param.grad = None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, recurse: bool = True) -> None:
        """Reduce gradients in backward (True), or add full gradients up until a backward that does (False)."""
        for state in _states(self, recurse):
            set_sync(state, bool(requires_gradient_sync))

    def set_requires_all_reduce(self, requires_all_reduce: bool, recurse: bool = True) -> None:
        """On a mesh that replicates: sum over the replicas in backward, or only over the shards for now."""
        for state in _states(self, recurse):
            set_all_reduce(state, bool(requires_all_reduce))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Leave reductions in flight at the end of a backward that another one follows (False).

        Eager only: a compiled backward waits for its own. Pipelines set it around backward, so no warning says so.
        """
        _state(self).iteration.is_last_backward = bool(is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Gather parameters again in backward (True), or keep them from forward to backward (False)."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward={reshard_after_forward!r} is not a bool.")
        params = [param for state in _states(self, recurse) for param in state.group.params]
        if params and not any(param.mesh.group for param in params):
            raise ValueError(
                f"{_state(self).name}: set_reshard_after_forward has nothing to do where all parameters are "
                "replicated, as nothing is gathered. Call it on modules that fully_shard shards."
            )
        for state in _states(self, recurse):
            state.group.reshard_after_forward = reshard_after_forward
            state.group.post_forward = None
            refresh(state)

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Keep gathered parameters from one backward to the next forward (False); call ``reshard`` before a step.

        Eager only: a graph gathers for each forward. Pipelines set it around backward, so no warning says so.
        """
        for state in _states(self, recurse):
            state.group.reshard_after_backward = bool(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool, recurse: bool = False) -> None:
        """Do not gather again in backward (False): for units whose backward reads no parameter, like an embedding."""
        for state in _states(self, recurse):
            state.group.unshard_in_backward = bool(unshard_in_backward)
            refresh(state)

    def set_keep_unsharded_storage(self, keep: bool, recurse: bool = True) -> None:
        """Keep the memory of gathered parameters when they are freed: their addresses stay, at the price of memory."""
        for state in _states(self, recurse):
            state.group.keep_storage = bool(keep)
            refresh(state)

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Launch the gathers of ``modules`` when this one's forward begins, instead of that of the next in order."""
        state = _state(self)
        state.forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")
        refresh(state)

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Launch the gathers of ``modules`` when this one's backward begins, instead of that of the next in order."""
        state = _state(self)
        state.backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")
        refresh(state)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather with ``comm``: it has ``allocate(size, dtype=, device=)``, and is called with ``(output, input, group,
        async_op)``. Eager only.
        """
        state = _state(self)
        _require_one_mesh(state, "set_custom_all_gather")
        state.group.comms.all_gather = _require_comm(comm, "set_custom_all_gather")
        refresh(state)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce with ``comm``: it has ``allocate``, and is called with ``(output, input, group, op, async_op)``.

        Eager only.
        """
        state = _state(self)
        _require_one_mesh(state, "set_custom_reduce_scatter")
        state.group.comms.reduce_scatter = _require_comm(comm, "set_custom_reduce_scatter")
        refresh(state)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` on each bucket of summed gradients, in place, before they are divided and cast. Eager only."""
        state = _state(self)
        _require_one_mesh(state, "set_all_reduce_hook")
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook takes a function of a tensor, but got {type(hook).__name__}.")
        if stream is not None and any(param.mesh.num_replicas > 1 for param in state.group.params):
            raise ValueError(
                f"{state.name} is sharded over a mesh that replicates, and its all-reduce has one: leave out stream=."
            )
        state.group.comms.all_reduce_hook = hook
        state.group.comms.all_reduce_hook_stream = stream
        refresh(state)

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward's gathers wait for ``event`` instead of for all that is queued now."""
        if _state(self).group.mesh.device.type == "cpu":
            return  # where nothing is queued: a step that was called is done
        # Gathers are queued behind the stream that is current: making that one wait is what it takes.
        event.wait(torch.accelerator.current_stream())

    def set_gradient_divide_factor(self, factor: float, recurse: bool = False) -> None:
        """Divide summed gradients by ``factor`` instead of by the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            raise ValueError(f"set_gradient_divide_factor takes a positive number, but got {factor!r}.")
        for state in _states(self, recurse):
            state.group.divide_factor = float(factor)
            refresh(state)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        warnings.warn(
            "set_reduce_scatter_divide_factor has a new name: set_gradient_divide_factor.",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool, recurse: bool = False) -> None:
        """Send nothing but sums, and divide outside of the collective."""
        for state in _states(self, recurse):
            state.group.force_sum = bool(enable)
            refresh(state)

    def set_reduce_scatter_unused_params(self, enable: bool, recurse: bool = True) -> None:
        """Give parameters that a backward did not use a gradient of zeros, so that all ranks reduce alike."""
        for state in _states(self, recurse):
            state.group.reduce_unused = bool(enable)
            refresh(state)

    def set_reduce_scatter_max_input_buffers(self, num_buffers: int, recurse: bool = True) -> None:
        """How many units' reductions may be in flight: the largest number asked for under a root holds."""
        if isinstance(num_buffers, bool) or not isinstance(num_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers takes an int, but got {num_buffers!r}.")
        if num_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers takes at least 1, but got {num_buffers}.")
        for state in _states(self, recurse):
            state.group.max_reductions = num_buffers
            refresh(state)

    def set_separate_reduce_scatter_group(self, enable: bool = True, recurse: bool = True) -> None:
        """Reduce in process groups of their own, so that a reduction does not queue behind a gather; all ranks call it.

        The groups are made for every set of ranks that shards, in one order on all ranks.
        """
        states = _states(self, recurse)
        if not enable:
            for state in states:
                state.group.reduce_groups = {}
                refresh(state)
            return
        names = {param.mesh.group for state in states for param in state.group.params}
        made = {name: compat.twin_group(name) for name in sorted(names, key=group_ranks)}
        for state in states:
            state.group.reduce_groups = made
            refresh(state)

    def set_manual_backward_finalization(self, enable: bool) -> None:
        """Leave the end of a backward to ``finalize_backward`` (True): for schedules of many micro-batches.

        A compiled backward ends by itself; what ``finalize_backward`` ends is that of units that run eagerly.
        """
        state = _require_root(self, "set_manual_backward_finalization")
        iteration = state.iteration
        if compat.backward_task() is not None:
            raise RuntimeError("set_manual_backward_finalization was called inside a backward. Call it between steps.")
        if iteration.manual_finalization and not enable and iteration.touched:
            raise RuntimeError(
                "set_manual_backward_finalization(False) was called after a backward that is not finalized. Call "
                "finalize_backward() first."
            )
        iteration.manual_finalization = bool(enable)

    def finalize_backward(self, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards since the last finalization: reduce what is left, free, and wait, or return a handle."""
        state = _require_root(self, "finalize_backward")
        iteration = state.iteration
        if iteration.pending_handle is not None:
            raise RuntimeError("finalize_backward was called before wait() on the handle of the last one.")
        if compat.backward_task() is not None:
            raise RuntimeError("finalize_backward was called inside a backward. Call it when backward has returned.")
        if not iteration.manual_finalization:
            raise RuntimeError(
                "finalize_backward needs set_manual_backward_finalization(True) before the backward; without it every "
                "backward finalizes itself."
            )
        for unit in state.units():
            if not unit.group.all_reduce:
                raise RuntimeError(
                    f"{unit.name} holds gradients that are summed over the shards alone. Call "
                    "set_requires_all_reduce(True) before the last backward."
                )
        reduce_left_over(state)
        for unit in iteration.touched:
            if unit.gathered is not None and unit.group.reshard_after_backward:
                unit.gathered.free()
        iteration.touched.clear()
        handle = GradientReductionHandle(state if async_op else None)
        if async_op:
            iteration.pending_handle = handle
            return handle
        iteration.traffic.finish()
        return None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the buffers of collectives from the process group's own allocator, where it has one (NCCL)."""
        state = _state(self)
        if state.group.comms.custom is not None:
            raise RuntimeError(f"{state.name} has collectives of your own ({state.group.comms.custom}): they allocate.")
        if not enable:
            state.group.comms.allocator = None
        else:
            state.group.comms.allocator = compat.group_allocator(state.group.mesh.group, state.group.mesh.device)
        refresh(state)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Take the buffers of gathers from symmetric memory (GPUs)."""
        state = _state(self)
        if state.group.comms.custom is not None:
            raise RuntimeError(f"{state.name} has collectives of your own ({state.group.comms.custom}): they allocate.")
        state.group.comms.allocator = compat.symmetric_allocator(
            state.group.mesh.group, state.group.mesh.device, backend
        )
        refresh(state)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for FSDP2's callers: every gather here is asynchronous on the current stream already."""
        del async_op

    def _get_fsdp_state(self) -> FSDP2View:
        """What FSDP2's callers ask for by this name."""
        return FSDP2View(_state(self), end_backward)


def _state(module: Any) -> UnitState:
    state = state_of(module)
    assert state is not None
    return state


def _states(module: Any, recurse: bool) -> list[UnitState]:
    return states_in(module) if recurse else [_state(module)]


def _require_root(module: Any, method: str) -> UnitState:
    state = _state(module)
    if state.outer is not None:
        raise RuntimeError(f"{state.name} is inside {state.root.name}: call {method} on that one, the outermost.")
    return state


def _require_one_mesh(state: UnitState, method: str) -> None:
    groups = {param.mesh.group for param in state.group.params}
    if len(groups) > 1:
        raise ValueError(
            f"{state.name} shards its parameters over {len(groups)} meshes (shard_placement_fn), so {method} does not "
            "say which of them is meant. Shard the modules of each mesh by themselves."
        )


def _require_comm(comm: Any, method: str) -> Any:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(f"{method} takes an object with allocate() and __call__(), but got {type(comm).__name__}.")
    return comm


def _units_of(modules: Any, method: str) -> list[UnitState]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"{method} takes a list of modules, but got {type(modules).__name__}.")
    states = []
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise ValueError(f"{method} got a {type(module).__name__} that fully_shard was not applied to.")
        states.append(state)
    return states


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name`` a second forward: parameters are gathered before it and freed after it."""
    if isinstance(module, compat.OptimizedModule):
        module = module._orig_mod  # where the wrapper looks for its methods
    if state_of(module) is None:
        if isinstance(module, compat.TORCH_FSDP_MODULE):
            raise TypeError(
                f"register_fsdp_forward_method({method_name!r}): this {type(module).__name__} was sharded by "
                "torch.distributed.fsdp.fully_shard before fsdp_compile.adopt(). Adopt first, then shard."
            )
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}.")
    method = getattr(type(module), method_name)

    # unit_forward once more, which must stay one frame of its own code: Dynamo counts recompilations by code object.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = _state(self)
        args, kwargs = as_taken(state, args, kwargs)
        try:
            if torch.compiler.is_dynamo_compiling():
                output = method(self, *args, **kwargs)
            else:
                output = eager_forward(state, self, method, args, kwargs)
        except BaseException:
            raise
        return as_given(state, output)

    setattr(module, method_name, forward.__get__(module, type(module)))


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Let several roots, such as a pipeline's chunks on one rank, count their reductions in flight together.

    Eager only: the order of a graph's reductions is planned.
    """
    roots = [state.root for state in _units_of(list(modules), "share_comm_ctx")]
    traffic = Traffic()
    for root in roots:
        root.iteration.traffic = traffic
