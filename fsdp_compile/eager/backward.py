"""The eager path's backward: gather again, prefetch, reduce, free, and clean up at the end.

    enter_backward     backward reached the outputs of a use: gather, launch the gather of the unit that comes next
    arrive             a gradient of a use is there: launch the reduction of its bucket, if it is the last one of that
    complete           no more gradients of a use come: free, and reduce what is left, or hold it back
    leave_backward     backward of the use reads no parameters any more: free
    end_backward       reduce the gradients that are left, free, and wait for the reductions in flight
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, dynamo
from ..core.grads import brought_to, is_asked_for
from ..core.unit import Unit
from ..passes.wire import streams
from .gathered import Gathered
from .reduction import Reduction, deliver, hold_back, with_pending
from .running import Recording, Running, Use, recover, running
from .trace import span


def enter_backward(use: Use) -> None:
    """Gather when backward reaches the outputs of a forward, and launch the gathers of what comes next."""
    run, settings, iteration = use.run, use.unit.settings, use.run.iteration
    task = autograd.backward_task()
    if task is not None and use.left_in == task:
        return  # an output that is an input passed on, as T5's position bias: its gradient comes later
    clean_up_at_end(use.unit)
    iteration.creates_graph |= torch.is_grad_enabled()
    run.backward_use = use
    is_first = use.task != task or task is None
    if use.task != task:
        use.task = task
        run.in_backward.add(use)
    if not settings.unshard_in_backward:
        return
    use.gathered.wait(use.again())
    if not is_first:
        return  # another output: the units before this one may be done by now
    if settings.backward_prefetch:
        for target in map(running, settings.backward_prefetch):
            iteration.touched.setdefault(target)
            ahead = target.current()
            ahead.launch(ahead.gathered_again({*range(len(ahead.shards))} - ahead.tables))
    else:
        for coming in iteration.come_after(use):
            if coming.unit.settings.unshard_in_backward:
                coming.gathered.launch(coming.again())


def leave_backward(use: Use) -> None:
    """Free a unit's parameters when backward has finished one of its uses, unless backward of another use runs."""
    run = use.run
    if use.task is not None and use.task != autograd.backward_task():
        return  # this backward runs inside another one (reentrant checkpointing), which goes on reading
    use.left_in = autograd.backward_task()
    run.in_backward.discard(use)
    use.forget_reads()
    is_last = use.is_last_in_backward
    stays = use.unit.keeps or not (use.unit.regather or is_last)
    if not run.in_backward and not stays and not run.iteration.creates_graph:
        use.gathered.free(and_slices=is_last)


def arrive(recording: Recording, index: int, grad: Tensor | None, leaf: Any) -> DTensor | None:
    """Take the gradient of a read (None: it will not come); return it, reduced, if the caller asked autograd for it."""
    use, gathered = recording.use, recording.use.gathered
    iteration = use.run.iteration
    if grad is not None and grad.requires_grad:
        raise RuntimeError(
            f"{gathered.params[index].fqn}: FSDP does not support gradients of gradients of parameters, and this one's "
            "was asked for with create_graph=True. Ask for gradients of inputs alone, as a penalty does."
        )
    clean_up_at_end(use.unit)
    if not autograd.in_compiled_autograd():  # which does not call back at its end
        iteration.incomplete.setdefault(recording, autograd.backward_task())
    recording.arrived.add(index)
    result = None
    shard = gathered.shards[index]
    if shard.is_leaf and not autograd.in_compiled_autograd() and autograd.accumulates(leaf) is False:
        pass  # this backward does not accumulate into the shard, so nothing is reduced
    elif is_asked_for(shard, leaf):
        recording.delivered.add(index)
        if grad is not None:
            result = _reduce_asked_for(use.run, gathered, index, grad)
    else:
        if grad is not None:
            iteration.hooks.hold_back(gathered.shards[index])
            recording.grads[index] = grad
    if recording.arrived >= recording.read:
        with span("post_backward", use.unit):
            complete(recording)
    elif grad is not None:
        _reduce_buckets(recording)
    return result


