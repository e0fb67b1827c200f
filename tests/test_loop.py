"""Checkpointed blocks and frozen bases, compiled: what is gathered and reduced."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.comparing import assert_same_grads, loss_of, mine
from tests.compiling import compiled
from tests.matrix import models
from tests.models import Checkpointed, Stack, shard
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks
from tests.recording import Wire


def _gathers(make: type[Stack]) -> tuple[int, int]:
    model = shard(make(1), reshard_after_forward=True)
    run = compiled(model, "aot_eager")
    loss_of(run(mine())).backward()
    with Wire() as forward:
        loss = loss_of(run(mine()))
    with Wire() as backward:
        loss.backward()
    return forward.calls["gather"], backward.calls["gather"]


def test_recomputation_and_its_backward_share_a_gather(two_ranks: Ranks) -> None:
    for (forward, backward), (plain_forward, plain_backward) in zip(
        two_ranks.run(_gathers, Checkpointed), two_ranks.run(_gathers, Stack)
    ):
        # One gather a parameter: a block of 6, embedding, norm, head. Recomputing a block reads all six once.
        assert (forward, plain_forward) == (10, 10)
        assert backward == plain_backward == 6 + 3  # without the embedding, whose rows are looked up


@on_two_ranks
def test_only_adapters_are_reduced_and_the_base_is_gathered_as_it_is_stored() -> None:
    unsharded, model = models.adapted(torch.float32).eval(), models.adapted(torch.bfloat16).eval()
    for linear in models.frozen_linears(unsharded):
        linear.to(torch.bfloat16).to(torch.float32)
    run = compiled(shard(model), "passes")
    for step in range(2):
        tokens = models.batches(step)
        loss = run(tokens[dist.get_rank()])
        with Wire() as wire:
            loss.backward()
        torch.stack([unsharded(one) for one in tokens]).mean().backward()
        assert_same_grads(model, unsharded)
    assert all(linear.weight.dtype is torch.bfloat16 for linear in models.frozen_linears(model))
    assert wire.reductions == 1  # the adapters of the block are one bucket
