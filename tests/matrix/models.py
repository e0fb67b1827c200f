"""The model and the data of the matrix: a tiny tied transformer's MLP, and what single rows put in its place.

One block is enough for most rows: it and the root are two units. A second one is compiled for as long again. Nor is
there a norm in front of the head: norms are much code, and the block has one. Most rows train what ranks share evenly:
Inductor's code is the same for all of them then, and g++ builds it once. Uneven shards have rows of their own.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.comparing import loss_of
from tests.models import Block, EvenBlock, Spread, Stack

DIM, VOCAB, LENGTH = 8, 20, 6
NUM_MICRO = 4


class Dropping(Block):
    """Dropout behind the norm and the two linears, all with biases; 2 * dim + 1 hidden features shard unevenly."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.25, self.training)


class Even(Dropping, EvenBlock):
    """Hidden features that ranks share evenly."""


class Tiny(Stack):
    """A block, or more, and an embedding tied to the head; calling it gives the loss."""

    def __init__(self, block: type[Block] = Even, num_blocks: int = 1) -> None:
        super().__init__(num_blocks, DIM, VOCAB, tied=True, block=block)
        self.norm = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(super().forward(tokens))


def twins(kind: type[Tiny] = Tiny, block: type[Block] = Even, num_blocks: int = 1) -> tuple[Any, Any]:
    """(reference, model to shard) with equal parameters."""
    torch.manual_seed(0)
    reference = kind(block, num_blocks)
    return reference, copy.deepcopy(reference)


def batches(step: int, length: int = LENGTH) -> Tensor:
    """Tokens of every rank: [ranks, batch, length]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (dist.get_world_size(), 2, length), generator=generator)


def features(step: int) -> Tensor:
    """Inputs of ``SpreadLoss``: [ranks, batch, features]."""
    return torch.randn(dist.get_world_size(), 2, DIM, generator=torch.Generator().manual_seed(step))


def hidden_states(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a pipeline over two data-parallel ranks: [2, micro-batches, length, features]."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 2, NUM_MICRO, LENGTH, DIM, generator=generator)
    return inputs, targets


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


# Graph breaks.


class Unrolled(Tiny):
    """No loop around the block: Dynamo gives up on frames that break inside one."""

    def between(self) -> None:
        """What runs before and behind the block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.between()
        x = self.layers[0](x)
        self.between()
        return loss_of(self.head(self.norm(x)))


class Broken(Unrolled):
    """Two graph breaks."""

    def between(self) -> None:
        torch._dynamo.graph_break()


# Activation checkpointing.


def _save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


class SelectivelyCheckpointed(Even):
    """Recomputed, but for its matrix multiplications."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


# A stage of a pipeline.


class Chunk(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Even(DIM)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


# DTensors on the whole mesh.


class SpreadLoss(Spread):
    """The forward returns the loss. The model has no dropout, because each rank draws other random numbers for DTensors."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean()


# LoRA.


class Adapted(nn.Module):
    """A frozen linear, computed with in the dtype of its input, and a trainable addition of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.base.bias is not None
        return F.linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype)) + self.b(self.a(x))


def adapted(dtype: torch.dtype) -> Tiny:
    """Everything frozen but adapters on the linears of the blocks, whose weights are stored in ``dtype``."""
    torch.manual_seed(0)
    model = Tiny(Dropping).requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    for linear in frozen_linears(model):
        linear.to(dtype)
    return model


def frozen_linears(model: nn.Module) -> list[nn.Linear]:
    return [module.base for module in model.modules() if isinstance(module, Adapted)]
