"""The eager path: the same parameters through autograd instead of a graph, for debugging and what did not compile.

    begin_forward     gather the unit, launch the gather of the unit that comes next; reads give gathered tensors
    end_forward       free their storage (or keep it); hook the outputs
    backward reaches the outputs    gather again into the same storage, which the saved tensors alias; launch the next
    all gradients are there         launch their reduction, free; the shards get theirs when the next unit's is launched
    end of backward                 wait for what is in flight, reduce what nothing reached, free what is left

Reading is an autograd function, so repeated calls and unused parameters are autograd's own business. The last backward
of a unit's reads launches the reduction and returns nothing: the gradient of a shard is set when the reduction ends, so
that it overlaps with backward; tensor hooks on the shard see it then. Where somebody asks autograd for it
(``autograd.grad``) the backward of the read returns the reduced gradient instead. A unit whose forward was compiled
reads through markers and is not gathered here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._accumulate import accumulator_for
from ._call import Call, end_at_inputs
from ._cast import tensors_in
from ._eager_backward import clean_up_at_end, enter_backward
from ._gathered import Gathered, gathered_of
from ._graph_path import read_by_marker
from ._trace import span
from .passes.markers import require_data

if TYPE_CHECKING:
    from ._param import ShardedParam
    from ._state import UnitState

READS = "_fsdp_compile_reads"

# Called with the module and the parameter's name for every eager read of a gathered parameter.
read_observers: list[Callable[[nn.Module, str], None]] = []


def begin_forward(
    state: UnitState, module: nn.Module, args: Any, kwargs: Any, reads_are_compiled: bool
) -> tuple[Call, Any, Any]:
    """Gather for an eager forward; the call that its reads go to, and the inputs to call the module with."""
    if compat.backward_task() is not None:  # recomputed for backward
        call = _call_in_backward(state) or Call(state, gathered_of(state))
        state.calls.append(call)
        clean_up_at_end(state)
        return call, args, kwargs
    iteration = state.iteration
    if iteration.pending_handle is not None:
        raise RuntimeError(
            f"{state.name}: a forward began while finalize_backward(async_op=True) is pending. Call wait() on the "
            "handle that it returned first."
        )
    if iteration.in_stale_backward():
        state.root.recover()
    iteration.forward_number += state.outer is None and iteration.depth == 0
    call = _call_of_pass(state, module)
    if not reads_are_compiled:
        try:
            _gather_ahead(state, call.gathered)
        except BaseException:
            abandon_forward(state, call)
            raise
        some_frozen = any(not shard.requires_grad for shard in call.gathered.shards)
        if some_frozen and torch.is_grad_enabled() and not compat.in_functorch():
            args, kwargs = end_at_inputs(call, args, kwargs)
    iteration.depth += 1
    state.calls.append(call)
    return call, args, kwargs


def _gather_ahead(state: UnitState, gathered: Gathered) -> None:
    """Gather the unit, and launch the gathers of those that come next."""
    following = state.iteration.begin_unit(state)
    gathered.wait()
    for target in state.forward_prefetch or ([] if following is None else [following]):
        if target is not state and target.group.params:
            state.iteration.touched.setdefault(target)  # which may not run this time
            gathered_of(target).launch()


def _call_of_pass(state: UnitState, module: nn.Module) -> Call:
    """A call of its own for a module that is a unit alone; one for all members of a unit of several modules."""
    gathered = gathered_of(state)
    gathered.free_if_stale()
    if len(state.modules) == 1:
        return Call(state, gathered)
    if state.pass_call is None or state.pass_call.gathered is not gathered:
        state.pass_call, state.not_run_yet = Call(state, gathered), set(state.modules)
    return state.pass_call


def abandon_forward(state: UnitState, call: Call) -> None:
    """The forward raised: an error, or checkpointing that has recomputed enough."""
    if call in state.calls:
        state.calls.remove(call)
        state.iteration.depth -= compat.backward_task() is None
    if compat.backward_task() is None:
        call.forget_reads()
        state.pass_call = None
        if not state.calls:
            call.gathered.free()
        if state.iteration.depth == 0:
            state.iteration.abandon_forward()
            for unit in state.iteration.touched:
                if unit.gathered is not None and unit.held_call is None:
                    unit.gathered.free()


def end_forward(state: UnitState, module: nn.Module, call: Call, output: Any) -> Any:
    """Free or keep what the unit gathered, and be told when backward reaches it."""
    state.calls.remove(call)
    if compat.backward_task() is not None:
        call.forget_reads()
        return output  # its end frees
    iteration = state.iteration
    iteration.depth -= 1
    tensors = tensors_in(output)
    recorded = torch.is_grad_enabled() and not compat.in_functorch()
    outputs = [tensor for tensor in tensors if tensor.requires_grad] if recorded else []
    if call.gathered.is_full:
        iteration.touched.setdefault(state)
        call.gathered.give_away(tensors)
        _hook_outputs(call, outputs)
    state.not_run_yet.discard(module)
    if not state.not_run_yet:
        _end_pass(state, call, awaits_backward=bool(outputs))
    if iteration.depth == 0:
        for unit in iteration.end_forward():
            if unit.pass_call is not None:  # members of a list that did not run
                _end_pass(unit, unit.pass_call, awaits_backward=bool(outputs))
        for unit in iteration.touched:
            # Launched ahead for a forward that took another way this time.
            if unit.gathered is not None and unit.gathered.launched and unit.held_call is None:
                unit.gathered.free()
    return output


def _end_pass(state: UnitState, call: Call, awaits_backward: bool) -> None:
    state.pass_call, state.not_run_yet = None, set()
    call.forget_reads()
    if awaits_backward and call.was_read:
        state.iteration.awaits_backward(call)
    if state.calls or not call.gathered.is_full or compat.in_functorch():
        return  # a transform may have a backward of its own, which tells nobody: the next forward frees
    state.held_call = None
    if awaits_backward and state.group.post_forward is not None:
        call.gathered.free_but_a_slice()
    elif state.group.regather or not awaits_backward:
        call.gathered.free()


def _hook_outputs(call: Call, outputs: list[Tensor]) -> None:
    state, before_backward = call.state, functools.partial(_before_backward, call)
    for tensor in outputs:
        if tensor._is_view() and not state.warned_of_view:
            state.warned_of_view = True
            warnings.warn(
                f"{state.name} returns a view. An in-place operation on it takes away the hook that gathers the unit's "
                "parameters for backward: return a copy, or do not write to it.",
                stacklevel=2,
            )
        tensor.register_hook(before_backward)


def _before_backward(call: Call, grad: Tensor) -> None:
    with span("pre_backward", call.state):
        enter_backward(call)


compat.leave_all_to_python(_before_backward)


def eager_read(module: nn.Module, name: str, param: Any) -> Any:
    """An eager read: the gathered parameter inside a forward, the sharded one outside."""
    if not isinstance(param, DTensor):
        return param
    read: tuple[ShardedParam, UnitState, UnitState] = module.__dict__[READS][name]
    sharded, owner, reader = read
    # Without a forward that runs, checkpointing inside the unit may be recomputing a part of one for backward.
    call = owner.calls[-1] if owner.calls else _call_in_backward(owner) or owner.held_call
    if read_observers and (call is not None or owner.runs_forward or reader.runs_forward):
        for observe in read_observers:
            observe(module, name)
    if call is not None:
        gathered = call.read(sharded.fqn)
        return param if gathered is None else gathered
    if owner.runs_forward or reader.runs_forward:
        # A compiled forward is running around this read, or only another unit's: gather just this one.
        require_data(sharded.fqn, param)
        spec = owner.group.spec_of(sharded)
        return sharded.as_read(read_by_marker(param, accumulator_for(owner, sharded, spec), spec))
    return param


def _call_in_backward(state: UnitState) -> Call | None:
    """The forward call that the running backward has reached, if it has reached this unit."""
    task = compat.backward_task()
    return state.backward_call if task is not None and task == state.backward_task else None
