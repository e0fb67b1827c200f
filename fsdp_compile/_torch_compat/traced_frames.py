"""What Dynamo is tracing: the calls around a read, and what the graph has read before."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # 2.11 to 2.15

from .autograd import in_functorch
from .dynamo import output_being_traced, trace_region_anew

_ENTER = torch.autograd.grad_mode._enter_inference_mode

# What was kept, by key, for each outermost frame. It holds the graph; the frame goes when the graph is written.
_kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def traces_call_of(modules: Sequence[nn.Module], file: str) -> bool:
    """Whether a function from ``file`` is being traced whose ``self`` is one of ``modules``.

    ``f_code``, ``symbolic_locals``, ``VariableTracker.realize`` and ``value``: 2.11 to 2.15.
    """
    for frame in _frames():
        if frame.f_code.co_filename == file and "self" in frame.symbolic_locals:
            called = getattr(frame.symbolic_locals["self"].realize(), "value", None)
            if any(called is module for module in modules):
                return True
    return False


def keep_local(what: Any, local: str) -> None:
    """Keep the tensor in a local variable of the traced function, and make it an ``nn.Parameter`` to its readers.

    A tensor that a transform of torch.func made is dead when that ends, so it is not kept. ``class_type`` of a plain
    tensor and ``meta["example_value"]`` of a DTensor make it a parameter: 2.11 to 2.15.
    """
    variable = _variable(next(_frames(), None), local)  # none where Dynamo gave up on the frame
    if variable is None:
        return
    example = variable.as_proxy().node.meta["example_value"]
    if is_traceable_wrapper_subclass(example):
        vars(example)["_is_param"] = True
    elif variable.class_type is torch.Tensor:
        variable.class_type = nn.Parameter
    if not in_functorch():
        _kept.setdefault([*_frames()][-1], {})[what] = variable


def give_again(what: Any, local: str) -> bool:
    """Set that local variable to what was kept; return whether something was."""
    variable = _kept_of(what)
    if variable is None:
        return False
    trace_region_anew()
    next(_frames()).symbolic_locals[local] = variable
    return True


def was_kept(what: Any, local: str) -> bool:
    """Whether the tensor that was kept is the value of the local variable, in the innermost frame that has it."""
    variable = _kept_of(what)
    found = _variable(next((one for one in _frames() if local in one.symbolic_locals), None), local)
    if found is None or variable is None:
        return False
    return found.as_proxy().node is variable.as_proxy().node


def node_of(local: str) -> Any:
    """Return the graph node of the tensor in a local variable of the traced function, or None."""
    variable = _variable(next(_frames(), None), local)
    return None if variable is None else variable.as_proxy().node


def calls_of(modules: Sequence[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Return what tells the running call of a module, or of several that run in turns, from others in the same graph.

    ``nn_module_stack`` has keys of a module's id, and of how many of its calls by one name came before: 2.11 to 2.15.
    """
    frame = next(_frames(), None)
    ids = {str(id(module)) for module in modules}
    calls = [] if frame is None else [(*key.partition("@"), name) for key, (name, *_) in frame.nn_module_stack.items()]
    return tuple((number, name if len(modules) == 1 else "") for module, _, number, name in calls if module in ids)


def in_inference_mode() -> bool:
    """Whether what is traced next runs in inference mode, which Dynamo writes into the graph and does not enter itself.

    It has been left if the result of ``_enter_inference_mode`` has a user, the exit: 2.11 to 2.15.
    """
    output = output_being_traced()
    if output is None:
        return torch.is_inference_mode_enabled()
    entered = [one.graph.find_nodes(op="call_function", target=_ENTER) for one in output.tracers]
    return torch.is_inference_mode_enabled() or any(not node.users for nodes in entered for node in nodes)


def _variable(frame: Any, local: str) -> Any:
    variable = None if frame is None else frame.symbolic_locals.get(local)
    realized = None if variable is None else variable.realize()
    return realized if isinstance(realized, torch._dynamo.variables.TensorVariable) else None


def _kept_of(what: Any) -> Any:
    """Return what was kept if it may be used here: in the graph that has it, and in those of bodies inside that one.

    Dynamo erases nodes that it cannot go on with. ``Node._erased``, ``Proxy.tracer``, ``tracers``: 2.11 to 2.15.
    """
    output = output_being_traced()
    frames = [*_frames()]
    variable = _kept.get(frames[-1], {}).get(what) if frames else None
    if variable is None:
        return None
    proxy = variable.as_proxy()
    return variable if proxy.tracer in output.tracers and not proxy.node._erased else None


def _frames() -> Iterator[Any]:
    """Yield the frames that Dynamo traces, innermost first (``OutputGraph.current_tx``, ``parent``: 2.11 to 2.15)."""
    output = output_being_traced()
    frame = None if output is None else output.current_tx
    while frame is not None:
        yield frame
        frame = frame.parent
