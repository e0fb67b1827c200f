"""Sketch the copies of activations to the host and back: when they run, and where the device has what they copy.

    forward     a --- last use |--copy--| wait      the device has ``a`` until the wait
    backward    launch |--copy--| wait --- last use     and again from the launch on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..schedule.windows import begins_of, fetched_at, sent_in_turn
from ..wire.streams import TO_DEVICE, TO_HOST
from .profiles import HardwareProfile
from .replay import Event, Launch, Wait
from .roofline import copy_seconds

T = TypeVar("T")


@dataclass(frozen=True)
class Leaving(Generic[T]):
    """An activation that is on the host between its last use in forward and its first use in backward."""

    key: T
    unit: str
    num_bytes: int
    place: int  # of the last use in forward, or of the first in backward


@dataclass(frozen=True)
class Copies(Generic[T]):
    """The copies of one half of a step."""

    events: Mapping[int, Sequence[Event]]  # behind each place in forward, in front of it in backward
    bound: Mapping[T, int]  # where the device no longer has each activation, or has it again


def to_host(
    leaving: Sequence[Leaving[T]], uses: Iterable[tuple[str, int]], end: int, profile: HardwareProfile
) -> Copies[T]:
    """Return the copies of forward; ``uses`` are the places where units use what they gather."""
    last = {one.key: one.place for one in leaving}
    of_key = {one.key: (f"to_host {number}", one) for number, one in enumerate(leaving)}
    begins = begins_of([*uses, *((one.unit, one.place) for one in leaving)])
    events: dict[int, list[Event]] = {}
    bound: dict[T, int] = {}
    for key, waited in sent_in_turn(last, begins):
        name, one = of_key[key]
        emitted = events.setdefault(one.place, [])
        emitted.append(Launch(name, copy_seconds(one.num_bytes, profile), TO_HOST))
        emitted += [Wait(of_key[other][0]) for other in waited]
        bound.update(dict.fromkeys(waited, one.place))
    for key in last.keys() - bound.keys():
        bound[key] = end
    left = [of_key[key][0] for key in last if bound[key] == end]
    events.setdefault(end, []).extend(Wait(name) for name in left)
    return Copies(events, bound)


def to_device(
    leaving: Sequence[Leaving[T]], uses: Iterable[tuple[str, int]], lookahead: int, profile: HardwareProfile
) -> Copies[T]:
    """Return the copies of backward."""
    begins = begins_of([*uses, *((one.unit, one.place) for one in leaving)])
    bound = fetched_at({one.key: one.place for one in leaving}, begins, lookahead)
    launches: dict[int, list[Event]] = {}
    waits: dict[int, list[Event]] = {}
    for number, one in enumerate(sorted(leaving, key=lambda one: one.place)):
        name, at = f"to_device {number}", max(bound[one.key], 0)
        launches.setdefault(at, []).append(Launch(name, copy_seconds(one.num_bytes, profile), TO_DEVICE))
        waits.setdefault(one.place, []).append(Wait(name))
    places = launches.keys() | waits.keys()
    events = {place: [*launches.get(place, ()), *waits.get(place, ())] for place in places}
    return Copies(events, {key: max(place, 0) for key, place in bound.items()})
