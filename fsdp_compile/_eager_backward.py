"""The eager path's backward: gather again, launch the next, reduce, free, and end it all in order.

    enter_backward     backward reached the outputs of a call: gather, launch the gather of the unit that comes next
    reduce             all gradients of a call are there: launch their reduction, or hold them back
    reduce_asked_for   the same for one that autograd gives to somebody: at once, and by itself
    leave_backward     nothing of the call reads parameters any more: free
    end_backward       reduce what nothing reached, free what is left, wait for what is in flight
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._gathered import Gathered, gathered_of
from ._reduction import Reduction, brought_to, hold_back, wait_for_offloaded, with_pending
from ._trace import span

if TYPE_CHECKING:
    from ._call import Call
    from ._state import UnitState


def enter_backward(call: Call) -> None:
    """Backward reached the outputs of a forward call: gather, and launch what comes next."""
    state, iteration = call.state, call.state.iteration
    task = compat.backward_task()
    clean_up_at_end(state)
    iteration.creates_graph |= torch.is_grad_enabled()
    state.backward_call, state.backward_task = call, task
    if call.task != task:
        call.task = task
        state.in_backward.add(call)
    if not state.group.unshard_in_backward:
        return
    call.gathered.wait()
    if state.backward_prefetch:
        for target in state.backward_prefetch:
            iteration.touched.setdefault(target)
            gathered_of(target).launch()
        return
    for earlier in iteration.before(call):
        if earlier.state is not state:
            if earlier.state.group.unshard_in_backward:
                earlier.gathered.launch()
            break


def leave_backward(call: Call) -> None:
    """Backward is through with a forward call: free, unless another call of the unit is under way."""
    state = call.state
    if call.task is not None and call.task != compat.backward_task():
        return  # a backward inside another one (reentrant checkpointing), which goes on reading
    state.in_backward.discard(call)
    call.forget_reads()
    if not state.in_backward and state.group.reshard_after_backward and not state.iteration.creates_graph:
        call.gathered.free()


def is_asked_for(shard: DTensor, leaf: Any) -> bool:
    """Whether somebody asked autograd for the gradient of a shard, who gets it in the place of ``shard.grad``."""
    return torch.is_grad_enabled() or not shard.is_leaf or not compat.accumulates(leaf)


def is_watched(shard: DTensor, leaf: Any) -> bool:
    """Whether a gradient that is reduced already must come through autograd: asked for, or hooks see it on its way."""
    return bool(shard._backward_hooks) or is_asked_for(shard, leaf)


def reduce(state: UnitState, gathered: Gathered, grads: dict[int, Tensor], delivered: Collection[int] = ()) -> None:
    """Send gradients on their way to the shards; ``delivered`` ones have been sent already."""
    group = state.group
    if not group.sync:
        hold_back(gathered, grads)
        return
    grads = with_pending(gathered, grads)
    if group.reduce_unused:
        _require_reduce_dtype(state, gathered)
        for index, (shard, spec) in enumerate(zip(gathered.shards, gathered.specs)):
            if shard.requires_grad and index not in grads and index not in delivered:
                grads[index] = torch.zeros(spec.size, dtype=spec.reduce_dtype, device=group.mesh.device)
    state.reduced_in = compat.backward_task()
    if grads or (group.partials and group.all_reduce):
        state.iteration.traffic.reduce(gathered, grads, state.iteration.max_reductions)


def reduce_asked_for(state: UnitState, gathered: Gathered, index: int, grad: Tensor) -> DTensor | None:
    """The gradient of one shard, for autograd to carry on; None while it is a partial sum."""
    grads = with_pending(gathered, {index: grad}, only=gathered.params[index].fqn)
    state.reduced_in = compat.backward_task()
    local = Reduction(gathered, grads, alone=True).finish().get(index)
    if local is None:
        return None
    shard = gathered.shards[index]
    return compat.dtensor_like(shard, brought_to(shard, local, read_at_once=True))


def _require_reduce_dtype(state: UnitState, gathered: Gathered) -> None:
    for param, shard in zip(gathered.params, gathered.shards):
        if compat.get_grad_dtype(shard) is None and state.mp_policy.reduce_dtype is None:
            raise ValueError(
                f"{param.fqn} has grad_dtype=None, so its gradient has no dtype of its own, and "
                "set_reduce_scatter_unused_params needs one for zeros. Give MixedPrecisionPolicy a reduce_dtype."
            )


def clean_up_at_end(state: UnitState) -> None:
    """Have the end of the backward that runs clean up; once for each backward."""
    if compat.in_compiled_autograd():
        return  # it has no end, and its units hold nothing
    iteration, task = state.iteration, compat.backward_task()
    iteration.touched.setdefault(state)
    if task not in iteration.tasks:
        iteration.tasks.append(task)
        root = state.root
        iteration.max_reductions = root.max_reductions_in_flight()  # walks the model: once a backward
        compat.at_end_of_backward(functools.partial(end_backward, root, task))


def end_backward(root: UnitState, task: int | None = None) -> None:
    """The last of a backward: gradients that nothing asked for, what is in flight, and the storages.

    Where it raises, as a hook may, the backward is noted as one that did not end, and the next forward recovers.
    """
    iteration = root.iteration
    others = [one for one in iteration.tasks if one != task]
    for recording in [one for one, since in iteration.incomplete.items() if since == task]:
        recording.complete()  # a parameter that was read has no part in this backward
    if others:
        iteration.tasks = others
        return  # inside another backward, which goes on
    if not iteration.manual_finalization:
        reduce_left_over(root)
    for unit in iteration.touched:
        unit.backward_call = unit.backward_task = None
        unit.in_backward.clear()
        unit.reduced_in = None
        keeps = iteration.creates_graph or unit.calls or not unit.group.reshard_after_backward
        if unit.gathered is not None and not keeps:
            unit.gathered.free()
    if iteration.is_last_backward and not iteration.manual_finalization:
        with span("end_backward", root):
            iteration.traffic.finish()
        if not iteration.creates_graph:
            iteration.touched.clear()
    iteration.creates_graph = False
    iteration.hooks.release()
    iteration.tasks.clear()


compat.leave_all_to_python(end_backward)


def reduce_left_over(root: UnitState) -> None:
    """Reduce what was held back and nothing in this backward took, and zeros where all ranks must reduce."""
    for unit in reversed(root.units()):
        group = unit.group
        if group.has_left_over or (group.sync and group.reduce_unused and unit.reduced_in is None):
            reduce(unit, gathered_of(unit), {})


def reduce_now(state: UnitState) -> None:
    """The same for one unit, at once."""
    if state.group.has_left_over:
        gathered = gathered_of(state)
        Reduction(gathered, with_pending(gathered, {})).complete()
        if state.group.offload:
            wait_for_offloaded()
