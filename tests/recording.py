"""What a test looks at beside numbers: collectives as ops and on the wire, and the graphs that the passes see."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile._torch_compat import inductor
from fsdp_compile.graph.install import manager

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
    """What this rank asks the process group for, whoever asks: each launch with its sizes, in order, and their count."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any]] = []
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Wire:
        cpu = torch.profiler.ProfilerActivity.CPU
        self._profile = torch.profiler.profile(activities=[cpu], record_shapes=True).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # gloo's threads record for a moment after their work is done, and must not write where nothing is any more.
        time.sleep(0.05)
        self._profile.__exit__(*error)
        for event in sorted(self._profile.events() or (), key=lambda event: event.time_range.start):
            if not event.name.startswith("c10d::"):
                continue
            self.launches.append((event.name, event.input_shapes))
            kind = next(
                (kind for kind in ("gather", "alltoall", "reduce_scatter", "allreduce") if kind in event.name), ""
            )
            if kind:
                self.calls[kind] += 1

    @property
    def reductions(self) -> int:
        return self.calls["alltoall"] + self.calls["reduce_scatter"] + self.calls["allreduce"]


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
