"""torch.distributed.pipelining runs sharded stages: two, each over two ranks. Compiled ones are in the matrix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from fsdp_compile import fully_shard
from tests.comparing import assert_same_grads
from tests.models import Block, mesh_of
from tests.ranks import Ranks

MICRO_BATCHES = 4
DIM = 16


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def _pipeline(name: str, num_chunks: int, reshard: bool) -> None:
    mesh = mesh_of("pp", "dp")
    stage_rank, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    unsharded = [nn.Sequential(Block(DIM), Block(DIM)) for _ in range(2 * num_chunks)]
    # A V-schedule has rank 0's second chunk last, the others go around.
    first, last = stage_rank, 2 * num_chunks - 1 - stage_rank
    indices = [first] if num_chunks == 1 else [first, last if "ZBV" in name or "DualPipe" in name else 2 + stage_rank]
    chunks = []
    for index in indices:
        chunk = copy.deepcopy(unsharded[index])
        for layer in chunk:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard)
        chunks.append(fully_shard(chunk, mesh=mesh["dp"], reshard_after_forward=reshard))
    stages = [
        PipelineStage(chunk, index, 2 * num_chunks, torch.device("cpu"), group=mesh["pp"].get_group())
        for chunk, index in zip(chunks, indices)
    ]
    cls = getattr(schedules, name)
    schedule: Any = cls(stages[0] if num_chunks == 1 else stages, MICRO_BATCHES, loss_fn=_loss)
    generator = torch.Generator().manual_seed(7)
    for step in range(2):
        inputs = torch.randn(2, 2 * MICRO_BATCHES, DIM, generator=generator)
        targets = torch.randn(2, 2 * MICRO_BATCHES, DIM, generator=generator)
        has_first, has_last = 0 in indices, 2 * num_chunks - 1 in indices
        arguments = (inputs[dp_rank],) if has_first else ()
        losses: list[Tensor] = []
        if has_last:
            schedule.step(*arguments, target=targets[dp_rank], losses=losses)
        else:
            schedule.step(*arguments)
        x = inputs
        for chunk in unsharded:
            x = chunk(x)
        # The loss of a batch is the mean over its micro-batches, and the gradient is the mean over the ranks.
        _loss(x, targets).backward()
        for chunk, index in zip(chunks, indices):
            assert_same_grads(chunk, unsharded[index])
        for module in (*chunks, *unsharded):
            module.zero_grad()
        assert step or not has_last or len(losses) == MICRO_BATCHES
    dist.barrier()


@pytest.mark.compat
@pytest.mark.parametrize(("name", "reshard"), [("ScheduleGPipe", True), ("Schedule1F1B", False)])
def test_schedules_of_one_stage_a_rank(four_ranks: Ranks, name: str, reshard: bool) -> None:
    four_ranks.run(_pipeline, name, 1, reshard)


@pytest.mark.compat
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_schedules_of_two_stages_a_rank(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(_pipeline, name, 2, False)


# Their weight backward takes parameters one by one: on torch 2.11 it counts gradients twice where several share a node.
# ZBV on 2.11 fails over gloo without us: a rank sends to itself.
@pytest.mark.parametrize(
    "name", [pytest.param("ScheduleInterleavedZeroBubble", marks=pytest.mark.compat), "ScheduleZBVZeroBubble"]
)
def test_zero_bubble_schedules(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(_pipeline, name, 2, False)
