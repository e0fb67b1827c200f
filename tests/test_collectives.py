"""The gather that we launch on gloo, many at once: torch's own corrupts the heap within this test's number of turns."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_compile.passes.wire.collectives import all_gather_of, c10d
from tests.ranks import Ranks

IN_FLIGHT = 32
TURNS = 500


def _gather_many_at_once() -> int:
    rank, num_ranks, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    gather = all_gather_of("gloo")
    wrong = 0
    for turn in range(TURNS):
        shards = [torch.full((8 + index, 2), float(100 * turn + rank + index)) for index in range(IN_FLIGHT)]
        launched = [gather(shard, num_ranks, name) for shard in shards]
        del shards
        for index, full in enumerate(launched):
            c10d.wait_tensor(full)
            expected = torch.arange(num_ranks).repeat_interleave(8 + index) + 100.0 * turn + index
            wrong += not torch.equal(full, expected[:, None].expand(-1, 2))
    return wrong


@pytest.mark.compat
def test_many_gathers_in_flight_on_gloo(two_ranks: Ranks) -> None:
    assert two_ranks.run(_gather_many_at_once) == [0, 0]
