"""Small models and the comparison with an unsharded one, used by several test files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard


class Block(nn.Module):
    """Norm, up, down; 2 * dim + 1 hidden features, so that no rank count divides everything."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class BreakBlock(Block):
    """A graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(torch.relu(hidden))


class Stack(nn.Module):
    """Embedding, blocks in a loop, norm and head; tied on request."""

    def __init__(
        self, num_blocks: int = 3, dim: int = 16, vocab: int = 31, tied: bool = False, block: type[nn.Module] = Block
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(block(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Checkpointed(Stack):
    """Every block is recomputed in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def shard(model: Stack, **kwargs: Any) -> Stack:
    """Each block, then the root."""
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def pair(seed: int = 0, make: Callable[[], Stack] = Stack, **kwargs: Any) -> tuple[Stack, Stack]:
    """(unsharded, sharded) with equal parameters."""
    torch.manual_seed(seed)
    unsharded = make()
    return unsharded, shard(copy.deepcopy(unsharded), **kwargs)


def batches(step: int, vocab: int = 31) -> Tensor:
    """Tokens of every rank in one step: [ranks, 4, 7]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, vocab, (dist.get_world_size(), 4, 7), generator=generator)


def loss_of(logits: Tensor) -> Tensor:
    return logits.float().pow(2).mean()


def reference_backward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Backward of the mean loss over all ranks' batches; the loss."""
    loss = torch.stack([loss_of(model(batch)) for batch in tokens]).mean()
    loss.backward()
    return loss.detach()


def mean_over_ranks(loss: Tensor) -> Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_grads(sharded: nn.Module, unsharded: nn.Module, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    ours, theirs = dict(sharded.named_parameters()), dict(unsharded.named_parameters())
    assert list(ours) == list(theirs)
    for fqn, param in ours.items():
        expected = theirs[fqn].grad
        if expected is None:
            assert param.grad is None, f"{fqn} has a gradient, the unsharded one has none"
            continue
        assert param.grad is not None, f"{fqn} has no gradient"
        torch.testing.assert_close(full(param.grad), expected, atol=atol, rtol=rtol, msg=lambda text: f"{fqn}: {text}")  # noqa: B023


def assert_same_params(sharded: nn.Module, unsharded: nn.Module, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    for (fqn, ours), (expected_fqn, theirs) in zip(sharded.named_parameters(), unsharded.named_parameters()):
        assert fqn == expected_fqn
        torch.testing.assert_close(full(ours), theirs, atol=atol, rtol=rtol, msg=lambda text: f"{fqn}: {text}")  # noqa: B023


def train_and_compare(
    run: Callable[[Tensor], Tensor],
    sharded: nn.Module,
    unsharded: nn.Module,
    steps: int = 3,
    place: int | None = None,
    num_places: int | None = None,
) -> None:
    """AdamW steps on both; losses, gradients and parameters agree at each.

    ``place`` is this rank's among the ``num_places`` that have a batch of their own; as a rule every rank has.
    """
    place = dist.get_rank() if place is None else place
    optim = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(unsharded.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = batches(step)[:num_places]
        loss = loss_of(run(tokens[place]))
        loss.backward()
        expected = reference_backward(unsharded, tokens)
        torch.testing.assert_close(mean_over_ranks(loss), expected, atol=1e-6, rtol=1e-5)
        assert_same_grads(sharded, unsharded)
        for one in (optim, reference):
            one.step()
            one.zero_grad()
    assert_same_params(sharded, unsharded, atol=1e-4, rtol=1e-3)
