"""Backward inside the compiled step, with compiled autograd: one backward graph, also across graph breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.passes import GraphRecord
from tests.comparing import assert_same_grads, assert_same_params, batches, full, loss_of, reference_backward
from tests.models import Block, BreakBlock, Stack, mesh_of, pair
from tests.ranks import Ranks
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


def _train(block: type[Block], backend: str) -> tuple[list[tuple[str, int, int]], int]:
    with compiled_autograd() as seen:
        unsharded, model = pair(make=lambda: Unrolled(2, block=block), reshard_after_forward=True)
        run = _step(model, backend)
        optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
        for step in range(3):
            for micro in range(2):  # the second adds to what the first left
                tokens = batches(10 * step + micro)
                reference_backward(unsharded, tokens)
                run(tokens[dist.get_rank()])
            assert_same_grads(model, unsharded)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
        return [(one.stage, one.num_unshards, one.num_reduces) for one in seen], torch._dynamo.utils.counters["compiled_autograd"]["captures"]


@pytest.mark.parametrize(
    "block", [pytest.param(Block, marks=pytest.mark.more), pytest.param(BreakBlock, marks=pytest.mark.slow)]
)
def test_one_backward_graph_whatever_the_forward_is(two_ranks: Ranks, block: type[Block]) -> None:
    for seen, captures in two_ranks.run(_train, block, "inductor"):
        assert captures >= 1
        backwards = {(gathers, reductions) for stage, gathers, reductions in seen if stage == "backward"}
        # 2 blocks of 6, embedding, norm and head: of the embedding rows are looked up.
        assert backwards == {(15, 16)}
        assert (len([stage for stage, *_ in seen if stage == "forward"]) > 1) == (block is BreakBlock)


@pytest.mark.slow  # on Inductor: a row of test_matrix.py
def test_numbers_without_code_generation(two_ranks: Ranks) -> None:
    two_ranks.run(_train, BreakBlock, "aot_eager")


def _whole_step(backend: str) -> None:
    """Clipping and the optimizer inside the compiled step."""
    with compiled_autograd():
        unsharded, model = pair(make=Single)
        optim, reference = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, unsharded))

        @torch.compile(backend=backend)
        def step(tokens: Tensor) -> Tensor:
            loss = loss_of(model(tokens))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optim.step()
            optim.zero_grad()
            return norm

        for number in range(3):
            tokens = batches(number)
            norm = step(tokens[dist.get_rank()])
            reference_backward(unsharded, tokens)
            expected = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.05)
            torch.testing.assert_close(full(norm), expected, atol=1e-6, rtol=1e-4)
            reference.step()
            reference.zero_grad()
        assert_same_params(model, unsharded, atol=1e-5, rtol=1e-4)


@pytest.mark.slow  # on Inductor: a row of test_matrix.py
def test_clipping_and_the_optimizer_inside_the_compiled_step(two_ranks: Ranks) -> None:
    two_ranks.run(_whole_step, "aot_eager")


def _two_steps(
    unsharded: Stack, model: Stack, backend: str, set_flag: Callable[[bool], None], num_micro_batches: int
) -> None:
    """Gradients of several micro-batches, the last of which has the flag set."""
    run = _step(model, backend)
    for step in range(2):
        for micro in range(num_micro_batches):
            tokens = batches(10 * step + micro)
            set_flag(micro == num_micro_batches - 1)
            reference_backward(unsharded, tokens)
            run(tokens[dist.get_rank()])
        assert_same_grads(model, unsharded)


def _accumulate(backend: str) -> None:
    with compiled_autograd():
        unsharded, model = pair(make=Single)
        _two_steps(unsharded, model, backend, model.set_requires_gradient_sync, num_micro_batches=3)


@pytest.mark.more
def test_accumulation_without_communication(two_ranks: Ranks) -> None:
    two_ranks.run(_accumulate, "aot_eager")


def _optimizer_in_backward(backend: str) -> None:
    with compiled_autograd():
        unsharded, model = pair(make=Single)
        for one in (model, unsharded):
            for param in one.parameters():
                param.register_post_accumulate_grad_hook(_descend)
        run = _step(model, backend)
        for step in range(2):
            tokens = batches(step)
            reference_backward(unsharded, tokens)
            run(tokens[dist.get_rank()])
        assert_same_params(model, unsharded, atol=1e-5, rtol=1e-4)


def _descend(param: Tensor) -> None:
    assert param.grad is not None
    with torch.no_grad():
        param.sub_(param.grad, alpha=0.1)
    param.grad = None


@pytest.mark.slow  # on Inductor: a row of test_matrix.py
def test_an_optimizer_in_backward(two_ranks: Ranks) -> None:
    two_ranks.run(_optimizer_in_backward, "aot_eager")


def _replicas(backend: str) -> None:
    with compiled_autograd():
        mesh = mesh_of("replicate", "shard")
        unsharded, model = pair(make=Single, mesh=mesh)
        _two_steps(unsharded, model, backend, model.set_requires_all_reduce, num_micro_batches=2)


@pytest.mark.more
def test_replicas_accumulate(four_ranks: Ranks) -> None:
    four_ranks.run(_replicas, "aot_eager")


def _evaluate_between(backend: str) -> None:
    with compiled_autograd():
        unsharded, model = pair(make=Single)
        run = _step(model, backend)
        for micro in range(2):
            tokens = batches(micro)
            model.set_requires_gradient_sync(micro == 1)
            reference_backward(unsharded, tokens)
            run(tokens[dist.get_rank()])
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                model(tokens[0])
        assert_same_grads(model, unsharded)


@pytest.mark.more
def test_what_is_held_survives_an_eager_evaluation(two_ranks: Ranks) -> None:
    two_ranks.run(_evaluate_between, "aot_eager")
