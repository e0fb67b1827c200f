"""Buckets are packed and copied out of by calls: what is in memory, what Inductor generates, and many on the wire."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.tensor import Shard

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile._torch_compat import process_groups
from fsdp_compile.passes import _torch_compat as compat
from fsdp_compile.passes.wire import layout
from fsdp_compile.passes.wire.collectives import all_gather_members, all_gather_of, c10d, reduce_scatter_members
from fsdp_compile.passes.wire.packing import copied, pack
from tests.comparing import train_and_compare
from tests.compiling import compiled, no_kernels_built
from tests.models import Stack, shard
from tests.on_ranks import on_three_ranks, on_two_ranks
from tests.test_eager import PlainAllGather, PlainReduceScatter

BF16 = torch.bfloat16


def _laid_out(parts: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Rank after rank, of each part the rows that the rank gets."""
    rows = [part.reshape(num_ranks, -1) for part in parts]
    return torch.cat([row[rank] for rank in range(num_ranks) for row in rows])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_bucket_has_what_each_rank_gets_end_to_end(num_ranks: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(4, 3), torch.randn(8), torch.randn(4, 2, 2), torch.randn(5, 4).t(), torch.randn(4, 6)[:, ::2]]
    torch.testing.assert_close(pack(parts, num_ranks, dtype), _laid_out(parts, num_ranks).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float64])
def test_what_is_packed_is_cast_on_the_way(dtype: torch.dtype) -> None:
    parts = [torch.randn(4, 3, dtype=dtype), torch.randn(2), torch.randn(2, 2, dtype=BF16)]
    expected = _laid_out([part.float() for part in parts], 2)
    torch.testing.assert_close(pack(parts, 2, torch.float32), expected, rtol=0, atol=0)


def test_bytes_and_nothing_at_all_are_packed_too() -> None:
    parts = [torch.arange(6, dtype=torch.uint8), torch.empty(0, 3, dtype=torch.uint8)]
    assert torch.equal(pack(parts, 2, torch.uint8), parts[0])


def test_a_copy_is_contiguous_and_has_memory_of_its_own() -> None:
    bucket = torch.arange(24.0)
    view = bucket.view(2, 12)[:, 3:9].view(2, 2, 3)
    copy = copied(view)
    assert torch.equal(copy, view) and copy.is_contiguous()
    bucket.zero_()
    assert copy.sum() != 0


class Attends(nn.Module):
    """As in a transformer: what is normed is added to what comes of it."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + torch.softmax(self.q(y) @ self.k(y).transpose(-1, -2), -1) @ self.v(y)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def _codes(model: nn.Module) -> list[str]:
    """What Inductor generates for forward, and for backward."""
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True)
    with no_kernels_built():
        return run_and_get_code(lambda: run(torch.zeros(2, 5, dtype=torch.long)).sum().backward())[1]


def _kernels(model: nn.Module) -> list[int]:
    """How many different ones Inductor generates for each."""
    return [len(set(re.findall(r"cpp_pybinding\(\[.*?\n'''", code, re.DOTALL))) for code in _codes(model)]


@pytest.mark.slow
@pytest.mark.usefixtures("fake_group_of_four")
def test_hardly_more_kernels_are_generated_than_for_the_unsharded_model() -> None:
    """With kernels that pack and unpack, and others for what Inductor fused with these, it was twice as many."""
    forward, backward = _kernels(Stack(3, block=Attends))
    our_forward, our_backward = _kernels(shard(Stack(3, block=Attends)))
    assert our_forward <= forward + 1 and our_backward <= backward + 4


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize("vocab", [8192, 31])
def test_nothing_is_in_flight_beside_a_large_embeddings_gradient(vocab: int) -> None:
    """Its kernel stands behind the waits; one of a small embedding hides what is on its way."""
    _, code = _codes(shard(Stack(2, block=Attends, vocab=vocab)))
    behind = code[code.rindex(f"empty_strided_cpu(({vocab}, 16)") :]
    num_launched = len(re.findall(r"= torch.ops.(?:fsdpc|_c10d_functional).reduce_scatter", behind))
    num_awaited = behind.count("wait_tensor.default(")
    assert num_launched > 0
    assert num_awaited == num_launched if vocab == 8192 else num_awaited > num_launched


@pytest.mark.compat
@pytest.mark.more
@on_two_ranks
def test_many_gathers_in_flight_on_gloo() -> None:
    """torch's own gather corrupts the heap within this number of turns."""
    rank, num_ranks, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    gather = all_gather_of("gloo")
    by_rank = torch.arange(num_ranks)[:, None].expand(-1, 2)
    expected = [by_rank.repeat_interleave(8 + index, 0) + index for index in range(32)]
    wrong = 0
    for turn in range(500):
        shards = [torch.full((8 + index, 2), float(100 * turn + rank + index)) for index in range(32)]
        launched = [gather(shard, num_ranks, name) for shard in shards]
        del shards
        for index, full in enumerate(launched):
            c10d.wait_tensor(full)
            wrong += not torch.equal(full, expected[index] + 100.0 * turn)
    assert wrong == 0


