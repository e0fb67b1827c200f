"""Rows: what stands around a compiled model, each a section of docs/recipes.md."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp_compile
from tests.matrix import models
from tests.matrix.meter import Meter
from tests.matrix.train import LR, Run, backward, compiled, mode, reference_backward, train
from tests.models import shard


def adopted(meter: Meter) -> None:
    """torch's name for fully_shard is ours inside the block."""
    reference, model = models.twins()
    with fsdp_compile.adopt() as adoption:
        for layer in model.layers:
            torch_fsdp.fully_shard(layer)
        torch_fsdp.fully_shard(model)
    assert isinstance(adoption, fsdp_compile.Adoption) and isinstance(model, fsdp_compile.FSDPModule)
    train(meter, model, reference, compiled(meter, model))


def resumed(meter: Meter) -> None:
    """A model of other values goes on from another's state, optimizer included."""
    reference, first = models.twins()
    torch.manual_seed(7)
    second = shard(models.Tiny())
    models_in_turn = (shard(first), second)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    state = None
    for step, model in enumerate(models_in_turn):
        run = compiled(meter, model)
        ours = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        if state is not None:
            set_state_dict(model, ours, model_state_dict=state[0], optim_state_dict=state[1])
        with meter.counting():
            backward(run, step, models.batches(step))
        reference_backward(reference, models.batches(step), step)
        meter.compare_gradients(model, reference)
        for optim in (ours, theirs):
            optim.step()
            optim.zero_grad()
        meter.compare_params(model, reference)
        state = get_state_dict(run, ours)


def averaged(meter: Meter) -> None:
    """A moving average, evaluated compiled."""
    reference, model = models.twins()
    averages = [AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for one in (shard(model), reference)]
    run = compiled(meter, model)
    for step in range(2):
        train(meter, model, reference, run, first=step, num_steps=1)
        for average, one in zip(averages, (model, reference)):
            average.update_parameters(one)
    mode(False, *averages)
    tokens = models.batches(0)[dist.get_rank()]
    with torch.no_grad():
        meter.compare("loss", compiled(meter, averages[0])(tokens), averages[1](tokens))


def taught(meter: Meter) -> None:
    """A frozen copy teaches; it runs without gradients in the same loop."""
    reference, model = models.twins()
    shard(model)
    teachers = [copy.deepcopy(one).eval().requires_grad_(False) for one in (model, reference)]
    runs = [compiled(meter, one) for one in (model, teachers[0])]
    optims = [torch.optim.SGD(one.parameters(), lr=LR) for one in (model, reference)]

    def apart(student: nn.Module, teacher: nn.Module) -> Run:
        def loss(tokens: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher(tokens)
            return (student(tokens) - 2 * target).pow(2)

        return loss

    for step in range(2):
        with meter.counting() if step else nullcontext():
            backward(apart(*runs), step, models.batches(step))
        reference_backward(apart(reference, teachers[1]), models.batches(step), step)
        meter.compare_gradients(model, reference)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    meter.compare_params(teachers[0], teachers[1])


def grouped(meter: Meter) -> None:
    """AdamW with decay for matrices alone, whose steps send nothing."""
    reference, model = models.twins()
    run = compiled(meter, shard(model))
    optims = [
        torch.optim.AdamW(
            [
                {"params": [param for param in one.parameters() if param.ndim == 2], "weight_decay": 0.1},
                {"params": [param for param in one.parameters() if param.ndim < 2], "weight_decay": 0.0},
            ],
            lr=1e-2,
            eps=1e-3,  # gradients near zero differ in the last bits, and would step by their sign
        )
        for one in (model, reference)
    ]
    for step in range(3):
        with meter.counting():
            backward(run, step, models.batches(step))
        counted = meter.wire
        reference_backward(reference, models.batches(step), step)
        meter.compare_gradients(model, reference)
        with meter.counting() as wire:
            for optim in optims:
                optim.step()
        meter.require(not wire.forward and not wire.backward, f"a step sends {wire.forward}")
        meter.wire = counted
        for optim in optims:
            optim.zero_grad()
        meter.compare_params(model, reference)


class Gated(nn.Module):
    """One of two linears, as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.abs().mean() < 10, self.near, self.far, (x,)).pow(2).mean()


def branched(meter: Meter) -> None:
    """Each rank takes another branch; what a rank did not reach counts as zeros."""
    torch.manual_seed(0)
    reference = Gated()
    model = fsdp_compile.fully_shard(copy.deepcopy(reference))

    def inputs(step: int) -> Tensor:
        features = models.features(step)
        features[1::2] *= 30
        return features

    train(meter, model, reference, compiled(meter, model), batches=inputs, lr=1e-4)


def made_of_nothing(meter: Meter) -> None:
    """Sharded by class on the meta device, given the values of an unsharded model, clipped, looked at whole."""
    reference = models.Tiny()
    torch.manual_seed(3)
    for module in reference.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with torch.device("meta"):
        model = models.Tiny()
    fsdp_compile.auto_shard(model, models.Dropping)
    torch.manual_seed(3 if dist.get_rank() == 0 else 4)
    fsdp_compile.materialize(model)
    fsdp_compile.sync_module_states(fsdp_compile.cast_buffers(model, torch.float64))  # it has no buffers
    run = compiled(meter, model)
    train(meter, model, reference, run, num_steps=2)
    with meter.counting():
        backward(run, 2, models.batches(2))
    reference_backward(reference, models.batches(2), 2)
    norm = fsdp_compile.clip_grad_norm_(model, 0.1)
    meter.compare("norm", norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    meter.compare_gradients(model, reference)
    with fsdp_compile.full_params(model):
        for (name, full), expected in zip(model.named_parameters(), reference.parameters()):
            meter.compare(name, full.detach(), expected.detach())
