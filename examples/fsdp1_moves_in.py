"""One FSDP1 script, three times: under torch's class, under ours, and under ours in one graph.

    python examples/fsdp1_moves_in.py        two processes on the CPU, half a minute

What changes between the first two is where FullyShardedDataParallel comes from.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_compile.fsdp1 as ours

RANKS, STEPS, WIDTH = 2, 6, 64


class Block(nn.Module):
    """Norm, up, down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def script(fsdp: Any, model: nn.Module, compiled: bool) -> list[float]:
    """The user's: it knows nothing of which class it is given."""
    model = fsdp(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    run = torch.compile(model, fullgraph=True) if compiled else model
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(RANKS * step + dist.get_rank())
        x = torch.randn(16, WIDTH, generator=generator)
        loss = (run(x) - x.roll(1, -1)).pow(2).mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(float(loss) / RANKS)
    return losses


def train(rank: int, rendezvous: str) -> None:
    """One rank: the three of them in turn."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
    columns = [
        script(cls, copy.deepcopy(model), compiled)
        for cls, compiled in (
            (torchs.FullyShardedDataParallel, False),
            (ours.FullyShardedDataParallel, False),
            (ours.FullyShardedDataParallel, True),
        )
    ]
    if rank == 0:
        print("step   torch's FSDP1   ours       ours, compiled")
        for step, row in enumerate(zip(*columns)):
            print(f"{step:4}   {row[0]:.6f}        {row[1]:.6f}   {row[2]:.6f}")
        print(f"graphs of the compiled model: {torch._dynamo.utils.counters['stats']['unique_graphs']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(os.path.join(folder, "rendezvous"),), nprocs=RANKS)
