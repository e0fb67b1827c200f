"""Find what keeps an exposed collective from being hidden, by launching it earlier in a replay.

    G1 | G2 | w1 c1 | w2 c2       w2 waits 3 ms
    G2 | G1 | w1 c1 | w2 c2       the step gets no shorter              compute: links as busy, as little beside them
    c1 | R1 | c2 ... w1           R1 sends what c1 computes             dependency: it was launched when it could be
    c0 | G1 | c1 | w1 c2          launched before c0: 3 ms less         order; memory, where that is over the budget

A cause is what one would have to change. Events are data: no graph is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir.plan import as_size
from .replay import Compute, Event, Launch, ReplayedCollective, Timeline, Wait, as_ms, simulate

HIDDEN, COMPUTE, MEMORY, DEPENDENCY, ORDER = "hidden", "compute", "memory", "dependency", "order"

_TRIED = 4  # a launch is tried in front of so many others, and at the earliest place of all
_WORTH = 0.05  # share of the exposed seconds that an earlier launch has to save, to count as the cause


@dataclass(frozen=True)
class Verdict:
    """Why a collective is exposed."""

    cause: str  # COMPUTE, MEMORY, DEPENDENCY or ORDER
    words: str
    earlier: str = ""  # ORDER, MEMORY: the event in front of which its launch would shorten the step
    saves_s: float = 0.0  # by how much
    holds_bytes: int = 0  # and the most that would be alive between there and where it is launched now


@dataclass(frozen=True)
class _Tried:
    place: int  # in the short list
    saves_s: float
    holds_bytes: int


class Verdicts:
    """Judge the exposed collectives of one replay; with a budget, at most ``room_bytes`` may be alive."""

    def __init__(self, events: Sequence[Event], timeline: Timeline, room_bytes: int | None = None) -> None:
        self._alive = [point.num_bytes for point in timeline.memory]
        self._room_bytes = room_bytes
        self._short, self._first, self._short_of = _shortened(events)
        self._launched = {one.name: place for place, one in enumerate(self._short) if isinstance(one, Launch)}
        self._waited = {one.name: place for place, one in enumerate(self._short) if isinstance(one, Wait)}
        self._total_s = simulate(self._short).total_s

    def of(self, flight: ReplayedCollective, behind: str = "") -> Verdict:
        """Return why computation waits for it; ``behind`` names what is computed last before its launch, if any."""
        tried = [self._try(flight.launch, place) for place in self._earlier(flight.launch)]
        worth = [one for one in tried if one.saves_s > _WORTH * flight.exposed_s]
        room = self._room_bytes
        fitting = [one for one in worth if room is None or one.holds_bytes <= room]
        if fitting:
            best = _nearest(fitting)
            return self._said(ORDER, best, "launched earlier, the step takes")
        if worth:
            best = _nearest(worth)
            assert room is not None
            over = f"; the budget has room for {as_size(room)}"
            return self._said(MEMORY, best, "launched earlier, the step would take", over)
        # Compute as the clock shows it, slowed down by collectives: this is how much of a collective it hides.
        launched, beside_s = flight.computed_s, flight.beside_s
        beside = f"only {as_ms(beside_s)} of compute stand beside it"
        if self._cannot_move(flight.launch, _WORTH * flight.exposed_s):
            if flight.launch.needs:
                rest = "nothing is left to compute" if not beside_s else f"{as_ms(beside_s)} are left to compute"
                return Verdict(DEPENDENCY, f"launched as soon as what it sends is there, and {rest} beside it")
            where = f"launched behind {behind}, {as_ms(launched)} of compute from" if behind else "launched when"
            begins = "the begin of the graph" if behind else "the graph begins"
            return Verdict(DEPENDENCY, f"{where} {begins}; {beside}")
        if not behind and not flight.launch.needs:
            return Verdict(COMPUTE, f"{beside}, though it is launched before any parameter is read")
        tail = "; launched earlier, the step is no shorter" if tried else ""
        return Verdict(COMPUTE, f"{beside}{tail}")

    def _cannot_move(self, launch: Launch, seconds: float) -> bool:
        """Whether no more than ``seconds`` are computed between the earliest place for a launch and its own.

        The packing of other launches does not count, unless something waits there: in front of it, the launch would
        also be in front of them in the queue.
        """
        between = self._short[self._earliest(launch) : self._packed(launch)]
        waits = any(isinstance(one, Wait) for one in between)
        works = [one for one in between if isinstance(one, Compute) and (waits or not one.is_copy)]
        return sum(one.seconds for one in works) <= seconds

    def _said(self, cause: str, found: _Tried, words: str, tail: str = "") -> Verdict:
        holds = f"{as_size(found.holds_bytes)} are alive then"
        said = f"{words} {as_ms(found.saves_s)} less, and {holds}{tail}"
        return Verdict(cause, said, self._short[found.place].name, found.saves_s, found.holds_bytes)

    def _earlier(self, launch: Launch) -> list[int]:
        """Return earlier places for a launch: the earliest of all, and in front of launches close to it."""
        place, earliest = self._packed(launch), self._earliest(launch)
        others = [at for at in range(earliest, place) if isinstance(self._short[at], Launch)]
        chosen = {earliest, *others[-_TRIED:]} if earliest < place else set()
        return sorted(at for at in chosen if any(_takes_time(one) for one in self._short[at:place]))

    def _packed(self, launch: Launch) -> int:
        """Return where the packing right in front of a launch begins, which moves with it."""
        place = self._launched[launch.name]
        while place and _is_copy(self._short[place - 1]):
            place -= 1
        return place

    def _earliest(self, launch: Launch) -> int:
        return max((self._done(one) + 1 for one in launch.needs), default=0)

    def _done(self, name: str) -> int:
        """Return where in the short list a compute has run, or a collective has been waited for."""
        return self._waited[name] if name in self._waited else self._short_of[name]

    def _try(self, launch: Launch, place: int) -> _Tried:
        at, end = self._packed(launch), self._launched[launch.name] + 1
        moved = [*self._short[:place], *self._short[at:end], *self._short[place:at], *self._short[end:]]
        saves_s = self._total_s - simulate(moved).total_s
        more = sum(num_bytes for _, num_bytes in launch.allocs)
        alive = self._alive[self._first[place] : self._first[at]]
        return _Tried(place, saves_s, max(alive, default=0) + more)


def _nearest(tried: Sequence[_Tried]) -> _Tried:
    """Return the smallest step back that saves nearly as much as any."""
    most = max(one.saves_s for one in tried)
    return max((one for one in tried if one.saves_s >= 0.9 * most), key=lambda one: one.place)


def _takes_time(event: Event) -> bool:
    """Whether it matters that a launch passes this event: work, a wait, or another launch in the queue."""
    return not isinstance(event, Compute) or event.seconds > 0


def _is_copy(event: Event) -> bool:
    return isinstance(event, Compute) and event.is_copy


def _shortened(events: Sequence[Event]) -> tuple[list[Event], list[int], Mapping[str, int]]:
    """Return the events without memory, with computes that follow one another merged into one.

    Also return the place of the first original event of each, and where each compute went.
    """
    needed = {name for event in events if isinstance(event, Launch) for name in event.needs}
    ends = False  # whether the last event is a compute that a launch needs, and might be put right behind it
    short: list[Event] = []
    first: list[int] = []
    short_of: dict[str, int] = {}
    for place, event in enumerate(events):
        last = short[-1] if short else None
        joins = isinstance(last, Compute) and not ends and _is_copy(event) == _is_copy(last)
        if isinstance(event, Compute) and isinstance(last, Compute) and joins:
            short[-1] = dataclasses.replace(last, seconds=last.seconds + event.seconds)
        elif isinstance(event, Launch):
            short.append(dataclasses.replace(event, allocs=(), frees=(), needs=()))
            first.append(place)
        else:
            short.append(dataclasses.replace(event, allocs=(), frees=()))
            first.append(place)
        if isinstance(event, Compute):
            short_of[event.name] = len(short) - 1
        ends = event.name in needed
    return short, first, short_of
