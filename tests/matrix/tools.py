"""Rows: functions and methods that look at a compiled model, or change how it communicates."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import fsdp_compile
from fsdp_compile.passes._torch_compat import CustomGraphPass
from tests.compiling import num_graphs
from tests.matrix import models
from tests.matrix.meter import Meter
from tests.matrix.train import LR, Run, backward, compiled, optimizers, reference_backward, step_all, train
from tests.models import shard, twins


def _mine(step: int = 0) -> Tensor:
    return models.batches(step)[dist.get_rank()]


# Looking.


def looked_at(meter: Meter) -> None:
    """What each function says of one compiled model, which trains on behind each of them."""
    reference, model = models.twins()
    run = compiled(meter, shard(model))
    with fsdp_compile.inspect(model) as report:
        train(meter, model, reference, run, num_steps=1)
    _reported(meter, report)
    train(meter, model, reference, run, first=1, num_steps=1)
    _explained(meter, reference, fsdp_compile.explain(run, _mine()))  # it puts gradients back
    meter.require(num_graphs() == 2, f"{num_graphs()} graphs, and not one each of inspect and explain")
    _profiled(meter, model, reference, run)
    rounding = {"atol": 1e-6, "rtol": 1e-4}
    parity = fsdp_compile.check_parity(model, _mine(), backend=meter.backend, **rounding)  # with dropout
    meter.require(isinstance(parity, fsdp_compile.Parity) and bool(parity), str(parity))
    train(meter, model, reference, run, first=7, num_steps=1)


def _reported(meter: Meter, report: fsdp_compile.Report) -> None:
    meter.require(isinstance(report, fsdp_compile.Report), "the block gave no report")
    stages = [graph.stage for graph in report.graphs]
    meter.require(stages == (["joint", "forward", "backward"] if _lowers(meter) else ["joint"]), f"saw {stages}")
    meter.require("layers.0.down.weight" in str(report.plans[-1]), "no plan has layers.0.down.weight")
    with tempfile.TemporaryDirectory() as folder:
        report.save(folder)
        meter.require(any(Path(folder).iterdir()), "nothing was saved")


def _explained(meter: Meter, reference: nn.Module, found: fsdp_compile.Explanation) -> None:
    """Each parameter with its collectives and what hides them."""
    meter.require(isinstance(found, fsdp_compile.Explanation), f"explain gave {type(found).__name__}")
    if not _lowers(meter):
        meter.require(bool(found.eagerly) and not found.steps, str(found))
        return
    [step] = found.steps
    names = {name for name, _ in reference.named_parameters()}
    meter.require({one.fqn for one in step.parameters} == names, f"explained {step.parameters}")
    meter.require(all(one.buckets for one in step.parameters), "a parameter travels in no bucket")
    meter.require({one.stage for one in step.memory} == {"forward", "backward"}, str(found))
    kinds = fsdp_compile.ExplainedStep, fsdp_compile.ExplainedBucket, fsdp_compile.ExplainedMemory
    all_of = step, step.buckets[0], step.memory[0]
    meter.require(all(map(isinstance, all_of, kinds)), "other classes than the public ones")
    meter.require(isinstance(step.parameters[0], fsdp_compile.ExplainedParameter), "no ExplainedParameter")


def _profiled(meter: Meter, model: Any, reference: nn.Module, run: Run) -> None:
    """Batches 3 to 6; two of them are recorded, with a range for what carries each parameter.

    Parameters stay as they are: in so many steps the loss would diverge.
    """
    with tempfile.TemporaryDirectory() as folder:
        with fsdp_compile.profile(model, folder, wait=1, active=2) as profile:
            for step in range(3, 7):  # by hand: the meter profiles the steps of `train` itself
                loss = backward(run, step, models.batches(step))
                losses = reference_backward(reference, models.batches(step), step)
                meter.compare("loss", loss, losses[dist.get_rank()])
                meter.compare_gradients(model, reference)
                model.zero_grad()
                reference.zero_grad()
                profile.step()
        meter.require(isinstance(profile, fsdp_compile.Profile) and profile.path is not None, "no trace was written")
        summary = profile.summary
        meter.require(isinstance(summary, fsdp_compile.Summary) and summary.num_steps == 2, str(summary))
        if _lowers(meter):
            found = {name for one in summary.collectives for name in one.parameters}
            meter.require(found == {name for name, _ in reference.named_parameters()}, f"ranges name {sorted(found)}")


# Changing.


def configured(meter: Meter) -> None:
    """One bucket a unit, reduced by reduce-scatter. The user's own post-grad pass takes ours' place, and
    install_passes puts them beside one another."""
    theirs = _Counting()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=None):
        reference, model = models.twins()
        fsdp_compile.configure(shard(model), bucketing="group", reduction="reduce_scatter")
        torch._inductor.config.post_grad_custom_pre_pass = theirs
        fsdp_compile.install_passes()
        train(meter, model, reference, compiled(meter, model))
    meter.require(theirs.num_graphs == (2 if _lowers(meter) else 0), f"their pass saw {theirs.num_graphs} graphs")
    sent = meter.wire.backward
    meter.require(sent["reduce_scatter"] > 0 == sent["all_to_all"], f"reduced by {dict(sent)}")
    if _lowers(meter):
        meter.require(sent["reduce_scatter"] == 2, f"{sent['reduce_scatter']} reductions of 2 units")


class _Counting(CustomGraphPass):
    """A user's pass; without a uuid nothing is cached."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.num_graphs += 1

    def uuid(self) -> Any:
        return None


