"""Backward behind a graph break: Dynamo watches what autograd calls then, and leaves alone what is ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_compile import no_sync
from tests.comparing import batches, loss_of
from tests.models import Stack, pair


def _num_breaks(model: nn.Module, backend: str) -> int:
    torch._dynamo.reset()
    counters.clear()

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens))
        torch._dynamo.graph_break()
        loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend=backend)
    compiled(batches(0)[dist.get_rank()])
    return sum(counters["graph_break"].values())


def _breaks(backend: str, accumulates: bool) -> None:
    unsharded, sharded = pair(make=lambda: Stack(num_blocks=1))
    expected = _num_breaks(unsharded, backend)
    assert expected > 0
    assert _num_breaks(sharded, backend) == expected
    if accumulates:
        with no_sync(sharded):
            assert _num_breaks(sharded, backend) == expected
        assert _num_breaks(sharded, backend) == expected  # and takes what was held back


@pytest.mark.parametrize("accumulates", [False, pytest.param(True, marks=pytest.mark.more)])
def test_as_many_breaks_as_without_sharding(two_ranks: Any, accumulates: bool) -> None:
    two_ranks.run(_breaks, "aot_eager", accumulates)


def _eager_breaks() -> None:
    """Every forward is eager, and the break stands in front of its backward."""
    unsharded, sharded = pair(make=lambda: Stack(num_blocks=1))

    def num_breaks(model: nn.Module) -> int:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compiler.disable(model)

        def step(tokens: Tensor) -> None:
            loss_of(run(tokens)).backward()

        torch.compile(step, backend="aot_eager")(batches(0)[dist.get_rank()])
        return sum(counters["graph_break"].values())

    assert num_breaks(sharded) == num_breaks(unsharded)


def test_the_eager_path_is_left_alone_too(two_ranks: Any) -> None:
    two_ranks.run(_eager_breaks)


@pytest.mark.more
def test_as_many_breaks_as_without_sharding_on_inductor(two_ranks: Any) -> None:
    two_ranks.run(_breaks, "inductor", False)
