"""Any optimizer runs on whole tensors of sharded models, with the numbers of the unsharded one, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_optimizer import SOAP, Shampoo
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from fsdp_compile.optim import Muon, WholeTensorOptimizer
from tests.comparing import full
from tests.on_ranks import on_four_ranks
from tests.recording import Wire
from tests.test_muon import PLACED, matrices, matrices_on, placed_like, train

CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SOAP": partial(SOAP, lr=0.01, precondition_frequency=2),
    "Shampoo": partial(Shampoo, lr=0.01, preconditioning_compute_steps=2),
    "Adafactor": partial(Adafactor, lr=0.1, weight_decay=0.1),
    "Muon": partial(torch.optim.Muon, lr=0.1),
}


@on_four_ranks
@pytest.mark.parametrize("case", PLACED)
def test_numbers_are_those_of_the_class_on_unsharded_tensors(case: str) -> None:
    """To the bit; tests/test_muon.py has buckets of other sizes."""
    for name, make in CLASSES.items():
        ours, theirs = matrices_on(case), matrices()
        train(WholeTensorOptimizer(ours, make), ours, 5)
        train(make(theirs), theirs, 5)
        for mine, other in zip(ours, theirs):
            assert torch.equal(full(mine), other), name


def _groups(params: list[nn.Parameter], *algorithms: str) -> list[dict[str, Any]]:
    groups = [{"params": params[:2], "lr": 0.05}, {"params": params[2:4], "weight_decay": 0.0}, {"params": params[4:]}]
    return [{**group, "algorithm": name} for group, name in zip(groups, algorithms)] if algorithms else groups


def _muon(params: list[nn.Parameter]) -> list[Optimizer]:
    matrices, others, more = _groups(params)
    return [torch.optim.Muon([matrices, more], lr=0.1), AdamW([others], lr=0.02)]


GROUPED: dict[str, tuple[Callable[..., Optimizer], Callable[..., list[Optimizer]]]] = {
    "Muon": (lambda params: Muon(_groups(params, "muon", "adamw", "muon"), lr=0.1, adamw={"lr": 0.02}), _muon),
    **{
        name: (
            lambda params, make=CLASSES[name]: WholeTensorOptimizer(_groups(params), make),
            lambda params, make=CLASSES[name]: [make(_groups(params))],
        )
        for name in ("SOAP", "Adafactor")
    },
}


@on_four_ranks
@pytest.mark.parametrize("name", GROUPED)
def test_groups_schedules_closures_other_dtypes_and_steps_without_some_gradients(name: str) -> None:
    """As they are without sharding; the last two parameters are added when three steps are done, one of them in bf16.

    No tall matrix is in bf16: torch adds the update of one as a view across it, which rounds otherwise (2.15, CPU).
    """
    ours, theirs = matrices_on("rows"), matrices()
    for params in (ours, theirs):
        params[1] = nn.Parameter(params[1].detach().bfloat16())
        params[-2] = nn.Parameter(params[-2].detach().bfloat16())
        params[-2].grad_dtype = torch.float32
    makes = GROUPED[name]
    optimizer, others = makes[0](ours[:-2]), makes[1](theirs[:-2])
    schedules = [ExponentialLR(one, 0.8) for one in (optimizer, *others)]
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": ours[-2:], "lr": 0.02})
            others[0].add_param_group({"params": theirs[-2:], "lr": 0.02})
        for number, (param, other) in enumerate(zip(ours, theirs)):
            grad = torch.randn(other.shape, generator=generator).to(other.grad_dtype or torch.float32)
            without = number % 3 == step % 3 or (step == 4 and number < 2)
            other.grad = None if without else grad
            param.grad = None if without else placed_like(grad, param)
        for one in (optimizer, *others):
            assert one.step(lambda step=step: step + 1) == step + 1
        for schedule in schedules if step < 3 else ():  # a schedule knows the groups that were there first
            schedule.step()
    for param, other in zip(ours, theirs):
        assert param.dtype == other.dtype
        assert torch.equal(full(param), other)
    numbers = {id(param): number for params in (ours, theirs) for number, param in enumerate(params)}
    groups = [
        sorted(({**group, "params": [numbers[id(param)] for param in group["params"]]} for group in one), key=_first)
        for one in (optimizer.param_groups, [group for one in others for group in one.param_groups])
    ]
    assert groups[0] == groups[1]


def _first(group: dict[str, Any]) -> int:
    return int(group["params"][0])


@on_four_ranks
def test_mistakes_are_the_classs_own_on_all_ranks() -> None:
    params = matrices_on("rows")
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        WholeTensorOptimizer([*params, nn.Parameter(torch.zeros(3))], torch.optim.Muon)
    with pytest.raises(Exception, match="learning rate must be positive"):
        WholeTensorOptimizer(params, SOAP, lr=-1.0)


@on_four_ranks
def test_a_step_is_two_exchanges_and_the_state_is_on_one_rank() -> None:
    params = matrices_on("rows")
    optimizer = WholeTensorOptimizer(params, CLASSES["SOAP"])
    with Wire() as wire:
        train(optimizer, params, 1)
    assert wire.calls["all_to_all"] == 2
    held = [bool(optimizer.state[param]) for param in params]
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, held)
    assert all(sum(of_ranks) == 1 for of_ranks in zip(*everybody))
