"""What a rank that fell back holds, and how it goes on, where a step does not end as the graph's would."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.core.unit import unit_of
from fsdp_compile.eager.routed import Routed
from fsdp_compile.eager.running import running
from fsdp_compile.passes.ledger import Ledger, ledger
from tests.comparing import assert_same_grads
from tests.compiling import compiled
from tests.models import Stack, shard, twins
from tests.ranks import Ranks
from tests.recording import Wire


def _bytes_held() -> int:
    """Of all tensors that Python has, each storage once."""
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _settled(expected: int) -> int:
    """What is held once the process group's threads have let go of what they sent."""
    deadline = time.monotonic() + 5
    while _bytes_held() != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return _bytes_held()


def _forwards_alone(reshard: bool) -> tuple[list[int], int, int]:
    """Bytes held before and after each eager forward that no backward follows; units on routes, how many live on."""
    _, model = twins(Stack)
    shard(model, reshard_after_forward=reshard)
    run, batch = compiled(model, "passes", fullgraph=False), torch.arange(12).view(2, 6)
    for _ in range(2):
        run(batch).sum().backward()
    model.zero_grad()
    routed: list[weakref.ref[Any]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        gathered = running(unit_of(module)).gathered
        assert isinstance(gathered, Routed)
        routed.append(weakref.ref(gathered))

    held = []
    with torch.compiler.set_stance("force_eager"):
        run(batch).sum()  # what is made once, is
        hooks = [layer.register_forward_hook(note) for layer in model.layers]
        gc.collect()
        gc.disable()
        try:
            held.append(_bytes_held())
            for _ in range(3):
                loss = run(batch).sum()
                del loss
                held.append(_settled(held[0]))
        finally:
            gc.enable()
        for hook in hooks:
            hook.remove()
    return held, len(routed), sum(one() is not None for one in routed)


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.more)])
def test_nothing_is_held_where_no_backward_follows(two_ranks: Ranks, reshard: bool) -> None:
    for held, seen, alive in two_ranks.run(_forwards_alone, reshard):
        assert seen == 6 and alive == 0
        assert len(set(held)) == 1, held


def _switch_off_late() -> list[bool]:
    """After accumulating once, sync is switched off between each forward and its backward; rank 1 runs eagerly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded, model = twins(Stack)
    shard(model)
    run = compiled(model, "passes", fullgraph=False)

    def batch(step: int, of: int = rank) -> Tensor:
        return torch.randint(0, 31, (2, 6), generator=torch.Generator().manual_seed(10 * step + of))

    launched = []
    for step in range(8):
        reduces = step in (1, 7)
        model.set_requires_gradient_sync(step not in (0, 7))
        with torch.compiler.set_stance("force_eager" if rank == 1 and step >= 2 else "default"), Wire() as wire:
            loss = run(batch(step)).pow(2).mean()
            model.set_requires_gradient_sync(reduces)
            loss.backward()
        launched += wire.launches
        torch.stack([unsharded(batch(step, of)).pow(2).mean() for of in range(world)]).mean().backward()
        if reduces:
            assert_same_grads(model, unsharded, atol=1e-5)
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, launched)
    assert by_rank[0] == by_rank[1] and launched
    return [unit_of(layer).accumulation.decides_in_backward for layer in model.layers]


def test_sync_switched_off_between_forward_and_backward(two_ranks: Ranks) -> None:
    compiles, falls_back = two_ranks.run(_switch_off_late)
    assert compiles == falls_back == [True, True]


def _scans(steps: int) -> int:
    """How often the ledger is looked through in so many steps that stay eager."""
    _, model = twins(Stack)
    shard(model)
    run, batch = compiled(model, "passes", fullgraph=False), torch.arange(12).view(2, 6)
    run(batch).sum().backward()
    scans = []
    ran = Ledger.ran

    def counted(self: Ledger, since: int = 0) -> Any:
        scans.append(1)
        return ran(self, since)

    Ledger.ran = counted  # type: ignore[method-assign]
    try:
        with torch.compiler.set_stance("force_eager"):
            for _ in range(steps):
                run(batch).sum().backward()
    finally:
        Ledger.ran = ran  # type: ignore[method-assign]
    assert ledger.has_run
    return len(scans)


def test_the_ledger_is_not_looked_through_again_where_nothing_ran(two_ranks: Ranks) -> None:
    once, often = two_ranks.run(_scans, 1), two_ranks.run(_scans, 4)
    assert once == often and once[0] > 0
