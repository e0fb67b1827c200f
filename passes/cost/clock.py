"""How much shorter a list of events is with a few changes, by replaying no more of it than the change touches.

    as it is     c1 |--w1--| c2  c3 |--w2--| c4              each | is a wait
    without w1   c1 c2  c3 |--w2--| c4                       from c3 on the same
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from .replay import Compute, Event, Lanes, Launch

# After a change, so often do replayed steps look whether all is as it was: a look takes as long as some steps.
_LOOK_EVERY = 8


class Clock:
    """A list of events, and the state of the lanes before each of them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._steps: list[Event] = []  # computes that follow one another are one
        self._places: dict[str, list[tuple[int, float]]] = {}  # of each event's name, with its seconds of compute
        for event in events:
            last = self._steps[-1] if self._steps else None
            if isinstance(event, Compute) and isinstance(last, Compute):
                self._steps[-1] = Compute(last.name, last.seconds + event.seconds)
            else:
                self._steps.append(bare(event))
            seconds = event.seconds if isinstance(event, Compute) else 0.0
            self._places.setdefault(event.name, []).append((len(self._steps) - 1, seconds))
        self._states = [Lanes()]  # before each step
        for step in self._steps:
            self._states.append(self._states[-1].copy())
            self._states[-1].run(step)

    def seconds_of(self, names: Collection[str]) -> float:
        """Return the compute seconds of these events."""
        return sum(seconds for name in names for _, seconds in self._places.get(name, ()))

    def seconds_with(self, launch: str, seconds: float, group: str) -> float:
        """Return by how much the list is shorter if a launch takes these seconds, in this group."""
        place = min(place for place, _ in self._places[launch])
        event = self._steps[place]
        assert isinstance(event, Launch)
        return self._shorter({place: dataclasses.replace(event, seconds=seconds, group=group)})

    def seconds_without(self, names: Collection[str]) -> float:
        """Return by how much the list is shorter without these events."""
        changed: dict[int, Event | None] = {}
        for place, seconds in sorted(where for name in names for where in self._places.get(name, ())):
            event = changed.get(place, self._steps[place])
            less = isinstance(event, Compute) and Compute(event.name, max(event.seconds - seconds, 0.0))
            changed[place] = less or None
        return self._shorter(changed)

    def _shorter(self, changed: Mapping[int, Event | None]) -> float:
        if not changed:
            return 0.0
        first, last = min(changed), max(changed)
        state = self._states[first].copy()
        for place in range(first, len(self._steps)):
            if place > last and place % _LOOK_EVERY == 0 and state.is_like(self._states[place]):
                return self._states[place].now_s - state.now_s
            step = changed.get(place, self._steps[place])
            if step is not None:
                state.run(step)
        return self._states[-1].now_s - state.now_s


def bare(event: Event) -> Event:
    """Return an event without memory, and a launch without its ``needs``: some of those events are left out."""
    bare = dataclasses.replace(event, allocs=(), frees=())
    return dataclasses.replace(bare, needs=()) if isinstance(bare, Launch) else bare
