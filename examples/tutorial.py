"""The tutorial's script: docs/tutorial.md goes through it from top to bottom.

    torchrun --standalone --nproc-per-node 2 examples/tutorial.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp_compile
from fsdp_compile import fully_shard

FOLDER = Path(os.environ.get("TUTORIAL_FOLDER", "runs/tutorial"))


# 1. a model and its data, as for one process


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim=64, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, 1)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (self.head(x).squeeze(-1) - y).square().mean()


def batch_of(step):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(16, 64, generator=generator)
    return x, x[:, :8].sum(-1)


# 2. sharded


def sharded_model():
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


# 3. compiled and trained


def train(model, optim, steps):
    losses = []
    for step in steps:
        loss = model(*batch_of(step))
        loss.backward()
        fsdp_compile.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(round(loss.item() / dist.get_world_size(), 4))
    return losses


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    model, optim = sharded_model()
    compiled = torch.compile(model, fullgraph=True)

    # 4. inspected: what became of the first step
    with fsdp_compile.inspect(model) as report:
        losses = train(compiled, optim, range(1))

    # 5. trained, saved, trained on
    losses += train(compiled, optim, range(1, 10))
    of_model, of_optim = get_state_dict(model, optim)
    dcp.save({"model": of_model, "optim": of_optim}, checkpoint_id=str(FOLDER))
    losses += train(compiled, optim, range(10, 20))

    # 6. another model goes on from the checkpoint, without being compiled
    model, optim = sharded_model()
    of_model, of_optim = get_state_dict(model, optim)
    dcp.load({"model": of_model, "optim": of_optim}, checkpoint_id=str(FOLDER))
    set_state_dict(model, optim, model_state_dict=of_model, optim_state_dict=of_optim)
    resumed = train(model, optim, range(10, 20))

    if dist.get_rank() == 0:
        print(report)
        print("losses   ", *losses)
        print("resumed from step 10, eagerly", *resumed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
