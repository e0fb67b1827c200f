"""What this package asks of torch's optimizers: a step without hooks, a count of its writes, and fused kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


def step_without_hooks(optimizer: Optimizer) -> None:
    """Take the step of a class, but for the hooks and the profiler's range of any optimizer's step.

    torch wraps ``step`` of each class once (``hooked``: 2.11 to 2.15).
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


@functools.cache
def count_steps_as_writes() -> None:
    """Have each step of any optimizer count as a write to each of its DTensors, from now on.

    Torch itself does not count what ``foreach=True`` writes to DTensors, or ``fused=True`` to any tensor: 2.11 to 2.15.
    """
    register_optimizer_step_post_hook(_count_writes)


def _count_writes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():  # a graph's writes are counted when it has run
        params = [param for group in optimizer.param_groups for param in group["params"]]
        written = [one for one in params if isinstance(one, DTensor) and not one.is_inference()]
        torch.autograd.graph.increment_version(written)


def foreach_norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each tensor, computed in ``dtype``; few kernels on a GPU (``_foreach_norm``: 2.11 to 2.15)."""
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_scale(tensors: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply each by a scalar of its dtype, in place; few kernels on a GPU (``_foreach_mul_``: 2.11 to 2.15)."""
    torch._foreach_mul_(tensors, scale)
