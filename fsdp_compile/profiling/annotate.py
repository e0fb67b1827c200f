"""Add our ranges to the profiler's record: what each collective carried, how long it took, and how long was planned.

    before    gloo's threads      gloo:all_gather |------|
    after     gloo's threads      gloo:all_gather |------|
              collectives         FSDP::gather layers.0.up.weight +3 |------|     args: bytes, ranks, exposed, planned
              thread that waits   FSDP::wait for gather layers.0.up.weight +3 |==|
              the graph's thread  FSDP::forward graph |-----------------------------|

The ranges are events of the trace, so every viewer shows them, and summaries and refined profiles are computed from
them. Facts that belong to no event are stored beside the events, under "fsdp_compile".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..passes import HardwareProfile
from ..passes.cost.roofline import Group, collective_seconds
from ..passes.ir.plan import named
from .listen import EAGER, Expected, Heard, mark_of
from .match import Recorded, flights_of
from .record import Event, recorded_events

KEY = "fsdp_compile"
COLLECTIVE, WAIT, GRAPH = "collective", "wait", "graph"
_FIRST_LANE = 1 << 22  # above all numbers of threads
# Names that torch-tb-profiler knows. It does not count operators of other names as communication.
_PLUGIN_NAMES = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "reduce_scatter",
    "all_reduce": "all_reduce",
}


@dataclass(frozen=True)
class Facts:
    """Facts that the profiler's record does not hold."""

    rank: int
    world_size: int
    num_steps: int  # recorded to their ends
    device: str  # "cpu" or "cuda"
    hardware: HardwareProfile  # by which the run was planned
    allows_tf32: bool
    heard: Sequence[Heard]
    ranks: dict[str, tuple[int, ...]]  # of each process group


