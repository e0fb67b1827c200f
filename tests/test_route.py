"""A rank that runs eagerly among ranks that run compiled launches what they launch, and trains on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import fully_shard
from fsdp_compile.eager import forward
from tests.comparing import assert_same_grads
from tests.models import Stack, twins
from tests.ranks import Ranks
from tests.test_structure import WIDTH, Net, Noisy

TOKENS = 31


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, TOKENS, (2, 3 + step), generator=generator)


def _rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3 + step, WIDTH, generator=generator)


def _launched(step: Callable[[], Any]) -> list[tuple[str, Any]]:
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    return [(one.name, one.input_shapes) for one in events if one.name.startswith("c10d::")]


def _train(
    make: Callable[[], nn.Module], batch: Callable[[int, int], Tensor], whole: bool, how: str, **options: Any
) -> list[int]:
    """Rank 1 falls back after two steps; eager forwards of units in each step."""
    if options.pop("replicas", False):
        options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    unsharded, model = twins(make)
    for one in model.layers:  # type: ignore[union-attr]
        fully_shard(one, **options)
        if not whole:
            one.compile()
    fully_shard(model, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    run: Any = torch.compile(model) if whole else model
    begun = []
    original = forward.follow
    forward.follow = lambda unit: (begun.append(unit), original(unit))[1]  # type: ignore[assignment]
    counts, launched = [], []
    try:
        for step in range(5):
            begun.clear()
            with ExitStack() as stack:
                if how == "stance" and rank == 1 and step in (2, 4):
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                if how == "limit" and rank == 1:  # each step has another length
                    stack.enter_context(torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False))
                launched += _launched(lambda: run(batch(step, rank)).pow(2).mean().backward())  # noqa: B023
            counts.append(len(begun))
            torch.stack([unsharded(batch(step, other)).pow(2).mean() for other in range(world)]).mean().backward()
            assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-4)
            for one in (model, unsharded):
                one.zero_grad()
                with torch.no_grad():
                    for param in one.parameters():
                        param.mul_(1.01)
    finally:
        forward.follow = original
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, launched)
    assert all(one == by_rank[0] for one in by_rank) and launched
    return counts


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.more)], ids=["whole", "blocks"])
@pytest.mark.parametrize("how", ["limit", pytest.param("stance", marks=pytest.mark.more)])
def test_a_rank_that_falls_back_trains_on(two_ranks: Ranks, how: str, whole: bool) -> None:
    compiled, falls_back = two_ranks.run(_train, Stack, _tokens, whole, how)
    around = 0 if whole else 1  # the root, which is not compiled then
    assert compiled == [around] * 5
    assert falls_back == [around, around, 3, around if how == "stance" else 3, 3]


@pytest.mark.more
def test_with_many_kinds_of_layers(two_ranks: Ranks) -> None:
    two_ranks.run(_train, _net, _rows, True, "stance", reshard_after_forward=True)


def _net() -> nn.Module:
    return Net(without=(Noisy,))
