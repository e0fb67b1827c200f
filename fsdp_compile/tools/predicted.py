"""Predict inspected steps: find which graphs make one step, and print the table of its collectives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..passes import GraphRecord, HardwareProfile, Prediction, load_profile
from ..passes.budget.budget import default_profile
from ..passes.cost.predicted import PredictedGraph, predict
from ..passes.cost.replay import as_ms
from ..passes.cost.roofline import Group
from ..passes.ir.provenance import find_unshards, reduce_nodes, unshard_nodes
from ..passes.schedule.reasons import Residency, residency_of, residency_of_whole
from .tables import table

_WHYS = 3  # so many exposed collectives are explained, the longest ones


@dataclass
class StepRecords:
    """The records of graphs that run one after the other."""

    joint: GraphRecord | None = None
    graphs: list[GraphRecord] = field(default_factory=list)

    @property
    def records(self) -> list[GraphRecord]:
        return [*([self.joint] if self.joint else []), *self.graphs]

    def predicted(self, profile: HardwareProfile | str | Path | None = None) -> Prediction:
        """Predict the step on ``profile``; by default on the budget's profile, else on the device's built-in one."""
        if profile is None:
            return self._by_default
        if not self.graphs:
            raise LookupError(
                "a step is predicted from the graphs that are cut from its joint graph, and none was recorded: compile "
                "on Inductor, and run backward in the block as well."
            )
        where = profile if isinstance(profile, HardwareProfile) else load_profile(profile)
        pairs = [(one.snapshots[-1], one.plan) for one in self.graphs]
        choice = None if self.joint is None else self.joint.plan.choice
        budget_bytes = None if choice is None else choice.budget_bytes
        groups = {name: Group.of(ranks, where) for one in self.graphs for name, ranks in one.ranks.items()}
        return predict(pairs, where, groups, self.residency, budget_bytes)

    @functools.cached_property
    def _by_default(self) -> Prediction:
        planned_by = next((one.profile for one in self.records if one.profile is not None), None)
        return self.predicted(planned_by or default_profile(_device_of(self.records)))

    @functools.cached_property
    def residency(self) -> dict[str, Residency]:
        """What becomes of each parameter after forward; empty where the joint graph is not known."""
        if self.joint is None:
            return {}
        if self.joint.plan.stage == "whole":
            return residency_of_whole(self.joint.plan)
        before, after = self.joint.snapshots[-2:]
        names = [marker.fqn for marker in find_unshards(after)]
        return residency_of(before, names, self.joint.plan, self.joint.decided_by)


def _device_of(records: Sequence[GraphRecord]) -> torch.device:
    captured = [record.snapshots[0] for record in records]
    marker = next(node for graph in captured for node in (*unshard_nodes(graph), *reduce_nodes(graph)))
    device: torch.device = marker.meta["val"].device
    return device


def steps_of(records: Sequence[GraphRecord]) -> list[StepRecords]:
    """Group graphs into steps, in the order of their compilation.

    Graphs know the plan of their step. Where several steps have one plan, for batches of other sizes, the first forward
    and the first backward belong to the first joint graph.
    """
    steps: list[StepRecords] = []
    waiting: dict[tuple[str, str], list[StepRecords]] = {}
    for record in records:
        if record.stage == "joint":
            steps.append(StepRecords(record))
            for stage in ("forward", "backward", "whole"):
                waiting.setdefault((record.plan.id, stage), []).append(steps[-1])
            continue
        known = waiting.get((record.step, record.stage))
        if known:
            known.pop(0).graphs.append(record)
        else:
            steps.append(StepRecords(graphs=[record]))
    for step in steps:
        step.graphs.sort(key=lambda one: one.stage, reverse=True)  # forward before backward
    return steps


def collectives_table(graph: PredictedGraph) -> list[str]:
    """Return a table of where each launch and each wait stands, then why the most exposed ones are exposed."""
    rows = [
        [
            str(place),
            f"{one.launched_behind} ..",
            f".. {one.waited_before}",
            as_ms(one.seconds),
            as_ms(one.beside_s),
            "hidden" if one.is_hidden else as_ms(one.exposed_s),
        ]
        for place, one in enumerate(graph.collectives)
    ]
    header = ["#", "launched behind", "waited for before", "takes", "beside it", "exposed"]
    lines = table([header, *rows], right=(0, 3, 4, 5))
    exposed = [(place, one) for place, one in enumerate(graph.collectives) if not one.is_hidden]
    exposed.sort(key=lambda found: -found[1].exposed_s)
    return [*lines, *(f"#{place}: {one.why}" for place, one in exposed[:_WHYS])]
