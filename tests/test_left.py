"""What holds a parameter from before it was sharded: optimizers train the shards, untied modules are named."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from fsdp_compile import fully_shard
from tests.comparing import assert_same_params, batches, loss_of, mine, reference_backward
from tests.models import Stack
from tests.on_ranks import on_two_ranks


@pytest.mark.parametrize("backend", [None, "inductor"])
@on_two_ranks
def test_an_optimizer_that_was_built_before_sharding_trains_the_shards(backend: str | None) -> None:
    torch.manual_seed(0)
    model = Stack(1, tied=True)
    unsharded = copy.deepcopy(model)
    pairs = [(one, torch.optim.AdamW(one.parameters(), lr=1e-2)) for one in (model, unsharded)]
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    for step in range(2):
        loss_of(run(mine(step))).backward()
        reference_backward(unsharded, batches(step))
        for _, optimizer in pairs:
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
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("is_tied_again", [False, True])
def test_a_module_that_is_not_tied_any_more_is_named(backend: str | None, is_tied_again: bool) -> None:
    model = Untied()
    fully_shard(model.embed)
    if is_tied_again:
        model.head.weight = model.embed.weight
    run = model.embed if backend is None else torch.compile(model.embed, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(torch.arange(4))
    said = [str(one.message) for one in caught if "not tied any more" in str(one.message)]
    assert len(said) == (0 if is_tied_again else 1), said
    assert is_tied_again or "weight of a Embedding and weight of a Linear are not tied any more" in said[0]
