"""Mark what this rank issues in the profiler's record, and keep beside the record what each mark stands for.

    ledger    forward of 7 launches        profiler    range "FSDP::forward #0", in front of the graph's launches
              all_gather of layers.1                   range "FSDP::all_gather #1", in front of that one, eagerly

The record says when operators ran, and on what sizes, but not which parameters they carried. The listener keeps these
by the number of the mark. It also keeps the predictions for graphs that compile meanwhile.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._torch_compat import autograd
from .._torch_compat.process_groups import group_ranks
from ..core.unit import Unit, original_class
from ..graph.install import manager
from ..lookout.lookout import lookout
from ..lookout.names import Namer
from ..passes import GraphRecord, HardwareProfile
from ..passes.budget.budget import default_profile
from ..passes.cost.predicted import PredictedGraph
from ..passes.wire.ledger import Called, GraphText, Issued, begin, ledger
from ..tools.predicted import steps_of

EAGER = "eager"  # takes the place of a graph's stage
_MARK = re.compile(r"FSDP::\w+ #(\d+)")


@dataclass(frozen=True)
class Expected:
    """One collective that was issued, or is about to be."""

    kind: str
    group: str
    dtype: str
    num_bytes: int  # that one rank gives to a gather, or gets from a reduction
    parameters: tuple[str, ...]
    planned_s: float | None = None  # with nothing else on the links, where its graph was predicted
    planned_exposed_s: float | None = None
    model: str = ""  # class of the outermost sharded module; with a number from the second of that class on


@dataclass(frozen=True)
class Heard:
    """What one mark stands for: a graph with all its launches, or one launch of the eager path."""

    stage: str
    launches: tuple[Expected, ...]
    planned_s: float | None = None
    planned_exposed_s: float | None = None
    text: GraphText | None = None  # of a graph, by which its plan is found


def mark_of(name: str, heard: Sequence[Heard]) -> Heard | None:
    """Return what the mark with this name stands for; None if the name is not that of a mark."""
    found = _MARK.fullmatch(name)
    return heard[int(found[1])] if found and int(found[1]) < len(heard) else None


class StepListener:
    """Listens to the ledger and to the passes between ``start`` and ``stop``."""

    def __init__(self, hardware: HardwareProfile | None) -> None:
        self.device = torch.device("cpu")  # of the shards that were issued
        # Of each process group, noted at its first use: a script may end its groups before the profile.
        self.ranks: dict[str, tuple[int, ...]] = {}
        self._hardware = hardware
        self._heard: list[Heard] = []
        self._models = _Models()
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # numbers of graphs' marks, by texts and shards
        self._records: list[GraphRecord] = []
        self._namer: Namer | None = None  # made at the first launch, when all modules are sharded

    def start(self) -> None:
        if ledger.hear is not None:
            raise RuntimeError("a profile is recorded in this process already. End it first, or leave this one out.")
        ledger.hear = self._hear
        manager.observers.append(self._records.append)

    def stop(self) -> None:
        """Stop listening; it does nothing where the listener never started."""
        if ledger.hear == self._hear:
            ledger.hear = None
            manager.observers.remove(self._records.append)

    @property
    def hardware(self) -> HardwareProfile:
        """The profile for predictions: the one that was given, else the budget's, else the device's built-in one."""
        planned_by = next((one.profile for one in self._records if one.profile is not None), None)
        return self._hardware or planned_by or default_profile(self.device)

    def heard(self) -> list[Heard]:
        """Return what the marks stand for, in the order of their numbers."""
        predicted = self._predicted()
        return [_planned(one, predicted[one.text]) if one.text in predicted else one for one in self._heard]

    def _hear(self, entry: Issued | Called) -> None:
        if not autograd.profiler_runs():
            return
        namer = self._namer = self._namer or lookout.namer()
        if isinstance(entry, Issued):
            number, stage = self._note(entry, namer), entry.kind
        else:
            number, stage = self._call(entry, namer), entry.text.stage
        with torch.profiler.record_function(f"FSDP::{stage} #{number}"):
            pass

    def _note(self, entry: Issued, namer: Namer) -> int:
        self._see(entry.memory)
        reduces = entry.kind != "all_gather"
        first = entry.specs[0]
        dtype = str(first.reduce_dtype if reduces else first.dtype).removeprefix("torch.")
        num_bytes = sum(spec.reduce_bytes if reduces else spec.gather_bytes for spec in entry.specs)
        self._meet(entry.group)
        link = namer.of_launch(entry)
        unit = entry.unit()
        model = self._models.of(unit.root) if unit is not None else self._models.at(entry.address, namer)
        expected = Expected(entry.kind, entry.group, dtype, num_bytes, link.names, model=model)
        self._heard.append(Heard(EAGER, (expected,)))
        return len(self._heard) - 1

    def _call(self, entry: Called, namer: Namer) -> int:
        text = entry.text
        key = id(text), entry.addresses
        if key not in self._known:
            self._see(*entry.memory)
            self._meet(*text.groups)
            names = {group: iter([link.names for link in links]) for group, links in namer.of_call(entry).items()}
            launches = tuple(
                Expected(one.kind, one.group, one.dtype, one.num_bytes, next(names[one.group]), model=model)
                for one, model in zip(text.launches, self._models.of_call(entry, namer), strict=True)
            )
            self._known[key] = len(self._heard)
            self._heard.append(Heard(text.stage, launches, text=text))
        return self._known[key]

    def _see(self, *memory: object) -> None:
        for storage in memory:
            if isinstance(storage, torch.UntypedStorage):
                self.device = storage.device

    def _meet(self, *groups: str) -> None:
        for group in groups:
            if group not in self.ranks:
                self.ranks[group] = group_ranks(group)

    def _predicted(self) -> dict[GraphText, PredictedGraph]:
        """Return predictions by the texts of graphs, without graphs whose custom operators cannot be predicted."""
        found = {}
        for step in steps_of(self._records):
            try:
                graphs = step.predicted(self.hardware).graphs
            except Exception:  # custom operators may raise anything; the measured part is there all the same
                continue
            for record, graph in zip(step.graphs, graphs, strict=True):
                for node in record.snapshots[-1].find_nodes(op="call_function", target=begin):
                    found[GraphText.loads(str(node.args[1]))] = graph
        return found


class _Models:
    """Names models by class, and the second of a class "Net 2". Ranks issue in one order, so their names agree."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Unit, str] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()

    def of(self, root: Unit) -> str:
        if root not in self._names:
            name = original_class(root.modules[0]).__name__
            self._counts[name] += 1
            self._names[root] = name if self._counts[name] == 1 else f"{name} {self._counts[name]}"
        return self._names[root]

    def of_call(self, called: Called, namer: Namer) -> list[str]:
        """Return the model of each launch. A unit that is only reduced has no shard, so it gets the only model."""
        units = called.text.units
        known = {unit: self.at(address, namer) for unit, address in zip(units, called.addresses)}
        models = set(known.values())
        only = models.pop() if len(models) == 1 else ""
        return [known.get(one.members[0].unit, only) for one in called.text.launches]

    def at(self, address: int, namer: Namer) -> str:
        """Return the model of the parameter whose shard is at ``address``; empty where it is not known."""
        unit = namer.at(address)
        return "" if unit is None else self.of(unit.root)


def _planned(heard: Heard, graph: PredictedGraph) -> Heard:
    """Return the mark of a graph, with what was predicted for it."""
    launches = tuple(
        dataclasses.replace(one, planned_s=its.seconds, planned_exposed_s=its.exposed_s)
        for one, its in zip(heard.launches, graph.collectives, strict=True)
    )
    return dataclasses.replace(
        heard, launches=launches, planned_s=graph.seconds, planned_exposed_s=graph.exposed_s
    )
