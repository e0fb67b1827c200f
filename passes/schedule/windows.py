"""When activations are copied to the host and back: a copy has the time of one unit, in either direction.

    forward     unit 1  s a  s b | unit 2  s c  w a  s d  w b |  ...          s send, w wait
    backward            ...      | unit 2  f b  f a  w d  w c | unit 1  w b  w a

A copy to the host is launched behind the last use. Until it is waited for, the device has the activation. A copy from
the host is launched when the unit before begins, as gathers are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def begins_of(uses: Iterable[tuple[str, int]]) -> list[int]:
    """Return the places where units begin: a unit begins where it first uses a parameter or an activation."""
    begins: dict[str, int] = {}
    for unit, place in uses:
        begins[unit] = min(place, begins.get(unit, place))
    return sorted({*begins.values()})


def fetched_at(first: Mapping[T, int], begins: Sequence[int], lookahead: int) -> dict[T, int]:
    """Return the place in front of which each copy from the host is launched; -1 is the begin of the graph."""
    found = {}
    for copy in sorted(first, key=first.__getitem__):
        turn = bisect_right(begins, first[copy]) - 1 - lookahead
        found[copy] = begins[turn] if turn >= 0 else -1
    return found


def sent_in_turn(last: Mapping[T, int], begins: Sequence[int]) -> Iterator[tuple[T, list[T]]]:
    """Yield copies to the host in the order of launch, each with those that are waited for behind its launch.

    Of two units, the first copy of the earlier one is waited for when that of the later one is launched, and so on.
    """
    in_flight: list[tuple[tuple[int, int], T]] = []
    turn, number = 0, 0
    for copy in sorted(last, key=last.__getitem__):
        before, turn = turn, bisect_right(begins, last[copy])
        number = number + 1 if turn == before else 0
        waited = []
        while in_flight and in_flight[0][0] <= (turn - 1, number):
            waited.append(in_flight.pop(0)[1])
        in_flight.append(((turn, number), copy))
        yield copy, waited
