"""Backward inside the compiled step, with compiled autograd: one backward graph. tests/matrix has optimizers in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fsdp_compile.passes import GraphRecord
from tests.comparing import assert_same_grads, assert_same_params, batches, loss_of, mine, reference_backward
from tests.models import Stack, mesh_of, pair
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.recording import recorded


class Unrolled(Stack):
    """No loop: Dynamo gives up on frames that break inside one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.layers[0](x)
        x = self.layers[1](x)
        return self.head(self.norm(x))


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
def test_one_backward_graph() -> None:
    """With graph breaks in forward, too: a row of tests/matrix."""
    with compiled_autograd() as seen:
        unsharded, model = pair(make=Unrolled, reshard_after_forward=True)
        run = _step(model, "inductor")
        optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
        for step in range(3):
            for micro in range(2):  # the second adds to what the first left
                reference_backward(unsharded, batches(10 * step + micro))
                run(mine(10 * step + micro))
            assert_same_grads(model, unsharded)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
        backwards = {(one.num_unshards, one.num_reduces) for one in seen if one.stage == "backward"}
    # 2 blocks of 6, embedding, norm and head: of the embedding rows are looked up.
    assert backwards == {(15, 16)}
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] >= 1


def _two_steps(unsharded: Stack, model: Stack, set_flag: Callable[[bool], None], evaluates: bool) -> None:
    """Gradients of three micro-batches, the last of which has the flag set; behind each it may be evaluated eagerly."""
    run = _step(model, "aot_eager")
    for step in range(2):
        for micro in range(3):
            set_flag(micro == 2)
            reference_backward(unsharded, batches(10 * step + micro))
            run(mine(10 * step + micro))
            if evaluates:
                with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    model(mine())
        assert_same_grads(model, unsharded)


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [False, True])
@on_two_ranks
def test_what_is_held_survives_an_eager_evaluation(evaluates: bool) -> None:
    with compiled_autograd():
        unsharded, model = pair(make=Single)
        _two_steps(unsharded, model, model.set_requires_gradient_sync, evaluates)


@pytest.mark.slow
@on_four_ranks
def test_replicas_accumulate() -> None:
    with compiled_autograd():
        unsharded, model = pair(make=Single, mesh=mesh_of("replicate", "shard"))
        _two_steps(unsharded, model, model.set_requires_all_reduce, evaluates=False)
