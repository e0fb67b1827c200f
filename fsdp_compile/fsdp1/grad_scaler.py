"""ShardedGradScaler: torch's scaler, for gradients of which a rank has a part.

torch's own scaler works on DTensors, one mesh at a time. Here every rank checks its local part of each gradient, and an
all-reduce tells all ranks whether any found an infinity. So sharded, replicated and ignored parameters may be in one
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from ..core.parts import local_of


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` with which the ranks of ``process_group``, by default all, skip a step together."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Return the outputs times the scale, each in its own dtype."""
        if isinstance(outputs, Tensor):
            scaled: Tensor = super().scale(outputs)
            return scaled.to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            raise ValueError(
                f"outputs must be a Tensor or an iterable of Tensors, not a {type(outputs).__name__}. Scale the loss "
                "itself."
            )
        scaled_each = map(self.scale, outputs)
        return type(outputs)(scaled_each) if isinstance(outputs, (list, tuple)) else scaled_each

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide gradients by the scale in place; return, by device, whether any is infinite.

        ``unscale_`` calls it, and torch's own works on tensors with gradients, here the local parts (2.11 to 2.15).
        """
        parts = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    param.grad = param.grad.coalesce()  # entries of one place may sum to an infinity
                    grad = param.grad.values()
                else:
                    grad = local_of(param.grad)
                part = grad.detach()
                part.grad = grad.detach()
                parts.append(part)
        local: Any = SimpleNamespace(param_groups=[{"params": parts}])
        for found_here in super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16=True).values():
            found_inf += found_here.to(found_inf.device)
        dist.all_reduce(found_inf, group=self.process_group)
        return {found_inf.device: found_inf}
