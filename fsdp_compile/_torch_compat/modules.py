"""What modules know about their tensors."""

from __future__ import annotations

from torch import Tensor, nn


def saved_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers that are in state dicts (``_non_persistent_buffers_set``: 2.11 to 2.15)."""
    return {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
