"""Options that FSDP2's functions do not have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..core.mesh import ShardMesh, inner_mesh, ranks_of_a_node
from ..core.settings import ONCE
from ..core.unit import Unit, saved_tensors, units_in
from ..graph.install import manager
from ..lookout.lookout import lookout
from ..optim.on_host import StatesOnHost
from ..passes import Budget, HardwareProfile, Plan, load_profile
from ..passes.budget.budget import default_profile
from ..passes.budget.residency import MAY, OFFLOAD, SHARDS
from ..passes.ir.module_paths import plain_name
from .classes import refresh

_AS_IT_IS: Any = object()  # the default where None means: no plan, no budget from now on


def configure(
    model: nn.Module,
    *,
    bucketing: str | None = None,
    reduction: str | None = None,
    gather: str | None = None,
    plan: Plan | None = _AS_IT_IS,
    memory_budget: int | float | str | None = _AS_IT_IS,
    may: Collection[str] | None = None,
    optimizer: StatesOnHost | None = None,
    profile: HardwareProfile | str | Path | None = None,
    watch_s: float | None = None,
) -> None:
    """Set how the units inside ``model`` communicate; options that are left out stay as they are.

    **bucketing** ``"size"`` (default) merges small parameters of a unit and lets large ones travel alone, by constants
    for each backend; ``"neighbours"`` merges small units as well, which are then gathered, kept and freed as one;
    ``"group"`` makes one bucket per unit, as FSDP2 does; ``"none"`` one collective per parameter. Blocks that are
    compiled one by one, and the eager path, have no neighbours to merge.

    **reduction** is ``"reduce_scatter"``, or ``"all_to_all"`` followed by a sum, which the CPU computes in rank order;
    ``"auto"`` (default) takes the second on gloo, whose reduce-scatter moves every byte twice.

    **gather** ``"once a step"`` keeps what the first micro-batch gathers until the backward that synchronizes gradients
    ends, whatever ``reshard_after_forward`` says: with ``no_sync`` or ``set_requires_gradient_sync(False)`` around the
    other micro-batches, each parameter is gathered once, and its whole size stays in memory for so long. With a
    **memory_budget**, those parameters stay that the budget keeps. With ``"for each micro-batch"`` (default), forward
    gathers, and backward gathers again what ``reshard_after_forward`` frees.

    **plan** is what the compiled model follows in place of its own plan: ``report.joint.plan`` of an inspection, edited
    with ``dataclasses.replace`` or as JSON. Every rank gives the same plan. A graph that does not fit the plan is
    refused when it compiles. ``plan=None`` takes the plan back. The eager path does not use it.

    **memory_budget** is the peak memory that forward and backward of one rank may use: bytes (``70 << 30``), text
    (``"70GiB"``, ``"800MiB"``), a share of the memory that is free on the GPU when the model is first compiled (a
    float in (0, 1]), or ``"fsdp2"``: what FSDP2 is predicted to need. Shards, gradients, saved activations, gathered
    parameters and buffers count. Memory outside of the compiled model does not, and an optimizer's states count only if
    the optimizer is given as **optimizer**.
    Predicted bytes and seconds then decide which parameters stay gathered from forward to backward, whatever
    ``reshard_after_forward`` says (a number of ranks still holds). If several nodes share a parameter, they also decide
    whether slices of it are kept, for the ranks of a node to gather from; and if memory is short, which activations
    backward recomputes. The first rank chooses for all ranks, by its own batch. Every rank makes the same call.
    ``report.joint.plan.choice`` has the reasons. The budget holds from the next compilation on, in place of an earlier
    plan, until ``memory_budget=None`` takes it back. Then ``reshard_after_forward`` decides again what is kept, in a
    graph that is compiled anew or that was compiled before the budget. The eager path does not use the budget.

    **may** says what the budget may choose, by default ``("gather", "recompute")``: which parameters stay gathered
    (else ``reshard_after_forward`` says it), and which activations are computed again. With ``"offload"`` as well,
    activations may be in the memory of the host between forward and backward.

    **optimizer** is an ``optim.StatesOnHost``, with ``"offload"`` in ``may``. The budget is then for its states, too:
    as many bytes of them stay on the device as forward and backward leave. A byte of a gathered parameter or of an
    activation is kept only if it saves more seconds than a byte of these states. **optimizer**, **may** and **profile**
    belong to the budget that they are given with: without it, and until it has chosen, the optimizer keeps what its
    ``keep`` says.

    **profile** is the hardware for which to predict: a name or a file for ``passes.load_profile``, or a profile; by
    default the built-in one of the device. It also says how many ranks a node has.

    **watch_s** is how many seconds (60 by default, or FSDP_COMPILE_WATCH_S) a rank may wait for ranks that wait for
    something else before all of them say so, and raise; if a rank has left, they do so at once. With 0, ranks do not
    compare the collectives that they issue. It holds for the whole process, and must be the same on every rank.
    """
    if watch_s is not None and watch_s < 0:
        raise ValueError(f"watch_s={watch_s} is negative. 0 switches the comparing off.")
    units = units_in(model)
    if not units:
        raise ValueError(f"{type(model).__name__} holds no module that fully_shard was applied to. Shard it first.")
    no_plan, no_budget = plan is None, memory_budget is None
    plan = None if plan is _AS_IT_IS else plan
    memory_budget = None if memory_budget is _AS_IT_IS else memory_budget
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan is a Plan (Plan.from_json reads one from a file's text), not {type(plan).__name__}.")
    if plan is not None and memory_budget is not None:
        raise ValueError("A plan says what is kept for backward, and memory_budget has that chosen. Give one of them.")
    if profile is not None and memory_budget is None:
        raise ValueError("profile is what memory_budget is predicted by. Give memory_budget as well.")
    if may is not None and memory_budget is None:
        raise ValueError("may is what a memory_budget may choose. Give memory_budget as well.")
    if optimizer is not None and memory_budget is None:
        raise ValueError("optimizer has states that a memory_budget may have on the host. Give memory_budget as well.")
    budget = None if memory_budget is None else _budget(memory_budget, may, optimizer, profile, units)
    few = None
    if plan is not None:
        few = _ranks_that_a_plan_asks_for(plan, model, units)
    elif budget is not None:
        profile = budget.profile or default_profile(units[0].mesh.device)
        few = functools.partial(ranks_of_a_node, profile=profile)
    if gather == ONCE or (gather is None and any(unit.settings.gathers_once for unit in units)):
        _require_that_all_may_stay(units)
    given = manager.give(plan) if plan is not None else manager.give_budget(budget) if budget is not None else None
    if optimizer is not None and given is not None:
        optimizer.let_a_budget_choose(functools.partial(_kept_states_bytes, units[0], given))
    for unit in units:
        unit.settings.set_communication(bucketing, reduction, gather)
        if given is not None:
            unit.settings.plan = given
        elif no_budget if manager.is_budget(unit.settings.plan) else no_plan:
            unit.settings.plan, unit.may_slice = "", None
    if watch_s is not None:
        lookout.timeout_s = watch_s
    if few is not None:
        let_slices_be_kept(units, few, keeps_groups=plan is not None)
    for unit in units:
        refresh(unit)


def _require_that_all_may_stay(units: Sequence[Unit]) -> None:
    """Raise an error for a unit that keeps slices, since gather="once a step" keeps whole parameters."""
    for unit in units:
        if unit.post_forward is not None:
            raise ValueError(
                f"{unit.name} was sharded with an integer reshard_after_forward, which keeps slices. gather={ONCE!r} "
                "keeps whole parameters: call set_reshard_after_forward(True) on it before."
            )


def _ranks_that_a_plan_asks_for(plan: Plan, model: nn.Module, units: Sequence[Unit]) -> Callable[[ShardMesh], int]:
    """Return a function of a mesh: how many of its ranks the plan has gather from slices; 1 if it does not say."""
    asked: dict[str, set[int]] = {}  # numbers of ranks, by the mesh's group
    sliced = {*plan.slices}
    named = _owners(model, units)
    for bucket in () if plan.backward is None else plan.backward.gathers:
        owners = [named[plain] for fqn in sliced & {*bucket.fqns} if (plain := plain_name(fqn)) in named]
        if not owners and sliced & {*bucket.fqns}:  # the plan names it by a reader elsewhere, which is no path here
            owners = [unit for unit in units if unit.label == bucket.unit.partition(":")[0]] or [*units]
        for unit in owners:
            # Only buckets over a part of a mesh ask for groups. A name that was put into `slices` by hand is in a
            # bucket over the whole mesh: the groups that are there will do.
            if _is_part(bucket.num_ranks, unit.mesh):
                asked.setdefault(unit.mesh.group, set()).add(bucket.num_ranks)
    for sizes in asked.values():
        if len(sizes) > 1:
            raise ValueError(
                f"plan gathers from slices of {sorted(sizes)} ranks on one mesh. Have as many ranks in each bucket."
            )
    return lambda mesh: next(iter(asked.get(mesh.group, ())), 1)


def _owners(model: nn.Module, units: Sequence[Unit]) -> dict[str, Unit]:
    """Return the unit of each parameter, by every name that the parameter has in the model."""
    owner = {id(param.param): unit for unit in units for param in unit.params}
    return {name: owner[id(one)] for name, one in saved_tensors(model).items() if id(one) in owner}


def _is_part(size: int, mesh: ShardMesh) -> bool:
    """Whether a mesh can be divided into smaller groups of ``size`` ranks, not of 1."""
    return 1 < size < mesh.num_shards and mesh.num_shards % size == 0


def let_slices_be_kept(units: Sequence[Unit], few: Callable[[ShardMesh], int], keeps_groups: bool) -> None:
    """Make the process groups that slices need, since a compilation cannot make any.

    With ``keeps_groups``, a unit for which none is asked for keeps the group of an earlier call.
    """
    made: dict[str, ShardMesh | None] = {"": None}
    for unit in units:
        group, size = unit.mesh.group, few(unit.mesh)
        if group not in made:
            made[group] = inner_mesh(unit.mesh, size) if _is_part(size, unit.mesh) else None
        few_of_them = made[group] or (unit.may_slice if keeps_groups else None)
        unit.may_slice = None if unit.post_forward is not None else few_of_them


def _budget(
    said: int | float | str,
    may: Collection[str] | None,
    optimizer: StatesOnHost | None,
    profile: HardwareProfile | str | Path | None,
    units: Sequence[Unit],
) -> Budget:
    if isinstance(profile, (str, Path)):
        profile = load_profile(profile)
    if profile is not None and not isinstance(profile, HardwareProfile):
        raise TypeError(
            f"profile is a HardwareProfile, its name or the path of its file, not {type(profile).__name__}. "
            "`fsdp-compile calibrate --out` writes one."
        )
    budget = Budget.of(said)
    if may is not None:
        known = ", ".join(map(repr, MAY))
        unknown = [may] if isinstance(may, str) else [one for one in may if one not in MAY]
        if SHARDS in unknown:
            raise ValueError(
                f"may={may!r}: the model is sharded already, and a budget cannot move its shards. `fsdp-compile plan` "
                f"with `--may {' '.join(MAY)} {SHARDS}` says how many layers should have theirs on the host. Give "
                "these offload_policy=CPUOffloadPolicy()."
            )
        if unknown or not may:
            raise ValueError(f"may={may!r} is not a tuple of some of {known}. What is left out stays as it is.")
        budget = dataclasses.replace(budget, may=tuple(one for one in MAY if one in may))
    if optimizer is not None:
        budget = dataclasses.replace(budget, states_bytes=_states_bytes(optimizer, budget, units))
    device = units[0].mesh.device.type
    if budget.share is not None and device != "cuda":
        raise ValueError(
            f"memory_budget={said!r} is a share of free memory, and the ranks compute on {device!r}, where they share "
            "memory with one another and with other programs. Give bytes, such as '2GiB'."
        )
    num_units = sum(bool(unit.params) for unit in units)
    return dataclasses.replace(budget, profile=profile, num_units=num_units)


def _kept_states_bytes(unit: Unit, budget_id: str) -> int | None:
    """Return what a budget chose, while it is in force."""
    return manager.kept_states_bytes(budget_id) if unit.settings.plan == budget_id else None


def _states_bytes(optimizer: StatesOnHost, budget: Budget, units: Sequence[Unit]) -> int:
    if not isinstance(optimizer, StatesOnHost):
        raise TypeError(
            f"optimizer is of {type(optimizer).__name__}, not of fsdp_compile.optim.StatesOnHost, so its states stay "
            "where they are. Make it StatesOnHost(params, the class, ...), or leave it out and subtract its states "
            "from memory_budget."
        )
    shards = {id(param.param) for unit in units for param in unit.params}
    if not any(id(param) in shards for group in optimizer.param_groups for param in group["params"]):
        raise ValueError("optimizer has no parameter of the model. Make it of model.parameters(), after fully_shard.")
    if OFFLOAD not in budget.may:
        raise ValueError(
            f"optimizer has states that may be on the host, and may={budget.may!r} has no {OFFLOAD!r}. Add it."
        )
    return optimizer.state_bytes()
