"""Options that FSDP2's signature has no word for."""

from __future__ import annotations

from torch import nn

from ..core.unit import units_in
from .classes import refresh


def configure(model: nn.Module, *, bucketing: str | None = None, reduction: str | None = None) -> None:
    """Say how the units inside ``model`` communicate; what is left out stays as it is.

    **bucketing** ``"size"`` (default) merges small parameters of a unit and lets large ones travel alone, by constants
    for each backend; ``"group"`` makes one bucket a unit, as FSDP2 does; ``"none"`` one collective a parameter.

    **reduction** ``"reduce_scatter"``, or ``"all_to_all"`` followed by a sum in rank order; ``"auto"`` (default) takes
    the second on gloo, whose reduce-scatter moves every byte twice.
    """
    units = units_in(model)
    if not units:
        raise ValueError(f"{type(model).__name__} holds no module that fully_shard was applied to. Shard it first.")
    for unit in units:
        unit.settings.set_communication(bucketing, reduction)
    for unit in units:
        refresh(unit)
