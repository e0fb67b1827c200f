"""The settings of a unit, which users change after sharding, with FSDPModule's methods and ``configure``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._torch_compat.process_groups import Pool
from ..passes.wire.layout import BUCKETINGS

ONCE = "once a step"
GATHERS = ("for each micro-batch", ONCE)
REDUCTIONS = ("auto", "reduce_scatter", "all_to_all")


@dataclass
class Comms:
    """The user's replacements for our collectives in one unit; only the eager path uses them."""

    all_gather: Any = None
    reduce_scatter: Any = None
    # Takes the place of the sum over replicas, and returns the mean: FSDP1's communication hooks.
    all_reduce: Callable[[Tensor], Tensor] | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
    pools: Mapping[str, Pool] = field(default_factory=dict)  # what gathers in a process group, by its name, write to

    @property
    def custom(self) -> str | None:
        """Name of a setting that only the eager path can honour; None when all collectives are ours."""
        if self.all_gather is not None:
            return "set_custom_all_gather"
        if self.reduce_scatter is not None:
            return "set_custom_reduce_scatter"
        if self.all_reduce is not None:
            return "register_comm_hook"
        return None if self.all_reduce_hook is None else "set_all_reduce_hook"


@dataclass
class Settings:
    """The settings of one unit: first those that markers carry, then those that only the eager path uses."""

    # None: FSDP2's rule, regather unless this is the root.
    reshard_after_forward: bool | None = None
    gather: str = GATHERS[0]
    # ``ParamSpec.stays``, "" at first: what may stay gathered until the next forward. It is never taken back, so that
    # graphs stay the same.
    stays: str = ""
    bucketing: str = "size"
    plan: str = ""  # id of the plan that its graphs were given; empty for our own plan
    reduction: str = "auto"
    divide_factor: float | None = None  # what gradients are divided by in place of the number of ranks
    force_sum: bool = False  # collectives only sum; the division is done around them
    comms: Comms = field(default_factory=Comms)
    reduce_unused: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_storage: bool = False
    max_reductions: int = 1
    reduce_groups: dict[str, str] = field(default_factory=dict)  # process group to reduce in, by the one to gather in
    is_last_backward: bool = True  # as set on this unit's module; what counts is the root's iteration
    # Units to prefetch, instead of the one that is expected to come next.
    forward_prefetch: list[Any] = field(default_factory=list)
    backward_prefetch: list[Any] = field(default_factory=list)

    def set_communication(self, bucketing: str | None, reduction: str | None, gather: str | None) -> None:
        """Change the settings that are not None."""
        if bucketing is not None and bucketing not in BUCKETINGS:
            raise ValueError(f"bucketing={bucketing!r} is none of {', '.join(BUCKETINGS)}.")
        if reduction is not None and reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is none of {', '.join(REDUCTIONS)}.")
        if gather is not None and gather not in GATHERS:
            raise ValueError(f"gather={gather!r} is none of {', '.join(GATHERS)}.")
        self.gather = self.gather if gather is None else gather
        self.stays = self.stays or ("kept" if self.gathers_once else "")
        self.bucketing = self.bucketing if bucketing is None else bucketing
        self.reduction = self.reduction if reduction is None else reduction

    @property
    def gathers_once(self) -> bool:
        return self.gather == ONCE

    @property
    def unheeded_in_graphs(self) -> tuple[str, ...]:
        """Names of the methods that were called to change settings which graphs ignore."""
        said = {
            "set_modules_to_forward_prefetch": self.forward_prefetch,
            "set_modules_to_backward_prefetch": self.backward_prefetch,
            "set_reduce_scatter_max_input_buffers": self.max_reductions > 1,
            "set_separate_reduce_scatter_group": self.reduce_groups,
            "set_keep_unsharded_storage": self.keep_storage,
            "set_unshard_in_backward": not self.unshard_in_backward,
            "set_is_last_backward": not self.is_last_backward,
            "set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm": self.comms.pools,
        }
        return tuple(name for name, value in said.items() if value)
