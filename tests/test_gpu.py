"""What only a GPU shows: streams, pinned copies, memory of the process group, CUDA graphs. One GPU is enough."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import CPUOffloadPolicy, fully_shard
from fsdp_compile._state import states_in
from tests.conftest import SteadyRanks
from tests.ranks import Ranks
from tests.toy import Block, assert_same_grads, assert_same_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 3


class NcclRanks(Ranks):
    """One process a GPU, two at most."""

    def __init__(self) -> None:
        super().__init__(min(2, torch.cuda.device_count()), backend="nccl")


@pytest.fixture(scope="module")
def gpus() -> Iterator[SteadyRanks]:
    ranks = NcclRanks()
    yield ranks  # type: ignore[misc]
    ranks.stop()


def _pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    unsharded = nn.Sequential(*(Block() for _ in range(3)))
    model = copy.deepcopy(unsharded)
    if not options:
        model.cuda()
    for block in model:
        fully_shard(block, **options)
    return unsharded.cuda(), fully_shard(model, **options)


def _train(model: nn.Module, unsharded: nn.Module, run: Any, event: bool = False) -> None:
    """Every rank has the same batch, so the mean over ranks is the gradient; inputs come from the CPU."""
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    for step in range(STEPS):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        run(batch).square().mean().backward()
        unsharded(batch.cuda()).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), unsharded.parameters()):
            assert isinstance(ours.grad, DTensor), name
            torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad.cpu(), atol=1e-5, rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if event:
            done = torch.cuda.Event()
            done.record()
            model.set_post_optim_event(done)


def _eager() -> None:
    unsharded, model = _pair()
    _train(model, unsharded, model, event=True)
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
    for unit in states_in(model):
        assert unit.gathered is None or not unit.gathered.is_full


def test_eager_training_frees_what_it_gathered(gpus: Ranks) -> None:
    gpus.run(_eager)


def _compiled(mode: str | None) -> None:
    unsharded, model = _pair()
    _train(model, unsharded, torch.compile(model, fullgraph=True, mode=mode))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_training(gpus: Ranks, mode: str | None) -> None:
    gpus.run(_compiled, mode)


def _memory_of_steps() -> list[int]:
    """Allocated bytes after each step: what streams hold on to would grow."""
    unsharded, model = _pair()
    seen = []
    for _ in range(6):
        _train(model, unsharded, model)
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    return seen


def test_memory_does_not_grow(gpus: Ranks) -> None:
    for seen in gpus.run(_memory_of_steps):
        assert len(set(seen[1:])) == 1, seen


def _offloaded() -> None:
    unsharded, model = _pair(offload_policy=CPUOffloadPolicy())
    assert all(param.device.type == "cpu" and param.to_local().is_pinned() for param in model.parameters())
    _train(model, unsharded, model)
    for param in model.parameters():
        param.grad = None
    model(torch.ones(2, 16)).sum().backward()
    assert all(param.grad.device.type == "cpu" for param in model.parameters())


def test_offloaded_shards_and_gradients_are_pinned(gpus: Ranks) -> None:
    gpus.run(_offloaded)


def _misplaced() -> None:
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy()).cuda()
    with pytest.raises(RuntimeError, match=r"weight.*CPU"):
        model(torch.ones(2, 4))


def test_an_offloaded_shard_on_the_gpu_is_refused(gpus: Ranks) -> None:
    gpus.run(_misplaced)


def _groups_memory() -> None:
    unsharded, model = _pair()
    for unit in model.modules():
        if hasattr(unit, "set_allocate_memory_from_process_group_for_comm"):
            unit.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.ones(2, 16)).square().mean().backward()
    unsharded(torch.ones(2, 16, device="cuda")).square().mean().backward()
    assert_same_grads(model, unsharded)


def test_gathers_in_memory_of_the_process_group(gpus: Ranks) -> None:
    gpus.run(_groups_memory)
