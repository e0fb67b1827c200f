"""The bytes that each rank holds between steps: shards, their gradients, and the optimizer's states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .forecast import OPTIMIZERS, Hardware
from .joint import PRECISIONS


@dataclass(frozen=True)
class Weights:
    """The sizes of a whole model's parameters, as they are stored while it trains."""

    num_params: int
    stored_bytes: int
    trained_bytes: int  # of those that get gradients

    def standing_bytes(self, mesh: tuple[int, ...], hardware: Hardware) -> int:
        """Return the bytes of a rank's shards, their gradients and the optimizer's states."""
        states, _ = OPTIMIZERS[hardware.optimizer]
        return (self.stored_bytes + self.trained_bytes * (1 + states)) // mesh[-1]

    def rest_bytes(self, mesh: tuple[int, ...], hardware: Hardware) -> int:
        """Return the bytes that the memory leaves to forward and backward beside the optimizer's states."""
        states, _ = OPTIMIZERS[hardware.optimizer]
        return hardware.memory_bytes - self.trained_bytes * states // mesh[-1]


def weights_of(model: nn.Module, precision: str) -> Weights:
    """Return the sizes of a model that is trained in one of ``PRECISIONS``."""
    stored, _, _ = PRECISIONS[precision]
    params = list(model.parameters())
    num_bytes = {
        param: param.numel() * (param if stored is None or not param.is_floating_point() else stored).itemsize
        for param in params
    }
    return Weights(
        sum(param.numel() for param in params),
        sum(num_bytes.values()),
        sum(num_bytes[param] for param in params if param.requires_grad),
    )
