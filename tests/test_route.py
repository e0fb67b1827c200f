"""A rank that runs eagerly among ranks that run compiled launches what they launch, and trains on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.eager import forward
from tests.comparing import assert_same_grads
from tests.compiling import compiled
from tests.models import Checkpointed, Stack, shard, twins
from tests.ranks import Ranks
from tests.test_structure import WIDTH, Net, Noisy

NUM_STEPS = 5
HOWS = ("limit", "stance")


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 31, (2, 3 + step), generator=generator)


def _rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3 + step, WIDTH, generator=generator)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = Stack
    batch: Callable[[int, int], Tensor] = _tokens
    options: dict[str, Any] = field(default_factory=dict)
    how: str = "stance"  # or "limit": that of recompilations
    blocks: bool = False  # compiled one by one, not the whole model
    backend: str = "passes"
    replicated: bool = False
    frozen: tuple[str, ...] = ()
    holds_back: bool = False  # every other step is without sync
    evaluates: bool = False  # before each step, without gradients
    twice: bool = False  # backward, through the same graph
    tolerance: float = 1e-5


def _launched(step: Callable[[], Any]) -> list[tuple[str, Any]]:
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    return [(one.name, one.input_shapes) for one in events if one.name.startswith("c10d::")]


def _train(case: Case) -> list[int]:
    """Rank 1 falls back after two steps; how many forwards of units each step ran eagerly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded, model = twins(case.make)
    options = dict(case.options)
    if case.replicated:
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for one in (unsharded, model):
        for fqn in case.frozen:
            one.get_parameter(fqn).requires_grad_(False)
    shard(model, **options)
    if case.blocks:
        for layer in model.layers:
            layer.compile(backend=case.backend)
    run = model if case.blocks else compiled(model, case.backend, fullgraph=False)
    begun: list[Any] = []
    enter_route = forward.enter_route
    forward.enter_route = lambda unit: (begun.append(unit), enter_route(unit))[1]  # type: ignore[assignment]
    counts, launched = [], []

    def step(number: int) -> None:
        if case.evaluates:
            with torch.no_grad():
                run(_other(case.batch(number, rank)))
        loss = run(case.batch(number, rank)).float().pow(2).mean()
        loss.backward(retain_graph=case.twice)
        if case.twice:
            loss.backward()

    try:
        for number in range(NUM_STEPS):
            begun.clear()
            holds_back = case.holds_back and number % 2 == 0
            model.set_requires_gradient_sync(not holds_back)
            with ExitStack() as stack:
                # Buffers that are donated are no more for a second backward.
                stack.enter_context(torch._functorch.config.patch(donated_buffer=not case.twice))
                if rank == 1 and case.how == "stance" and number in (2, 3):
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                if rank == 1 and case.how == "limit":  # each step has another length
                    stack.enter_context(torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False))
                launched += _launched(partial(step, number))
            counts.append(len(begun))
            losses = [unsharded(case.batch(number, other)).float().pow(2).mean() for other in range(world)]
            (torch.stack(losses).mean() * (2 if case.twice else 1)).backward()
            if not holds_back:
                assert_same_grads(model, unsharded, atol=case.tolerance, rtol=10 * case.tolerance)
                for one in (model, unsharded):
                    one.zero_grad()
                    with torch.no_grad():
                        for param in one.parameters():
                            param.mul_(1.01)
    finally:
        forward.enter_route = enter_route
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, launched)
    assert all(one == by_rank[0] for one in by_rank) and launched
    return counts


def _other(batch: Tensor) -> Tensor:
    return batch.flip(0)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize(
    ("how", "backend"), [("limit", "passes"), *(pytest.param(how, "inductor", marks=pytest.mark.more) for how in HOWS)]
)
def test_a_rank_that_falls_back_trains_on(two_ranks: Ranks, how: str, backend: str, blocks: bool) -> None:
    stays, falls_back = two_ranks.run(_train, Case(how=how, blocks=blocks, backend=backend))
    around = 1 if blocks else 0  # the root, which is not compiled then
    assert stays == [around] * NUM_STEPS
    assert falls_back == [around, around, 3, 3, around if how == "stance" else 3]


CASES = {
    "checkpointed": Case(Checkpointed),
    "tied": Case(partial(Stack, tied=True)),
    "kept behind forward": Case(options={"reshard_after_forward": False}),
    "all gathered again": Case(options={"reshard_after_forward": True}),
    "in bfloat16": Case(
        options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        tolerance=3e-2,
    ),
    "frozen": Case(frozen=("layers.0.up.weight", "layers.1.down.bias", "embed.weight")),
    "accumulating": Case(holds_back=True),
    "evaluating": Case(evaluates=True),
    "backward twice": Case(twice=True),
    "blocks that accumulate": Case(blocks=True, holds_back=True, evaluates=True),
    "many kinds of layers": Case(lambda: Net(without=(Noisy,)), _rows, {"reshard_after_forward": True}),
}


@pytest.mark.more
@pytest.mark.parametrize("name", CASES)
def test_it_does_in_every_mode(two_ranks: Ranks, name: str) -> None:
    stays, falls_back = two_ranks.run(_by_name, name)
    assert max(falls_back) > max(stays)


def _by_name(name: str) -> list[int]:
    return _train(CASES[name])


@pytest.mark.more
def test_on_replicated_meshes(four_ranks: Ranks) -> None:
    _, falls_back, *_ = four_ranks.run(_train, Case(replicated=True))
    assert falls_back == [0, 0, 3, 3, 0]
