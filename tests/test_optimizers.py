"""Optimizers on sharded models: those of the table in docs/recipes.md, beside what they do on FSDP2's."""

from __future__ import annotations

import copy
import re
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
from tests.comparing import assert_same_params, batches, loss_of, mean_over_ranks, reference_backward
from tests.models import Stack
from tests.ranks import Ranks
from tests.test_recipes import RECIPES

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
    "SparseAdam": lambda params: optim.SparseAdam(params, lr=1e-2),
    "ZeroRedundancyOptimizer": lambda params: ZeroRedundancyOptimizer(params, optim.AdamW, lr=1e-2),
}
# What DTensors cannot do, ours and FSDP2's alike, and a word of the error.
REFUSED = {
    "SGD, fused": "_fused_sgd_",
    "Adagrad, fused": "_fused_adagrad_",
    "Rprop, foreach": "_foreach_copy_",
    "LBFGS": "unevenly",
    "LBFGS, strong Wolfe": "unevenly",
    "Adafactor": "in-place",
    "Adafactor, foreach": "in-place",
    "SparseAdam": "dense",
    "ZeroRedundancyOptimizer": "broadcast_",
}
if torch.torch_version.TorchVersion(torch.__version__) < (2, 15):
    REFUSED["Rprop"] = "aten."
BY_REPLICAS = ["LBFGS", "LBFGS, strong Wolfe", "Adafactor", "Adafactor, foreach"]


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


def _told(package: Any, name: str, api: str = "fully_shard", vocab: int = 31) -> str:
    """What comes of three steps on a model sharded by ``package``, compared with the unsharded one."""
    torch.manual_seed(0)
    unsharded = Stack(1, vocab=vocab)
    if vocab % 2 == 0:
        unsharded.layers[0].up, unsharded.layers[0].down = nn.Linear(16, 32), nn.Linear(32, 16)
    model: Any = copy.deepcopy(unsharded)
    for module in (*model.layers, model):
        getattr(package, api)(module)

    def backward(step: int) -> torch.Tensor:
        loss = loss_of(model(batches(step)[dist.get_rank()]))
        loss.backward()
        return mean_over_ranks(loss)  # LBFGS decides by it

    told = _steps(model, OPTIMIZERS[name], backward)
    if told == "steps":
        assert _steps(unsharded, OPTIMIZERS[name], lambda step: reference_backward(unsharded, batches(step))) == told
        # Muon multiplies in bf16, and on shards in another order.
        assert_same_params(model, unsharded, atol=2e-3 if name == "Muon" else 1e-4, rtol=1e-3)
    return told


def _beside_fsdp2(name: str) -> None:
    told = _told(fsdp_compile, name)
    assert told == _told(torch_fsdp, name)
    if name in REFUSED:
        assert REFUSED[name] in told
    else:
        assert told == "steps"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_unsharded_model(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(_beside_fsdp2, name)


def _elsewhere(name: str) -> None:
    assert _told(fsdp_compile, name, "replicate") == "steps"
    if name.startswith("LBFGS"):
        assert _told(fsdp_compile, name, vocab=32) == "steps"


@pytest.mark.parametrize("name", BY_REPLICAS)
def test_on_replicas_and_even_shards_more_of_them_step(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(_elsewhere, name)


def test_the_table_of_recipes_has_every_optimizer_of_torch() -> None:
    section = RECIPES.split("## Which optimizers", 1)[1].split("\n## ", 1)[0]
    rows = [row.split("|")[1:] for row in section.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+)", row[0])}
    classes = {name for name, one in vars(optim).items() if isinstance(one, type) and name != "Optimizer"}
    assert named == classes | {"ZeroRedundancyOptimizer"}
    refused = {name.split(",")[0] for name in REFUSED}
    assert refused <= {name for row in rows if "raises" in row[1] for name in re.findall(r"`([A-Z]\w+)", row[0])}
