"""Explain the planned time and memory of a step, for each parameter and each collective.

    print(fsdp_compile.explain(model, batch))      #3 0.412 ms, because of the order: launched earlier (...) ... less
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import dynamo
from ..api.fitting import listed
from ..core.containers import tensors_in
from ..passes import Bucket, GraphRecord, HardwareProfile, ParamSpec
from ..passes.cost.predicted import PredictedGraph
from ..passes.ir.meta import ROLE, Role
from ..passes.ir.provenance import Marker, find_unshards, whole_of
from ..passes.schedule.buckets import gather_key, reduce_key
from ..passes.schedule.neighbours import neighbours_among
from ..passes.wire.layout import NEIGHBOURS, bucket_limits
from .breaks import BreakReport, watching
from .explained import ExplainedBucket, ExplainedMemory, ExplainedParameter, ExplainedStep, Explanation
from .inspect import Report, inspect
from .pictured import step_owners
from .predicted import StepRecords, steps_of
from .tables import format_bytes, format_dtype, format_unit, plural
from .trial import module_given, trial

# What the members of a bucket may have to have in common, each with the words for it.
_CALLED = {
    "group": "process group", "num_shards": "number of shards", "replicate_group": "group of replicas",
    "num_replicas": "number of replicas", "dtype": "dtype on the wire", "reduce_dtype": "dtype on the wire",
    "reduce_op": "operator", "predivide": "divisor", "postdivide": "divisor", "device": "place",
    "grad_dtype": "dtype of the gradients", "reduction": "reduction", "bucketing": "bucketing",
}  # fmt: skip


def explain(
    model: nn.Module,
    *args: Any,
    profile: HardwareProfile | str | Path | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Run ``model(*args, **kwargs)`` and its backward once, compiled, and explain the predicted time and memory.

    Every rank must call it. Backward begins at ``loss(output)``, or without ``loss`` at the sum of all output tensors
    that require gradients; under ``no_grad`` there is no backward. Gradients, and those that earlier micro-batches held
    back, running statistics and random number generators are afterwards as before, and no post-accumulate-grad hook
    runs. Code that was compiled before is compiled afresh, and a model without compiled code runs under
    ``torch.compile``. ``profile`` names hardware other than the plan's.
    """
    whole = module_given(model, "explain")
    is_compiled = whole is not model or any(dynamo.is_compiled(module) for module in whole.modules())
    run = model if is_compiled else torch.compile(model)
    breaks = BreakReport()
    with trial(whole), inspect(whole) as report, watching(whole, breaks):
        output = _called(run, args, kwargs)
        if torch.is_grad_enabled():
            total = _total(output) if loss is None else loss(output)
            if total is not None:
                total.backward()
    steps = [_explained(step, profile) for step in steps_of(report.records) if step.graphs]
    return Explanation(report.model, tuple(steps), tuple(_eagerly(report, breaks)), breaks, report)


