"""What holds a parameter from before it was sharded: optimizers train the shards, untied modules are named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fsdp_compile import fully_shard
from tests.comparing import assert_same_params, backward_on_both
from tests.compiling import PATHS, compiled
from tests.models import Stack, shard, twins
from tests.on_ranks import on_two_ranks


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_an_optimizer_that_was_built_before_sharding_trains_the_shards(path: str) -> None:
    unsharded, model = twins(lambda: Stack(1, tied=True))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    shard(model)
    run = compiled(model, path)
    for step in range(2):
        backward_on_both(run, unsharded, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)


class Untied(nn.Module):
    """A model whose two outer modules share a weight, and that no unit contains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize(("path", "is_tied_again"), [("eager", False), ("aot_eager", False), ("eager", True)])
def test_a_module_that_is_not_tied_any_more_is_named(path: str, is_tied_again: bool) -> None:
    model = Untied()
    fully_shard(model.embed)
    if is_tied_again:
        model.head.weight = model.embed.weight
    run = compiled(model.embed, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(torch.arange(4))
    said = [str(one.message) for one in caught if "not tied any more" in str(one.message)]
    assert len(said) == (0 if is_tied_again else 1), said
    assert is_tied_again or "weight of a Embedding and weight of a Linear are not tied any more" in said[0]
