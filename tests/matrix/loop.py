"""Rows: what a training loop does with the model."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_compile
from tests.matrix import models
from tests.matrix.meter import Meter
from tests.matrix.train import (
    LR,
    Run,
    backward,
    compiled,
    mode,
    optimizers,
    reference_backward,
    seed,
    step_all,
    train,
)
from tests.models import shard
from tests.test_eager import PlainAllGather, PlainReduceScatter

# Accumulation.


def accumulate(meter: Meter, *ways: Callable[..., Any], **kwargs: Any) -> None:
    """Four micro-batches a step, the last of which reduces, each step told so in its way: by a method, or no_sync. Then
    one backward by itself, to compare what was sent. The first step compiles, and is not counted."""
    reference, model = models.twins()
    shard(model, **kwargs)
    run = compiled(meter, model)
    optims = optimizers(model, reference)

    def micro_batch(way: Callable[..., Any], step: int, micro: int) -> None:
        last = micro == models.NUM_MICRO - 1
        if way is not fsdp_compile.no_sync:
            way(model, last)
        with nullcontext() if last or way is not fsdp_compile.no_sync else way(model):
            backward(run, 10 * step + micro, models.batches(10 * step + micro))

    counted = []
    for step, way in enumerate(ways):
        with meter.counting(models.NUM_MICRO) if step else nullcontext():
            for micro in range(models.NUM_MICRO):
                micro_batch(way, step, micro)
        counted += [meter.wire] if step else []
        for micro in range(models.NUM_MICRO):
            reference_backward(reference, models.batches(10 * step + micro), 10 * step + micro)
        meter.compare_gradients(model, reference)
        step_all(optims)
    with meter.counting() as of_one:
        backward(run, 0, models.batches(0))
    meter.wire = counted[-1]
    if fsdp_compile.FSDPModule.set_requires_all_reduce in ways:
        what, sent = "sums over replicas", [wire.backward["all_reduce"] for wire in (*counted, of_one)]
    else:
        what, sent = "bytes reduced", [wire.reduced_bytes for wire in (*counted, of_one)]
    *four, one = sent
    meter.notes.append(f"{what}: {four[0]} in {models.NUM_MICRO} micro-batches, {one} in one")
    meter.require({*four} == {one} and one > 0, f"micro-batches do not cost exactly one reduction: {what} {sent}")


# Activation checkpointing.


def checkpointed(meter: Meter) -> None:
    """One block in torch.utils.checkpoint, with a policy that saves matrix products; another one in torch's
    checkpoint_wrapper, as FSDP1 and trainers apply it."""
    reference, model = models.twins(num_blocks=2)
    for one in (reference, model):
        one.layers[0].__class__ = models.SelectivelyCheckpointed
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    shard(model, reshard_after_forward=True)
    train(meter, model, reference, compiled(meter, model))


# Graph breaks, compiled autograd, optimizers.


def breaks(meter: Meter) -> None:
    """Two graph breaks in forward, which explain_breaks sees. With backward inside the compiled step and compiled
    autograd, one backward graph."""
    reference, model = models.twins(models.Broken)
    shard(model)
    if meter.backward_inside:
        train(meter, model, reference, _step(model, meter.backend))
        return
    report = fsdp_compile.explain_breaks(model, models.batches(0)[dist.get_rank()])
    meter.require(isinstance(report, fsdp_compile.BreakReport) and not report, "two breaks were not seen")
    meter.require((len(report.breaks), report.num_graphs) == (1, 3), str(report))  # one line of code breaks it twice
    meter.require(isinstance(report.breaks[0], fsdp_compile.GraphBreak), "a break is no GraphBreak")
    train(meter, model, reference, compiled(meter, model, fullgraph=False))


def _step(model: nn.Module, backend: str) -> Run:
    """Forward and backward in one compiled function."""

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        return loss

    return torch.compile(step, backend=backend)


def optimizer_in_backward(meter: Meter) -> None:
    """A hook on each parameter steps as soon as its gradient is there."""
    reference, model = _exact_twins()
    for one in (model, reference):
        for param in one.parameters():
            param.register_post_accumulate_grad_hook(_descend)
    _train_by_updates(meter, model, reference, compiled(meter, model), lambda: None)


def _descend(param: Tensor) -> None:
    assert param.grad is not None
    with torch.no_grad():
        param.sub_(param.grad, alpha=LR)
    param.grad = None


def whole_step(meter: Meter) -> None:
    """Backward, clipping and the optimizer inside the compiled step."""
    reference, model = _exact_twins()
    optim, theirs = (torch.optim.SGD(one.parameters(), lr=LR) for one in (model, reference))

    @torch.compile(backend=meter.backend)
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optim.step()
        optim.zero_grad()
        return loss

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()

    with _no_graph_of_another_rank():
        _train_by_updates(meter, model, reference, step, finish)


def compiled_optimizer(meter: Meter) -> None:
    """The model compiled, and the optimizer's step compiled by itself."""
    reference, model = _exact_twins()
    optim, theirs = (torch.optim.SGD(one.parameters(), lr=LR, momentum=0.9) for one in (model, reference))
    optimize = torch.compile(optim.step, backend=meter.backend)
    run = compiled(meter, model)

    def step(tokens: Tensor) -> Tensor:
        loss = run(tokens)
        loss.backward()
        optimize()
        optim.zero_grad()
        return loss

    def finish() -> None:
        theirs.step()
        theirs.zero_grad()

    meter.backward_inside = True
    with _no_graph_of_another_rank():
        _train_by_updates(meter, model, reference, step, finish)


