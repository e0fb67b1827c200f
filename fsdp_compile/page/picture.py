"""The plain data of a step that a page and a trace show: seconds from the begin of the step, bytes of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..passes.cost.owners import Owned


@dataclass(frozen=True)
class PicturedWork:
    """Work of this rank, or a collective that is not ours."""

    name: str
    operator: str
    module: str  # the module whose code it is; may be empty
    start_s: float
    end_s: float
    lane: str  # "compute", "copy" for packing and unpacking, or a process group


@dataclass(frozen=True)
class PicturedCollective:
    """One collective of ours."""

    kind: str
    unit: str
    fqns: tuple[str, ...]
    dtype: str  # on the wire
    num_bytes: int  # one rank's part
    bucket_bytes: int  # all ranks' parts
    group: str
    launched_s: float
    start_s: float
    end_s: float
    waited_s: float
    seconds: float
    beside_s: float
    exposed_s: float
    cause: str
    verdict: str
    places: tuple[str, str, str, str]  # the nodes behind and before its launch, and behind and before its wait


@dataclass(frozen=True)
class PicturedMemory:
    """The bytes alive at each event, by kind, and the storages that make the peak."""

    at: tuple[float, ...]
    of_kind: Mapping[str, tuple[int, ...]]
    peak_s: float
    peak_at: str
    peak_bytes: int
    owners: tuple[Owned, ...]  # largest first


@dataclass(frozen=True)
class PicturedGraph:
    """Forward, backward, or the one graph that there is."""

    stage: str
    start_s: float
    seconds: float
    exposed_s: float
    compute: tuple[PicturedWork, ...]
    collectives: tuple[PicturedCollective, ...]
    others: tuple[PicturedWork, ...]  # collectives that are not ours
    memory: PicturedMemory


@dataclass(frozen=True)
class PicturedChanges:
    """The changes that one pass made to one graph."""

    stage: str
    name: str
    count: int
    seconds: float
    lines: tuple[str, ...]  # begin with "-", "+", " ", or "@" where some are left out
    num_left_out: int = 0


@dataclass(frozen=True)
class PicturedStep:
    """One step, or one forward without gradients; a step that was not lowered has no graphs."""

    name: str
    profile: str = ""
    seconds: float = 0.0
    exposed_s: float = 0.0
    peak_bytes: int = 0
    held_bytes: int = 0
    graphs: tuple[PicturedGraph, ...] = ()
    params: tuple[tuple[str, str, str], ...] = ()  # name, what becomes of it after forward, why
    choice: str = ""  # what a budget chose
    plan: Mapping[str, Any] = field(default_factory=dict)
    plan_id: str = ""
    differences: tuple[PicturedChanges, ...] = ()


@dataclass(frozen=True)
class Picture:
    """All the data of a report."""

    model: str
    torch: str  # version
    notes: tuple[str, ...]
    steps: tuple[PicturedStep, ...]