def _called(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model. Where that raises TypeError for a lone dict, add a note that its items may be keywords."""
    try:
        return run(*args, **kwargs)
    except TypeError as error:
        if sys.version_info >= (3, 11) and len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            error.add_note(
                "explain gave the model a dict as its one argument. Where forward takes what is in it as keywords, "
                "call explain(model, **batch)."
            )
        raise


def _total(output: Any) -> Tensor | None:
    leaves = [one for one in tensors_in(output) if one.requires_grad]
    return sum((one.sum() for one in leaves[1:]), leaves[0].sum()) if leaves else None


def _explained(step: StepRecords, profile: HardwareProfile | str | Path | None) -> ExplainedStep:
    predicted = step.predicted(profile)
    markers = _markers(step)
    specs = {fqn: marker.spec for fqn, marker in markers.items()}
    halves = zip(predicted.graphs, step.graphs, strict=True)
    buckets = [bucket for graph, record in halves for bucket in _buckets(graph, record, specs)]
    parameters = [
        ExplainedParameter(
            fqn=fqn,
            unit=format_unit(marker.unit),
            dtype=format_dtype(marker.spec.dtype),
            num_bytes=marker.spec.gather_bytes,
            reduce_dtype=format_dtype(marker.spec.reduce_dtype),
            becomes=predicted.residency[fqn].becomes if fqn in predicted.residency else "",
            why=predicted.residency[fqn].why if fqn in predicted.residency else "",
            buckets=tuple(one for one in buckets if fqn in one.launch.fqns),
        )
        for fqn, marker in markers.items()
    ]
    memory = [
        ExplainedMemory(graph.stage, tuple(point.at_s for point in graph.timeline.memory), owners)
        for graph, owners in zip(predicted.graphs, step_owners(step), strict=True)
    ]
    again = () if step.joint is None else step.joint.plan.recompute
    return ExplainedStep(predicted, tuple(buckets), tuple(parameters), tuple(memory), again)


def _markers(step: StepRecords) -> dict[str, Marker]:
    """Return an unshard marker of each parameter, from the earliest graph that has one, by its name in the plan."""
    graphs = [step.joint.snapshots[-1]] if step.joint is not None else [one.snapshots[0] for one in step.graphs]
    found = [marker for graph in reversed(graphs) for marker in find_unshards(graph)]
    return {marker.fqn: marker for marker in found if whole_of(marker.node) is None}  # else it gathers slices


def _buckets(graph: PredictedGraph, record: GraphRecord, specs: Mapping[str, ParamSpec]) -> Iterator[ExplainedBucket]:
    """Yield the collectives of one graph in the order of launch, each with the reason why its bucket stands apart."""
    roles: dict[str, Role] = {node.name: node.meta[ROLE] for node in record.snapshots[-1].nodes if ROLE in node.meta}
    for one in graph.collectives:
        role = roles[one.launch]
        apart = why_apart(role.kind, record.plan.buckets(role.kind), role.bucket, specs)
        yield ExplainedBucket(graph.stage, one, apart)


def _eagerly(report: Report, breaks: BreakReport) -> list[str]:
    """Return what ran outside of graphs, and why, as lines."""
    said = []
    for one in breaks.breaks:
        modules = ", ".join(one.modules) or "code of no module"
        said.append(f"{modules}, {one.where}: {one.reason}")
    for module, names in breaks.eager_reads.items():
        said.append(f"{module} reads {', '.join(names)} outside of any graph: the eager path gathers it there")
    if report.around:
        units = listed([one.unit for one in report.around.values()], most=4)
        count = plural(len(report.around), "unit")
        how = "compiled by themselves, or in parts"
        said.append(f"the collectives of {count} ({units}): {how}, the eager path gathers around them")
    if not any(graph.stage != "joint" for graph in report.graphs) and not report.around:
        said.append(f"all collectives: {report.notes[-1]}")
    return said


def why_apart(kind: str, buckets: Sequence[Bucket], place: int, specs: Mapping[str, ParamSpec]) -> str:
    """Return why the bucket at ``place`` is not merged with the next one to be launched; empty for the last one.

    ``kind`` is "gather" or "reduce".
    """
    if place + 1 >= len(buckets):
        return ""
    one, other = buckets[place : place + 2]
    if one.phase != other.phase:
        return "the next is of another phase of the step"
    has_specs = one.fqns[0] in specs and other.fqns[0] in specs
    unlike = _unlike(kind, one, other, specs) if has_specs else ""
    if one.unit != other.unit:
        does = "be whole" if kind == "gather" else "wait"
        may = has_specs and not unlike and _could_be_neighbours(kind, buckets, one, other, specs)
        allowed = ", which bucketing='neighbours' allows" if may else ""
        return f"the next is of another unit: together one would {does} a unit longer{allowed}"
    if unlike or not has_specs:
        return unlike
    a = specs[one.fqns[0]]
    return f"together they would have more than {format_bytes(bucket_limits(a.backend, a.num_shards).bucket_bytes)}"


def _unlike(kind: str, one: Bucket, other: Bucket, specs: Mapping[str, ParamSpec]) -> str:
    """Return what keeps two buckets apart besides their units and sizes; empty if nothing does."""
    a, b = specs[one.fqns[0]], specs[other.fqns[0]]
    key = gather_key if kind == "gather" else reduce_key
    for name, called in _CALLED.items():
        if key(b) != key(dataclasses.replace(b, **{name: getattr(a, name)})):
            values = getattr(b, name), getattr(a, name)
            its, mine = [format_dtype(value) if "dtype" in name else repr(value) for value in values]
            return f"the next has another {called}: {its}, not {mine}"
    if key(a) != key(b):
        return "the weight of an embedding is gathered apart: forward reads it first"
    if one.num_ranks != other.num_ranks:  # one of them is gathered from slices, and specs do not describe those
        return f"the next has another process group: {other.num_ranks} ranks, not {one.num_ranks}"
    if a.bucketing == "none":
        return "bucketing='none': each parameter has a collective of its own"
    limits = bucket_limits(a.backend, a.num_shards)
    for bucket in (one, other):
        num_bytes = bucket.num_bytes * bucket.num_ranks
        if len(bucket.fqns) == 1 and num_bytes > limits.small_bytes:
            size, small = format_bytes(num_bytes), format_bytes(limits.small_bytes)
            return f"{bucket.fqns[0]} has {size}, and what has more than {small} travels alone"
    return ""


def _could_be_neighbours(
    kind: str, buckets: Sequence[Bucket], one: Bucket, other: Bucket, specs: Mapping[str, ParamSpec]
) -> bool:
    """Whether bucketing='neighbours' would have the units of two buckets that are alike travel together."""
    is_asked = specs[one.fqns[0]].bucketing == "size"  # all parameters of a unit ask for the same, and both units do
    if not is_asked or not all(fqn in specs for bucket in buckets for fqn in bucket.fqns):
        return False
    units: dict[str, list[ParamSpec]] = {}
    for bucket in buckets:
        if bucket.phase == one.phase:
            # A reduction waits for the last gradient of its unit, so the unit's last bucket tells its place.
            members = units.pop(bucket.unit, []) if kind == "reduce" else units.get(bucket.unit, [])
            units[bucket.unit] = [*members, *(specs[fqn] for fqn in bucket.fqns)]
    groups = neighbours_among(units, small_end=-1 if kind == "reduce" else 0, asking=("size", NEIGHBOURS))
    return any({one.unit, other.unit} <= {*group} for group in groups)
