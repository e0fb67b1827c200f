"""Read the annotated traces of a run: steps, collectives, waits and products of each rank.

    folder/
        node0_0.1795435328466417008.pt.trace.json      one for each rank, as torch-tb-profiler wants them
        node0_1.1795435328466434338.pt.trace.json
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..passes import HardwareProfile
from .annotate import COLLECTIVE, GRAPH, KEY
from .record import Event, Interval, load, recorded_events

SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
# Matrix products, and which argument of them is the left factor; the right one follows.
_LEFT_OF = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}


@dataclass(frozen=True)
class Ran:
    """One collective of one rank, in seconds of its record's clock."""

    name: str
    kind: str
    step: int
    stage: str
    ranks: tuple[int, ...]
    num_bytes: int
    parameters: tuple[str, ...]
    start_s: float
    end_s: float
    waited: tuple[Interval, ...]
    is_recorded: bool  # by the backend; else only its launch and its wait are known
    planned_s: float | None
    planned_exposed_s: float | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def exposed_s(self) -> float:
        return sum(end - start for start, end in self.waited)

    @property
    def identity(self) -> tuple[str, str, str, tuple[str, ...]]:
        """A key that is equal for the same collective on another rank or in another step."""
        return self.stage, self.kind, self.name, self.parameters


@dataclass(frozen=True)
class GraphCall:
    """One call of a graph."""

    seconds: float
    planned_s: float | None


@dataclass(frozen=True)
class Product:
    """One matrix product."""

    dtype: str
    flops: float
    interval: Interval


@dataclass(frozen=True)
class Trace:
    """What one rank recorded."""

    path: Path
    rank: int
    world_size: int
    host: str
    backend: str
    device: str
    allows_tf32: bool
    hardware: HardwareProfile
    steps: tuple[Interval, ...]
    collectives: tuple[Ran, ...]  # of these steps, in the order of launch
    calls: tuple[GraphCall, ...]
    products: tuple[Product, ...]

    @property
    def num_steps(self) -> int:
        """The number to divide by for the figures of one step: at least 1."""
        return max(len(self.steps), 1)


def read_folder(folder: str | Path) -> list[Trace]:
    """Read the traces of all ranks that are there, sorted by rank; ValueError unless they are of one run of ours."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder. Give the one that `fsdp-compile profile --out` wrote traces into.")
    paths = sorted(path for path in Path(folder).iterdir() if path.name.endswith(SUFFIXES))
    if not paths:
        raise ValueError(f"{folder} holds no *{SUFFIXES[0]}: give a folder that `fsdp-compile profile` wrote.")
    traces = sorted(map(read_trace, paths), key=lambda one: one.rank)
    for one, other in pairwise(traces):
        if one.rank == other.rank:
            raise ValueError(
                f"{folder} has two traces of rank {one.rank}, {one.path.name} and {other.path.name}: of two runs. Keep "
                "those of one, or profile into a folder of its own."
            )
    return traces


def read_trace(path: Path) -> Trace:
    """Read one trace; ValueError where it has none of our ranges."""
    trace = load(path)
    facts = trace.get(KEY)
    if not isinstance(facts, dict):
        raise ValueError(
            f"{path} has no ranges of fsdp_compile: a profiler of another kind wrote it. Use fsdp_compile.profile, or "
            "`fsdp-compile profile`."
        )
    events = recorded_events(trace)
    steps = [event for event in events if event.is_step][: facts["num_steps"]]
    ours = [event for event in events if event.args.get(KEY) == COLLECTIVE]
    ours.sort(key=lambda event: event.args["launched_us"])
    distributed = trace.get("distributedInfo") or {}
    return Trace(
        path=path,
        rank=facts["rank"],
        world_size=facts["world_size"],
        host=str(trace.get("host_name", "")),
        backend=str(distributed.get("backend", "")),
        device=facts["device"],
        allows_tf32=facts["allows_tf32"],
        hardware=HardwareProfile.from_json(json.dumps(facts["hardware"])),
        steps=tuple((one.start / 1e6, one.end / 1e6) for one in steps),
        collectives=tuple(_ran(event) for event in ours if event.args["step"] is not None),
        calls=tuple(
            GraphCall((event.end - event.start) / 1e6, _s(event.args["planned_us"]))
            for event in events
            if event.args.get(KEY) == GRAPH and any(step.start <= event.start <= step.end for step in steps)
        ),
        products=tuple(_products(events)),
    )


def _ran(event: Event) -> Ran:
    args = event.args
    return Ran(
        name=event.name.removeprefix("FSDP::"),
        kind=args["kind"],
        step=args["step"],
        stage=args["stage"],
        ranks=tuple(args["ranks"]),
        num_bytes=args["bytes"],
        parameters=tuple(args["parameters"]),
        start_s=event.start / 1e6,
        end_s=event.end / 1e6,
        waited=tuple((start / 1e6, end / 1e6) for start, end in args["waited_us"]),
        is_recorded=args["recorded"],
        planned_s=_s(args["planned_us"]),
        planned_exposed_s=_s(args["planned_exposed_us"]),
    )


def _s(us: float | None) -> float | None:
    return None if us is None else us / 1e6


def _products(events: Sequence[Event]) -> Iterable[Product]:
    """Yield matrix products. Where kernels are recorded, the time is that of the kernels that the operator launched."""
    kernels: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.category == "kernel":
            kernels[event.args.get("External id")].append(event)
    for event in events:
        left = _LEFT_OF.get(event.name)
        if left is None:
            continue
        one, other = event.shape(left), event.shape(left + 1)
        flops = 2.0 * math.prod(one) * other[-1] if one and other else 0.0  # multiplications and additions
        ran = kernels.get(event.args.get("External id"), []) if kernels else [event]
        if flops and ran:
            interval = min(one.start for one in ran) / 1e6, max(one.end for one in ran) / 1e6
            yield Product(event.dtype(left), flops, interval)
