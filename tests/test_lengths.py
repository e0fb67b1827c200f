"""Ranks whose batches have other lengths, in graphs of other shapes, issue the same collectives in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile import fully_shard
from tests.comparing import assert_same_grads
from tests.compiling import num_graphs
from tests.models import twins
from tests.ranks import Ranks
from tests.recording import Wire
from tests.test_structure import (
    LAYERS,
    WIDTH,
    Attends,
    Layer,
    Net,
    Positioned,
    ProductsSaved,
    Projections,
    Queries,
)

# Of each rank: one row is a shape of its own for compilers, and so is a batch as wide as the model.
NUM_STEPS = 20
LENGTHS = ((1, WIDTH, 300), (7, 1, 3))
# Those in which lengths could decide what is gathered.
KINDS = (Layer, Projections, ProductsSaved, Positioned, Queries, Attends)


def _batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    length = LENGTHS[rank][step if step < 3 else int(torch.randint(3, (), generator=generator))]
    return torch.randn(length, WIDTH, generator=generator)


def _train() -> None:
    unsharded, model = twins(lambda: Net(tuple(one for one in LAYERS if one not in KINDS)))
    for one in model.layers:
        fully_shard(one, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    rank = dist.get_rank()
    # Static shapes on one rank, dynamic ones on the other; each recompiles in steps of its own.
    run = torch.compile(model, fullgraph=True, dynamic=rank == 1)
    launched: list[tuple[str, Any]] = []
    for step in range(NUM_STEPS):
        with Wire() as wire:
            run(_batch(step, rank)).pow(2).mean().backward()
        launched += wire.launches
        torch.stack([unsharded(_batch(step, other)).pow(2).mean() for other in range(2)]).mean().backward()
        assert_same_grads(model, unsharded, atol=1e-4, rtol=1e-3)
        model.zero_grad()
        unsharded.zero_grad()
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, launched)
    assert len(launched) >= len(model.layers) * NUM_STEPS and by_rank[0] == by_rank[1]
    assert num_graphs() == 3 if rank == 0 else num_graphs() < 3


@pytest.mark.slow
def test_ranks_with_other_lengths_launch_the_same(two_ranks: Ranks) -> None:
    two_ranks.run(_train, limit_s=900)
