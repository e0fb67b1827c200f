"""What torch puts around the step of an optimizer, and kernels over all gradients at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def step_without_hooks(optimizer: Optimizer) -> None:
    """Take the step of a class, but for the hooks and the profiler's range of any optimizer's step.

    torch wraps ``step`` of each class once (``hooked``: 2.11 to 2.15).
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def foreach_norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each, computed in ``dtype``; few kernels on a GPU (``_foreach_norm``: 2.11 to 2.15)."""
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_scale(tensors: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply each in place by a scalar of its dtype; few kernels on a GPU (``_foreach_mul_``: 2.11 to 2.15)."""
    torch._foreach_mul_(tensors, scale)
