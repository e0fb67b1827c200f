"""Gradient accumulation: a backward reduces a unit's gradients, or holds them back for a later backward.

    mode                 the full gradient
    reduce               is reduced
    hold                 is added to ``held.pending``
    resume               is reduced together with what is pending
    resume_over_shards   likewise over the shards alone; the result waits in ``held.partials`` for the sum over replicas

The compiled path asks for the mode when it traces, and a guard asks at each call. The eager path reads the same fields
when a gradient arrives. The resume modes, whose tickets cost a copy of each gradient, begin when the user holds
gradients back, and end with the first backward that leaves none waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Mode = Literal["reduce", "hold", "resume", "resume_over_shards"]


@dataclass
class Held:
    """A unit's gradients that are held back, by FQN, and what became of them in the running backward."""

    pending: dict[str, Tensor] = field(default_factory=dict)  # full gradients
    partials: dict[str, Tensor] = field(default_factory=dict)  # summed over the shards, not yet over the replicas
    # Reduced gradients of shards with hooks: the hooks run on the sum of all uses in a backward.
    for_hooks: dict[str, Tensor] = field(default_factory=dict)
    # What the running backward did, by FQN. "begun": it held back a gradient, and none waited before. "grown": it added
    # to a gradient that waited. "given": it added to one that waited, and the shard has got the sum.
    became: dict[str, Literal["begun", "grown", "given"]] = field(default_factory=dict)

    def note(self, fqn: str, is_there: bool) -> None:
        """Note that this backward holds a gradient back; ``is_there`` says whether one waits already."""
        if is_there and self.became.get(fqn) != "begun":
            self.became[fqn] = "grown"
        else:
            self.became.setdefault(fqn, "begun")

    def take(self, fqn: str) -> Tensor:
        """Remove and return the full gradient that waits, for this backward to reduce with its own."""
        self.note(fqn, is_there=True)
        return self.pending.pop(fqn)

    def note_arrival(self, fqn: str) -> None:
        """Note that a shard has got its gradient, to which a gradient that waited was added."""
        if self.became.get(fqn) == "grown":
            self.became[fqn] = "given"

    def end_backward(self) -> None:
        self.became.clear()

    def undo_backward(self) -> tuple[set[str], set[str]]:
        """Drop what a backward that raised held back; return which earlier sums it has added to, and which it lost."""
        for fqn in [fqn for fqn, state in self.became.items() if state == "begun"]:
            self.pending.pop(fqn, None)
            self.partials.pop(fqn, None)
        self.for_hooks.clear()
        grown = {fqn for fqn, state in self.became.items() if state != "begun"}
        lost = {fqn for fqn in grown if self.became[fqn] == "grown"} - self.pending.keys() - self.partials.keys()
        self.end_backward()
        return grown - lost, lost


@dataclass
class Accumulation:
    """One unit's settings of gradient accumulation, and the gradients that it holds back."""

    sync: bool = True
    all_reduce: bool = True
    may_hold: bool = False  # full gradients may be waiting when a backward runs
    may_hold_partials: bool = False
    # The user turned sync off between a forward and its backward, so only backward knows whether to reduce.
    decides_in_backward: bool = False
    held: Held = field(default_factory=Held)

    def mode_of(self, is_replicated: bool) -> Mode:
        """Return what compiled backwards do with the gradient of a parameter."""
        if not self.sync or self.decides_in_backward:
            return "hold"  # if backward finds that it must synchronize, the end of backward reduces
        if self.may_hold_partials and is_replicated:
            return "resume_over_shards"
        return "resume" if self.may_hold else "reduce"

    @property
    def has_left_over(self) -> bool:
        """Whether gradients wait although the unit synchronizes now."""
        return self.sync and bool(self.held.pending or (self.held.partials and self.all_reduce))

    def end_backward(self, is_last: bool = True) -> None:
        """Note that a backward ended; after the last one, leave the resume modes if no gradient waits any more."""
        self.held.end_backward()
        if is_last and self.sync and not self.held.pending:
            self.may_hold = False
            if self.all_reduce and not self.held.partials:
                self.may_hold_partials = False
