"""What stands around an eager forward: its two ends, and what becomes of errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._torch_compat import autograd, dynamo
from ..core.captures import refuse_run
from ..core.unit import Unit
from .follow import replaces_graphs
from .forward import abandon_forward, begin_forward, end_forward
from .mistakes import read_around
from .reads import read_all
from .routed import Routed
from .running import Call
from .trace import span

# Dynamo compiles frames inside of a forward that it left to Python; what is ours around them is not for it.
_not_traced = functools.partial(torch.compiler.disable, reason="the eager path runs in Python")

# Called with each unit around whose graph the eager path stands.
around_observers: list[Callable[[Unit], None]] = []


def eager_forward(unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``forward(module, ...)`` between the two ends of the eager path, which gathers for all that it runs.

    Dynamo compiles its frames where it could not compile it whole. Their graphs take what is gathered, as that of a
    forward does which is compiled by itself.
    """
    is_broken = dynamo.is_at_work()
    if is_broken and not dynamo.forward_is_compiled(module) and _replaces_graphs(unit, args, kwargs):
        is_broken, forward = False, functools.partial(_in_python, forward)
    has_graphs = is_broken or dynamo.forward_is_compiled(module)
    if has_graphs and (is_broken or unit.outer is not None) and can_give(unit):
        return forward_around_graph(unit, module, forward, args, kwargs)
    call = None
    try:
        call, args, kwargs = begin(unit, module, args, kwargs, has_graphs)
        return end(unit, module, call, forward(module, *args, **kwargs))
    except BaseException as error:
        _fail(unit, call, error)
        raise


def forward_around_graph(unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same around a ``forward`` that is compiled by itself: its graph takes what is gathered here."""
    call, given = None, unit.given
    try:
        call, args, kwargs = begin(unit, module, args, kwargs, are_compiled=False, around_graph=True)
        if isinstance(call.gathered, Routed):  # in the place of a larger graph, in which each read is by itself
            forward = functools.partial(_in_python, forward)
        else:
            _give_all(call)
        output = forward(module, *args, **kwargs)
        unit.give(given)
        return end(unit, module, call, output)
    except BaseException as error:
        unit.give(given)
        _fail(unit, call, error)
        raise


@_not_traced
def _in_python(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward of which nothing is compiled, be it that the user compiled it."""
    with torch.compiler.set_stance("force_eager"):
        return forward(*args, **kwargs)


_replaces_graphs = _not_traced(replaces_graphs)

dynamo.leave_to_python(eager_forward)
dynamo.leave_to_python(forward_around_graph)


def stands_around(unit: Unit) -> bool:
    """Whether the eager path gathers and reduces around a forward of the unit that is compiled by itself.

    Not around the outermost unit's, where one graph has it all, and its passes do better.
    """
    return unit.outer is not None and can_give(unit)


def can_give(unit: Unit) -> bool:
    """Whether graphs inside of a forward of the unit can take what the eager path gathers around them.

    Not where it has no end: under compiled autograd backward has none, and to transforms of torch.func what is gathered
    here is a constant.
    """
    return unit.gives_to_graphs and not autograd.uses_compiled_autograd() and not autograd.in_functorch()


dynamo.leave_all_to_python(can_give, Unit.give)


@_not_traced
def _give_all(call: Call) -> None:
    """Have the reads of compiled code take what is gathered."""
    for observe in around_observers:
        observe(call.unit)
    fulls = dict(zip(call.gathered.index, read_all(call)))
    call.unit.give(tuple(fulls.get(param.fqn) for param in call.unit.params))


@_not_traced
def begin(
    unit: Unit, module: nn.Module, args: Any, kwargs: Any, are_compiled: bool, around_graph: bool = False
) -> tuple[Call, Any, Any]:
    """Before the module is called: its call, and the inputs to call it with."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        refuse_run(unit.name)
    with span("pre_forward", unit), _naming_circles(unit, "inputs"):
        return begin_forward(unit, module, args, kwargs, are_compiled, around_graph)


@_not_traced
def end(unit: Unit, module: nn.Module, call: Call, output: Any) -> Any:
    """After it returned."""
    with span("post_forward", unit), _naming_circles(unit, "outputs"):
        return end_forward(unit, module, call, output)


@_not_traced
def _fail(unit: Unit, call: Call | None, error: BaseException) -> None:
    if call is not None:
        abandon_forward(unit, call)
    mistake = read_around(unit, error)
    if mistake is not None:
        raise mistake from error


@contextmanager
def _naming_circles(unit: Unit, what: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise RuntimeError(
            f"{unit.name}: the search for tensors in its {what} exceeded max depth, likely due to a circular reference "
            "in the containers around them. Take that out."
        ) from error
