"""Make the steps of a model with many layers from two with few: repeat what one more layer added.

    3 layers    E a a b1 b2 b3 z s s s
    4 layers    E a a b1 b2 b3 c z s s s s          added: c, and an s at the end
    9 layers    E a a b1 b2 b3 c c c c c c z s s s s s s s s s

Where the longer is not the shorter with a few blocks inserted, layers do not repeat, and nothing is extended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .steps import Bytes, Half, Step, plus

_MOST_BLOCKS = 4


@dataclass(frozen=True)
class Added:
    """The steps and bytes that a longer half has and a shorter one lacks."""

    blocks: tuple[tuple[int, tuple[Step, ...]], ...]  # each with its place in the steps of the shorter half
    held: Bytes
    given: Bytes


def added(shorter: Half, longer: Half) -> Added | None:
    """Return what the longer half adds to the shorter; None where it is not the shorter with a few blocks inserted."""
    blocks = _blocks(shorter.steps, longer.steps)
    if not blocks or len(blocks) > _MOST_BLOCKS:
        return None
    before = 0  # steps in the blocks before this one
    for place, block in sorted(blocks):
        if not _is_one(place + before, len(block), longer.steps):
            return None
        before += len(block)
    return Added(tuple(blocks), plus(longer.held, shorter.held, -1), plus(longer.given, shorter.given, -1))


def extended(half: Half, more: Sequence[tuple[Added, int]]) -> Half:
    """Return a half with each of these additions inserted its number of times."""
    steps, held, given = list(half.steps), half.held, half.given
    blocks = [(place, block * times) for one, times in more for place, block in one.blocks]
    for place, block in sorted(blocks, key=lambda found: -found[0]):
        steps[place:place] = block
    for one, times in more:
        held, given = plus(held, one.held, times), plus(given, one.given, times)
    return Half(held, given, tuple(steps))


def _is_one(place: int, length: int, steps: Sequence[Step]) -> bool:
    """Whether a block is one repeating pattern, which can be inserted any number of times.

    Where two repeating patterns touch (c d c d s s, and one more of each), the inserted block is c d s, which does not
    repeat. A block that repeats waits as often as it launches, since a model of more layers has no more collectives in
    flight.
    """
    names = [step.what for step in steps]
    block = names[place : place + length]
    if block.count("launch") != block.count("wait"):
        return False
    if block in (names[max(place - length, 0) : place], names[place + length : place + 2 * length]):
        return True
    return not any(
        names[max(place - first, 0) : place] == block[:first]
        and names[place + length : place + length + length - first] == block[first:]
        for first in range(1, length)
    )


def _blocks(shorter: Sequence[Step], longer: Sequence[Step]) -> list[tuple[int, tuple[Step, ...]]]:
    """Return the fewest blocks that make the longer when inserted in the shorter; none where that is impossible."""
    num_added = len(longer) - len(shorter)
    if num_added <= 0:
        return []
    begin = 0
    while begin < len(shorter) and shorter[begin] == longer[begin]:
        begin += 1
    # By place in the shorter, and by number of steps inserted before: how many blocks that takes, after a step that
    # both have (alike), and within a block (inside).
    far = len(longer) + 1
    alike = [0] + [far] * num_added
    before: list[tuple[list[int], list[int]]] = []
    for place in range(begin, len(shorter) + 1):
        inside = [far] * (num_added + 1)
        for put_in in range(1, num_added + 1):
            inside[put_in] = min(inside[put_in - 1], alike[put_in - 1] + 1)
        before.append((alike, inside))
        if place < len(shorter):
            goes_on = [shorter[place] == longer[place + put_in] for put_in in range(num_added + 1)]
            alike = [min(*both) if same else far for same, *both in zip(goes_on, alike, inside)]
    if min(before[-1][0][num_added], before[-1][1][num_added]) >= far:
        return []
    ends: list[tuple[int, int]] = []  # the place of a block, and how many steps are inserted up to its end
    begins: list[int] = []
    put_in, place = num_added, len(shorter)
    while put_in:
        alike, inside = before[place - begin]
        if inside[put_in] < alike[put_in]:
            ends.append((place, put_in))
            while inside[put_in] < far and inside[put_in] == inside[put_in - 1]:
                put_in -= 1
            put_in -= 1
            begins.append(put_in)
        place -= 1
    return [(place, tuple(longer[place + first : place + last])) for (place, last), first in zip(ends, begins)]
