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
from tests.compiling import num_graphs
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

# Accumulation.


def accumulate(meter: Meter, how: str, **kwargs: Any) -> None:
    """Four micro-batches, the last of which reduces; then one backward by itself, to compare what was sent."""
    reference, model = models.twins()
    shard(model, **kwargs)
    run = compiled(meter, model)
    setter = model.set_requires_all_reduce if how == "all_reduce" else model.set_requires_gradient_sync
    optims = optimizers(model, reference)

    def micro_batch(step: int, micro: int) -> None:
        last = micro == models.NUM_MICRO - 1
        if how != "no_sync":
            setter(last)
        with nullcontext() if last or how != "no_sync" else fsdp_compile.no_sync(model):
            backward(run, 10 * step + micro, models.batches(10 * step + micro))

    for step in range(3):
        with meter.counting(models.NUM_MICRO) if step == 2 else nullcontext():
            for micro in range(models.NUM_MICRO):
                micro_batch(step, micro)
        for micro in range(models.NUM_MICRO):
            reference_backward(reference, models.batches(10 * step + micro), 10 * step + micro)
        meter.compare_gradients(model, reference)
        step_all(optims)
    of_four = meter.wire
    with meter.counting() as of_one:
        backward(run, 0, models.batches(0))
    meter.wire = of_four
    if how == "all_reduce":
        sums = [wire.backward["all_reduce"] for wire in (of_four, of_one)]
        meter.notes.append(f"sums over replicas: {sums[0]} in {models.NUM_MICRO} micro-batches, {sums[1]} in one")
        meter.require(sums[0] == sums[1] > 0, "replicas are not summed once")
        return
    four, one = (wire.reduced_bytes for wire in (of_four, of_one))
    meter.notes.append(
        f"reduced: {four / 1024:.1f} KiB in {models.NUM_MICRO} micro-batches, {one / 1024:.1f} KiB in one"
    )
    meter.require(four == one > 0, "micro-batches do not cost exactly one reduction")


# Activation checkpointing.


def selectively_checkpointed(meter: Meter) -> None:
    """torch.utils.checkpoint around each block, whose policy saves matrix products."""
    reference, model = models.twins(block=models.SelectivelyCheckpointed)
    shard(model, reshard_after_forward=True)
    train(meter, model, reference, compiled(meter, model))


def wrapped_checkpoints(meter: Meter) -> None:
    """torch's checkpoint_wrapper, as FSDP1 and trainers apply it."""
    reference, model = models.twins()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    shard(model, reshard_after_forward=True)
    train(meter, model, reference, compiled(meter, model))


# Graph breaks, compiled autograd, optimizers.


def breaks(meter: Meter) -> None:
    """Two graph breaks in forward. With backward inside the compiled step and compiled autograd, one backward graph."""
    reference, model = models.twins(models.Broken)
    shard(model)
    run = _step(model, meter.backend) if meter.backward_inside else compiled(meter, model, fullgraph=False)
    train(meter, model, reference, run)


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
    run = _step(model, meter.backend) if meter.backward_inside else compiled(meter, model)
    _train_by_updates(meter, model, reference, run, lambda: None)
    if meter.wire.num_backwards > 1:
        meter.notes.append("the hooks run eagerly, and each breaks the backward graph")


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


# Collectives and factors of the user's own.


def custom(meter: Meter) -> None:
    """One block with collectives and hooks of the user's own, which take it out of graphs."""
    reference, model = models.twins()
    block = shard(model).layers[1]
    block.set_custom_all_gather(models.GatherByHand())
    block.set_custom_reduce_scatter(models.ReduceByHand())
    block.set_all_reduce_hook(lambda summed: None)
    block.set_reduce_scatter_unused_params(True)
    train(meter, model, reference, compiled(meter, model, fullgraph=False))


def divide_factor(meter: Meter) -> None:
    """Gradients divided by half the number of ranks: twice the mean, in the graph."""
    reference, model = models.twins()
    shard(model).set_gradient_divide_factor(dist.get_world_size() / 2, recurse=True)
    for param in reference.parameters():
        param.register_hook(lambda grad: 2 * grad)
    train(meter, model, reference, compiled(meter, model), lr=LR / 2)


# Evaluation and lengths.


def evaluate(meter: Meter, without_grad: Callable[[], Any], reshard: bool | None = None) -> None:
    """Training, evaluation without gradients, training: the second round compiles nothing."""
    reference, model = models.twins()
    shard(model, reshard_after_forward=reshard)
    run = compiled(meter, model)
    train(meter, model, reference, run, num_steps=1)
    for start in (1, 2):
        mode(False, model, reference)
        with without_grad(), meter.counting():
            tokens = models.batches(start)[dist.get_rank()]
            meter.compare("loss", run(tokens), reference(tokens))
        mode(True, model, reference)
        train(meter, model, reference, run, first=start, num_steps=1)
    mode(False, model, reference)  # with gradients, as adversarial training and tuning of frozen layers do
    train(meter, model, reference, run, first=3, num_steps=1)


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


def loop(meter: Meter) -> None:
    """Accumulation, evaluation and two lengths for 6 steps: nothing is compiled after the first pass through each."""
    reference, model = models.twins()
    run = compiled(meter, shard(model))
    optims = optimizers(model, reference, lr=0.1)
    for step in range(6):
        length = models.LENGTH if step % 2 else 4
        micro_batches = [models.batches(10 * step + micro, length) for micro in range(2)]
        with meter.counting(2) if step == 5 else nullcontext():
            for micro, tokens in enumerate(micro_batches):
                model.set_requires_gradient_sync(micro == 1)
                backward(run, micro, tokens)
        for micro, tokens in enumerate(micro_batches):
            reference_backward(reference, tokens, micro)
        meter.compare_gradients(model, reference)
        step_all(optims)
        mode(False, model, reference)
        with torch.no_grad():
            meter.compare("loss", run(micro_batches[0][0]), reference(micro_batches[0][0]))
        mode(True, model, reference)
        if step == 1:
            seen = num_graphs()
    meter.notes.append(f"{seen} graphs after step 2")
    meter.require(num_graphs() == seen, "compiled again after step 2")


def double_backward(meter: Meter) -> None:
    """A penalty on the gradients of a block's inputs: eagerly, between steps of the same compiled block."""
    torch.manual_seed(0)
    reference = models.Dropping(models.DIM)
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
