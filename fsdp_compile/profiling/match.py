"""Match each launch in a record with a collective of the plan, with the backend's run of it, and with its wait.

    thread that computes   mark #0  launch   launch        mm mm   wait=====    mm
    backend's              .        |--> all_gather----------------------|
                           .                 |--> queued                 |all_gather------|
    mark #0 says           all_gather of layers.0.w, all_gather of layers.1.w, ...

A graph launches what its mark says, in that order; a launch that is of another kind or size is not ours. Gloo's
threads take collectives in the order of their launches, and NCCL's kernels carry the number of the call that launched
them. Waits carry only sizes: of collectives of equal size, the one that was launched first is waited for first.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..passes.wire.collectives import KIND_OF
from ..passes.wire.layout import places_of_members
from .listen import EAGER, Expected, Heard, mark_of
from .record import DTYPES, Event, Interval, union, without

ITEMSIZES = dict(DTYPES.values())
_KINDS = {op.name().partition("::")[2]: kind for op, kind in KIND_OF.items()}
_LAUNCH = re.compile(rf"(?:fsdpc|_c10d_functional)::({'|'.join(_KINDS)})(?:_out|_)?")
_WAIT = "_c10d_functional::wait_tensor"
# The names that gloo's threads record for each kind; gloo's reduce-scatter is an all-reduce.
_GLOO = {
    "all_gather": {"gloo:all_gather"},
    "reduce_scatter": {"gloo:reduce_scatter", "gloo:all_reduce"},
    "all_to_all": {"gloo:all_to_all"},
    "all_reduce": {"gloo:all_reduce"},
}
_RUNTIME = ("cuda_runtime", "cuda_driver")


@dataclass
class Recorded:
    """One collective that ran."""

    kind: str
    launch: Event
    expected: Expected | None  # None where it is not ours
    stage: str
    num_ranks: int  # 0 where it is not known
    run: Event | None = None  # the backend's record of it
    wait: Event | None = None
    waited: tuple[Interval, ...] = ()  # when computation stood still for it

    @property
    def interval(self) -> Interval:
        """The time on the wire; where the backend recorded nothing, the time from the launch to the end of the wait."""
        if self.run is not None:
            return self.run.start, self.run.end
        return self.launch.start, self.launch.end if self.wait is None else self.wait.end

    @property
    def num_bytes(self) -> int:
        """Bytes of the output of a gather, and of the input of other kinds."""
        given = _bytes_sent(self.launch, self.expected)
        return given * (self.num_ranks or 1) if self.kind == "all_gather" else given

    @property
    def dtype(self) -> str:
        return _dtype_sent(self.launch, self.expected)


def flights_of(events: Sequence[Event], heard: Sequence[Heard], ranks: dict[str, tuple[int, ...]]) -> list[Recorded]:
    """Return all collectives of a record, in the order of their launches."""
    flights = _launched(events, heard, ranks)
    if any(event.category == "kernel" for event in events):
        _find_kernels(flights, events)
    else:
        _find_on_gloo(flights, events)
    _find_waits(flights, events)
    _find_exposed(flights, events)
    return flights


def _launched(events: Sequence[Event], heard: Sequence[Heard], ranks: dict[str, tuple[int, ...]]) -> list[Recorded]:
    flights: list[Recorded] = []
    inside: dict[object, float] = defaultdict(float)  # by thread: when its last launch returned
    left: dict[object, tuple[str, list[Expected]]] = {}  # by thread: what its graph has still to launch
    next_up: dict[object, Expected] = {}  # by thread: the eager launch that its mark announced
    for event in events:
        mark = mark_of(event.name, heard)
        if mark is not None:
            if mark.stage == EAGER:
                next_up[event.thread] = mark.launches[0]
            else:
                left[event.thread] = mark.stage, list(mark.launches)
            continue
        found = _LAUNCH.fullmatch(event.name)
        if found is None or event.start < inside[event.thread]:
            continue
        inside[event.thread] = event.end
        kind, expected, stage = _KINDS[found[1]], next_up.pop(event.thread, None), EAGER
        if expected is None or expected.kind != kind:
            stage, queue = left.get(event.thread, ("", []))
            expected = _first_like(queue, kind, event, ranks)
        num_ranks = len(ranks[expected.group]) if expected else _said(kind, event)
        flights.append(Recorded(kind, event, expected, stage if expected else "", num_ranks))
    return flights


def _first_like(queue: list[Expected], kind: str, launch: Event, ranks: dict[str, tuple[int, ...]]) -> Expected | None:
    for place, one in enumerate(queue):
        sent = one.num_bytes
        if kind in ("reduce_scatter", "all_to_all"):
            sent *= len(ranks[one.group])
        if one.kind == kind and sent == _bytes_sent(launch, one):
            return queue.pop(place)
    return None


def _dtype_sent(launch: Event, expected: Expected | None) -> str:
    """Return the dtype of what a launch was given: where that is not recorded, of what is expected."""
    return launch.dtype() or (expected.dtype if expected else "")


def _bytes_sent(launch: Event, expected: Expected | None) -> int:
    return sum(launch.elements()) * ITEMSIZES.get(_dtype_sent(launch, expected), 0)


def _said(kind: str, launch: Event) -> int:
    """Return how many ranks take part, from the launch's arguments; 0 where these do not say it."""
    place = {"all_gather": 1, "reduce_scatter": 2}.get(kind)
    given = launch.args.get("Concrete Inputs") or []
    if place is None or place >= len(given) or not str(given[place]).isdecimal():
        return 0
    return int(given[place])


