"""Batches of every rank, losses, and the comparison of a sharded model with an unsharded one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def batches(step: int, vocab: int = 31) -> Tensor:
    """Tokens of every rank in one step: [ranks, 4, 7]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, vocab, (dist.get_world_size(), 4, 7), generator=generator)


def loss_of(logits: Tensor) -> Tensor:
    return logits.float().pow(2).mean()


def mine(step: int = 0) -> Tensor:
    """This rank's."""
    return batches(step)[dist.get_rank()]


def local_loss(model: nn.Module, step: int) -> Tensor:
    return loss_of(model(mine(step)))


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


def compare_one_step(
    unsharded: nn.Module, sharded: nn.Module, inputs: Tensor, backend: str | None, fullgraph: bool = True
) -> None:
    """Run both forward and backward on the same batch, the sharded one compiled with a backend; compare gradients."""
    run = sharded if backend is None else torch.compile(sharded, backend=backend, fullgraph=fullgraph)
    for call in (unsharded, run):
        call(inputs).pow(2).sum().backward()
    assert_same_grads(sharded, unsharded)


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


def backward_on_both(run: Callable[[Tensor], Tensor], unsharded: nn.Module, *steps: int) -> None:
    """Backward of this rank's batch of each step on the one, and of all ranks' batches on the other."""
    for step in steps:
        loss_of(run(mine(step))).backward()
        reference_backward(unsharded, batches(step))


def train_steps(run: Callable[[Tensor], Tensor], optim: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Steps on this rank's batches; the losses."""
    losses = []
    for step in steps:
        loss = loss_of(run(mine(step)))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses
