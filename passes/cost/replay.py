"""Replay a list of computes, launches and waits, to tell how long it takes, what is exposed and why, and what is alive.

    compute   |--c1--|--c2--|......|--c3--|..|--c4--|       dots: waiting, which is what "exposed" means
    group g   |---------w1---------|                        launched before c1, waited for before c3: longer than both
                        ^ launch of w2
    group g                        |----w2---|              queued behind w1, waited for before c4

There is one lane of computation and one for each process group, whose collectives run in the order of their launches.
Copies to the host have a lane, and copies from there: what is said of collectives holds for them.
Events are data, so a planner can try an order that no graph has yet; ``events.py`` makes the events of a graph. The
same events give the same times anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LONG = "longer than the compute beside it"
QUEUED = "queued behind another one"
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
    seconds: float
    group: str
    allocs: tuple[tuple[str, int], ...] = ()
    frees: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # computes that must have run, collectives that must have been waited for
    slows_compute: float = 0.0  # share of its speed that computation loses meanwhile


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
class Flight:
    """A collective, from its launch to the wait for it."""

    launch: Launch
    place: int
    launched_s: float
    start_s: float  # when the links are free for it
    end_s: float
    behind: str  # what ran in its lane when it was launched
    computed_s: float  # of all compute up to its launch, with the slowdown by collectives, without waiting
    waited: bool = False
    waited_s: float = 0.0  # when computation needs it
    beside_s: float = 0.0  # of compute between its launch and the wait
    exposed_s: float = 0.0  # that computation waits for it
    reason: str = ""  # of an exposed one: LONG, QUEUED or LATE
    detail: str = ""

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def queued_s(self) -> float:
        """The seconds between its launch and its turn on the links."""
        return self.start_s - self.launched_s


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
    exposed: tuple[Flight, ...]  # in the order of the waits
    memory: tuple[Point, ...]  # one for each event
    flights: Mapping[str, Flight]  # by the collectives' names, in the order of launch

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


@dataclass
class Lanes:
    """When each lane is free, in the middle of a replay."""

    now_s: float = 0.0  # computation
    groups: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)  # of collectives that were not waited for
    slowing: tuple[tuple[float, float, float], ...] = ()  # collectives: begin, end, the share of speed that they take

    def run(self, event: Event) -> float:
        """Run one event, and return when it begins."""
        start_s = self.now_s
        if isinstance(event, Compute):
            self.slowing = tuple(one for one in self.slowing if one[1] > self.now_s)
            self.now_s = _advance(self.now_s, event.seconds, self.slowing)
        elif isinstance(event, Launch):
            start_s = max(self.now_s, self.groups.get(event.group, 0.0))
            self.groups[event.group] = self.ends[event.name] = start_s + event.seconds
            if event.slows_compute > 0:
                self.slowing += ((start_s, start_s + event.seconds, event.slows_compute),)
        else:
            self.now_s = max([self.now_s, *(self.ends.pop(name) for name in (event.name, *event.others))])
        return start_s


def simulate(events: Iterable[Event], held_bytes: int = 0) -> Timeline:
    """Replay the events, with ``held_bytes`` alive throughout; raise ValueError for an order that cannot be."""
    events = list(events)
    lanes, compute_s, copy_s = Lanes(), 0.0, 0.0
    compute: list[Span] = []
    groups: dict[str, list[Span]] = {}
    flights: dict[str, Flight] = {}
    exposed: list[Flight] = []
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
            span = Span(event.name, lanes.run(event), lanes.now_s)
            compute.append(span)
            compute_s += span.end_s - span.start_s
            copy_s += span.end_s - span.start_s if event.is_copy else 0.0
            ran[event.name] = place
        elif isinstance(event, Launch):
            _require_launch(event, flights, ran)
            lane = groups.setdefault(event.group, [])
            span = Span(event.name, lanes.run(event), lanes.ends[event.name])
            behind = lane[-1].name if span.start_s > lanes.now_s else ""
            lane.append(span)
            flights[event.name] = Flight(event, place, lanes.now_s, span.start_s, span.end_s, behind, compute_s)
        else:
            if event.name not in flights:
                raise ValueError(f"The events wait for {event.name}, which nothing launched before. Move the wait.")
            flight = flights[event.name]
            if flight.waited:
                raise ValueError(f"The events wait for {event.name} twice. Take the second wait out.")
            waited_s = lanes.run(event)
            flight.waited, flight.waited_s, flight.beside_s = True, waited_s, compute_s - flight.computed_s
            if flight.end_s > waited_s:
                flight.exposed_s = flight.end_s - waited_s
                flight.reason, flight.detail = _why_exposed(flight, events, ran, stood)
                exposed.append(flight)
                stood.add(place)
            ran[event.name] = place
            for name in event.others:
                flights[name].waited = True
        memory.end(event)
    for name, flight in flights.items():
        if not flight.waited:
            raise ValueError(f"{name} is launched, and nothing waits for it. Add a wait for {name}.")
    return Timeline(
        lanes.now_s, compute_s, copy_s, tuple(compute), {group: tuple(spans) for group, spans in groups.items()},
        tuple(exposed), tuple(memory.points), flights,
    )  # fmt: skip


def _why_exposed(
    flight: Flight, events: Sequence[Event], ran: Mapping[str, int], stood: Collection[int]
) -> tuple[str, str]:
    """Return why computation waits that long for a collective: the reason, and its details."""
    takes = f"it takes {as_ms(flight.launch.seconds)} and {as_ms(flight.beside_s)} of compute stand beside it"
    if flight.queued_s > 0 and flight.queued_s >= flight.exposed_s / 2:
        return QUEUED, f"{as_ms(flight.queued_s)} behind {flight.behind}; {takes}"
    last = max(flight.launch.needs, key=ran.__getitem__, default="")
    between = range(ran[last] + 1, flight.place) if last else ()
    moves = any(place in stood or _computes(events[place]) for place in between)
    return (LATE, f"right after {last}; {takes}") if last and not moves else (LONG, takes)


def _computes(event: Event) -> bool:
    """Whether an event is compute that takes time, and is not a copy that moves with a launch."""
    return isinstance(event, Compute) and event.seconds > 0 and not event.is_copy


def _require_launch(launch: Launch, flights: Mapping[str, Flight], ran: Mapping[str, int]) -> None:
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


def _advance(now_s: float, seconds: float, slowing: Sequence[tuple[float, float, float]]) -> float:
    """Return when work of so many seconds ends if it begins now, slowed down by collectives (``Lanes.slowing``)."""
    turns = sorted({turn for begin_s, end_s, _ in slowing for turn in (begin_s, end_s) if turn > now_s})
    for turn_s in turns:
        speed = math.prod(1 - share for begin_s, end_s, share in slowing if begin_s <= now_s < end_s)
        if now_s + seconds / speed <= turn_s:
            return now_s + seconds / speed
        seconds -= (turn_s - now_s) * speed
        now_s = turn_s
    return now_s + seconds


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