def _reduce_buckets(recording: Recording) -> None:
    """Reduce buckets once their gradients are all there: that of a model's head, while the layers compute theirs.

    They wait where partial sums of earlier backwards are to join them, or zeros.
    """
    use, gathered = recording.use, recording.use.gathered
    accumulation, iteration = use.unit.accumulation, use.run.iteration
    joined = not accumulation.all_reduce or accumulation.held.partials or use.unit.settings.reduce_unused
    if joined or not accumulation.sync:
        return
    while (bucket := recording.take_next()) is not None:
        grads = {index: recording.grads.pop(index) for index in bucket & recording.grads.keys()}
        gathered.unalias(grads)
        grads = with_pending(gathered, grads, only=bucket)
        recording.delivered.update(grads)
        if grads:
            begun = recording.reduction
            recording.reduction = iteration.traffic.reduce(gathered, grads, iteration.max_reductions, begun)
            recording.reduction.more_come |= _more_come_for_hooks(use, grads)


def complete(recording: Recording) -> None:
    """Free the parameters and reduce the gradients of a use, when no more of them will come."""
    use, run = recording.use, recording.use.run
    grads, delivered, begun = recording.grads, recording.delivered, recording.reduction
    recording.forget()
    run.iteration.incomplete.pop(recording, None)
    # Free before the reduction allocates memory. But the rest of this unit's backward may still read a frozen
    # parameter, until it reaches the unit's inputs, or until backward ends where no input requires a gradient.
    use.gathered.unalias(grads)
    if not (use.ends_at_inputs or use.read_frozen):
        leave_backward(use)
    _reduce(run, use.gathered, grads, delivered, begun, _more_come_for_hooks(use, grads))


def _more_come_for_hooks(use: Use, grads: Collection[int]) -> bool:
    """Whether some of these gradients have hooks to wait for, and other uses of the unit may add to them."""
    has_hooks = any(any(autograd.hooks_of(use.gathered.shards[index])) for index in grads)
    return has_hooks and use.run.iteration.awaits_others(use)


def _reduce(
    run: Running,
    gathered: Gathered,
    grads: dict[int, Tensor],
    delivered: Collection[int] = (),
    begun: Reduction | None = None,
    more_come: bool = False,
) -> None:
    """Reduce gradients, or hold them back.

    Gradients of ``delivered`` parameters need no reduction any more. If some of the use's buckets were launched
    already, ``begun`` is their reduction.
    """
    unit, accumulation = run.unit, run.unit.accumulation
    if not accumulation.sync:
        hold_back(gathered, grads)
        return
    grads = with_pending(gathered, grads)
    if unit.settings.reduce_unused:
        _require_reduce_dtype(unit, gathered)
        for index, (shard, spec) in enumerate(zip(gathered.shards, gathered.specs)):
            if shard.requires_grad and index not in grads and index not in delivered:
                grads[index] = torch.zeros(spec.size, dtype=spec.reduce_dtype, device=unit.mesh.device)
    run.reduced_in = autograd.backward_task()
    if grads or (accumulation.held.partials and accumulation.all_reduce):
        reduction = run.iteration.traffic.reduce(gathered, grads, run.iteration.max_reductions, begun)
        reduction.more_come |= more_come


def _reduce_asked_for(run: Running, gathered: Gathered, index: int, grad: Tensor) -> DTensor | None:
    """Reduce the gradient of one shard, and return it for autograd to pass on; None while it is a partial sum."""
    grads = {index: grad}
    joins = autograd.in_compiled_autograd() or not gathered.shards[index].is_leaf  # else the caller gets this one alone
    if joins:
        grads = with_pending(gathered, grads, only=[index])
    run.reduced_in = autograd.backward_task()
    local = Reduction(gathered, grads, alone=True, joins_partials=joins).finish().get(index)
    if local is None:
        return None
    shard = gathered.shards[index]
    return dtensors.dtensor_like(shard, brought_to(shard, local, read_at_once=True))


