"""Process groups for reductions: one for each set of ranks, however often they are switched on."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import fully_shard
from fsdp_compile.passes.wire.ledger import ledger
from tests.on_ranks import on_two_ranks
from tests.processes import wait_until


def _counts() -> tuple[int, int]:
    """Process groups and open files of this process."""
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


def _sharded() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


@on_two_ranks
def test_switching_often_makes_one_group() -> None:
    model = _sharded()
    model.set_separate_reduce_scatter_group(True)
    model(torch.ones(2, 4)).sum().backward()
    first = _counts()
    for turn in range(50):
        model.set_separate_reduce_scatter_group(turn % 2 == 1)
    another = _sharded()
    another.set_separate_reduce_scatter_group(True)
    for one in (model, another):
        one(torch.ones(2, 4)).sum().backward()
    assert _counts() == first


def _watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fsdp_compile lookout"]


@on_two_ranks
def test_a_new_world_has_its_own(tmp_path: Any) -> None:
    def world(number: int) -> None:
        where = f"file://{tmp_path}/rendezvous.{number}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)

    rank = dist.get_rank()
    dist.destroy_process_group()
    counts = []
    for number in range(3):
        world(number)
        model = _sharded()
        model.set_separate_reduce_scatter_group(True)
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad is not None
        counts.append(_counts())
        assert ledger.is_kept, "ranks of this world are not compared"
        dist.destroy_process_group()
    world(3)
    model = _sharded()  # before the thread that watched the last world has seen that it is gone
    wait_until(lambda: not _watching(), "it has")
    model(torch.ones(2, 4)).sum().backward()
    assert ledger.is_kept and len(_watching()) == 1
    assert counts[0][0] == counts[1][0] == counts[2][0]
