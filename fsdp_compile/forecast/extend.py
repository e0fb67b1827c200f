"""The steps of a model with many layers, from two that have few: what one more layer added is put in as often.

    3 layers    E a a b1 b2 b3 z                one longest common beginning, one common end
    4 layers    E a a b1 b2 b3 c z
                             ^ added
    9 layers    E a a b1 b2 b3 c c c c c c z

Where the longer one is not the shorter one with something put in, the layers do not repeat, and nothing is extended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .steps import Bytes, Half, Step, plus


@dataclass(frozen=True)
class Added:
    """What a longer half has beside a shorter one."""

    place: int  # in the steps of the shorter one
    steps: tuple[Step, ...]
    held: Bytes
    given: Bytes


def added(shorter: Half, longer: Half) -> Added | None:
    """What was put in; None where that is not all the difference."""
    num_added = len(longer.steps) - len(shorter.steps)
    if num_added <= 0:
        return None
    place = 0
    while place < len(shorter.steps) and shorter.steps[place] == longer.steps[place]:
        place += 1
    if shorter.steps[place:] != longer.steps[place + num_added :]:
        return None
    return Added(
        place,
        longer.steps[place : place + num_added],
        plus(longer.held, shorter.held, -1),
        plus(longer.given, shorter.given, -1),
    )


def extended(half: Half, more: Sequence[tuple[Added, int]]) -> Half:
    """A half with each of these so many times."""
    steps, held, given = list(half.steps), half.held, half.given
    for one, times in sorted(more, key=lambda found: -found[0].place):
        steps[one.place : one.place] = one.steps * times
        held, given = plus(held, one.held, times), plus(given, one.given, times)
    return Half(held, given, tuple(steps))
