"""What becomes of a unit's gradients in backward: they are reduced, or wait for a backward that reduces them.

    mode                 the full gradient
    reduce               is reduced
    hold                 is added to ``held.pending``
    resume               is reduced together with what is pending
    resume_over_shards   the same, but only over the shards: the sum waits in ``held.partials`` for that of the replicas

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
class Held:
    """A unit's gradients that wait, by FQN, and which of them the backward that runs has added to."""

    pending: dict[str, Tensor] = field(default_factory=dict)  # full gradients
    partials: dict[str, Tensor] = field(default_factory=dict)  # reduced, and not summed over the replicas
    begun: set[str] = field(default_factory=set)  # they hold gradients of this backward alone
    grown: set[str] = field(default_factory=set)  # of earlier ones, too

    def note(self, fqn: str, is_there: bool) -> None:
        """Note that this backward holds a gradient back, where one waits already or not."""
        if is_there and fqn not in self.begun:
            self.grown.add(fqn)
        elif fqn not in self.grown:
            self.begun.add(fqn)

    def take(self, fqn: str) -> Tensor:
        """The full gradient that waits, for this backward to reduce with its own."""
        self.note(fqn, is_there=True)
        return self.pending.pop(fqn)

    def end_backward(self) -> None:
        self.begun.clear()
        self.grown.clear()

    def undo_backward(self) -> set[str]:
        """Drop what a backward that raised held back, and return where that is not possible: sums that it added to."""
        for fqn in self.begun:
            self.pending.pop(fqn, None)
            self.partials.pop(fqn, None)
        grown = set(self.grown)
        self.end_backward()
        return grown


@dataclass
class Accumulation:
    """One unit's, by what the user said and did."""

    sync: bool = True
    all_reduce: bool = True
    may_hold: bool = False  # full gradients may be waiting when a backward runs
    may_hold_partials: bool = False
    # The user said so between a forward and its backward, so only backward knows.
    decides_in_backward: bool = False
    held: Held = field(default_factory=Held)

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
        return self.sync and bool(self.held.pending or (self.held.partials and self.all_reduce))

    def end_backward(self, is_last: bool = True) -> None:
        """Note that a backward ended, and after the last one that nothing waits any more, where that is so."""
        self.held.end_backward()
        if is_last and self.sync and not self.held.pending:
            self.may_hold = False
            if self.all_reduce and not self.held.partials:
                self.may_hold_partials = False
