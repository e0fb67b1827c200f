"""Options that FSDP2's signature has no word for."""

from __future__ import annotations

from torch import nn

from ._classes import refresh
from ._state import states_in


def configure(model: nn.Module, *, bucketing: str | None = None, reduction: str | None = None) -> None:
    """Say how the units inside ``model`` communicate; what is left out stays as it is.

    **bucketing** ``"size"`` (default) merges small parameters of a unit and lets large ones travel alone, by constants
    for each backend; ``"group"`` makes one bucket a unit, as FSDP2 does; ``"none"`` one collective a parameter.

    **reduction** ``"reduce_scatter"``, or ``"all_to_all"`` followed by a sum in rank order; ``"auto"`` (default) takes
    the second on gloo, whose reduce-scatter moves every byte twice.
    """
    states = states_in(model)
    if not states:
        raise ValueError(f"{type(model).__name__} holds no module that fully_shard was applied to. Shard it first.")
    for state in states:
        state.group.set_options(bucketing, reduction)
    for state in states:
        refresh(state)
