"""Turn a report into the data that a page and a trace are made of: plain lists, numbers and names (page/picture.py)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence

import torch

from ..page.picture import (
    Picture,
    PicturedChanges,
    PicturedCollective,
    PicturedGraph,
    PicturedMemory,
    PicturedStep,
    PicturedWork,
)
from ..passes import GraphRecord
from ..passes.cost.memory import weigh
from ..passes.cost.owners import RETURNED, MemoryOwners, Owned, module_of, owners_of, saved_kinds
from ..passes.cost.predicted import PredictedGraph
from ..passes.ir.meta import ROLE
from ..passes.wire.streams import TO_DEVICE, TO_HOST
from .collectives import collectives_of
from .graph_code import node_lines
from .predicted import StepRecords
from .tables import format_dtype, format_unit

_CONTEXT = 3  # lines around what a pass changed
_MOST_LINES = 4000  # of one difference, so that a page of 100 blocks opens at once


def pictured(model: str, steps: Sequence[StepRecords], notes: Sequence[str]) -> Picture:
    """Return the picture of all steps of a report."""
    found = [one for number, step in enumerate(steps) if (one := _step(step, number)) is not None]
    return Picture(model, torch.__version__.partition("+")[0], tuple(notes), tuple(found))


def _step(step: StepRecords, number: int) -> PicturedStep | None:
    if not step.graphs:
        return PicturedStep(f"step {number + 1}", differences=tuple(_differences(step)))
    predicted = step.predicted()
    graphs, start_s = [], 0.0
    for one, record, owners in zip(predicted.graphs, step.graphs, step_owners(step), strict=True):
        graphs.append(_graph(one, record, owners, start_s))
        start_s += one.seconds
    trained = step.joint is not None or any(record.plan.reduces for record in step.graphs)
    plan = step.joint.plan if step.joint is not None else step.graphs[0].plan
    return PicturedStep(
        name=f"step {number + 1}" if trained else f"forward without gradients, {number + 1}",
        profile=predicted.profile,
        seconds=predicted.seconds,
        exposed_s=predicted.exposed_s,
        peak_bytes=predicted.peak_bytes,
        held_bytes=predicted.held_bytes,
        graphs=tuple(graphs),
        params=tuple((fqn, one.becomes, one.why) for fqn, one in predicted.residency.items()),
        choice="" if plan.choice is None else str(plan.choice),
        plan=json.loads(plan.to_json()),
        plan_id=plan.id,
        differences=tuple(_differences(step)),
    )


def step_owners(step: StepRecords) -> list[MemoryOwners]:
    """Return who holds memory in each graph of a step. What forward's callers hold is alive in backward as well."""
    graphs = [one.snapshots[-1] for one in step.graphs]
    if len(graphs) < 2:
        return [owners_of(graphs[0], step.graphs[0].plan)]
    (forward, backward), (its_plan, then) = graphs, [one.plan for one in step.graphs]
    weight = weigh(forward, backward)
    first = owners_of(forward, its_plan)
    saved = saved_kinds(forward, its_plan, backward)
    returned = Owned("output", "", RETURNED, weight.returned_bytes)
    held = (*first.callers, *([returned] if returned.num_bytes else []))
    return [first, owners_of(backward, then, weight.given_up, saved, held)]


def _graph(predicted: PredictedGraph, record: GraphRecord, owners: MemoryOwners, start_s: float) -> PicturedGraph:
    graph = record.snapshots[-1]
    nodes = {node.name: node for node in graph.nodes}
    compute = []
    for span in predicted.timeline.compute:
        if span.end_s <= span.start_s:
            continue
        node = nodes[span.name]
        operator = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
        lane = "copy" if ROLE in node.meta else "compute"
        begin_s, end_s = start_s + span.start_s, start_s + span.end_s
        compute.append(PicturedWork(span.name, operator, module_of(node), begin_s, end_s, lane))
    collectives = tuple(
        PicturedCollective(
            one.kind, format_unit(one.unit), one.fqns, format_dtype(one.dtype), one.num_bytes,
            launch.bucket_bytes, one.group, start_s + one.launched_s, start_s + one.start_s,
            start_s + one.end_s, start_s + one.waited_s, one.seconds, one.beside_s, one.exposed_s, one.cause,
            one.verdict, (one.launched_behind, one.launched_before, one.waited_behind, one.waited_before),
        )
        for one, launch in zip(predicted.collectives, collectives_of(graph, record.plan), strict=True)
    )  # fmt: skip
    return PicturedGraph(
        predicted.stage, start_s, predicted.seconds, predicted.exposed_s, tuple(compute), collectives,
        _others(predicted, start_s), _memory(predicted, owners, start_s),
    )  # fmt: skip


def _others(predicted: PredictedGraph, start_s: float) -> tuple[PicturedWork, ...]:
    """Return the model's own collectives, and copies to and from the host."""
    ours = {one.launch for one in predicted.collectives}
    spans = [(group, span) for group, spans in predicted.timeline.groups.items() for span in spans]
    return tuple(
        PicturedWork(span.name, _what(group), "", start_s + span.start_s, start_s + span.end_s, group)
        for group, span in spans
        if span.name not in ours
    )


def _what(lane: str) -> str:
    return "copy of an activation or a gradient" if lane in (TO_HOST, TO_DEVICE) else "collective of the model"


def _memory(predicted: PredictedGraph, owners: MemoryOwners, start_s: float) -> PicturedMemory:
    at = tuple(start_s + point.at_s for point in predicted.timeline.memory)
    alive = owners.alive
    peak = alive.index(max(alive)) if alive else 0
    return PicturedMemory(
        at=at,
        of_kind={kind: levels for kind, levels in owners.of_kind.items() if any(levels)},
        peak_s=at[peak] if at else start_s,
        peak_at=owners.peak_at if at else "",
        peak_bytes=max(alive, default=0),
        owners=tuple(owners.peak),
    )


def _differences(step: StepRecords) -> Iterator[PicturedChanges]:
    for record in step.records:
        lines = [node_lines(record, place) for place in range(len(record.snapshots))]
        for place, one in enumerate(record.passes):
            changed = _changed(lines[place], lines[place + 1])
            more = max(len(changed) - _MOST_LINES, 0)
            yield PicturedChanges(record.stage, one.name, one.count, one.seconds, tuple(changed[:_MOST_LINES]), more)


def _changed(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return lines of a diff: they begin with "-", "+", " ", or "@" where some are left out."""
    lines = difflib.unified_diff(before, after, n=_CONTEXT, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++"))]
