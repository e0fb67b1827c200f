"""FSDP1 scripts that train under either class: torch's, or ours by another import."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

import fsdp_compile.fsdp1
from fsdp_compile.fsdp1.wrap import CustomPolicy, ModuleWrapPolicy
from tests.comparing import batches, full, loss_of, mean_over_ranks
from tests.compiling import compiled
from tests.models import Block, Stack

OURS: Any = fsdp_compile.fsdp1.FullyShardedDataParallel
THEIRS: Any = torch_fsdp.FullyShardedDataParallel
CPU = torch.device("cpu")


class Buffered(nn.Module):
    """A batch norm and a buffer of floats between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 5)
        self.register_buffer("scale", torch.linspace(1, 2, 5))
        self.register_buffer("count", torch.tensor([3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))) * self.scale


def features(step: int) -> Tensor:
    """Rows of every rank for ``Buffered``."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(dist.get_world_size(), 4, 6, generator=generator)


@contextmanager
def silenced() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Trained:
    """What a script saw and left behind."""

    model: Any
    losses: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    grad_dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def params(self) -> dict[str, Tensor]:
        if isinstance(self.model, OURS):
            return {name: full(param.detach()) for name, param in self.model.named_parameters()}
        context = THEIRS.summon_full_params(self.model) if isinstance(self.model, THEIRS) else nullcontext()
        with silenced(), context:
            return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def train(
    model: Any,
    backend: str | None = None,
    steps: int = 2,
    inputs: Callable[[int], Tensor] = batches,
    fullgraph: bool = True,
) -> Trained:
    """The same few lines for every class."""
    seen = Trained(model)
    run = compiled(model, backend, fullgraph)
    optim = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.2)
    for step in range(steps):
        loss = loss_of(run(inputs(step)[dist.get_rank()]))
        loss.backward()
        seen.losses.append(float(mean_over_ranks(loss)))
        seen.grad_dtypes = {param.grad.dtype for param in model.parameters() if param.grad is not None}
        optim.step()
        optim.zero_grad()
    return seen


def train_unsharded(model: nn.Module, steps: int = 2) -> Trained:
    """The mean over all ranks' batches, in one process."""
    seen = Trained(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(steps):
        losses = []
        for tokens in batches(step):
            losses.append(loss_of(model(tokens)))
        loss = torch.stack(losses).mean()
        loss.backward()
        seen.losses.append(loss.item())
        optim.step()
        optim.zero_grad()
    return seen


def assert_alike(ours: Trained, theirs: Trained, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    """Losses, names and values."""
    torch.testing.assert_close(ours.losses, theirs.losses, atol=atol, rtol=rtol)
    mine, others = ours.params, theirs.params
    assert list(mine) == list(others)
    for name, value in mine.items():
        torch.testing.assert_close(value, others[name], atol=atol, rtol=rtol, msg=lambda text: f"{name}: {text}")  # noqa: B023


def under_theirs(module: nn.Module, **kwargs: Any) -> Any:
    """FSDP1 needs to be told that the CPU is meant, and says much that is not this test's business."""
    with silenced():
        return THEIRS(module, **{"device_id": CPU, "use_orig_params": True, **kwargs})


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def mixed(model: Stack, fsdp: Any) -> Any:
    """One block replicated, the other sharded, the norm ignored."""

    def policy(module: nn.Module) -> Any:
        return is_block(module) and (module is model.layers[1] or {"sharding_strategy": ShardingStrategy.NO_SHARD})

    with silenced():
        return fsdp(model, auto_wrap_policy=CustomPolicy(policy), ignored_modules=[model.norm])


BLOCKS = ModuleWrapPolicy({Block})


def plain(seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(1, tied=True)


def made(fsdp: Any, seed: int = 0, **kwargs: Any) -> Any:
    """The same, wrapped."""
    with silenced():
        return fsdp(plain(seed), auto_wrap_policy=BLOCKS, **kwargs)


def optimizer(model: Any, num_groups: int = 1) -> torch.optim.Optimizer:
    params = [param for _, param in model.named_parameters()]
    groups = [{"params": params[number::num_groups], "lr": 0.05 / (number + 1)} for number in range(num_groups)]
    return torch.optim.AdamW(groups, eps=1e-3)
