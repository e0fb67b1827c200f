"""What all rows of `benchmarks.frameworks` share: the models, the batches, and what a row is.

A row trains five steps, saves behind the third, and resumes from there in a model that was made anew:

    losses   1  2  3  4  5      of the first model
                      4  5      of the second one

No row knows this package: each calls its framework, which calls torch's FSDP by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, SAVED_AFTER = 5, 3
VOCAB, DIM, SEQ, BATCH = 64, 32, 16, 2
LR = 1e-2
TOLERANCE = 1e-4
IN_BFLOAT16 = 2e-2  # of losses: a kernel rounds once where single operators round after each
FORGETS = 1e-2  # accelerate asks a new optimizer under FSDP1 which state to load, and it has none: all engines alike
FSDP1, FSDP2 = "FSDP1", "FSDP2"
Losses = list[float]


@dataclass(frozen=True)
class Row:
    """``run(compiled, folder)`` returns the losses, each the mean over the ranks."""

    name: str
    package: str
    run: Callable[[bool, Path], Losses]
    engine: str = FSDP2
    tolerance: float = TOLERANCE
    resumed_within: float = TOLERANCE  # of the first model's losses


@dataclass(frozen=True)
class Refused:
    """What torch's own FSDP does not do on a CPU: ``attempt`` raises, and what it raises is the reason."""

    name: str
    package: str
    attempt: Callable[[], object]
    engine: str = FSDP2


class Block(nn.Module):
    def __init__(self, hidden: int = 2 * DIM + 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Under torchtitan's names, with as many layers as show what is shared."""

    enable_weight_tying = False

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = layers
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        layers = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for layer in layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(nn.ModuleList(Block() for _ in range(2)))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "intermediate_size": 2 * DIM, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=SEQ, use_cache=False, **sizes))


def tokens_of(step: int, rank: int | None = None) -> Tensor:
    """A batch for each step and rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)


def loss_between(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@contextmanager
def started_by_torchrun() -> Iterator[None]:
    """The environment that frameworks look for, of the group that is there already."""
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, GROUP_RANK="0", LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
