"""Options that FSDP2's signature has no word for."""

from __future__ import annotations

from torch import nn

from ..core.unit import units_in
from ..graph.install import manager
from ..lookout.lookout import lookout
from ..passes import Plan
from .classes import refresh


def configure(
    model: nn.Module,
    *,
    bucketing: str | None = None,
    reduction: str | None = None,
    plan: Plan | None = None,
    watch_s: float | None = None,
) -> None:
    """Say how the units inside ``model`` communicate; what is left out stays as it is.

    **bucketing** ``"size"`` (default) merges small parameters of a unit and lets large ones travel alone, by constants
    for each backend; ``"group"`` makes one bucket a unit, as FSDP2 does; ``"none"`` one collective a parameter.

    **reduction** ``"reduce_scatter"``, or ``"all_to_all"`` followed by a sum in rank order; ``"auto"`` (default) takes
    the second on gloo, whose reduce-scatter moves every byte twice.

    **plan** is what the compiled model follows in place of its own: ``report.joint.plan`` of an inspection, edited with
    ``dataclasses.replace`` or as JSON. Every rank gives the same one. A graph that it does not fit is refused when it
    compiles. The eager path has no use for it.

    **watch_s** for how many seconds (60 by default, or what FSDP_COMPILE_WATCH_S says) a rank may wait for ranks that
    wait for something else, or have left, before all of them raise; 0, said before the first collective, has ranks not
    compare what they issue. For the whole process, and the same on every rank.
    """
    if watch_s is not None:
        if watch_s < 0:
            raise ValueError(f"watch_s={watch_s} is negative. 0 switches the comparing off.")
        lookout.timeout_s = watch_s
    units = units_in(model)
    if not units:
        raise ValueError(f"{type(model).__name__} holds no module that fully_shard was applied to. Shard it first.")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan is a Plan (Plan.from_json reads one from a file's text), not {type(plan).__name__}.")
    for unit in units:
        unit.settings.set_communication(bucketing, reduction)
        if plan is not None:
            unit.settings.plan = manager.give(plan)
    for unit in units:
        refresh(unit)
