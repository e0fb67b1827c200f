"""Runs a module's forward on the eager path: what comes before it, after it, and when it raises."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dynamo
from ..core.captures import refuse_run
from ..core.unit import Unit
from .forward import begin_forward, end_forward, enter
from .reads import read_all
from .running import Use
from .trace import span

# Dynamo compiles the frames inside a forward that it left to Python. It must not compile our functions around them.
_not_traced = functools.partial(torch.compiler.disable, reason="the eager path runs in Python")

# Each observer is called with a unit whose graph is about to take parameters that the eager path gathered.
around_observers: list[Callable[[Unit], None]] = []


def eager_forward(unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``forward(module, ...)``; the eager path gathers before it, and frees after it.

    Where Dynamo could not compile the forward whole, it compiles frames inside it. Their graphs take the gathered
    parameters as inputs, like the graph of a forward that is compiled by itself.
    """
    is_broken = dynamo.is_at_work()
    has_graphs = is_broken or dynamo.forward_is_compiled(module)
    if has_graphs and (is_broken or unit.outer is not None) and can_give(unit):
        return forward_around_graph(unit, module, forward, args, kwargs)
    abandon = enter(unit)
    try:
        use, args, kwargs = begin(unit, module, args, kwargs, has_graphs)
        return end(unit, module, use, forward(module, *args, **kwargs))
    except BaseException as error:
        _fail(unit, abandon, error)
        raise


def forward_around_graph(unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Like ``eager_forward``, for a ``forward`` that is compiled by itself: its graph takes what is gathered here."""
    abandon, given = enter(unit), unit.given
    try:
        use, args, kwargs = begin(unit, module, args, kwargs, are_compiled=False)
        _give_all(use)
        output = forward(module, *args, **kwargs)
        unit.give(given)
        return end(unit, module, use, output)
    except BaseException as error:
        unit.give(given)
        _fail(unit, abandon, error)
        raise


dynamo.leave_to_python(eager_forward)
dynamo.leave_to_python(forward_around_graph)


def can_give(unit: Unit) -> bool:
    """Whether graphs inside a forward of the unit can take the parameters that the eager path gathers around them.

    They cannot under compiled autograd, whose backward does not call back at its end, nor inside transforms of
    torch.func, which would take the gathered parameters for constants.
    """
    return unit.gives_to_graphs and not autograd.uses_compiled_autograd() and not autograd.in_functorch()


dynamo.leave_all_to_python(can_give, enter, Unit.give)


@_not_traced
def _give_all(use: Use) -> None:
    """Have compiled reads take the gathered parameters."""
    for observe in around_observers:
        observe(use.unit)
    fulls = dict(zip(use.gathered.index, read_all(use)))
    use.unit.give(tuple(fulls.get(param.fqn) for param in use.unit.params))


@_not_traced
def begin(unit: Unit, module: nn.Module, args: Any, kwargs: Any, are_compiled: bool) -> tuple[Use, Any, Any]:
    """Prepare a forward before the module is called; return the ``Use``, and the inputs to call the module with."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        refuse_run(unit.name)
    with span("pre_forward", unit), _naming_circles(unit, "inputs"):
        return begin_forward(unit, module, args, kwargs, are_compiled)


@_not_traced
def end(unit: Unit, module: nn.Module, use: Use, output: Any) -> Any:
    """End the forward after the module returned; return the output."""
    with span("post_forward", unit), _naming_circles(unit, "outputs"):
        return end_forward(unit, module, use, output)


@_not_traced
def _fail(unit: Unit, abandon: Callable[[], None], error: BaseException) -> None:
    abandon()
    mistake = _read_around(unit, error)
    if mistake is not None:
        raise mistake from error


def _read_around(unit: Unit, error: BaseException) -> RuntimeError | None:
    """Return the error to raise instead, if a forward computed with a shard that it did not read by its attribute.

    DTensor refuses to mix with plain tensors and does not name the parameter; the traceback's frames hold it.
    """
    if not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return None
    names = {id(shard): param.fqn for param in unit.params for shard in (param.param, param.shard)}
    traceback: types.TracebackType | None = error.__traceback__
    found = None
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, DTensor) and id(value) in names:
                found = names[id(value)]
        traceback = traceback.tb_next
    if found is None:
        return None
    return RuntimeError(
        f"{found} was read as a shard inside a forward: from where it was kept before the forward began, or in the "
        "forward of another unit. Read the attribute, or gather it with .full_tensor()."
    )


@contextmanager
def _naming_circles(unit: Unit, what: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise RuntimeError(
            f"{unit.name}: the search for tensors in its {what} exceeded max depth, likely due to a circular reference "
            "in the containers around them. Take that out."
        ) from error