def _require_reduce_dtype(unit: Unit, gathered: Gathered) -> None:
    for param, shard in zip(gathered.params, gathered.shards):
        if shard.grad_dtype is None and unit.mp_policy.reduce_dtype is None:
            raise ValueError(
                "Reducing unused parameters with grad_dtype=None requires an explicit "
                f"MixedPrecisionPolicy.reduce_dtype, which zeros have where {param.fqn} is unused. Set it, or leave "
                "out set_reduce_scatter_unused_params."
            )


def clean_up_at_end(unit: Unit) -> None:
    """Have ``end_backward`` run at the end of the running backward, once for each backward."""
    if not autograd.backward_has_an_end():
        return  # nothing runs at its end, and its units hold nothing
    iteration, task = running(unit).iteration, autograd.backward_task()
    if task not in iteration.tasks:
        root = unit.root
        if iteration.in_stale_backward():  # an eager forward would have recovered, but none ran
            recover(root)
        iteration.forget_raised()
        # This walks the model, so it is done once a backward.
        iteration.max_reductions = max(inner.settings.max_reductions for inner in root.inside())
        end = functools.partial(_end_aside, streams.accelerator.current(unit.mesh.device), root, task)
        iteration.tasks[task] = weakref.ref(end)
        autograd.at_end_of_backward(end)
    iteration.touched.setdefault(running(unit))


def _end_aside(stream: Any, root: Unit, task: int | None) -> None:
    """End a backward on the stream that it runs on; autograd calls back on that of the caller of ``backward()``."""
    with streams.Aside(stream) as aside:
        end_backward(root, task)
    aside.join()


def end_backward(root: Unit, task: int | None = None) -> None:
    """End a backward: reduce the gradients that are left, free the parameters, and wait for reductions in flight.

    If this raises, as a user's hook may, the backward counts as one that did not end, and the next forward recovers.
    """
    iteration = running(root).iteration
    iteration.forget_raised()
    others = {*iteration.tasks} - {task}
    for recording in [one for one, since in iteration.incomplete.items() if since == task]:
        complete(recording)  # some parameter that was read has no part in this backward
    if others:
        iteration.tasks.pop(task, None)
        return  # this backward ran inside another one, which goes on
    root.watch.say_no_plan_eagerly()
    if not iteration.manual_finalization:
        reduce_left_over(root)
    for run in iteration.touched:
        run.backward_use = run.reduced_in = None
        run.in_backward.clear()
        if not run.unit.keeps:
            run.unit.keeper.free()
        keeps = iteration.creates_graph or run.uses or run.unit.keeps
        if run.gathered is not None and not keeps:
            run.gathered.free()
    is_last = iteration.is_last_backward and not iteration.manual_finalization
    if is_last:
        with span("end_backward", root):
            iteration.traffic.finish()
        for run in iteration.touched:
            for fqn in [*run.unit.accumulation.held.for_hooks]:  # their other uses had no part in this backward
                gathered = run.current()
                deliver(gathered, gathered.index[fqn], run.unit.accumulation.held.for_hooks.pop(fqn))
    for run in iteration.touched:
        run.unit.accumulation.end_backward(is_last)
    if is_last and not iteration.creates_graph:
        iteration.touched.clear()
    iteration.creates_graph = False
    iteration.hooks.release()
    iteration.tasks.clear()


dynamo.leave_all_to_python(_end_aside, end_backward)


def reduce_left_over(root: Unit) -> None:
    """Reduce held-back gradients that no reduction of this backward took, and zeros where all ranks must reduce."""
    for unit in reversed(root.inside()):
        run, accumulation = running(unit), unit.accumulation
        needs_zeros = accumulation.sync and unit.settings.reduce_unused and run.reduced_in is None
        if accumulation.has_left_over or needs_zeros:
            _reduce(run, run.current(), {})


def reduce_now(unit: Unit) -> None:
    """Reduce what one unit held back, and wait for it."""
    if unit.accumulation.has_left_over:
        gathered = running(unit).current()
        Reduction(gathered, with_pending(gathered, {})).complete()
        streams.wait_on_cpu()


def note_reduction(unit: Unit) -> None:
    """Note that the running backward reduces gradients of the unit in compiled code."""
    running(unit).reduced_in = autograd.backward_task()
