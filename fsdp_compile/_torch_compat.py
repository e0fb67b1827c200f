"""Every private torch name that the runtime half touches, with the versions it was seen in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn

# torch._dynamo.eval_frame.OptimizedModule, what torch.compile(module) returns: 2.11 to 2.15
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread (``_current_graph_task_id``: 2.11 to 2.15)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running ends (``_execution_engine``: 2.11 to 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def get_post_grad_pass() -> Any:
    """What Inductor calls before its post-grad passes (2.11: one pass; 2.15: one, or a list)."""
    return inductor_config.post_grad_custom_pre_pass


def set_post_grad_pass(value: Any) -> None:
    inductor_config.post_grad_custom_pre_pass = value


def get_joint_pass() -> Any:
    """What AOTAutograd calls on a joint graph, ``(module, inputs) -> module`` (2.11 to 2.15).

    Not in any cache key; the hash of our source is, through the post-grad pass.
    """
    return functorch_config.joint_custom_pass


def set_joint_pass(value: Any) -> None:
    functorch_config.joint_custom_pass = value


def get_scheduler_passes() -> list[Any]:
    """The scheduler passes in force; none unless their switch is on (2.11 to 2.15)."""
    passes = list(inductor_config.reorder_for_compute_comm_overlap_passes)
    return passes if inductor_config.reorder_for_compute_comm_overlap else []


def set_scheduler_passes(passes: list[Any]) -> None:
    inductor_config.reorder_for_compute_comm_overlap_passes = passes
    inductor_config.reorder_for_compute_comm_overlap = True


def get_grad_dtype(param: torch.Tensor) -> torch.dtype | None:
    """The dtype that gradients of ``param`` are asked to have; its own where torch does not know the word (2.11)."""
    return getattr(param, "grad_dtype", param.dtype)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called (``_compiled_call_impl``: 2.11 to 2.15)."""
    return module._compiled_call_impl is not None
