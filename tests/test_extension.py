"""Tensor subclasses that say themselves what is gathered, and shards that stay on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.ranks import Ranks
from tests.toy import Stack, assert_same_grads, batches, loss_of, pair, reference_backward, shard, train_and_compare


class Halved(Tensor):
    """An fp32 weight that travels as bf16 halves of its value: what is read is gathered and doubled."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Halved:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Halved:
        return Halved(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keeps = func in (
            torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.slice.Tensor,
            torch.ops.aten.view.default, torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor,
        )  # fmt: skip
        args, kwargs = pytree.tree_map_only(Halved, lambda one: one.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            return Halved(out)
        return Halved(out) if keeps and isinstance(out, Tensor) else out

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return ((self.inner / 2).to(torch.bfloat16),), {"factor": 2.0}

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (halves,) = outputs
        value = halves.to(param_dtype) * metadata["factor"]
        if out is not None:
            with torch.no_grad():
                out.data.copy_(value)
            return None
        return value, (value,)


def _extension(dim: int) -> None:
    torch.manual_seed(0)
    reference = Stack(dim=dim)
    model = copy.deepcopy(reference)
    for theirs, layer in zip(reference.layers, model.layers):
        layer.down.weight = nn.Parameter(Halved(layer.down.weight.detach()))
        with torch.no_grad():
            theirs.down.weight.copy_(theirs.down.weight.to(torch.bfloat16))
    shard(model)
    for step in range(2):
        inputs = batches(step)
        loss_of(model(inputs[dist.get_rank()])).backward()
        reference_backward(reference, inputs)
    assert_same_grads(model, reference)


def test_a_subclass_decides_what_travels(two_ranks: Ranks) -> None:
    two_ranks.run(_extension, 16)


def test_what_a_subclass_sends_is_padded_for_it(three_ranks: Ranks) -> None:
    for dim in (16, 4):  # the last shard is short, or empty
        three_ranks.run(_extension, dim)


def _cut_short() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Halved(layer.weight.detach()))
    fully_shard(layer)
    rank = dist.get_rank()
    layer.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: ((torch.ones(1 if rank == 2 else 2, 4),), {})
    if rank == 2:
        with pytest.raises(RuntimeError, match=r"weight: .* returned 1 rows for a shard of 0"):
            layer(torch.ones(2, 4))


def test_a_gather_of_another_size_is_refused(three_ranks: Ranks) -> None:
    three_ranks.run(_cut_short)


def _sliced() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Halved(layer.weight.detach()))
    fully_shard(layer, reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"weight has an all-gather extension.*\(2\)"):
        layer(torch.ones(2, 4))


def test_an_extension_and_an_int_are_refused(four_ranks: Ranks) -> None:
    four_ranks.run(_sliced)


def _half() -> None:
    del Halved.fsdp_post_all_gather
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Halved(layer.weight.detach()))
    fully_shard(layer)
    with pytest.raises(RuntimeError, match="weight is a Halved with fsdp_pre_all_gather and without"):
        layer(torch.ones(2, 4))


def test_half_an_extension_is_refused(two_ranks: Ranks) -> None:
    try:
        two_ranks.run(_half)
    finally:
        two_ranks.stop()  # the workers' class is not what it was


def _offload() -> None:
    unsharded, model = pair(offload_policy=CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy())
    assert all(param.device.type == "cpu" for param in model.parameters())
    train_and_compare(model, model, unsharded)
    assert_same_grads(model, unsharded)


def test_shards_on_the_cpu(two_ranks: Ranks) -> None:
    two_ranks.run(_offload)
