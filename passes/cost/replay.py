"""Replay a list of computes, launches and waits, to tell how long it takes, what is exposed and why, and what is alive.

    compute   |--c1--|--c2--|......|--c3--|..|--c4--|       dots: waiting, which is what "exposed" means
    group g   |---------w1---------|                        launched before c1, waited for before c3: longer than both
                        ^ launch of w2
    group g                        |----w2---|              queued behind w1, waited for before c4

There is one lane of computation and one for each process group, whose collectives run in the order of their launches.
Groups that use the same link share it: two collectives that run on it at the same time take twice as long each.
Copies to the host have a lane, and copies from there: what is said of collectives holds for them.
Events are data, so a planner can try an order that no graph has yet; ``events.py`` makes the events of a graph. The
same events give the same times anywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LONG = "longer than the compute beside it"
QUEUED = "queued behind another one"
SHARED = "it shares its link with another group's"
LATE = "launched as soon as what it needs was there"


@dataclass(frozen=True)
class Compute:
    """Work of this rank."""

    name: str
    seconds: float
    allocs: tuple[tuple[str, int], ...] = ()  # buffers and their bytes, alive from the begin of the event
    frees: tuple[str, ...] = ()  # buffers, gone at its end
    is_copy: bool = False  # it packs or unpacks for a collective, so it moves with that


@dataclass(frozen=True)
class Launch:
    """The start of a collective, which runs beside the following events until a wait for it."""

    name: str
    seconds: float  # with nothing else on the link
    group: str
    allocs: tuple[tuple[str, int], ...] = ()
    frees: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # computes that must have run, collectives that must have been waited for
    slows_compute: float = 0.0  # share of its speed that computation loses meanwhile
    link: str = ""  # which several groups share; without one, the group has its own


@dataclass(frozen=True)
class Wait:
    """No event behind it begins before the collective of this name has ended."""

    name: str
    allocs: tuple[tuple[str, int], ...] = ()
    frees: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # launched before it in its lane, so they have ended as well


Event = Compute | Launch | Wait


@dataclass(frozen=True)
class Span:
    """One thing that a lane did, from when to when."""

    name: str
    start_s: float
    end_s: float


@dataclass
class ReplayedCollective:
    """A collective, from its launch to the wait for it."""

    launch: Launch
    place: int
    launched_s: float
    computed_s: float  # of all compute up to its launch, with the slowdown by collectives, without waiting
    behind: str = ""  # the collective before it in its lane, if that had not ended at its launch
    start_s: float = 0.0  # when its turn comes
    end_s: float = 0.0  # as long as it runs, when it would end if nothing more was launched
    landed: bool = False
    waited: bool = False
    waited_s: float = 0.0  # when computation needs it
    beside_s: float = 0.0  # of compute between its launch and the wait
    exposed_s: float = 0.0  # that computation waits for it
    reason: str = ""  # of an exposed one: LONG, QUEUED, SHARED or LATE
    detail: str = ""

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def queued_s(self) -> float:
        """The seconds between its launch and its turn."""
        return self.start_s - self.launched_s

    @property
    def shared_s(self) -> float:
        """The seconds that it takes longer because others use its link."""
        return max(self.end_s - self.start_s - self.launch.seconds, 0.0)


@dataclass(frozen=True)
class Point:
    """Bytes alive during one event."""

    event: str
    at_s: float
    num_bytes: int


@dataclass(frozen=True)
class Timeline:
    """What a replay found."""

    total_s: float
    compute_s: float  # with the slowdown by collectives, without waiting
    copy_s: float  # part of ``compute_s``: packing and unpacking
    compute: tuple[Span, ...]
    groups: Mapping[str, tuple[Span, ...]]
    exposed: tuple[ReplayedCollective, ...]  # in the order of the waits
    memory: tuple[Point, ...]  # one for each event
    flights: Mapping[str, ReplayedCollective]  # by the collectives' names, in the order of launch

    @property
    def exposed_s(self) -> float:
        return sum(one.exposed_s for one in self.exposed)

    @property
    def peak_bytes(self) -> int:
        return max((point.num_bytes for point in self.memory), default=0)

    @property
    def peak_at(self) -> str:
        """The first event at the peak."""
        highest = max(self.memory, key=lambda point: point.num_bytes, default=None)
        return "" if highest is None else highest.event

    def __str__(self) -> str:
        lines = [
            f"{as_ms(self.total_s)}: {as_ms(self.compute_s)} computing, {as_ms(self.exposed_s)} waiting; "
            f"peak {self.peak_bytes:,} bytes at {self.peak_at or 'no event'}"
        ]
        lines += [f"    {as_ms(one.exposed_s):>12} for {one.name}: {one.reason} ({one.detail})" for one in self.exposed]
        return "\n".join(lines)


class Lanes:
    """Computation, and beside it the collectives, in the middle of a replay."""

    def __init__(self) -> None:
        self.now_s = 0.0  # computation
        self._queues: dict[str, deque[ReplayedCollective]] = {}  # by group; the first one of each runs
        self._running: list[ReplayedCollective] = []

    def compute(self, seconds: float) -> None:
        """Go on until so much is computed, slowed down by what runs beside it."""
        while self._running:
            turn_s = min(one.end_s for one in self._running)
            speed = math.prod(1 - one.launch.slows_compute for one in self._running)
            if self.now_s + seconds / speed <= turn_s:
                self.now_s += seconds / speed
                return
            seconds -= (turn_s - self.now_s) * speed
            self._land(turn_s)
        self.now_s += seconds

    def launch(self, flight: ReplayedCollective) -> None:
        """Begin a collective now, or when those before it in its lane have ended."""
        self._land(self.now_s)
        queue = self._queues.setdefault(flight.launch.group, deque())
        flight.behind = queue[-1].name if queue else ""
        queue.append(flight)
        if queue[0] is flight:
            self._begin(flight)

    def wait(self, flight: ReplayedCollective) -> None:
        """Let time pass until a collective has ended."""
        while not flight.landed:
            self._land(min(one.end_s for one in self._running))

    def _land(self, now_s: float) -> None:
        """Let time pass up to the next end, or less far; behind what ends there, the next one in its lane begins."""
        self.now_s = now_s
        for flight in [one for one in self._running if one.end_s <= now_s]:
            flight.landed = True
            self._running = [one for one in self._running if one is not flight]
            others = self._on(flight.launch.link)
            self._share(others, len(others), len(others) + 1)
            queue = self._queues[flight.launch.group]
            queue.popleft()
            if queue:
                self._begin(queue[0])

    def _begin(self, flight: ReplayedCollective) -> None:
        others = self._on(flight.launch.link)
        self._share(others, len(others) + 1, len(others))
        flight.start_s, flight.end_s = self.now_s, self.now_s + (len(others) + 1) * flight.launch.seconds
        self._running.append(flight)

    def _on(self, link: str) -> list[ReplayedCollective]:
        return [one for one in self._running if link and one.launch.link == link]

    def _share(self, flights: Iterable[ReplayedCollective], number: int, before: int) -> None:
        """Have so many collectives share the link of these from now on."""
        for one in flights:
            one.end_s = self.now_s + (one.end_s - self.now_s) * number / before


def simulate(events: Iterable[Event], held_bytes: int = 0) -> Timeline:
    """Replay the events, with ``held_bytes`` alive throughout; raise ValueError for an order that cannot be."""
    events = list(events)
    lanes, compute_s, copy_s = Lanes(), 0.0, 0.0
    compute: list[Span] = []
    flights: dict[str, ReplayedCollective] = {}
    exposed: list[ReplayedCollective] = []
    ran: dict[str, int] = {}  # places of computes, and of the waits for collectives
    stood: set[int] = set()  # places of waits that took time
    memory = _Memory(held_bytes)
    for place, event in enumerate(events):
        memory.begin(event, lanes.now_s)
        if isinstance(event, Compute):
            _require_seconds(event.name, event.seconds)
            if event.name in ran or event.name in flights:
                what = "is the name of a compute and of a collective" if event.name in flights else "stands twice"
                raise ValueError(f"{event.name} {what} in the events. Give each a name of its own.")
            start_s = lanes.now_s
            lanes.compute(event.seconds)
            compute.append(Span(event.name, start_s, lanes.now_s))
            compute_s += lanes.now_s - start_s
            copy_s += lanes.now_s - start_s if event.is_copy else 0.0
            ran[event.name] = place
        elif isinstance(event, Launch):
            _require_launch(event, flights, ran)
            flights[event.name] = ReplayedCollective(event, place, lanes.now_s, compute_s)
            lanes.launch(flights[event.name])
        else:
            if event.name not in flights:
                raise ValueError(f"The events wait for {event.name}, which nothing launched before. Move the wait.")
            flight = flights[event.name]
            if flight.waited:
                raise ValueError(f"The events wait for {event.name} twice. Take the second wait out.")
            flight.waited, flight.waited_s, flight.beside_s = True, lanes.now_s, compute_s - flight.computed_s
            lanes.wait(flight)
            if flight.end_s > flight.waited_s:
                flight.exposed_s = flight.end_s - flight.waited_s
                flight.reason, flight.detail = _why_exposed(flight, events, ran, stood)
                exposed.append(flight)
                stood.add(place)
            ran[event.name] = place
            for name in event.others:
                flights[name].waited = True
        memory.end(event)
    groups: dict[str, list[Span]] = {}
    for name, flight in flights.items():
        if not flight.waited:
            raise ValueError(f"{name} is launched, and nothing waits for it. Add a wait for {name}.")
        groups.setdefault(flight.launch.group, []).append(Span(name, flight.start_s, flight.end_s))
    return Timeline(
        lanes.now_s, compute_s, copy_s, tuple(compute), {group: tuple(spans) for group, spans in groups.items()},
        tuple(exposed), tuple(memory.points), flights,
    )  # fmt: skip


def _why_exposed(
    flight: ReplayedCollective, events: Sequence[Event], ran: Mapping[str, int], stood: Collection[int]
) -> tuple[str, str]:
    """Return why computation waits that long for a collective: the reason, and its details."""
    takes = f"it takes {as_ms(flight.launch.seconds)} and {as_ms(flight.beside_s)} of compute stand beside it"
    if flight.queued_s > 0 and flight.queued_s >= flight.exposed_s / 2:
        return QUEUED, f"{as_ms(flight.queued_s)} behind {flight.behind}; {takes}"
    if flight.shared_s >= flight.exposed_s / 2:
        return SHARED, f"{as_ms(flight.shared_s)} longer than alone; {takes}"
    last = max(flight.launch.needs, key=ran.__getitem__, default="")
    between = range(ran[last] + 1, flight.place) if last else ()
    moves = any(place in stood or _computes(events[place]) for place in between)
    return (LATE, f"right after {last}; {takes}") if last and not moves else (LONG, takes)


def _computes(event: Event) -> bool:
    """Whether an event is compute that takes time, and is not a copy that moves with a launch."""
    return isinstance(event, Compute) and event.seconds > 0 and not event.is_copy


def _require_launch(launch: Launch, flights: Mapping[str, ReplayedCollective], ran: Mapping[str, int]) -> None:
    _require_seconds(launch.name, launch.seconds)
    if launch.name in flights:
        raise ValueError(f"{launch.name} is launched twice. Give each collective a name of its own.")
    if launch.name in ran:
        raise ValueError(
            f"{launch.name} is the name of a compute and of a collective in the events. Give each a name of its own."
        )
    if not 0 <= launch.slows_compute < 1:
        raise ValueError(f"{launch.name} slows compute by {launch.slows_compute!r}. Give a share from 0 to below 1.")
    for name in launch.needs:
        if name not in ran:
            raise ValueError(
                f"{launch.name} is launched before {name}, which it needs, has run or been waited for. Move the launch "
                f"behind it, or add {name} to the events."
            )


def _require_seconds(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name} takes {seconds!r} seconds. Give a number that is at least 0.")


@dataclass
class _Memory:
    """The buffers that are alive, by name."""

    num_bytes: int
    points: list[Point] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)

    def begin(self, event: Event, at_s: float) -> None:
        for name, num_bytes in event.allocs:
            if name in self.buffers:
                raise ValueError(f"{event.name} allocates {name}, which is alive. Free it before, or rename it.")
            if num_bytes < 0:
                raise ValueError(f"{event.name} allocates {num_bytes} bytes for {name}. Give a number of at least 0.")
            self.buffers[name] = num_bytes
            self.num_bytes += num_bytes
        self.points.append(Point(event.name, at_s, self.num_bytes))

    def end(self, event: Event) -> None:
        for name in event.frees:
            if name not in self.buffers:
                raise ValueError(f"{event.name} frees {name}, which is not alive. Allocate it, and free it once.")
            self.num_bytes -= self.buffers.pop(name)


def as_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
