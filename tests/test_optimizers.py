"""Optimizers on sharded models: those of the table in docs/recipes.md, beside what they do on FSDP2's."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
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
from tests.on_ranks import on_two_ranks
from tests.test_recipes import RECIPES

optim = torch.optim
# What has a loop over parameters, and the same with ``foreach=True``.
EACH: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "Adam": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {},
    "Adamax": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2},
    "Rprop": {"lr": 1e-2},
    "ASGD": {"lr": 0.1},
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    **{name: partial(getattr(optim, name), foreach=False, **given) for name, given in EACH.items()},
    **{f"{name}, foreach": partial(getattr(optim, name), foreach=True, **given) for name, given in EACH.items()},
    **{f"{name}, fused": partial(getattr(optim, name), fused=True, **EACH[name]) for name in list(EACH)[:4]},
    "AdamW, amsgrad": partial(optim.AdamW, lr=1e-2, amsgrad=True),
    "AdamW, lr is a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(1e-2)),
    "Adam, weight decay": partial(optim.Adam, lr=1e-2, weight_decay=0.1, foreach=False),
    "SGD, nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop, centered": partial(optim.RMSprop, lr=1e-2, momentum=0.9, centered=True, foreach=False),
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=3),
    "LBFGS, strong Wolfe": partial(optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
    "Adafactor, foreach": partial(optim.Adafactor, lr=1e-2, foreach=True),
    "Muon": lambda params: optim.Muon([param for param in params if param.ndim == 2], lr=1e-2),
    "SparseAdam": partial(optim.SparseAdam, lr=1e-2),
    "ZeroRedundancyOptimizer": partial(ZeroRedundancyOptimizer, optimizer_class=optim.AdamW, lr=1e-2),
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
    """Two of them, the second with what the first one kept; "steps", or the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = make(list(model.parameters()))
            for step in range(2):

                def closure(step: int = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    return backward(step)

                optimizer.step(closure)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "steps"


def _told(package: Any, name: str, api: str = "fully_shard", vocab: int = 31) -> str:
    """What comes of two steps on a model sharded by ``package``, compared with the unsharded one."""
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_two_ranks
def test_an_optimizer_steps_as_on_the_unsharded_model(name: str) -> None:
    told = _told(fsdp_compile, name)
    if name in REFUSED:
        assert REFUSED[name] in told == _told(torch_fsdp, name)
    else:
        assert told == "steps"


@pytest.mark.parametrize("name", BY_REPLICAS)
@on_two_ranks
def test_on_replicas_and_even_shards_more_of_them_step(name: str) -> None:
    assert _told(fsdp_compile, name, "replicate") == "steps"
    if name.startswith("LBFGS"):
        assert _told(fsdp_compile, name, vocab=32) == "steps"


def test_the_table_of_recipes_has_every_optimizer_of_torch() -> None:
    section = RECIPES.split("## Which optimizers", 1)[1].split("\n## ", 1)[0]
    rows = [row.split("|")[1:] for row in section.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+)", row[0])}
    classes = {name for name, one in vars(optim).items() if isinstance(one, type) and name != "Optimizer"}
    assert named == classes | {"ZeroRedundancyOptimizer"}
    refused = {name.split(",")[0] for name in REFUSED}
    assert refused <= {name for row in rows if "raises" in row[1] for name in re.findall(r"`([A-Z]\w+)", row[0])}
