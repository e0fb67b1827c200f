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
from .running import Running, Use, recover, running
from .trace import span

# Each observer is called with the module and the parameter's name at every eager read of a gathered parameter.
read_observers: list[Callable[[nn.Module, str], None]] = []


def begin_forward(
    unit: Unit, module: nn.Module, args: Any, kwargs: Any, reads_are_compiled: bool
) -> tuple[Use, Any, Any]:
    """Gather for an eager forward; return the use that its reads belong to, and the inputs for the module."""
    run = running(unit)
    if autograd.backward_task() is not None:  # checkpointing recomputes the forward
        clean_up_at_end(unit)
        use = _use_in_backward(run)
        if use is None:  # reentrant checkpointing: its backward will be another one
            use = Use(run, run.current())
            use.is_in_backward, use.records = True, torch.is_grad_enabled()
            args, kwargs = end_at_inputs(use, args, kwargs)
        run.uses.append(use)
        return use, args, kwargs
    iteration = run.iteration
    if iteration.pending_handle is not None:
        raise RuntimeError(
            f"{unit.name}: The previous gradient reduction must be waited on before forward. Call wait() on the handle "
            "that finalize_backward(async_op=True) returned."
        )
    if iteration.in_stale_backward():
        recover(unit.root)
    iteration.forward_number += unit.outer is None and iteration.depth == 0
    use = _use_of(run)
    use.region = autograd.checkpointed_region()
    is_first, use.records = not use.records, use.records or torch.is_grad_enabled()
    iteration.depth += 1
    run.uses.append(use)
    if not reads_are_compiled:
        if unit.outer is None and not iteration.has_run:
            paths = paths_in(unit.modules)
            Agreement.note_eager(frozenset(name for one in unit.inside() for name in names_in(one, paths).values()))
            iteration.has_run = True
        if not unit.comes_in_parts:
            gather(use, use.gathered.buckets)
        for target in map(running, unit.settings.forward_prefetch):
            if target is not run:
                prefetch(target)
        if is_first:  # that autograd records, if it does: its backward is the last
            args, kwargs = end_at_inputs(use, args, kwargs)
    return use, args, kwargs


def _use_of(run: Running) -> Use:
    """Return the ``Use`` that a forward shares with the forward before it, or with other modules of the unit."""
    gathered = run.current()
    gathered.free_if_stale()
    use = run.shared_use
    if use is not None and _goes_on(use, gathered):
        run.iteration.goes_on(use)
        return use
    if run.unit.params:  # else it is no part of the schedule
        run.iteration.end_uses()
    run.not_run_yet = set(run.unit.modules)
    run.shared_use = Use(run, gathered)
    return run.shared_use


def _goes_on(use: Use, gathered: Gathered) -> bool:
    """Whether a forward that begins now goes on with the use; not if ``no_grad`` began or ended since."""
    follows = gathered.is_full and use.records == torch.is_grad_enabled()
    return use.gathered is gathered and (follows or bool(use.run.not_run_yet))


def enter(unit: Unit) -> Callable[[], None]:
    """Return the function to call if the forward of the unit that begins now raises."""
    run = running(unit)
    return functools.partial(_abandon_forward, run, len(run.uses), run.iteration.depth)


def _abandon_forward(run: Running, num_uses: int, depth: int) -> None:
    """Clean up after a forward that raised: for an error, or because checkpointing has recomputed enough.

    It may have raised anywhere, before its use was there or when the use had ended. ``num_uses`` and ``depth`` are
    those when it began.
    """
    iteration = run.iteration
    begun = run.uses[num_uses:]
    del run.uses[num_uses:]
    for use in begun:
        use.gathered.take_places_back()
    if autograd.backward_task() is None:
        iteration.depth = depth
        for use in begun:
            if use not in run.uses:  # which a forward inside itself shares
                use.forget_reads()
        run.shared_use = None
        if not run.uses and run.gathered is not None:
            run.gathered.free()
        if iteration.depth == 0:
            iteration.abandon_forward()
            for one in iteration.touched:
                if one.gathered is not None and one.held_use is None:
                    one.gathered.free()


def end_forward(unit: Unit, module: nn.Module, use: Use, output: Any) -> Any:
    """Free or keep the gathered parameters, hook the outputs for backward, and return the output."""
    run, iteration, is_recomputed = use.run, use.run.iteration, autograd.backward_task() is not None
    tensors = tensors_in(output)  # if this search raises, the forward has not ended
    use.gathered.take_places_back()
    run.uses.remove(use)
    iteration.depth -= not is_recomputed
    recorded = autograd.records_now()
    outputs = [tensor for tensor in tensors if tensor.requires_grad] if recorded else []
    if is_recomputed:
        use.forget_reads()
        if use.is_in_backward and use.was_read:
            _hook_outputs(use, outputs)  # another use in that backward may free before this one's comes
        return output  # the end of backward frees
    if use.gathered.is_here:
        iteration.touched.setdefault(run)
        use.gathered.give_away(tensors)
        _hook_outputs(use, outputs)
    use.has_outputs |= bool(outputs)
    use.is_transformed |= autograd.in_functorch()
    run.not_run_yet.discard(module)
    if not run.not_run_yet and use not in run.uses:
        iteration.has_ended(use)
    if iteration.depth == 0:
        iteration.end_forward()
        for one in iteration.touched:
            # It was prefetched, but this forward did not read it.
            if one.gathered is not None and one.held_use is None:
                one.gathered.drop()
    return output


def _hook_outputs(use: Use, outputs: list[Tensor]) -> None:
    before_backward = functools.partial(_before_backward, use)
    for tensor in outputs:
        if autograd.is_modules_view(tensor) and not use.run.warned_of_view:
            use.run.warned_of_view = True
            warnings.warn(
                f"{use.unit.name} returned a view tensor. An in-place operation on it takes away the hook that "
                "gathers the unit's parameters for backward: return a copy, or do not write to it.",
                stacklevel=2,
            )
        tensor.register_hook(before_backward)


def _before_backward(use: Use, grad: Tensor) -> None:
    with span("pre_backward", use.unit):
        enter_backward(use)


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
    use = owner.uses[-1] if owner.uses else _use_in_backward(owner) or owner.held_use
    if read_observers and (use is not None or owner.runs_forward or reader.runs_forward):
        for observe in read_observers:
            observe(module, name)
    if use is not None and param is sharded.shard:  # and not a tensor that functional_call put there
        gathered = read_gathered(use, sharded.fqn)
        return param if gathered is None else gathered
    if owner.runs_forward or reader.runs_forward:
        # A compiled forward runs around this read, or only another unit's, or nobody gathered: gather this one alone.
        require_data(sharded.fqn, param)
        return BY_MARKER
    return param


# nn.LSTM reads its parameters in Python inside of compiled code, where Dynamo looks at each frame that begins.
dynamo.leave_all_to_python(eager_read)


def use_of(unit: Unit) -> Use | None:
    """Return the eager forward of the unit that surely runs, or of which a part is recomputed for backward.

    Such a part runs with grad enabled. Hooks that are called in backward run without, and are to find shards. A
    backward that raised may leave uses behind, until the next forward recovers.
    """
    run = running(unit)
    if run.uses:
        return run.uses[-1] if run.uses[-1].ends_with_errors and not run.iteration.in_stale_backward() else None
    return _use_in_backward(run) if torch.is_grad_enabled() else None


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


def _use_in_backward(run: Running) -> Use | None:
    """Return the use that the running backward has reached, if it has reached this unit."""
    task, use = autograd.backward_task(), run.backward_use
    return use if task is not None and use is not None and use.task == task else None