class Even(nn.Module):
    """Two matrices of one size, which travel side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x)))


@pytest.mark.compat
@pytest.mark.usefixtures("fake_group_of_four")
def test_what_one_launch_sends_is_kept_until_its_wait() -> None:
    """Gradients, and slices, which forward saves for backward alone: backward may free these, and write to them."""
    model = nn.Sequential(*[Even() for _ in range(3)])
    for block in model:
        fully_shard(block, reshard_after_forward=2)
    run = torch.compile(fully_shard(model), fullgraph=True)
    with no_kernels_built():
        _, code = run_and_get_code(lambda: run(torch.zeros(8, 16)).sum().backward())[1]
    num_sent = {"all_gather": 0, "reduce_scatter": 0}
    for launch in re.finditer(r"(\w+) = torch.ops.fsdpc.(\w+)_members.default\(\[([^]]*)\]", code):
        launched, kind, sent = launch.groups()
        in_flight = code[launch.end() : code.index(f"wait_tensor.default({launched})")]
        gone = set(re.findall(r"del (\w+)", in_flight)) & set(sent.split(", "))
        assert not gone, f"{gone} of {launch[0]}"
        num_sent[kind] += len(sent.split(", "))
    assert num_sent == {"all_gather": 6, "reduce_scatter": 6}


class Cut(nn.Module):
    """Small matrices that are cut evenly, unevenly and hardly at all, a table, a frozen weight and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 6)
        self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(5, 9), nn.Linear(9, 6)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.ones(1))
        self.second.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.norm(x + self.third(torch.tanh(self.second(self.first(x)))) * self.scale)


class FromARing(PlainAllGather):
    """Waits by itself, and gathers into memory of its own: slices of one tensor, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = torch.empty(8, 4096)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.ring[self.num_calls % len(self.ring)][: math.prod(size)]

    def __call__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        super().__call__(output, input, group, async_op=False)


@pytest.mark.parametrize(
    ("path", "dim", "computes_in"),
    [("eager", 0, None), ("eager", 1, torch.float64), ("inductor", 1, None), ("own collectives", 1, None)],
)
@on_three_ranks
def test_members_of_a_bucket_travel_side_by_side(path: str, dim: int, computes_in: torch.dtype | None) -> None:
    """As on NCCL, where one launch sends them all; here there is one after another."""
    unsharded, model = (nn.Sequential(Cut(), nn.Linear(6, 3, bias=False)) for _ in range(2))
    model.load_state_dict(unsharded.state_dict())
    layout._PACK.remove("gloo")
    try:
        for one in (model[0], model):
            fully_shard(
                one,
                mp_policy=MixedPrecisionPolicy(param_dtype=computes_in),
                shard_placement_fn=lambda param: Shard(dim if param.shape[-1] % 3 == 0 and param.ndim > 1 else 0),
            )
        fsdp_compile.configure(model, reduction="reduce_scatter")
        if path == "own collectives":
            for one in (model[0], model):
                one.set_custom_all_gather(FromARing())
                one.set_custom_reduce_scatter(PlainReduceScatter())
        train_and_compare(compiled(model, "inductor" if path == "inductor" else None), model, unsharded)
    finally:
        layout._PACK.add("gloo")


@pytest.mark.compat
@on_two_ranks
def test_one_launch_starts_a_collective_for_each_member() -> None:
    """gloo can do what NCCL does, if one launch is in flight at a time."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    parts = [torch.full((size,), float(10 * size + rank)) for size in (3, 1, 40)]
    group = process_groups.process_group(name)
    with mock.patch.object(compat, "_that_starts_many", return_value=group) as asked:
        gathered = c10d.wait_tensor(all_gather_members(parts, 2, name))
        reduced = c10d.wait_tensor(reduce_scatter_members([part.repeat(2) for part in parts], "sum", 2, name))
    assert asked.call_count == 2
    places = layout.places_of_members([2 * len(part) for part in parts], 4)
    for at, part in zip(places, parts):
        size = len(part)
        expected = torch.tensor([10.0 * size, 10.0 * size + 1]).repeat_interleave(size)
        torch.testing.assert_close(gathered[at : at + 2 * size], expected, rtol=0, atol=0)
    sums = [torch.full((len(part),), 20.0 * len(part) + 1) for part in parts]
    torch.testing.assert_close(reduced, torch.cat(sums), rtol=0, atol=0)
