"""What torch puts around the step of an optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def step_without_hooks(optimizer: Optimizer) -> None:
    """Take the step of a class, but for the hooks and the profiler's range of any optimizer's step.

    torch wraps ``step`` of each class once (``hooked``: 2.11 to 2.15).
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)
