"""One rank of one case of ``benchmarks.divergence``: it trains a few steps, and prints the outcome in one line."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, STEPS = 16, 8
TOLERANCE = 1e-4


class Doubled(nn.Module):
    """A module that branches on ``training``."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.scale = Doubled()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks ``a`` and ``b`` stand side by side, and an argument says which of them run."""

    def __init__(self, hidden_of_b: int) -> None:
        super().__init__()
        self.front, self.a, self.b, self.back = (Block(width) for width in (64, 64, hidden_of_b, 64))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        x = self.front(x)
        for name in branch:
            x = getattr(self, name)(x)
        return self.back(x)


def length_of(case: str, step: int, rank: int) -> int:
    if case == "limit":
        return 3 + step if rank == 1 else 4
    if case in ("lengths", "dynamic"):
        return (1, 5, 24, 300)[int(torch.randint(4, (), generator=torch.Generator().manual_seed(97 * step + rank)))]
    return 4


def branch_of(case: str, step: int, rank: int) -> str:
    if step < 2 or rank != 1:
        return "a"
    return {"branch": "b", "shapes": "b", "unused": ""}.get(case, "a")


@contextlib.contextmanager
def circumstances(case: str, step: int, rank: int) -> Iterator[None]:
    """Apply the settings in which the second rank differs."""
    with contextlib.ExitStack() as stack:
        if rank == 1 and case == "limit":
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False))
        if rank == 1 and (case == "never" or (case == "stance" and step >= 2)):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if rank == 1 and case == "tuning":
            stack.enter_context(torch._inductor.config.patch(max_fusion_size=4, reorder_for_peak_memory=False))
        yield


def train(case: str, how: str, rank: int, world: int) -> float:
    """Train, and return the largest error of a gradient, as a share of that parameter's largest unsharded gradient."""
    torch.manual_seed(0)
    unsharded = Model(128 if case == "shapes" else 64)
    torch.manual_seed(0)
    model = Model(128 if case == "shapes" else 64)
    compiles = case != "unwrapped" or rank != 1
    run = sharded(model, how, compiles, dynamic=True if case == "dynamic" and rank == 1 else None)
    if case == "breaks" and rank == 1:
        model.a.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    worst = 0.0
    for step in range(STEPS):
        if case == "ends" and rank == 1 and step == 4:
            return worst
        if case == "slow" and rank == 1 and step == 3:
            time.sleep(8)
        if case == "eval":
            model.train(rank != 1 or step < 2)
        with circumstances(case, step, rank):
            run(batch(case, step, rank), branch_of(case, step, rank)).pow(2).mean().backward()
        unsharded.zero_grad()
        for other in range(world):
            unsharded.train(case != "eval" or other != 1 or step < 2)
            loss = unsharded(batch(case, step, other), branch_of(case, step, other)).pow(2).mean()
            (loss / world).backward()
        worst = max(worst, difference(model, unsharded, rank, world))
        model.zero_grad()
        if case in ("branch", "shapes", "unused"):
            time.sleep(0.5)  # about as long as a step of a real model
    return worst


def batch(case: str, step: int, rank: int) -> Tensor:
    return torch.randn(length_of(case, step, rank), WIDTH, generator=torch.Generator().manual_seed(31 * step + rank))


def sharded(model: Model, how: str, compiles: bool, dynamic: bool | None) -> Callable[..., Any]:
    fully_shard: Any
    if how.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard
    else:
        from fsdp_compile import fully_shard
    for block in model.children():
        fully_shard(block)
        if how.endswith("blocks") and compiles:
            block.compile(dynamic=dynamic)
    fully_shard(model)
    return torch.compile(model, dynamic=dynamic) if how == "whole" and compiles else model


def difference(model: nn.Module, unsharded: nn.Module, rank: int, world: int) -> float:
    """Compare gradients on this rank alone. A collective would let ranks meet that have parted."""
    worst = 0.0
    for (fqn, ours), theirs in zip(model.named_parameters(), unsharded.parameters()):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        chunks = expected.chunk(world)
        mine = chunks[rank] if rank < len(chunks) else expected[:0]
        grad: Any = ours.grad
        got = torch.zeros_like(mine) if grad is None else grad.to_local()
        assert got.shape == mine.shape, fqn
        if mine.numel():
            worst = max(worst, float((got - mine).abs().max() / expected.abs().max().clamp_min(1e-3)))
    return worst


def main(case: str, how: str, rank: int, world: int, port: int, timeout_s: int) -> None:
    torch.set_num_threads(1)
    if case == "cache" and rank == 1:  # the other rank has the cache of an earlier run
        os.environ["TORCHINDUCTOR_CACHE_DIR"] += "-of-its-own"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    said: dict[str, Any] = {}
    try:
        said["off"] = train(case, how, rank, world)
    except Exception as error:
        said["raised"], said["text"] = type(error).__name__, str(error)[:2000]
    print(json.dumps(said), flush=True)
    # A rank that has trained waits for the others: a group that one rank leaves early is another case.
    with contextlib.suppress(Exception):
        if case != "ends":
            dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