def _no_graph_of_another_rank() -> contextlib.AbstractContextManager[object]:
    """Graphs of an optimizer take DTensors, which AOTAutograd's cache knows by their global size alone (2.15).

    So a rank is served what another one compiled, for a shard of another length, as soon as that is in the cache.
    """
    return torch._functorch.config.patch(enable_autograd_cache=False)


def _exact_twins() -> tuple[Any, Any]:
    """(reference, sharded) in float64: an update of a float32 weight is rounded to the weight's last bits."""
    reference, model = (one.double() for one in models.twins(models.Unrolled))
    return reference, shard(model)


def _train_by_updates(
    meter: Meter, model: nn.Module, reference: nn.Module, run: Run, finish: Callable[[], None]
) -> None:
    """Three whole steps, compared by what they changed; ``finish`` is the reference's step after its backward."""
    for step in range(3):
        tokens = models.batches(step)
        before = [[param.detach().clone() for param in one.parameters()] for one in (model, reference)]
        with meter.counting() if step == 2 else nullcontext():
            seed(step, dist.get_rank())
            loss = run(tokens[dist.get_rank()])
            if not meter.backward_inside:
                loss.backward()
        losses = []
        for place, batch in enumerate(tokens):
            seed(step, place)
            losses.append(reference(batch))
        torch.stack(losses).mean().backward()  # one backward: its hooks run once
        finish()
        meter.compare_updates(model, reference, *before)
    meter.name_eager_modules(model)


# Collectives of the user's own.


def custom(meter: Meter) -> None:
    """The block with collectives and hooks of the user's own, which take it out of graphs."""
    reference, model = models.twins()
    block = shard(model).layers[0]
    block.set_custom_all_gather(PlainAllGather())
    block.set_custom_reduce_scatter(PlainReduceScatter())
    block.set_all_reduce_hook(lambda summed: None)
    block.set_reduce_scatter_unused_params(True)
    train(meter, model, reference, compiled(meter, model, fullgraph=False))


# Evaluation and lengths.


def evaluate(meter: Meter) -> None:
    """Training, evaluation without gradients, training: the second round compiles nothing, and each has its plan."""
    reference, model = models.twins()
    run = compiled(meter, shard(model))
    train(meter, model, reference, run, num_steps=1)
    plan = _plan_of(meter, run)
    if plan is not None:
        meter.require({*plan.params} == {name for name, _ in reference.named_parameters()}, str(plan))
    for start in (1, 2):
        mode(False, model, reference)
        with torch.no_grad(), meter.counting():
            tokens = models.batches(start)[dist.get_rank()]
            meter.compare("loss", run(tokens), reference(tokens))
        if plan is not None:
            of_evaluation = fsdp_compile.plan_of(model, training=False)
            meter.require(of_evaluation.stage == "inference", "no plan of the evaluation")
            meter.require(fsdp_compile.plan_of(model).id == plan.id, "an evaluation is in the place of the step")
        mode(True, model, reference)
        train(meter, model, reference, run, first=start, num_steps=1)
    mode(False, model, reference)  # with gradients, as adversarial training and tuning of frozen layers do
    train(meter, model, reference, run, first=3, num_steps=1)


def _plan_of(meter: Meter, run: Any) -> Any:
    """None where no graph has collectives of ours: it says so then."""
    try:
        return fsdp_compile.plan_of(run)
    except LookupError:
        meter.require(meter.backend != "inductor", "there is no plan")
        return None


def two_lengths(meter: Meter) -> None:
    """Sequences of two lengths in turn, in one graph."""
    reference, model = models.twins()
    run = compiled(meter, shard(model))

    def batches(step: int) -> Tensor:
        return models.batches(step, length=models.LENGTH if step % 2 else 4)

    def marked(tokens: Tensor) -> Tensor:
        tokens = tokens.clone()
        torch._dynamo.mark_dynamic(tokens, 1)
        return run(tokens)

    train(meter, model, reference, marked, batches=batches)


def double_backward(meter: Meter) -> None:
    """A penalty on the gradients of a block's inputs: eagerly, between steps of the same compiled block."""
    torch.manual_seed(0)
    reference = models.Even(models.DIM)
    model = fsdp_compile.fully_shard(copy.deepcopy(reference))
    run = compiled(meter, model)
    for step, eager in enumerate((False, True, False)):
        inputs = models.features(step)
        ours, theirs = (functools.partial(_penalized, one, penalty=eager) for one in (run, reference))
        with torch.compiler.set_stance("force_eager" if eager else "default"), meter.counting():
            backward(ours, step, inputs)
        reference_backward(theirs, inputs, step)
        meter.compare_gradients(model, reference)
        for one in (model, reference):
            one.zero_grad()


def _penalized(run: Run, inputs: Tensor, penalty: bool) -> Tensor:
    inputs = inputs.clone().requires_grad_()
    loss = run(inputs).pow(2).mean()
    if not penalty:
        return loss
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.pow(2).sum()
