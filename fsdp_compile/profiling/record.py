"""Read the profiler's record of one rank, as exported (Kineto's JSON): operators by name, time, thread and sizes.

    {"ph": "X", "cat": "cpu_op", "name": "fsdpc::all_gather_into_tensor", "ts": us, "dur": us, "tid": thread,
     "args": {"Input Dims": [[512, 256], [], []], "Input type": ["float", "Scalar", ""], "Concrete Inputs": ["", "2"]}}
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Kineto's names of dtypes, each with torch's name and the bytes of an element. Of a list it does not say the dtype.
DTYPES = {
    "float": ("float32", 4), "double": ("float64", 8), "c10::BFloat16": ("bfloat16", 2), "c10::Half": ("float16", 2),
    "unsigned char": ("uint8", 1), "signed char": ("int8", 1), "int": ("int32", 4), "long int": ("int64", 8),
    "long": ("int64", 8), "bool": ("bool", 1), "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1), "c10::complex<float>": ("complex64", 8),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Event:
    """An event with a duration."""

    name: str
    category: str
    start: float  # us
    end: float
    thread: Any
    args: dict[str, Any] = field(repr=False)
    raw: dict[str, Any] = field(repr=False)

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the profiler on the CPU. Each stream of a GPU has a range of its own for the step."""
        return self.category == "user_annotation" and self.name.startswith("ProfilerStep#")

    def shape(self, place: int = 0) -> list[Any]:
        """Return the shape of an argument; for a list of tensors, the shape of each."""
        dims = self.args.get("Input Dims") or []
        return dims[place] if place < len(dims) else []

    def dtype(self, place: int = 0) -> str:
        """Return the dtype of an argument, if it is recorded."""
        types = self.args.get("Input type") or []
        return DTYPES.get(types[place], ("", 0))[0] if place < len(types) else ""

    def elements(self) -> list[int]:
        """Return the elements of the first argument, or of each tensor in it."""
        shape = self.shape()
        return [math.prod(one) for one in shape] if shape and isinstance(shape[0], list) else [math.prod(shape)]


def load(path: Path) -> dict[str, Any]:
    """Load a trace, compressed by gzip or not; ValueError for anything else."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            found = json.loads(file.read(), strict=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a trace ({error}). Profile again, or remove the file.") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError(f"{path} is no trace: it has no traceEvents. Profile again, or remove the file.")
    return found


def recorded_events(trace: dict[str, Any]) -> list[Event]:
    """Return all events with a duration, sorted by start; an event that contains others stands before them."""
    found = [
        Event(
            str(one["name"]), str(one.get("cat", "")), float(one["ts"]), float(one["ts"]) + float(one.get("dur", 0)),
            one.get("tid"), one.get("args") or {}, one,
        )
        for one in trace["traceEvents"]
        if one.get("ph") == "X"
    ]  # fmt: skip
    found.sort(key=lambda event: (event.start, -event.end))
    return found


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into sorted ones that neither touch nor overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def without(interval: Interval, taken: Iterable[Interval]) -> list[Interval]:
    """Return the parts of an interval that are not in ``taken``, a union."""
    left, at = [], interval[0]
    for start, end in taken:
        if end <= at or start >= interval[1]:
            continue
        if start > at:
            left.append((at, start))
        at = max(at, end)
    if at < interval[1]:
        left.append((at, interval[1]))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
