"""The frames that Dynamo traces: which call stands around a read, and what the call has read before."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # 2.11 to 2.15

from .autograd import in_functorch
from .dynamo import output_being_traced, trace_region_anew

# Results by what they are of, for each frame in which one may be given again.
_kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def call_of(modules: Sequence[nn.Module], files: Collection[str]) -> Any:
    """The innermost traced frame of a function from one of ``files`` whose ``self`` is one of ``modules``, or None.

    ``f_code``, ``symbolic_locals``, ``VariableTracker.realize`` and ``value``: 2.11 to 2.15.
    """
    for frame in _frames():
        if frame.f_code.co_filename in files and "self" in frame.symbolic_locals:
            called = getattr(frame.symbolic_locals["self"].realize(), "value", None)
            if any(called is module for module in modules):
                return frame
    return None


def outermost() -> Any:
    """The traced frame that nothing traced called, or None."""
    return next(reversed(list(_frames())), None)


def keep(frame: Any, what: Any, local: str) -> None:
    """Keep what the function that asks has in a local variable, a tensor that is a parameter to its readers.

    A tensor that a transform of torch.func made is dead when that ends, so it is not kept. ``class_type`` of a plain
    tensor and ``meta["example_value"]`` of a DTensor make it a parameter: 2.11 to 2.15.
    """
    asks = next(_frames(), None)  # none where Dynamo gave up on it
    variable = None if asks is None else asks.symbolic_locals[local].realize()
    if not isinstance(variable, torch._dynamo.variables.TensorVariable):
        return
    example = variable.as_proxy().node.meta["example_value"]
    if is_traceable_wrapper_subclass(example):
        vars(example)["_is_param"] = True
    elif variable.class_type is torch.Tensor:
        variable.class_type = nn.Parameter
    if frame is not None and not in_functorch():
        _kept.setdefault(frame, {})[what] = variable


def give_again(frame: Any, what: Any, local: str) -> bool:
    """Set that local variable to what was kept; whether something was."""
    variable = _kept_of(frame, what)
    if variable is None:
        return False
    trace_region_anew()
    next(_frames()).symbolic_locals[local] = variable
    return True


def was_kept(frame: Any, what: Any, local: str) -> bool:
    """Whether ``local``, of the innermost frame that has it, is what was kept, or its local tensor of a DTensor."""
    holds = next((one for one in _frames() if local in one.symbolic_locals), None)
    variable = _kept_of(frame, what)
    if holds is None or variable is None:
        return False
    found = holds.symbolic_locals[local].realize()
    return isinstance(found, type(variable)) and found.as_proxy().node is variable.as_proxy().node


def _kept_of(frame: Any, what: Any) -> Any:
    """What was kept, where it may be used: in the graph that has it, and in those of bodies inside that one.

    Dynamo takes nodes back that it cannot go on with. ``Node._erased``, ``Proxy.tracer``, ``tracers``: 2.11 to 2.15.
    """
    variable = None if frame is None else _kept.get(frame, {}).get(what)
    if variable is None:
        return None
    proxy = variable.as_proxy()
    return variable if proxy.tracer in output_being_traced().tracers and not proxy.node._erased else None


def _frames() -> Iterator[Any]:
    """What Dynamo is tracing, innermost first (``OutputGraph.current_tx``, ``parent``: 2.11 to 2.15)."""
    output = output_being_traced()
    frame = None if output is None else output.current_tx
    while frame is not None:
        yield frame
        frame = frame.parent