def annotate(trace: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Return the record with the ranges and the facts added. Events that are renamed are changed in place."""
    events = recorded_events(trace)
    flights = flights_of(events, facts.heard, facts.ranks)
    steps = [event for event in events if event.is_step][: facts.num_steps]
    pid = next((event.raw.get("pid") for event in events if event.category == "cpu_op"), 0)
    of_nccl = [event for event in events if event.name.startswith("nccl:")]
    added: list[dict[str, Any]] = []
    lanes = _Lanes(pid)
    models = {one.model for heard in facts.heard for one in heard.launches}
    says_model = len(models - {""}) > 1
    for flight in sorted(flights, key=lambda one: one.interval):
        step = next((_number_of(one) for one in steps if one.start <= flight.launch.start <= one.end), None)
        added += _ranges_of(flight, step, lanes, facts, says_model)
        _rename(flight, of_nccl)
    added += lanes.names()
    added += _graphs(events, facts.heard)
    return {
        **trace,
        KEY: {
            "rank": facts.rank,
            "world_size": facts.world_size,
            "num_steps": len(steps),
            "device": facts.device,
            "allows_tf32": facts.allows_tf32,
            "hardware": json.loads(facts.hardware.to_json()),
        },
        "traceEvents": [*trace["traceEvents"], *added],
    }


def called(expected: Expected | None, kind: str, num_bytes: int, says_model: bool = False) -> str:
    """Return a short name for a collective; with ``says_model``, the name says which model the parameters belong to."""
    if expected is None:
        return f"{kind} of {num_bytes} bytes, not ours"
    what = {"all_gather": "gather", "all_reduce": "reduce copies of"}.get(kind, "reduce")
    whose = f" of {expected.model}" if says_model and expected.model else ""
    return f"{what} {named(expected.parameters)}{whose}"


def _number_of(step: Event) -> int:
    """Return the number of a step as torch and TensorBoard count: steps that were not recorded count too."""
    return int(step.name.partition("#")[2])


def _ranges_of(
    flight: Recorded, step: int | None, lanes: _Lanes, facts: Facts, says_model: bool
) -> Iterator[dict[str, Any]]:
    name, (start, end) = called(flight.expected, flight.kind, flight.num_bytes, says_model), flight.interval
    prefix = "FSDP::" if flight.expected else ""
    yield lanes.add(f"{prefix}{name}", start, end, _args(flight, step, facts))
    wait = flight.wait
    if flight.waited and wait is not None and flight.waited[0] == (wait.start, wait.end):  # on a GPU no thread waits
        yield _range(f"{prefix}wait for {name}", {KEY: WAIT}, *_place(wait))


def _args(flight: Recorded, step: int | None, facts: Facts) -> dict[str, Any]:
    expected = flight.expected
    planned_s, planned_exposed_s = _planned(flight, facts)
    return {
        KEY: COLLECTIVE,
        "kind": flight.kind,
        "step": step,
        "stage": flight.stage,
        "group": expected.group if expected else "",
        "ranks": list(facts.ranks[expected.group]) if expected else [],
        "dtype": flight.dtype,
        "bytes": flight.num_bytes,
        "parameters": list(expected.parameters) if expected else [],
        "model": expected.model if expected else "",
        "launched_us": flight.launch.start,
        "waited_us": [list(one) for one in flight.waited],
        "recorded": flight.run is not None,
        "planned_us": _us(planned_s),
        "planned_exposed_us": _us(planned_exposed_s),
    }


def _planned(flight: Recorded, facts: Facts) -> tuple[float | None, float | None]:
    """Return what was predicted for the graph; without a prediction, only the seconds that such a collective takes."""
    expected = flight.expected
    if expected is None:
        return None, None
    if expected.planned_s is not None:
        return expected.planned_s, expected.planned_exposed_s
    group = Group.of(facts.ranks[expected.group], facts.hardware)
    return collective_seconds(flight.kind, flight.num_bytes, group, facts.hardware), None


def _rename(flight: Recorded, of_nccl: Sequence[Event]) -> None:
    """Let torch-tb-profiler's distributed view count a run: it knows few names, and kernels by operator number.

    ``of_nccl`` are the ranges of NCCL's operators on the threads that launch kernels.
    """
    run = flight.run
    if run is None or flight.expected is None:
        return
    if run.category != "kernel":
        _call_it(run, flight.kind)
        return
    for event in of_nccl:
        inside = flight.launch.start <= event.start and event.end <= flight.launch.end
        if inside and event.thread == flight.launch.thread:
            _call_it(event, flight.kind)
            event.raw["args"]["External id"] = run.args.get("External id")


def _call_it(event: Event, kind: str) -> None:
    known = f"{event.name.partition(':')[0]}:{_PLUGIN_NAMES[kind]}"
    if known != event.name:
        event.raw["name"] = known
        event.raw["args"] = {**event.args, "recorded as": event.name}


def _graphs(events: Sequence[Event], heard: Sequence[Heard]) -> Iterator[dict[str, Any]]:
    """Yield a range for each call of a graph. The call is the event around the graph's mark, named "## Call ..."."""
    calls: dict[object, list[Event]] = {}
    for event in events:
        mark = mark_of(event.name, heard)
        if event.name.startswith("## Call CompiledFxGraph"):
            calls.setdefault(event.thread, []).append(event)
        elif mark is not None and mark.stage != EAGER:
            around = [one for one in calls.get(event.thread, ()) if one.end >= event.end]
            if around:
                planned = {"planned_us": _us(mark.planned_s), "planned_exposed_us": _us(mark.planned_exposed_s)}
                args = {KEY: GRAPH, "stage": mark.stage, **planned}
                yield _range(f"FSDP::{mark.stage} graph", args, *_place(around[-1]))


class _Lanes:
    """The rows of a trace viewer: collectives that are in flight at the same time get different rows."""

    def __init__(self, pid: Any) -> None:
        self._pid = pid
        self._ends: list[float] = []

    def add(self, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
        """Return a range in the first row that is free."""
        free = (lane for lane, until in enumerate(self._ends) if until <= start)
        lane = next(free, len(self._ends))
        self._ends[lane : lane + 1] = [end]
        return _range(name, args, start, end, self._pid, _FIRST_LANE + lane)

    def names(self) -> Iterator[dict[str, Any]]:
        for lane in range(len(self._ends)):
            what = {"ph": "M", "pid": self._pid, "tid": _FIRST_LANE + lane, "ts": 0}
            yield {**what, "name": "thread_name", "args": {"name": f"fsdp_compile: collectives {lane}"}}
            yield {**what, "name": "thread_sort_index", "args": {"sort_index": _FIRST_LANE + lane}}


def _range(name: str, args: dict[str, Any], start: float, end: float, pid: Any, thread: Any) -> dict[str, Any]:
    when = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": "user_annotation", "name": name, **when, "pid": pid, "tid": thread, "args": args}


def _place(event: Event) -> tuple[float, float, Any, Any]:
    """Return when and where a range stands that begins and ends with an event."""
    return event.start, event.end, event.raw.get("pid"), event.thread


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6
