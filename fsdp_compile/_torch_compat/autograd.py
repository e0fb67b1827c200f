"""Autograd: backwards that run, hooks, the dtypes of gradients, transforms and compiled autograd."""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11 to 2.15


def backward_task() -> int | None:
    """Return the number of the backward that runs on this thread, None without one; a nested one has its own.

    ``_current_graph_task_id``: 2.11 to 2.15.
    """
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def restore_grad_dtype(param: torch.Tensor, grad_dtype: torch.dtype | None) -> None:
    """Set ``grad_dtype`` again after ``param`` was replaced; None asks for gradients as autograd produces them."""
    if param.grad_dtype == grad_dtype:
        return
    grad, param.grad = param.grad, None  # module.to() has converted it, and torch refuses one of another dtype
    param.grad_dtype = grad_dtype
    if grad is not None:
        param.grad = grad if grad_dtype is None else grad.to(grad_dtype)


def in_functorch() -> bool:
    """Whether a transform of ``torch.func`` is running (``_C._functorch.peek_interpreter_stack``: 2.11 to 2.15)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_functorch() -> contextlib.AbstractContextManager[object]:
    """Return a block in which no transform of ``torch.func`` applies (``_C._DisableFuncTorch``: 2.11 to 2.15)."""
    return torch._C._DisableFuncTorch()


def records_now() -> bool:
    """Whether autograd records what code computes here, and no transform of torch.func is running."""
    return torch.is_grad_enabled() and not in_functorch()


# The number of each checkpointed region that runs, by the hook that is made for it.
_regions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def checkpointed_region() -> int:
    """Return a number for the region that ``torch.utils.checkpoint`` will run once more in backward; 0 outside of one.

    ``_top_saved_tensors_default_hooks``: 2.11 to 2.15. A reentrant region runs under ``no_grad``, and backward calls
    its modules anew.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return 0
    if hooks[0] not in _regions:
        _regions[hooks[0]] = next(_numbers)
    return _regions[hooks[0]]


def apply_recorded(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call ``function.apply`` so that it is recorded by autograd and not transformed, wherever the call is."""
    if records_now():
        return function.apply(*args)
    with torch.inference_mode(False), torch.enable_grad(), temporarily_clear_interpreter_stack():
        return function.apply(*args)


def profiler_runs() -> bool:
    """Whether a profiler records ranges (``autograd.profiler._is_profiler_enabled``: 2.11 to 2.15)."""
    return torch.autograd.profiler._is_profiler_enabled


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running ends (``_execution_engine``: 2.11 to 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def is_modules_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view that a module made (``_is_view``: 2.11 to 2.15).

    Full backward hooks pass outputs through ``BackwardHookFunction``, whose outputs are views that no module made.
    """
    return tensor._is_view() and type(tensor.grad_fn).__name__ != "BackwardHookFunctionBackward"


def accumulates(leaf: Any) -> bool | None:
    """Whether the backward that runs accumulates into the parameter whose ``AccumulateGrad`` node is ``leaf``.

    It is None under ``autograd.grad`` for a gradient that was asked for, which goes to the caller, and if there is no
    such node: torch raises when it is asked about these. ``_will_engine_execute_node``: 2.11 to 2.15.
    """
    try:
        return bool(torch._C._will_engine_execute_node(leaf))  # type: ignore[attr-defined]
    except RuntimeError:
        return None


# Whether an autograd function can get gradients in the dtype that they were made in: ``set_output_grad_dtype``, 2.15.
# In 2.11 autograd casts them to the dtype of the output first.
GRADIENTS_COME_AS_PRODUCED = hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype")


def take_gradients_as_produced(ctx: Any, num_outputs: int) -> None:
    """Have the backward of an autograd function get its gradients in that dtype, if torch can."""
    if GRADIENTS_COME_AS_PRODUCED:
        ctx.set_output_grad_dtype(*[None] * num_outputs)


def quick_attributes() -> contextlib.AbstractContextManager[None]:
    """Return a block in which attributes of a DTensor are read as fast as a plain tensor's.

    Outside of it torch checks at each read whether the class has a ``__torch_function__`` that is in use; DTensor's is
    not. ``_C.DisableTorchFunctionSubclass``: 2.11 to 2.15.
    """
    return torch._C.DisableTorchFunctionSubclass()


# The hooks on a parameter itself, by key; empty or None without any: 2.11 to 2.15.
tensor_hooks = operator.attrgetter("_backward_hooks")
post_accumulate_grad_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")  # both


@contextlib.contextmanager
def without_post_accumulate_grad_hooks(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which post-accumulate hooks, an optimizer in one perhaps, do not run."""
    hooks = [post_accumulate_grad_hooks(param) or {} for param in params]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)


@contextlib.contextmanager
def no_new_versions(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block whose writes do not count for autograd (``autograd._unsafe_preserve_version_counter``: 2.11 to 2.15)."""
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with torch.autograd._unsafe_preserve_version_counter(counted):
        yield


def in_compiled_autograd() -> bool:
    """Whether a backward that compiled autograd compiled is running, in which callbacks for its end would never run.

    ``_dynamo.compiled_autograd.in_compiled_autograd_region``: 2.11 to 2.15.
    """
    from torch._dynamo import compiled_autograd

    return compiled_autograd.in_compiled_autograd_region


def backward_has_an_end() -> bool:
    """Whether a backward runs that calls back at its end: not one in a graph, of compiled autograd or a whole step."""
    return backward_task() is not None and not in_compiled_autograd()


@torch.compiler.assume_constant_result
def uses_compiled_autograd() -> bool:
    """Whether backwards inside compiled functions are compiled too.

    ``_dynamo.config.compiled_autograd``: 2.11 to 2.15. It is asked while tracing, and not guarded: a graph that was
    traced for compiled autograd trains without it as well.
    """
    return bool(torch._dynamo.config.compiled_autograd)
