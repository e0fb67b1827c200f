"""What a test looks at beside numbers: collectives as ops and on the wire, and the graphs that the passes see."""

from __future__ import annotations

import operator
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import inspect
from fsdp_compile._torch_compat import inductor
from fsdp_compile.core.unit import units_in
from fsdp_compile.eager.running import running
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import GraphRecord, Plan
from fsdp_compile.passes.cost.memory import GraphMemory, Lifetime, lives_of

GATHER, REDUCE, WAIT = "all_gather_into_tensor", "all_to_all_single", "wait_tensor"
NO_COLLECTIVES = (WAIT, "unshard", "reduce_grad", "sum_of_parts", "pack", "copied")


class Collectives(TorchDispatchMode):
    """Counts collectives by name, in order, with the elements that each was given: those of eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].removesuffix("_out")
        if func.namespace in ("fsdpc", "_c10d_functional") and name not in NO_COLLECTIVES:
            self.seen.append((name, args[0].numel()))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(seen == name for seen, _ in self.seen)

    def clear(self) -> None:
        self.seen.clear()


class Wire:
    """What this rank asks the process group for, whoever asks: each launch with its sizes, in order, and their count.

    It is read from torch's flight recorder, whose length tests/ranks.py sets. A profiler that stops while gloo's
    threads still record has ended a process now and then.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any]] = []
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Wire:
        self._seen = max((entry["record_id"] for entry in _flight_record()), default=-1)
        return self

    def __exit__(self, *error: Any) -> None:
        entries = _flight_record()
        assert all(entry["record_id"] <= self._seen + 1 for entry in entries[:1]), "more launches than the recorder holds"
        for entry in entries:
            if entry["record_id"] <= self._seen:
                continue
            name = entry["profiling_name"]
            self.launches.append((name, entry["input_sizes"]))
            kind = next((kind for kind in ("gather", "all_to_all", "reduce_scatter", "all_reduce") if kind in name), "")
            if kind:
                self.calls[kind] += 1

    @property
    def reductions(self) -> int:
        return self.calls["all_to_all"] + self.calls["reduce_scatter"] + self.calls["all_reduce"]


def _flight_record() -> list[Any]:
    """What process groups were asked for of late, the oldest first (``_dump_fr_trace``: 2.11 to 2.15)."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))["entries"]
    return sorted(entries, key=operator.itemgetter("record_id"))


def let_threads_rest() -> None:
    """Wait until no other thread of this process runs: before a profiler stops.

    gloo's record for a moment after their work is done, and must not write where nothing is any more.
    """
    deadline, rested = time.monotonic() + 5, 0
    while rested < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
        rested = 0 if _others_run() else rested + 1


def _others_run() -> bool:
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if int(task.name) != threading.get_native_id() and (task / "stat").read_text().rpartition(") ")[2][0] == "R":
                return True
    return False


@contextmanager
def recorded(seen: Any = None) -> Iterator[Any]:
    """The graphs that the passes see inside the block, where no graph comes from a cache: on a hit no pass runs.

    A list of GraphRecord, or ``seen`` with each one appended.
    """
    seen = [] if seen is None else seen
    manager.observers.append(seen.append)
    try:
        with inductor.no_compile_caches():
            yield seen
    finally:
        manager.observers.remove(seen.append)


class NoMarkers(list[Any]):
    """Graphs with markers that compiled; the passes see no others."""


@contextmanager
def no_markers() -> Iterator[None]:
    """A block in which no graph with markers compiles."""
    with recorded(NoMarkers()) as seen:
        yield
    assert not seen, f"{len(seen)} graphs gather for themselves"


@contextmanager
def plans_made() -> Iterator[list[Plan]]:
    """The plan of each step that is compiled inside the block, or comes from a cache."""
    plans: list[Plan] = []

    def observe(record: GraphRecord) -> None:
        if record.stage == "joint":
            plans.append(record.plan)

    manager.observers.append(observe)
    try:
        yield plans
    finally:
        manager.observers.remove(observe)


def planned(model: Any, batch: Tensor | None = None, backend: Any = "aot_eager") -> Plan:
    """The plan of a step that is compiled into one graph and taken; it leaves no gradients."""
    torch._dynamo.reset()
    with inspect(model) as report:
        run = torch.compile(model, backend=backend, fullgraph=True)
        run(torch.arange(10).view(2, 5) if batch is None else batch).sum().backward()
    model.zero_grad()
    return report.joint.plan


def lifetimes(graph: fx.Graph) -> list[Lifetime]:
    """The lifetimes of a graph's storages, if it runs node by node."""
    return lives_of(graph.nodes, GraphMemory.of(graph, fused=False))


def held_bytes(model: Any) -> int:
    """Bytes of gathered parameters that are there now."""
    gathered = [run.gathered for run in map(running, units_in(model)) if run.gathered is not None]
    return sum(full.untyped_storage().nbytes() for one in gathered for full in one.fulls or () if full is not None)
