"""Gathers into memory of a pool: each one, through forward and backward, and memory that is registered once.

Stand-ins count, since pools of NCCL and of symmetric memory need GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile._torch_compat import process_groups
from fsdp_compile._torch_compat.process_groups import Pool
from fsdp_compile.core.unit import units_in
from fsdp_compile.eager.running import running
from tests.comparing import train_and_compare
from tests.models import EvenBlock, Stack, pair, shard
from tests.on_ranks import on_two_ranks


class Group:
    """A process group whose backend has memory, and counts how often a pool of it is registered."""

    def __init__(self) -> None:
        self.num_registered = 0
        self.mem_allocator = object()

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def register_mem_pool(self, pool: Any) -> None:
        self.num_registered += 1


def _sizes(model: nn.Module) -> dict[tuple[str, int], int]:
    """How many bytes each parameter that was gathered has now, by its unit and place there."""
    return {
        (unit.name, index): full.untyped_storage().nbytes()
        for unit in units_in(model)
        if (gathered := running(unit).gathered) is not None
        for index, full in enumerate(gathered.fulls)
        if full is not None
    }


@pytest.mark.usefixtures("fake_group_of_four")
def test_every_gather_is_into_memory_of_the_group_which_is_registered_once() -> None:
    model = shard(Stack(2, block=EvenBlock, vocab=32))
    group, inside, outside = Group(), 0, 0
    last = _sizes(model)

    def count() -> int:
        nonlocal last
        before, last = last, _sizes(model)
        return sum(size > before[name] for name, size in last.items() if name in before)

    @contextmanager
    def use_mem_pool(pool: object, device: torch.device) -> Iterator[None]:
        nonlocal inside, outside
        outside += count()
        yield
        inside += count()

    device = SimpleNamespace(MemPool=lambda allocator: object(), use_mem_pool=use_mem_pool)
    with (
        mock.patch.object(process_groups, "process_group", return_value=group),
        mock.patch.object(torch, "get_device_module", return_value=device),
        mock.patch.object(torch.distributed, "all_reduce") as connect,
    ):
        for unit in (*model.layers, model):
            unit.set_allocate_memory_from_process_group_for_comm(True)
    for _ in range(3):
        inside = outside = 0
        model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    assert group.num_registered == connect.call_count == 1
    num_regathered = sum(1 for layer in model.layers for _ in layer.parameters())
    assert inside >= 2 * num_regathered and outside == 0


def test_a_tensor_is_registered_once() -> None:
    seen: list[Tensor] = []
    pool = Pool(nullcontext, seen.append)
    whole = torch.zeros(8)
    for tensor in (whole, whole[:4], whole, whole.view(2, 4), whole[4:]):
        pool.register(tensor)
    assert [len(tensor) for tensor in seen] == [8, 4, 4]


@on_two_ranks
def test_numbers_in_a_pools_memory() -> None:
    unsharded, model = pair()
    seen: list[int] = []
    for unit in units_in(model):
        unit.settings.comms.pools = {unit.mesh.group: Pool(nullcontext, lambda tensor: seen.append(tensor.numel()))}
    train_and_compare(model, model, unsharded)
    assert seen
