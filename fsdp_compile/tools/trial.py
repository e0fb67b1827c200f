"""Run a step that leaves no trace, and listen to one, for tools that look at it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._torch_compat import autograd, dynamo
from ..api.classes import parts_of
from ..core.accumulation import Held
from ..core.undo import Before
from ..core.unit import units_in
from ..eager.running import Iteration, running


@contextmanager
def observing(observers: list[Any], note: Callable[..., Any]) -> Iterator[None]:
    """Keep ``note`` in a list of observers while this block runs."""
    observers.append(note)
    try:
        yield
    finally:
        observers.remove(note)


def module_given(model: Any, tool: str) -> nn.Module:
    """Return the module that the user gave to a tool, without what ``torch.compile`` put around it."""
    whole = dynamo.behind_compile(model)
    if not isinstance(whole, nn.Module):
        raise TypeError(f"{tool} takes the model and its inputs, but got {type(model).__name__} as the model.")
    return whole


def require_between_steps(model: nn.Module, tool: str) -> None:
    """Raise inside a forward or a backward of ``model``, and while its gradients are still on their way."""
    for unit in units_in(model):
        if autograd.backward_task() is not None or running(unit).runs_forward:
            raise RuntimeError(f"{unit.name}: {tool} was called inside a forward or a backward. Call it outside.")
        if running(unit).iteration.pending_handle is not None:
            raise RuntimeError(
                f"{unit.name}: {tool} was called while finalize_backward(async_op=True) is pending. Call wait() "
                "on the handle that it returned first."
            )


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Undo the step that runs in this block.

    It begins without gradients, and no post-accumulate-grad hook runs. Afterwards gradients, gradients that were held
    back, buffers, attributes of modules, settings and random number generators are as before.
    """
    units = units_in(model)
    roots = list(dict.fromkeys(unit.root for unit in units))
    params = list(model.parameters())
    grads = [param.grad for param in params]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    parts = [part for unit in dict.fromkeys([*roots, *units]) for part in parts_of(unit)]
    before, put_generators_back = Before([*model.modules(), *parts]), _remember_generators()
    try:
        for root in roots:
            running(root).own_iteration = Iteration()
        for unit in units:
            running(unit).gathered = running(unit).held_use = None
            unit.accumulation.held = Held()
        for param in params:
            param.grad = None
        with autograd.without_post_accumulate_grad_hooks(params):
            yield
    finally:
        try:
            for root in roots:  # after an error reductions may be in flight
                running(root).iteration.traffic.forget(units)
                running(root).iteration.hooks.release()
            for unit in units:
                gathered = running(unit).gathered
                if gathered is not None:
                    gathered.free()
        finally:
            before.put_back()
            put_generators_back()
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _remember_generators() -> Callable[[], None]:
    """Return a function that restores the current random states of torch, Python and NumPy."""
    python, cpu = random.getstate(), torch.random.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device: Any = None if accelerator is None else torch.get_device_module(accelerator.type)
    of_device = None if device is None else device.get_rng_state()

    def put_back() -> None:
        random.setstate(python)
        torch.random.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if device is not None:
            device.set_rng_state(of_device)

    return put_back
