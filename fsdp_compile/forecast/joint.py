"""Trace the joint graph of a step on ranks that are not there: shard a meta model, trace it, stop before the cut."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .._torch_compat.inductor import trace_joint_graph
from ..api.auto_shard import auto_shard
from ..api.classes import refresh
from ..api.configure import let_slices_be_kept
from ..core.mesh import ranks_of_a_node
from ..core.unit import original_class, units_in
from ..graph.install import manager
from ..passes import GraphRecord, HardwareProfile, Plan
from ..passes.ir.provenance import settle_names
from ..tools.trial import observing
from .layers import LayerRun

# The dtypes in which parameters are stored (None: as the model has them) and computed with, and gradients are reduced.
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]] = {
    "bf16": (None, torch.bfloat16, torch.float32),
    "bf16-only": (torch.bfloat16, None, None),
    "fp16": (None, torch.float16, torch.float32),
    "fp32": (torch.float32, None, None),
}
NONE, SELECTIVE, FULL = "none", "selective", "full"

_LONGEST_LINE = 400  # of what Dynamo says
aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


class Mistake(ValueError):
    """An error of one sentence that says what to change; messages of other software may follow on further lines."""


@dataclass(frozen=True)
class StepArguments:
    """The arguments with which a model is called: the batch of a step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def joint_graph(
    model: nn.Module,
    call: StepArguments,
    mesh: DeviceMesh,
    precision: str,
    checkpointing: str,
    run: LayerRun | None,
    chosen_for: HardwareProfile | None,
    is_eager: bool,
) -> tuple[fx.Graph, Plan]:
    """Shard and checkpoint this model; return its joint graph, for ``trial_of``, and its plan without a budget.

    A search on ``chosen_for`` finds in the graph what a model offers that compiles within a budget. For a model that
    ``is_eager``, the graph has the operators that run without a compiler.
    """
    found: list[GraphRecord] = []
    stored, computed, reduced = PRECISIONS[precision]
    if stored is not None:
        model.to(stored)
    model.train()
    _checkpoint(model, checkpointing, run)
    if not units_in(model):
        _shard(model, mesh, MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced), run)
    if chosen_for is not None:
        let_slices_be_kept(units_in(model), partial(ranks_of_a_node, profile=chosen_for), keeps_groups=False)
        for unit in units_in(model):
            refresh(unit)
    model.to_empty(device="cpu")  # memory that is never written to costs nothing
    try:
        with observing(manager.observers, found.append):
            trace_joint_graph(model, call.args, call.kwargs, decomposed=not is_eager)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        called = original_class(model).__name__
        why = _why(error).replace(type(model).__name__, called)
        raise Mistake(
            f"{called} could not be traced into one graph: make it run under torch.compile(model, fullgraph=True) on "
            f"this batch; fsdp_compile.explain_breaks says where it breaks.{why}"
        ) from error
    joints = [record for record in found if record.stage == "joint"]
    if not joints:
        raise Mistake(
            f"{original_class(model).__name__} made no graph with parameters and gradients: return a model that is "
            "trained, whose forward reads its parameters."
        )
    graph = joints[0].snapshots[-3]  # before `chosen_slices` and `keep`
    settle_names(graph)
    return graph, joints[0].plan


def _shard(model: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy, run: LayerRun | None) -> None:
    """Make each layer a unit: the classes in the model's ``_no_split_modules``, or else the layers that repeat."""
    layers = set() if run is None else set(model.get_submodule(run.path).children())
    is_said = any(getattr(one, "_no_split_modules", None) for one in model.modules())
    auto_shard(model, None if is_said else lambda module: module in layers, mesh=mesh, mp_policy=precision)


def _checkpoint(model: nn.Module, how: str, run: LayerRun | None) -> None:
    if how == NONE:
        return
    if run is None:
        raise Mistake(
            "no layers repeat in this model, so there is nothing to checkpoint one by one: call torch.utils.checkpoint "
            "in its forward, and leave --checkpointing out."
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if how == SELECTIVE:
        settings["context_fn"] = _saving_every_second_product
    for layer in model.get_submodule(run.path).children():
        layer.forward = partial(checkpoint, layer.forward, **settings)  # type: ignore[method-assign]


def _saving_every_second_product() -> tuple[Any, Any]:
    """Return contexts for a region that save attention and every second other product, and recompute the rest."""
    seen = {False: 0, True: 0}  # counts in the forward and in its recomputation, which has the same order

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            seen[context.is_recompute] += 1
            saves = seen[context.is_recompute] % 2 == 1
        else:
            saves = "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def _why(error: BaseException) -> str:
    """Return Dynamo's message without the stack: what broke, its explanation, the first hint, and the last place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = lines[:1]
    for begin in ("Explanation:", "Developer debug context:", "Hint:", "Caused by:"):
        said += [line for line in lines if line.startswith(begin)][:1]
    said += [line for line in lines if line.startswith('File "')][-1:]
    return "".join(f"\n  {textwrap.shorten(line, _LONGEST_LINE, placeholder=' ...')}" for line in said)
