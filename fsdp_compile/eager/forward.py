"""The eager path: autograd reads the same parameters instead of a graph, for debugging and uncompiled code.

    begin_forward     gather the unit, launch the gather of the unit that comes next; reads give gathered tensors.
                      Of the outermost unit, each read gathers its bucket
    end_forward       hook the outputs; the storage is freed (or kept) when another unit gathers
    backward reaches the outputs    gather again into the same storage, which the saved tensors alias; launch the next
    all gradients are there         launch their reduction, free; shards get them when the next reduction is launched
    end of backward                 reduce the gradients that are left, free, and wait for the reductions in flight

A read is an autograd function, so autograd itself handles repeated calls and unused parameters. The backward of a
unit's last read launches the reduction and returns no gradient. The shard's gradient is set when the reduction ends, so
that the reduction overlaps with backward; tensor hooks on the shard run then. If the caller asks autograd for the
gradient (``autograd.grad``), the backward of the read returns the reduced gradient instead. A unit whose forward was
compiled reads through markers, and the eager path does not gather it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import autograd, dynamo
from ..core.containers import tensors_in
from ..core.param import BY_MARKER, READS, ShardedParam
from ..core.spec import spec_of
from ..core.unit import Unit, names_in, paths_in
from ..passes.ir.markers import require_data
from ..passes.ranks.agree import Agreement
from .backward import clean_up_at_end, enter_backward
from .gathered import Gathered
from .reads import end_at_inputs, gather, prefetch, read_gathered
from .running import Call, Running, recover, running
from .trace import span

# Each observer is called with the module and the parameter's name at every eager read of a gathered parameter.
read_observers: list[Callable[[nn.Module, str], None]] = []


def begin_forward(
    unit: Unit, module: nn.Module, args: Any, kwargs: Any, reads_are_compiled: bool
) -> tuple[Call, Any, Any]:
    """Gather for an eager forward; return the call that its reads belong to, and the inputs for the module."""
    run = running(unit)
    if autograd.backward_task() is not None:  # checkpointing recomputes the forward
        clean_up_at_end(unit)
        call = _call_in_backward(run)
        if call is None:  # reentrant checkpointing: its backward will be another one
            call = Call(run, run.current())
            call.is_in_backward, call.records = True, torch.is_grad_enabled()
            args, kwargs = end_at_inputs(call, args, kwargs)
        run.calls.append(call)
        return call, args, kwargs
    iteration = run.iteration
    if iteration.pending_handle is not None:
        raise RuntimeError(
            f"{unit.name}: The previous gradient reduction must be waited on before forward. Call wait() on the handle "
            "that finalize_backward(async_op=True) returned."
        )
    if iteration.in_stale_backward():
        recover(unit.root)
    iteration.forward_number += unit.outer is None and iteration.depth == 0
    call = _call_of(run)
    call.region = autograd.checkpointed_region()
    is_first, call.records = not call.records, call.records or torch.is_grad_enabled()
    iteration.depth += 1
    run.calls.append(call)
    if not reads_are_compiled:
        if unit.outer is None and not iteration.has_run:
            paths = paths_in(unit.modules)
            Agreement.note_eager(frozenset(name for one in unit.inside() for name in names_in(one, paths).values()))
            iteration.has_run = True
        if not unit.comes_in_parts:
            gather(call, call.gathered.buckets)
        for target in map(running, unit.settings.forward_prefetch):
            if target is not run:
                prefetch(target)
        if is_first:  # that autograd records, if it does: its backward is the last
            args, kwargs = end_at_inputs(call, args, kwargs)
    return call, args, kwargs


def _call_of(run: Running) -> Call:
    """Return the ``Call`` that a forward shares with the forward before it, or with other modules of the unit."""
    gathered = run.current()
    gathered.free_if_stale()
    call = run.shared_call
    if call is not None and _goes_on(call, gathered):
        run.iteration.goes_on(call)
        return call
    if run.unit.params:  # else it is no part of the schedule
        run.iteration.end_calls()
    run.not_run_yet = set(run.unit.modules)
    run.shared_call = Call(run, gathered)
    return run.shared_call


def _goes_on(call: Call, gathered: Gathered) -> bool:
    """Whether a forward that begins now shares the call; not if ``no_grad`` began or ended since."""
    follows = gathered.is_full and call.records == torch.is_grad_enabled()
    return call.gathered is gathered and (follows or bool(call.run.not_run_yet))


def enter(unit: Unit) -> Callable[[], None]:
    """Return the function to call if the forward of the unit that begins now raises."""
    run = running(unit)
    return functools.partial(_abandon_forward, run, len(run.calls), run.iteration.depth)


def _abandon_forward(run: Running, num_calls: int, depth: int) -> None:
    """Clean up after a forward that raised: for an error, or because checkpointing has recomputed enough.

    It may have raised anywhere, before its call was there or when the call had ended. ``num_calls`` and ``depth`` are
    those when it began.
    """
    iteration = run.iteration
    begun = run.calls[num_calls:]
    del run.calls[num_calls:]
    for call in begun:
        call.gathered.take_places_back()
    if autograd.backward_task() is None:
        iteration.depth = depth
        for call in begun:
            if call not in run.calls:  # which a forward inside itself shares
                call.forget_reads()
        run.shared_call = None
        if not run.calls and run.gathered is not None:
            run.gathered.free()
        if iteration.depth == 0:
            iteration.abandon_forward()
            for one in iteration.touched:
                if one.gathered is not None and one.held_call is None:
                    one.gathered.free()


def end_forward(unit: Unit, module: nn.Module, call: Call, output: Any) -> Any:
    """Free or keep the gathered parameters, hook the outputs for backward, and return the output."""
    run, iteration, is_recomputed = call.run, call.run.iteration, autograd.backward_task() is not None
    tensors = tensors_in(output)  # if this search raises, the forward has not ended
    call.gathered.take_places_back()
    run.calls.remove(call)
    iteration.depth -= not is_recomputed
    recorded = autograd.records_now()
    outputs = [tensor for tensor in tensors if tensor.requires_grad] if recorded else []
    if is_recomputed:
        call.forget_reads()
        if call.is_in_backward and call.was_read:
            _hook_outputs(call, outputs)  # another call in that backward may free before this one's comes
        return output  # the end of backward frees
    if call.gathered.is_here:
        iteration.touched.setdefault(run)
        call.gathered.give_away(tensors)
        _hook_outputs(call, outputs)
    call.has_outputs |= bool(outputs)
    call.is_transformed |= autograd.in_functorch()
    run.not_run_yet.discard(module)
    if not run.not_run_yet and call not in run.calls:
        iteration.has_ended(call)
    if iteration.depth == 0:
        iteration.end_forward()
        for one in iteration.touched:
            # It was prefetched, but this forward did not read it.
            if one.gathered is not None and one.held_call is None:
                one.gathered.drop()
    return output


def _hook_outputs(call: Call, outputs: list[Tensor]) -> None:
    before_backward = functools.partial(_before_backward, call)
    for tensor in outputs:
        if autograd.is_modules_view(tensor) and not call.run.warned_of_view:
            call.run.warned_of_view = True
            warnings.warn(
                f"{call.unit.name} returned a view tensor. An in-place operation on it takes away the hook that "
                "gathers the unit's parameters for backward: return a copy, or do not write to it.",
                stacklevel=2,
            )
        tensor.register_hook(before_backward)


def _before_backward(call: Call, grad: Tensor) -> None:
    with span("pre_backward", call.unit):
        enter_backward(call)


dynamo.leave_all_to_python(_before_backward)


def eager_read(module: nn.Module, name: str, param: Any) -> Any:
    """Return what a read gives: the gathered parameter in a forward, BY_MARKER if nobody gathered; else the shard."""
    known: tuple[ShardedParam, Unit, Unit] = module.__dict__[READS][name]
    if known[0].is_full and param is not known[0].shard:
        return _as_computed_with(param, known)
    if not known[0].is_cut(param):
        return param
    sharded, owner, reader = known[0], running(known[1]), running(known[2])
    # While no forward runs, checkpointing inside the unit may be recomputing a part of one for backward.
    call = owner.calls[-1] if owner.calls else _call_in_backward(owner) or owner.held_call
    if read_observers and (call is not None or owner.runs_forward or reader.runs_forward):
        for observe in read_observers:
            observe(module, name)
    if call is not None and param is sharded.shard:  # and not a tensor that functional_call put there
        gathered = read_gathered(call, sharded.fqn)
        return param if gathered is None else gathered
    if owner.runs_forward or reader.runs_forward:
        # A compiled forward runs around this read, or only another unit's, or nobody gathered: gather this one alone.
        require_data(sharded.fqn, param)
        return BY_MARKER
    return param


# nn.LSTM reads its parameters in Python inside of compiled code, where Dynamo looks at each frame that begins.
dynamo.leave_all_to_python(eager_read)


def call_of(unit: Unit) -> Call | None:
    """Return the eager forward of the unit that surely runs, or of which a part is recomputed for backward.

    Such a part runs with grad enabled. Hooks that are called in backward run without, and are to find shards. A
    backward that raised may leave calls behind, until the next forward recovers.
    """
    run = running(unit)
    if run.calls:
        return run.calls[-1] if run.calls[-1].ends_with_errors and not run.iteration.in_stale_backward() else None
    return _call_in_backward(run) if torch.is_grad_enabled() else None


def eager_write(module: nn.Module, name: str, value: Any) -> bool:
    """Register a tensor that is set under a parameter's name in a forward, until it ends; False outside of forwards."""
    _, owner, reader = module.__dict__[READS][name]
    runs = running(owner).runs_forward or running(reader).runs_forward
    if runs and isinstance(value, Tensor):
        module._parameters[name] = value  # type: ignore[assignment]
        return True
    return False


dynamo.leave_all_to_python(eager_write)


def _as_computed_with(full: Any, known: tuple[ShardedParam, Unit, Unit]) -> Any:
    """Return what full_params put in the shard's place; inside a forward, in the dtype that the inputs are cast to."""
    sharded, unit, reader = known
    inside = isinstance(full, Tensor) and (running(unit).runs_forward or running(reader).runs_forward)
    return full.to(spec_of(unit, sharded).dtype) if inside else full


def _call_in_backward(run: Running) -> Call | None:
    """Return the forward call that the running backward has reached, if it has reached this unit."""
    task, call = autograd.backward_task(), run.backward_call
    return call if task is not None and call is not None and call.task == task else None
