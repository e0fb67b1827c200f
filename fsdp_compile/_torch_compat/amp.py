"""Automatic mixed precision."""

from __future__ import annotations

import torch
from torch import Tensor


def unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients by ``inv_scale`` in place, and set ``found_inf`` to one if one of them is not finite.

    ``_amp_foreach_non_finite_check_and_unscale_``: 2.11 to 2.15.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
