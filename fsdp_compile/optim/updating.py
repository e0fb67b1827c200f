"""What the optimizers here have in common: a step that Dynamo leaves alone, and copies that are complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer


class UpdatingOptimizer(Optimizer):
    """An optimizer whose ``_update`` does a step; copies have the attributes that ``_copied`` names, too."""

    _copied: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._copied}}

    # Dynamo would trace the AdamW that was there first, and torch's caches take shards of unequal lengths for equal.
    @torch.compiler.disable(reason="exchanges and copies run beside the computation, in an order of their own")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; every rank calls this, with gradients of the same parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group says, but for its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
