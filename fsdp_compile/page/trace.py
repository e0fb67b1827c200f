"""A planned step in Chrome's trace format, which Perfetto and chrome://tracing open.

    process "step 1"    thread compute       mm     mm_1    ..waiting..   mm_2
                        thread group 0       |-all_gather layers.1-|
                        counter memory       shards, gathered, activations, ...
    an arrow from where a collective is launched to where it is waited for
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..passes.ir.plan import named
from .picture import Picture, PicturedCollective, PicturedGraph, PicturedStep

_EIGHTHS = 8e6  # eighths of a microsecond in a second
_GRAPHS, _COMPUTE, _FIRST_GROUP = 1, 2, 10  # threads, in the order in which they are shown


def trace_events(picture: Picture) -> dict[str, Any]:
    """Return the file as an object for ``json.dump``."""
    events: list[dict[str, Any]] = []
    for process, step in enumerate(picture.steps, 1):
        events += _step(step, process, f"{picture.model}, {step.name}, planned")
    about = {"model": picture.model, "torch": picture.torch, "made by": "fsdp_compile"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _step(step: PicturedStep, process: int, name: str) -> Iterator[dict[str, Any]]:
    yield _named("process", process, 0, name)
    for thread, title in ((_GRAPHS, "graphs"), (_COMPUTE, "compute")):
        yield _named("thread", process, thread, title)
        yield _sorted(process, thread)
    lanes: dict[str, int] = {}
    for graph in step.graphs:
        for group in (*[one.group for one in graph.collectives], *[one.lane for one in graph.others]):
            if group not in lanes:
                lanes[group] = _FIRST_GROUP + len(lanes)
                yield _named("thread", process, lanes[group], f"communication, group {group}")
                yield _sorted(process, lanes[group])
    flow = 0
    for graph in step.graphs:
        yield _span(process, _GRAPHS, graph.stage, "graph", graph.start_s, graph.start_s + graph.seconds, {
            "exposed ms": graph.exposed_s * 1e3
        })  # fmt: skip
        for work in graph.compute:
            about = {"node": work.name, "module": work.module}
            yield _span(process, _COMPUTE, work.operator, work.lane, work.start_s, work.end_s, about)
        for one in graph.others:
            yield _span(process, lanes[one.lane], one.operator, "model", one.start_s, one.end_s, {"node": one.name})
        for sent in graph.collectives:
            flow += 1
            yield from _collective(sent, process, lanes[sent.group], process * 1_000_000 + flow)
        yield from _memory(graph, process)


def _collective(one: PicturedCollective, process: int, lane: int, flow: int) -> Iterator[dict[str, Any]]:
    about = {
        "parameters": list(one.fqns), "unit": one.unit, "dtype": one.dtype, "bytes a rank": one.num_bytes,
        "bucket bytes": one.bucket_bytes, "exposed ms": one.exposed_s * 1e3, "verdict": f"{one.cause}: {one.verdict}",
    }  # fmt: skip
    name = f"{one.kind} {named(one.fqns)}"
    yield _span(process, lane, name, one.kind, one.start_s, one.end_s, about)
    if one.exposed_s:
        yield _span(process, _COMPUTE, f"wait for {name}", "wait", one.end_s - one.exposed_s, one.end_s, about)
    arrow = {"cat": "collective", "name": one.kind, "pid": process, "id": flow}
    yield {**arrow, "ph": "s", "tid": lane, "ts": _us(one.start_s)}
    yield {**arrow, "ph": "f", "bp": "e", "tid": _COMPUTE, "ts": _us(max(one.waited_s, one.end_s))}


def _memory(graph: PicturedGraph, process: int) -> Iterator[dict[str, Any]]:
    """Yield the bytes alive as one counter with a part for each kind, where any part changes."""
    last: tuple[int, ...] = ()
    kinds = list(graph.memory.of_kind)
    for at_s, *levels in zip(graph.memory.at, *graph.memory.of_kind.values()):
        if tuple(levels) != last:
            last = tuple(levels)
            counted = {"ph": "C", "pid": process, "name": "memory (bytes)", "ts": _us(at_s)}
            yield {**counted, "args": dict(zip(kinds, levels))}


def _span(
    process: int, thread: int, name: str, category: str, start_s: float, end_s: float, about: dict[str, Any]
) -> dict[str, Any]:
    where = {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category}
    return {**where, "ts": _us(start_s), "dur": _us(end_s) - _us(start_s), "args": about}


def _us(seconds: float) -> float:
    """Convert to microseconds, the format's unit, in eighths: each is a whole number of nanoseconds, exact in binary.

    Perfetto counts whole nanoseconds. Where one operator ends as the next begins, a fraction would make them overlap by
    one nanosecond, and Perfetto drops the second of two that overlap.
    """
    return round(seconds * _EIGHTHS) / 8


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": f"{what}_name", "args": {"name": name}}


def _sorted(process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
