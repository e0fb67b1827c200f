"""A memory budget for a step: how a user gives it, and how a graph's plan is chosen within it.

    70 << 30, "70GiB", "800 MB"    the peak of forward and backward on one rank: shards, gradients, saved activations,
                                   gathered parameters, buffers. Optimizer states do not count
    0.9                            this share of the memory that is free on the device when the graph is first planned,
                                   plus the bytes of the graph's inputs, which are there already
    "fsdp2"                        the peak that is predicted for the step in eager FSDP2
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch_compat as compat
from ..cost.profiles import PROFILES, HardwareProfile
from ..ir.aliases import tensor_bytes
from ..ir.plan import Choice, Plan, as_size
from ..ir.provenance import find_reduces, find_unshards, groups_of, num_units_of
from ..ranks.settle import Settled
from ..schedule.planner import plan_joint, plan_keeping
from ..wire.spec import without_use
from .periods import Periods
from .remember import remembered
from .residency import GATHER, OFFLOAD, RECOMPUTE, choose, told_to_keep
from .trial import Decision, trial_of

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class Budget:
    """The memory that a user allows a step of one model; one of the first three fields is set."""

    num_bytes: int | None = None
    share: float | None = None  # of the free memory
    like_fsdp2: bool = False
    profile: HardwareProfile | None = None  # None: the built-in one of the device
    num_units: int = 0  # of the model: a graph that reads fewer is not the whole step
    may: tuple[str, ...] = (GATHER, RECOMPUTE)  # what is chosen
    states_bytes: int = 0  # of an optimizer: the budget is for them as well, and they may be on the host

    @classmethod
    def of(cls, said: int | float | str) -> Budget:
        """Parse what a user gave; raise ValueError or TypeError if it is no budget."""
        what = (
            "Give bytes (an int), text such as '70GiB' or '800MiB', a share of free memory (a float in (0, 1]), or "
            "'fsdp2'."
        )
        if isinstance(said, bool) or not isinstance(said, (int, float, str)):
            raise TypeError(f"memory_budget is {said!r}. {what}")
        if isinstance(said, float):
            if not 0 < said <= 1:
                raise ValueError(f"memory_budget={said!r} is a float, so a share, and not in (0, 1]. {what}")
            return cls(share=said)
        if said == "fsdp2":
            return cls(like_fsdp2=True)
        if isinstance(said, str):
            found = _TEXT.fullmatch(said)
            scale = {name.lower(): scale for name, scale in _UNITS.items()}.get(found[2].lower()) if found else None
            if found is None or scale is None:
                raise ValueError(f"memory_budget={said!r} is no number of bytes. {what}")
            num_bytes = int(float(found[1]) * scale)
        else:
            num_bytes = said
        if num_bytes <= 0:
            raise ValueError(f"memory_budget={said!r} is less than a byte. {what}")
        return cls(num_bytes)

    def bytes_for(self, graph: fx.Graph, profile: HardwareProfile, input_bytes: int) -> int:
        """Return the bytes that the step of a joint graph may hold, inputs included."""
        if self.num_bytes is not None:
            return self.num_bytes
        if self.like_fsdp2:
            return trial_of(graph, told_to_keep(graph), profile, like_fsdp2=True).peak_bytes + self.states_bytes
        assert self.share is not None
        device = device_of(graph)
        free_bytes = torch.cuda.mem_get_info(device)[0]
        reserved_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(self.share * (free_bytes + reserved_bytes)) + input_bytes


def bytes_of(setting: str, said: Any) -> int:
    """Parse what a user gave for a number of bytes."""
    if isinstance(said, bool) or not isinstance(said, (int, str)):
        raise TypeError(f"{setting} is {said!r}. Give bytes, or text such as '5GB'.")
    try:
        num_bytes = Budget.of(said).num_bytes
    except ValueError:
        num_bytes = None
    if num_bytes is None:
        raise ValueError(f"{setting}={said!r} is no number of bytes. Give bytes, or text such as '5GB'.")
    return num_bytes


def plan_within(budget: Budget, graph: fx.Graph, settled: Settled, budget_id: str) -> Plan:
    """Return the plan of a joint graph within its budget: chosen here, or adopted from the rank that chooses for all.

    If the graph is not the whole step of the model, the plan is made without a budget, equally on all ranks.
    """
    if compat.partitioner_has_a_budget(graph):
        raise ValueError(
            "memory_budget and torch's activation_memory_budget are not supported together yet: what the partitioner "
            "computes again to meet its own is not known when parameters are chosen. Leave one of them out."
        )
    if compat.has_custom_partitioner():
        raise ValueError(
            "memory_budget and torch._inductor.config.custom_partitioner_fn are not supported together: what that "
            "saves is not known when parameters are chosen. Leave one of them out."
        )
    unshards = find_unshards(graph)
    num_units = num_units_of(unshards)
    if num_units < budget.num_units:
        warnings.warn(
            f"memory_budget is not applied to a graph that reads {num_units} of the {budget.num_units} units of its "
            "model: what the rest of the step holds is not in it. Where the graph broke, see explain_breaks, and "
            "compile the model as a whole, with fullgraph=True; leave units that forward does not use unsharded. "
            "Until then parameters are kept or gathered again as reshard_after_forward says.",
            stacklevel=2,
        )
        return plan_joint(graph)
    names = tuple(sorted(one.fqn for one in unshards))
    ranks = [compat.group_ranks(group) for group in groups_of(graph)]
    # A step that accumulates gradients without reducing them needs a decision of its own.
    reduced = sorted(one.fqn for one in find_reduces(graph))
    about = f"{budget_id} {hashlib.sha256(repr(reduced).encode()).hexdigest()[:16]}"
    decision = settled.decision(about, names, ranks, lambda rank: _decide(budget, graph, rank))
    choice = decision.choice
    if budget.num_bytes is not None and choice is not None and choice.budget_bytes != budget.num_bytes:
        warnings.warn(
            f"memory_budget is {as_size(budget.num_bytes)} on this rank, and {as_size(choice.budget_bytes)} on rank "
            f"{choice.rank}, which chooses for all: the former has no effect. Call configure with the same on every "
            "rank.",
            stacklevel=2,
        )
    plan = plan_keeping(
        graph, decision.keep, decision.recompute, decision.slices, decision.lookahead, decision.offload
    )
    return dataclasses.replace(plan, choice=choice)


def _decide(budget: Budget, graph: fx.Graph, rank: int) -> Plan:
    profile = budget.profile or default_profile(device_of(graph))

    def search() -> Plan:
        allowed = functools.partial(budget.bytes_for, graph, profile)
        its, choice = searched(graph, allowed, profile, budget.may, states_bytes=budget.states_bytes)
        keep, again, slices, away, _ = (tuple(sorted(names)) for names in its.names)
        return Plan(
            "joint", keep=keep, recompute=again, slices=slices, offload=away, lookahead=its.lookahead, choice=choice
        )

    decision = search() if budget.share is not None else remembered(graph, (budget, profile), search)
    assert decision.choice is not None
    choice = dataclasses.replace(decision.choice, rank=rank)
    if not choice.is_met:
        helps = f"add {OFFLOAD!r} to may"
        if OFFLOAD in budget.may:
            shards = _shards_of(choice.chosen.peak_bytes - choice.budget_bytes, graph)
            helps = f"have {shards} on the CPU (CPUOffloadPolicy)"
        warnings.warn(
            f"memory_budget is {as_size(choice.budget_bytes)} ({choice.budget_bytes:,} bytes), and the smallest plan "
            f"of this step, which is used, needs {as_size(choice.chosen.peak_bytes)} ({choice.chosen.peak_bytes:,} "
            f"bytes). To come down, {helps}, checkpoint whole blocks that are not yet "
            "(torch.utils.checkpoint), take a smaller batch or shorter sequences, or shard over more ranks.",
            stacklevel=2,
        )
    return dataclasses.replace(decision, choice=choice)


def _shards_of(num_bytes: int, graph: fx.Graph) -> str:
    """Say how many units, the largest first, have so many bytes of shards beside those of two units.

    Shards on the CPU are copied to the device one unit ahead of their gather, so it has those of two units at a time.
    """
    by_unit: dict[str, dict[fx.Node, int]] = {}
    for one in find_unshards(graph):
        if one.shard.meta["val"].device == one.node.meta["val"].device:
            by_unit.setdefault(without_use(one.unit), {})[one.shard] = tensor_bytes(one.shard.meta["val"])
    largest = sorted((sum(shards.values()) for shards in by_unit.values()), reverse=True)
    enough = (n for n, total in enumerate(itertools.accumulate(largest), 1) if total - sum(largest[:2]) >= num_bytes)
    found = next(enough, None)
    return "shards" if found is None else f"the shards of {found} of {len(largest)} units"


def searched(
    graph: fx.Graph,
    budget_bytes: Callable[[int], int],
    profile: HardwareProfile,
    may: Collection[str],
    periods: Periods | None = None,
    states_bytes: int = 0,
) -> tuple[Decision, Choice]:
    """Return what is chosen within a budget, and why; ``choose`` explains the arguments."""
    found = 0

    def allowed(held_bytes: int) -> int:
        nonlocal found
        found = budget_bytes(held_bytes)
        return found

    with _without_collections():
        best, lost = choose(graph, allowed, profile, may=may, periods=periods, states_bytes=states_bytes)
    candidates = best.as_candidate(), tuple(one.as_candidate() for one in lost)
    return best.figures, Choice(found, profile.name, 0, *candidates, states_bytes)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch the garbage collector off in a block; one by hand visits only what is made there.

    Each collection would visit all nodes of the large graphs.
    """
    was_enabled, has_frozen = gc.isenabled(), bool(gc.get_freeze_count())
    gc.disable()
    if not has_frozen:  # else unfreezing would undo what a user asked for
        gc.freeze()
    try:
        yield
    finally:
        if not has_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device on which a graph computes."""
    return min((one.node.meta["val"].device for one in find_unshards(graph)), key=str)


_OTHER_CARDS = ("pcie", "nvl", "40gb")  # the profiles are of SXM modules, and of the A100 with 80 GB


def default_profile(device: torch.device) -> HardwareProfile:
    """Return the built-in profile of a kind of device."""
    if device.type == "cpu":
        return PROFILES["cpu"]
    if device.type == "cuda":
        called = torch.cuda.get_device_name(device)
        closest = max((name for name in PROFILES if name in called.lower()), key=len, default="h100")
        if not re.search(rf"\b{closest}\b", called.lower()) or any(one in called.lower() for one in _OTHER_CARDS):
            warnings.warn(
                f"There is no built-in hardware profile for {called}, so its steps are predicted as an {closest}'s. "
                "Give configure(model, profile=...) a file that `fsdp-compile calibrate` wrote here.",
                stacklevel=2,
            )
        return PROFILES[closest]
    raise ValueError(
        f"There is no built-in hardware profile for {device.type!r}. Give configure(model, profile=...) a name, or the "
        "path of a file that `fsdp-compile calibrate` wrote."
    )