class Scoring(models.Tiny):
    """A forward of another name, of some of the parameters."""

    def score(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).pow(2).mean()


def forward_method(meter: Meter) -> None:
    """Training by ``forward`` and by a second method in turn."""
    reference, model = models.twins(Scoring)
    shard(model)
    fsdp_compile.register_fsdp_forward_method(model, "score")
    train(meter, model, reference, compiled(meter, model), num_steps=1)
    score = torch.compile(model.score, backend=meter.backend, fullgraph=True)
    for step in (1, 2):
        tokens = models.batches(step)
        with meter.counting():
            backward(score, step, tokens)
        reference_backward(reference.score, tokens, step)
        meter.compare_gradients(model, reference)
        for one in (model, reference):
            one.zero_grad()


class Two(nn.Module):
    """Two roots in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(models.DIM, models.DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).pow(2).mean()


def shared_context(meter: Meter) -> None:
    """Two roots that count their reductions together run in one graph."""
    reference, model = twins(Two)
    fsdp_compile.share_comm_ctx([fsdp_compile.fully_shard(one) for one in (model.first, model.second)])
    train(meter, model, reference, compiled(meter, model), batches=models.features)


def done_by_hand(meter: Meter) -> None:
    """unshard and reshard between compiled steps, a step anew after one that raised, and micro-batches whose end is
    said: a graph reduces by itself, and what ends them has nothing to do."""
    reference, model = models.twins()
    run = compiled(meter, shard(model))
    train(meter, model, reference, run, num_steps=1)
    handle = model.unshard(async_op=True)
    assert isinstance(handle, fsdp_compile.UnshardHandle)
    handle.wait()
    meter.compare("head.weight", model.head.weight.detach().clone(), reference.head.weight.detach())
    model.reshard()
    meter.require(isinstance(model, fsdp_compile.FSDPModule), "a sharded model is no FSDPModule")
    train(meter, model, reference, run, first=1, num_steps=1)
    backward(run, 5, models.batches(5))  # what it leaves is dropped
    model.reset_iter_state()
    meter.require(all(param.grad is None for param in model.parameters()), "reset_iter_state left gradients")
    _micro_batches_ended_by_hand(meter, model, reference, run)


def _micro_batches_ended_by_hand(meter: Meter, model: Any, reference: nn.Module, run: Run) -> None:
    model.set_manual_backward_finalization(True)
    optims = optimizers(model, reference)
    for step in range(2):
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            with meter.counting():
                backward(run, 2 * step + micro, models.batches(2 * step + micro))
            reference_backward(reference, models.batches(2 * step + micro), 2 * step + micro)
        handle = model.finalize_backward(async_op=step == 1)
        if step == 1:
            assert isinstance(handle, fsdp_compile.GradientReductionHandle)
            handle.wait()
        meter.compare_gradients(model, reference)
        step_all(optims)


def settings_of_graphs(meter: Meter) -> None:
    """What a graph heeds: keeping weights, also until an optimizer writes to them; a factor of half the number of ranks,
    so twice the mean; sums alone, and the old name of the factor."""
    reference, model = models.twins()
    shard(model, reshard_after_forward=False).set_gradient_divide_factor(dist.get_world_size() / 2, recurse=True)
    doubled = [param.register_hook(lambda grad: 2 * grad) for param in reference.parameters()]
    run = compiled(meter, model)
    train(meter, model, reference, run, num_steps=2, lr=LR / 2)
    kept = meter.wire.backward["all_gather"]
    for hook in doubled:
        hook.remove()
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(False)
    model.set_force_sum_reduction_for_comms(True, recurse=True)
    for unit in (*model.layers, model):
        unit.set_reduce_scatter_divide_factor(dist.get_world_size())
    train(meter, model, reference, run, first=2, num_steps=2)
    meter.require(kept == 0 < meter.wire.backward["all_gather"], f"{kept} gathers in backward before")


def settings_without_effect(meter: Meter) -> None:
    """What a graph does not heed it says, each by name. Settings for GPUs say on a CPU that it has no such memory, or
    have nothing to do. The numbers are right."""
    reference, model = models.twins()
    first, second = shard(model).layers[0], model
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    first.set_reduce_scatter_max_input_buffers(2)
    first.set_separate_reduce_scatter_group(True)
    second.set_keep_unsharded_storage(True)
    second.set_unshard_in_backward(False)
    for setting, words in (
        (lambda: model.set_symm_mem_for_comm(), "Symmetric memory needs GPUs"),
        (lambda: model.set_allocate_memory_from_process_group_for_comm(True), "no allocator"),
    ):
        try:
            setting()
        except RuntimeError as error:
            meter.require(words in str(error), f"it said: {error}")
        else:
            meter.require(False, f"nothing said {words!r}")
    model.set_post_optim_event(object())  # nothing is queued on a CPU, so nothing waits
    train(meter, model, reference, compiled(meter, model))


def _lowers(meter: Meter) -> bool:
    return meter.backend == "inductor"
