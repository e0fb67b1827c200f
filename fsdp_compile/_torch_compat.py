"""Every private torch name that the runtime half touches, with the versions it was seen in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as custom_graph_pass
from torch import nn

# torch._dynamo.eval_frame.OptimizedModule, what torch.compile(module) returns: 2.11 to 2.15
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule

from .passes._torch_compat import CustomGraphPass


def backward_task() -> int | None:
    """Number of the backward that runs on this thread, None without one; a nested one has its own.

    ``_current_graph_task_id``: 2.11 to 2.15.
    """
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def restore_grad_dtype(param: torch.Tensor, grad_dtype: torch.dtype | None) -> None:
    """Ask for gradients of ``grad_dtype`` again, after ``param`` was replaced (``Tensor.grad_dtype``: 2.15)."""
    if grad_dtype is not None and getattr(param, "grad_dtype", grad_dtype) != grad_dtype:
        param.grad_dtype = grad_dtype  # type: ignore[attr-defined]


def recompile_call(module: nn.Module) -> None:
    """Let ``module.compile()``, called before the module got its ``_call_impl``, compile that one.

    ``_compiled_call_impl`` is a closure of the context that compiles, as its free variable ``self``: 2.11 to 2.15.
    """
    compiled = module._compiled_call_impl
    if compiled is not None:
        cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or ()))
        module._compiled_call_impl = cells["self"].cell_contents(module._call_impl)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running ends (``_execution_engine``: 2.11 to 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def get_post_grad_pass() -> Any:
    """What Inductor calls before its post-grad passes (2.11: one pass; 2.15: one, or a list)."""
    return inductor_config.post_grad_custom_pre_pass


def set_post_grad_pass(value: Any) -> None:
    _set_in_all_threads(inductor_config, "post_grad_custom_pre_pass", value)


# Passes that want to be told whether the graph is for inference: 2.15. A composed pass must be one of them to be told.
InferenceAwareGraphPass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


def call_graph_pass(one_pass: Any, graph: torch.fx.Graph, is_inference: bool) -> None:
    """Call a user's pass as Inductor would."""
    if InferenceAwareGraphPass is not CustomGraphPass and isinstance(one_pass, InferenceAwareGraphPass):
        one_pass(graph, is_inference)
    else:
        one_pass(graph)


def get_joint_pass() -> Any:
    """What AOTAutograd calls on a joint graph, ``(module, inputs) -> module`` (2.11 to 2.15).

    Not in any cache key; the hash of our source is, through the post-grad pass.
    """
    return functorch_config.joint_custom_pass


def set_joint_pass(value: Any) -> None:
    _set_in_all_threads(functorch_config, "joint_custom_pass", value)


def get_scheduler_passes() -> list[Any]:
    """The scheduler passes in force; none unless their switch is on (2.11 to 2.15)."""
    passes = list(inductor_config.reorder_for_compute_comm_overlap_passes)
    return passes if inductor_config.reorder_for_compute_comm_overlap else []


def set_scheduler_passes(passes: list[Any]) -> None:
    _set_in_all_threads(inductor_config, "reorder_for_compute_comm_overlap_passes", passes)
    _set_in_all_threads(inductor_config, "reorder_for_compute_comm_overlap", True)


def _set_in_all_threads(config: Any, name: str, value: Any) -> None:
    """Set a setting here, and make it what other threads find.

    In 2.15 a setting is a ContextVar: what one thread sets, another does not see, and backward is compiled on the
    thread where autograd runs it first (on CUDA, autograd's own). There, the default counts. ``_config``: 2.11 to 2.15.
    """
    setattr(config, name, value)
    entry = config._config[name]
    if hasattr(entry.user_override, "get"):
        entry.default = value


def get_grad_dtype(param: torch.Tensor) -> torch.dtype | None:
    """The dtype that gradients of ``param`` are asked to have; its own where torch does not know the word (2.11)."""
    return getattr(param, "grad_dtype", param.dtype)


def forget_compiled(classes: set[type]) -> int:
    """Drop what Dynamo compiled for frames that read an instance of one of ``classes``; how many frames that were.

    A compiled frame guards on the identity of the classes of the modules that it read, and its guards print it. Dynamo
    drops a frame's entries all together. ``convert_frame.input_codes``, ``_debug_get_cache_entry_list``,
    ``guard_manager`` of an entry, ``reset_code``: 2.11 to 2.15.
    """
    from torch._dynamo import convert_frame

    eval_frame = torch._C._dynamo.eval_frame
    guards = [f", {id(cls)})" for cls in classes]
    num_frames = 0
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is None:
            continue
        entries = [str(entry.guard_manager) for entry in eval_frame._debug_get_cache_entry_list(code)]
        if any(guard in entry for entry in entries for guard in guards):
            eval_frame.reset_code(code)
            num_frames += 1
    return num_frames


@contextlib.contextmanager
def no_compile_caches() -> Iterator[None]:
    """Compile graphs even where a cache holds them; compiled kernels are still found in theirs (2.11 to 2.15)."""
    with (
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def num_dynamo_graphs() -> int:
    """Graphs that Dynamo has captured in this process (``_dynamo.utils.counters``: 2.11 to 2.15)."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a number: of a symbolic one the value seen when it was compiled, 2 if there was none (2.11 to 2.15)."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


# Source code for a script that runs a graph with collectives by itself: process groups under the names in GROUPS that
# pretend to have their recorded size. FakeStore, the "fake" backend, _register_process_group: 2.11 to 2.15.
FAKE_GROUPS_SOURCE = """\
def start_fake_groups():
    \"\"\"Groups of the recorded names and sizes whose collectives return at once, without communicating.\"\"\"
    from torch.distributed.distributed_c10d import _register_process_group, _resolve_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(GROUPS.values(), default=1))
    for name, size in GROUPS.items():
        try:
            _resolve_process_group(name)
        except (RuntimeError, LookupError, ValueError):
            _register_process_group(name, dist.new_group(list(range(size))))
"""
