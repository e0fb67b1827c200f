"""Backward behind a graph break: Dynamo watches what autograd calls then, and leaves alone what is ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_compile import no_sync
from tests.comparing import loss_of, mine
from tests.models import Stack, pair


def _num_breaks(model: nn.Module, breaks: bool = True) -> int:
    torch._dynamo.reset()
    counters.clear()
    run = model if breaks else torch.compiler.disable(model)

    @torch.compile(backend="aot_eager")
    def step(tokens: Tensor) -> None:
        loss = loss_of(run(tokens))
        if breaks:
            torch._dynamo.graph_break()
        loss.backward()

    step(mine())
    return sum(counters["graph_break"].values())


@pytest.mark.usefixtures("fake_group_of_four")
def test_as_many_breaks_as_without_sharding() -> None:
    unsharded, sharded = pair(make=lambda: Stack(num_blocks=1))
    expected = _num_breaks(unsharded)
    assert expected > 0
    assert _num_breaks(sharded) == expected
    with no_sync(sharded):
        assert _num_breaks(sharded) == expected
    assert _num_breaks(sharded) == expected  # and takes what was held back
    # Where every forward is eager, that is a break in front of its backward.
    assert _num_breaks(sharded, breaks=False) == _num_breaks(unsharded, breaks=False)
