"""A training script for torch's FSDP2 as users have them, which knows of nothing else: run by test_adopt.py."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method


class Model(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 33), nn.GELU(), nn.Linear(33, dim)) for _ in range(2)
        )
        self.head = nn.Linear(dim, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    register_fsdp_forward_method(model, "loss")
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(int(sys.argv[1])):
        loss = model.loss(torch.randint(0, 31, (2, 8), generator=generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(f"{loss.item():.6f}")
    if dist.get_rank() == 0:
        print(__name__, sys.argv, sys.path[0], sys.modules["__main__"].Model is Model, flush=True)
        print("engine", FSDPModule in type(model).__mro__[:2], flush=True)
        print("losses", *losses, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
