"""Explain the planned time and memory of a step, for each parameter and each collective.

    print(fsdp_compile.explain(model, batch))      #3 0.412 ms, because of the order: launched earlier (...) ... less
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import autograd, dynamo
from ..core.accumulation import Held
from ..core.containers import tensors_in
from ..core.unit import units_in
from ..eager.running import recover
from ..passes import HardwareProfile, Plan, Prediction
from ..passes.ir.provenance import Marker, find_unshards, whole_of
from .apart import why_apart
from .breaks import BreakReport, watching
from .explained import ExplainedBucket, ExplainedMemory, ExplainedParameter, ExplainedStep, Explanation
from .inspect import Report, inspect
from .pictured import step_owners
from .predicted import Step, steps_of
from .tables import format_dtype, format_unit, plural


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
    back, are afterwards as before, and no post-accumulate-grad hook runs. Running statistics are updated, as in any
    forward. Code that was compiled before is compiled afresh, and a model without compiled code runs under
    ``torch.compile``. ``profile`` names hardware other than the plan's.
    """
    whole = dynamo.behind_compile(model)
    if not isinstance(whole, nn.Module):
        raise TypeError(f"explain takes the model and its inputs, but got {type(model).__name__} as the model.")
    is_compiled = whole is not model or any(dynamo.is_compiled(module) for module in whole.modules())
    run = model if is_compiled else torch.compile(model)
    breaks = BreakReport()
    with _leaving_gradients(whole), inspect(whole) as report, watching(whole, breaks):
        output = _called(run, args, kwargs)
        if torch.is_grad_enabled():
            total = _total(output) if loss is None else loss(output)
            if total is not None:
                total.backward()
    steps = [_explained(step, profile) for step in steps_of(report.records) if step.graphs]
    return Explanation(report.model, tuple(steps), tuple(_eagerly(report, breaks)), breaks, report)


@contextmanager
def _leaving_gradients(model: nn.Module) -> Iterator[None]:
    """Run backward in this block without effect: gradients stay as they were, no post-accumulate-grad hook runs."""
    params = list(model.parameters())
    grads = [param.grad for param in params]
    units = units_in(model)
    held = [unit.accumulation.held for unit in units]
    for param in params:
        param.grad = None
    for unit in units:
        unit.accumulation.held = Held()
    try:
        with autograd.without_post_accumulate_grad_hooks(params):
            yield
    except BaseException:
        for root in dict.fromkeys(unit.root for unit in units):
            recover(root)  # here, since the next step would not know what the steps of this block held back
        raise
    finally:
        for unit, its in zip(units, held, strict=True):
            unit.accumulation.held = its
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


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


def _explained(step: Step, profile: HardwareProfile | str | Path | None) -> ExplainedStep:
    predicted = step.predicted(profile)
    markers = _markers(step)
    buckets = [bucket for graph in predicted.graphs for bucket in _buckets(step, predicted, graph.stage, markers)]
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
        for graph, owners in zip(predicted.graphs, step_owners(step, predicted))
    ]
    again = () if step.joint is None else step.joint.plan.recompute
    return ExplainedStep(predicted, tuple(buckets), tuple(parameters), tuple(memory), again)


def _markers(step: Step) -> dict[str, Marker]:
    """Return an unshard marker of each parameter, from the earliest graph that has one, by its name in the plan."""
    graphs = [step.joint.snapshots[-1]] if step.joint is not None else [one.snapshots[0] for one in step.graphs]
    found = [marker for graph in reversed(graphs) for marker in find_unshards(graph)]
    return {marker.fqn: marker for marker in found if whole_of(marker.node) is None}  # else it gathers slices


def _buckets(step: Step, predicted: Prediction, stage: str, markers: dict[str, Marker]) -> list[ExplainedBucket]:
    plan: Plan = next(record.plan for record in step.graphs if record.stage == stage)
    specs = {fqn: marker.spec for fqn, marker in markers.items()}
    apart = {
        (kind, bucket.fqns, bucket.phase): why_apart(kind, buckets, place, specs)
        for kind, buckets in (("gather", plan.gathers), ("reduce", plan.reduces))
        for place, bucket in enumerate(buckets)
    }
    found = []
    for one in predicted.of(stage).collectives:
        kind = "gather" if one.kind == "all_gather" else "reduce"
        said = next((words for (its, fqns, _), words in apart.items() if (its, fqns) == (kind, one.fqns)), "")
        found.append(ExplainedBucket(stage, one, said))
    return found


def _eagerly(report: Report, breaks: BreakReport) -> list[str]:
    """Return what ran outside of graphs, and why, as lines."""
    said = []
    for one in breaks.breaks:
        modules = ", ".join(one.modules) or "code of no module"
        said.append(f"{modules}, {one.where}: {one.reason}")
    for module, names in breaks.eager_reads.items():
        said.append(f"{module} reads {', '.join(names)} outside of any graph: the eager path gathers it there")
    if report.around:
        units = ", ".join(one.unit for one in list(report.around.values())[:4])
        count = plural(len(report.around), "unit")
        how = "compiled by themselves, or in parts"
        said.append(f"the collectives of {count} ({units}): {how}, the eager path gathers around them")
    if not any(graph.stage != "joint" for graph in report.graphs) and not report.around:
        said.append(f"all collectives: {report.notes[-1]}")
    return said