def _find_on_gloo(flights: Sequence[Recorded], events: Sequence[Event]) -> None:
    runs = [event for event in events if event.name.startswith("gloo:")]
    taken: set[int] = set()
    for flight in flights:
        elements = flight.launch.elements()
        begin = bisect.bisect_left(runs, flight.launch.start, key=lambda event: event.start)
        for place in range(begin, len(runs)):
            run = runs[place]
            if place not in taken and run.name in _GLOO[flight.kind] and run.elements() == elements:
                taken.add(place)
                flight.run = run
                break


def _find_kernels(flights: Sequence[Recorded], events: Sequence[Event]) -> None:
    kernels = {event.args.get("correlation"): event for event in events if _is_of_nccl(event)}
    calls: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        if event.category in _RUNTIME and event.args.get("correlation") in kernels:
            calls[event.thread].append(event)
    for flight in flights:
        made = calls[flight.launch.thread]
        first = bisect.bisect_left(made, flight.launch.start, key=lambda event: event.start)
        for call in made[first : first + 1]:
            if call.start <= flight.launch.end:
                flight.run = kernels[call.args["correlation"]]


def _is_of_nccl(event: Event) -> bool:
    return event.category == "kernel" and event.name.startswith("nccl")


def _find_waits(flights: Sequence[Recorded], events: Sequence[Event]) -> None:
    by_size: dict[tuple[int, str], list[Recorded]] = defaultdict(list)
    for flight in flights:
        by_size[_result(flight)].append(flight)
    for wait in events:
        if wait.name != _WAIT:
            continue
        queue = by_size[sum(wait.elements()), wait.dtype()]
        if queue and queue[0].launch.start <= wait.start:
            queue.pop(0).wait = wait


def _result(flight: Recorded) -> tuple[int, str]:
    """Return the elements and dtype of a launch's result."""
    elements, num_ranks, dtype = flight.launch.elements(), flight.num_ranks or 1, flight.dtype
    if flight.kind == "all_gather":
        elements = [one * num_ranks for one in elements]
        if flight.launch.name.endswith("members"):
            return places_of_members(elements, ITEMSIZES.get(dtype) or 1)[-1], dtype
        return elements[0], dtype  # each member has a wait of its own
    return sum(elements) // (num_ranks if flight.kind == "reduce_scatter" else 1), dtype


def _find_exposed(flights: Sequence[Recorded], events: Sequence[Event]) -> None:
    """Find when computation waits: on a GPU, no other kernel runs beside the collective; on the CPU, a thread waits."""
    computing = union((one.start, one.end) for one in events if one.category == "kernel" and not _is_of_nccl(one))
    for flight in flights:
        if flight.run is not None and flight.run.category == "kernel":
            flight.waited = tuple(without(flight.interval, computing))
        elif flight.wait is not None and (flight.run is None or flight.run.end > flight.wait.start):
            flight.waited = ((flight.wait.start, flight.wait.end),)
