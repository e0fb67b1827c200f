"""A rank that never had the graph launches what the others' graphs launch, from the first step on."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.models import Checkpointed, Stack
from tests.ranks import Ranks
from tests.test_route import NUM_STEPS, Case, Inner, never_compiling, train

BY_DEFAULT = ("never", "break")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how in BY_DEFAULT else pytest.mark.more) for how in never_compiling]
)
def test_it_trains_on(two_ranks: Ranks, how: str) -> None:
    compiles, never = two_ranks.run(train, Case(how=how))
    assert (compiles, never) == ([0] * NUM_STEPS, [3] * NUM_STEPS)


CASES = {
    "in bfloat16": Case(
        options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        tolerance=3e-2,
    ),
    "tied": Case(partial(Stack, tied=True)),
    "checkpointed": Case(Checkpointed),
    "kept behind forward": Case(options={"reshard_after_forward": False}),
    "frozen": Case(frozen=("layers.0.up.weight", "layers.1.down.bias", "embed.weight")),
    "accumulating": Case(holds_back=True),
    "synchronizing late": Case(decides_late=True),
    "evaluating": Case(evaluates=True),
    "backward twice": Case(twice=True),
    "units in blocks": Case(partial(Stack, 3, block=Inner), nested=True),
    "whole over blocks": Case(both=True),
    "on Inductor": Case(backend="inductor"),
}


@pytest.mark.more
@pytest.mark.parametrize("how", ["never", "unwrapped"])
@pytest.mark.parametrize("name", CASES)
def test_it_does_in_every_mode(two_ranks: Ranks, name: str, how: str) -> None:
    compiles, never = two_ranks.run(_by_name, name, how)
    assert max(compiles) < min(never)


def _by_name(name: str, how: str) -> list[int]:
    return train(dataclasses.replace(CASES[name], how=how))


@pytest.mark.more
@pytest.mark.parametrize("never", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_of_three_ranks(three_ranks: Ranks, never: tuple[int, ...]) -> None:
    """Whichever they are; and where none compiles, they are as they were."""
    counts = three_ranks.run(train, Case(how="never", never=never))
    assert [max(one) > 0 for one in counts] == [rank in never for rank in range(3)]
