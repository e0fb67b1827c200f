"""Backward inside the compiled step, with compiled autograd: one backward graph. tests/matrix has optimizers in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fsdp_compile.passes import GraphRecord
from tests.comparing import assert_same_grads, batches, loss_of, mine, reference_backward
from tests.models import Stack, pair
from tests.on_ranks import on_two_ranks
from tests.recording import recorded


class Single(Stack):
    """One block, without a loop."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers[0](self.embed(tokens))))


@contextmanager
def compiled_autograd() -> Iterator[list[GraphRecord]]:
    """Backward is compiled too; the graphs that the passes see."""
    with recorded() as seen, torch._dynamo.config.patch(compiled_autograd=True):
        yield seen


def _step(model: Stack, backend: str) -> Callable[[Tensor], Tensor]:
    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens))
        loss.backward()
        return loss

    return torch.compile(step, backend=backend)


@pytest.mark.slow
@on_two_ranks
def test_what_is_held_survives_an_eager_evaluation() -> None:
    """Of gradients of three micro-batches, the last of which synchronizes."""
    with compiled_autograd():
        unsharded, model = pair(make=Single)
        run = _step(model, "aot_eager")
        for step in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                reference_backward(unsharded, batches(10 * step + micro))
                run(mine(10 * step + micro))
                with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    model(mine())
            assert_same_grads(model, unsharded)
