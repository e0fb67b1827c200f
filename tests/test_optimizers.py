"""Optimizers on sharded models: those of the table in RECIPES.md, beside what they do on FSDP2's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fsdp_compile
from tests.conftest import SteadyRanks
from tests.toy import Stack, assert_same_params, batches, loss_of, reference_backward

optim = torch.optim
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, foreach=False),
    "AdamW, foreach": lambda params: optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW, fused": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW, amsgrad": lambda params: optim.AdamW(params, lr=1e-2, amsgrad=True),
    "AdamW, lr is a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(1e-2)),
    "Adam": lambda params: optim.Adam(params, lr=1e-2, weight_decay=0.1, foreach=False),
    "Adam, foreach": lambda params: optim.Adam(params, lr=1e-2, foreach=True),
    "Adam, fused": lambda params: optim.Adam(params, lr=1e-2, fused=True),
    "SGD": lambda params: optim.SGD(params, lr=0.1, foreach=False),
    "SGD, momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1, foreach=False),
    "Adagrad, foreach": lambda params: optim.Adagrad(params, lr=0.1, foreach=True),
    "Adagrad, fused": lambda params: optim.Adagrad(params, lr=0.1, fused=True),
    "Adadelta": lambda params: optim.Adadelta(params, foreach=False),
    "Adadelta, foreach": lambda params: optim.Adadelta(params, foreach=True),
    "Adamax": lambda params: optim.Adamax(params, lr=1e-2, foreach=False),
    "Adamax, foreach": lambda params: optim.Adamax(params, lr=1e-2, foreach=True),
    "NAdam": lambda params: optim.NAdam(params, lr=1e-2, foreach=False),
    "NAdam, foreach": lambda params: optim.NAdam(params, lr=1e-2, foreach=True),
    "RAdam": lambda params: optim.RAdam(params, lr=1e-2, foreach=False),
    "RAdam, foreach": lambda params: optim.RAdam(params, lr=1e-2, foreach=True),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True, foreach=False),
    "RMSprop, foreach": lambda params: optim.RMSprop(params, lr=1e-2, foreach=True),
    "Rprop": lambda params: optim.Rprop(params, lr=1e-2, foreach=False),
    "Rprop, foreach": lambda params: optim.Rprop(params, lr=1e-2, foreach=True),
    "ASGD": lambda params: optim.ASGD(params, lr=0.1, foreach=False),
    "ASGD, foreach": lambda params: optim.ASGD(params, lr=0.1, foreach=True),
    "LBFGS": lambda params: optim.LBFGS(params, lr=0.1, max_iter=3),
    "LBFGS, strong Wolfe": lambda params: optim.LBFGS(params, max_iter=3, line_search_fn="strong_wolfe"),
    "Adafactor": lambda params: optim.Adafactor(params, lr=1e-2),
    "Adafactor, foreach": lambda params: optim.Adafactor(params, lr=1e-2, foreach=True),
    "Muon": lambda params: optim.Muon([param for param in params if param.ndim == 2], lr=1e-2),
    "ZeroRedundancyOptimizer": lambda params: ZeroRedundancyOptimizer(params, optim.AdamW, lr=1e-2),
}


def _steps(model: Any, make: Callable[[list[nn.Parameter]], Any], backward: Callable[[int], torch.Tensor]) -> str:
    """Three of them; "steps", or the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = make(list(model.parameters()))
            for step in range(3):

                def closure(step: int = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    return backward(step)

                optimizer.step(closure)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "steps"


def _beside_fsdp2(name: str) -> list[str]:
    make = OPTIMIZERS[name]
    torch.manual_seed(0)
    unsharded = Stack(1)
    told = []
    models = []
    for package in (fsdp_compile, torch_fsdp):
        model = copy.deepcopy(unsharded)
        for layer in model.layers:
            package.fully_shard(layer)
        package.fully_shard(model)
        models.append(model)

        def backward(step: int, model: Any = model) -> torch.Tensor:
            loss = loss_of(model(batches(step)[dist.get_rank()]))
            loss.backward()
            dist.all_reduce(total := loss.detach().clone())  # LBFGS decides by it
            return total / dist.get_world_size()

        told.append(_steps(model, make, backward))
    assert _steps(unsharded, make, lambda step: reference_backward(unsharded, batches(step))) == "steps"
    for which, model in enumerate(models):
        if told[which] == "steps":
            try:
                assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
            except AssertionError:
                told[which] = "steps, to other numbers"
    return told


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_unsharded_model(two_ranks: SteadyRanks, name: str) -> None:
    told = two_ranks.run(_beside_fsdp2, name)
    print(name, told)
    assert told[0][0] == "steps"
