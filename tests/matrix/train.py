"""What the rows of the matrix share: how a model is sharded, compiled and trained beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.matrix import models
from tests.matrix.meter import Meter

LR = 0.5

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """A way of training, and what must hold of it."""

    name: str
    run: Callable[[Meter], None]
    num_graphs: int | None = 1
    """At most so many; None where the number says nothing."""
    num_backwards: int | None = 1
    """At most so many compiled regions that backward enters in the step that is counted."""
    compiled_autograd: bool = False
    ranks: int = 2
    """The fewest that show it: those of the tests."""
    shows: str = "fully_shard"
    """Public names, and methods of sharded modules, that it goes through."""
    warns: tuple[str, ...] = ()
    """What this package says, as patterns, and nothing else."""
    tolerance: float = 1e-4
    """Of the differences, each over the reference's largest of the same parameter."""
    own_random: bool = False
    """Inductor draws its own random numbers, as it does by default; else those of the eager reference."""


def compiled(meter: Meter, model: nn.Module, fullgraph: bool = True) -> Run:
    return torch.compile(model, backend=meter.backend, fullgraph=fullgraph)


def seed(step: int, place: int) -> None:
    """Before the forward of that batch, on either side: dropout draws alike."""
    torch.manual_seed(100 * step + place)


def optimizers(model: nn.Module, reference: nn.Module, lr: float = LR) -> list[torch.optim.Optimizer]:
    """One for each."""
    return [torch.optim.SGD(one.parameters(), lr=lr) for one in (model, reference)]


def step_all(optims: list[torch.optim.Optimizer]) -> None:
    for optim in optims:
        optim.step()
        optim.zero_grad()


def mode(training: bool, *models: nn.Module) -> None:
    """train() or eval() of each."""
    for model in models:
        model.train(training)


def reference_backward(reference: Run, batches: Tensor, step: int = 0) -> list[Tensor]:
    """Backward of the mean loss over the batches of a step; the losses."""
    losses = []
    for place, batch in enumerate(batches):
        seed(step, place)
        loss = reference(batch)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


def backward(run: Run, step: int, batches: Tensor) -> Tensor:
    """Forward and backward of this rank's batch."""
    place = dist.get_rank()
    seed(step, place)
    loss = run(batches[place])
    loss.backward()
    return loss.detach()


def train(
    meter: Meter,
    model: nn.Module,
    reference: nn.Module,
    run: Run,
    *,
    place: int | None = None,
    num_places: int | None = None,
    batches: Callable[[int], Tensor] = models.batches,
    lr: float = LR,
    first: int = 0,
    num_steps: int = 3,
) -> None:
    """Steps of SGD on both, from the first. ``place`` is this rank's among those with a batch of their own: as a rule
    all."""
    place = dist.get_rank() if place is None else place
    optims = optimizers(model, reference, lr)
    for step in range(first, first + num_steps):
        tokens = batches(step)[:num_places]
        with meter.counting() if step == first + num_steps - 1 else nullcontext():
            seed(step, place)
            loss = run(tokens[place])
            if not meter.backward_inside:
                loss.backward()
        losses = reference_backward(reference, tokens, step)
        meter.compare("loss", loss, losses[place])
        meter.compare_gradients(model, reference)
        step_all(optims)
    meter.name_eager_modules(model)
