"""What becomes of a unit's gradients in backward: they are reduced, or wait for a backward that reduces them.

    mode                 the full gradient
    reduce               is reduced
    hold                 is added to ``pending``
    resume               is reduced together with what is pending
    resume_over_shards   the same, but only over the shards: the sum is added to ``partials`` until replicas are summed

A mode is asked for by both paths: the eager one when a gradient is there, the compiled one when it traces, and by a
guard at each call. The modes with tickets, which cost a copy of each gradient, begin when the user asks gradients to
wait, and end with the first backward that leaves none waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Mode = Literal["reduce", "hold", "resume", "resume_over_shards"]


def delivers_in(mode: Mode) -> bool:
    """Whether shards get gradients."""
    return mode == "reduce" or mode == "resume"


@dataclass
class Accumulation:
    """One unit's, by what the user said and did."""

    sync: bool = True
    all_reduce: bool = True
    may_hold: bool = False  # full gradients may be waiting when a backward runs
    may_hold_partials: bool = False
    # The user said so between a forward and its backward, so only backward knows.
    decides_in_backward: bool = False
    # By FQN: full gradients, and reduced shards that are not summed over the replicas.
    pending: dict[str, Tensor] = field(default_factory=dict)
    partials: dict[str, Tensor] = field(default_factory=dict)

    def set_sync(self, sync: bool) -> None:
        """Reduce gradients in backward, or hold them back."""
        self.sync = sync
        self.may_hold |= not sync

    def set_all_reduce(self, all_reduce: bool) -> None:
        """Sum gradients over the replicas in backward, or hold back what is summed over the shards alone."""
        self.all_reduce = all_reduce
        self.may_hold_partials |= not all_reduce

    def mode_of(self, is_replicated: bool) -> Mode:
        """What compiled backwards do with the gradient of a parameter."""
        if not self.sync or self.decides_in_backward:
            return "hold"  # and where backward finds that it must synchronize, its end does
        if self.may_hold_partials and is_replicated:
            return "resume_over_shards"
        return "resume" if self.may_hold else "reduce"

    @property
    def has_left_over(self) -> bool:
        """Whether gradients wait that are to be reduced by now."""
        return self.sync and bool(self.pending or (self.partials and self.all_reduce))

    def end_backward(self) -> None:
        """Note after a backward that nothing waits any more, where that is so."""
        if self.sync and not self.pending:
            self.may_hold = False
            if self.all_reduce and not self.partials:
                self.may_hold_partials = False

    def forget(self) -> None:
        """Let go of the gradients that wait."""
        self.pending.clear()
        self.partials.clear()
