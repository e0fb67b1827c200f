"""Tensor subclasses that say themselves what is gathered, and shards that stay on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from tests.comparing import assert_same_grads, batches, loss_of, reference_backward
from tests.compiling import compiled
from tests.models import Stack, mesh_of, shard
from tests.on_ranks import on_four_ranks, on_three_ranks
from tests.ranks import Ranks


class Opaque(Tensor):
    """An fp32 weight that travels as bf16 halves of its value: what is read is gathered and doubled."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keeps = func in (
            torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.slice.Tensor,
            torch.ops.aten.view.default, torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor,
        )  # fmt: skip
        args, kwargs = pytree.tree_map_only(Opaque, lambda one: one.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            return cls(out)
        return cls(out) if keeps and isinstance(out, Tensor) else out

    def __repr__(self, **kwargs: Any) -> str:
        return f"{type(self).__name__}({self.inner!r})"

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


class Halved(Opaque):
    """The same, and a compiler can look inside."""

    def __tensor_flatten__(self) -> tuple[list[str], type]:
        return ["inner"], type(self)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Opaque:
        return meta(tensors["inner"])


class InEights(Halved):
    """An fp32 weight that travels as eight-bit floats, scaled by what is largest on all ranks."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert outer_size[0] >= self.shape[0] and outer_stride[-1] == 1
        assert isinstance(module, nn.Linear) and mp_policy == MixedPrecisionPolicy()
        largest = self.inner.abs().max() if self.inner.numel() else self.inner.new_zeros(())
        scale = _scale(funcol.all_reduce(largest, "max", mesh))
        return ((self.inner * scale).to(torch.float8_e4m3fn),), scale

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        value = outputs[0].to(param_dtype) / metadata
        if out is not None:
            with torch.no_grad():
                out.data.copy_(value)
            return None
        return value, (value,)


def _scale(largest: Tensor) -> Tensor:
    return 400 / largest


def _as_sent(subclass: type[Halved], weight: Tensor) -> Tensor:
    """What is read where ``weight`` travels as the subclass says."""
    if subclass is Halved:
        return weight.to(torch.bfloat16)
    scale = _scale(weight.abs().max())
    return (weight * scale).to(torch.float8_e4m3fn).float() / scale


def _pair(subclass: type[Halved], dim: int) -> tuple[Stack, Stack]:
    torch.manual_seed(0)
    reference = Stack(1, dim=dim)
    model = copy.deepcopy(reference)
    for theirs, layer in zip(reference.layers, model.layers):
        layer.down.weight = nn.Parameter(subclass(layer.down.weight.detach()))
        with torch.no_grad():
            theirs.down.weight.copy_(_as_sent(subclass, theirs.down.weight))
    shard(model)
    return reference, model


def _extension(subclass: type[Halved], dim: int, backend: str | None) -> None:
    reference, model = _pair(subclass, dim)
    run = compiled(model, backend)
    for step in range(2):
        inputs = batches(step)
        loss_of(run(inputs[dist.get_rank()])).backward()
        reference_backward(reference, inputs)
    assert_same_grads(model, reference)
    with torch.no_grad():
        torch.testing.assert_close(run(inputs[0]), reference(inputs[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_subclass_decides_what_travels(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(_extension, InEights, 16, backend)


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.more)])
def test_what_a_subclass_sends_is_padded_for_it(three_ranks: Ranks, backend: str | None) -> None:
    for dim in (16, 4) if backend is None else (4,):  # the last shard is short, or empty
        three_ranks.run(_extension, Halved, dim, backend)


@on_four_ranks
def test_an_extension_gets_the_mesh_of_its_shards() -> None:
    mesh = mesh_of("replicate", "shard")
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(InEights(layer.weight.detach()))
    fully_shard(layer, mesh=mesh)
    with torch.no_grad():
        local = layer.weight._local_tensor
        local.inner.fill_(1.0 + dist.get_rank() // 2)  # replicas that differ, so that a maximum over them would show
        outputs = [compiled(layer, backend)(torch.eye(8)) for backend in (None, "aot_eager")]
    largest = 1.0 + dist.get_rank() // 2
    for found in outputs:
        torch.testing.assert_close(found, _as_sent(InEights, torch.full((8, 8), largest)))


@on_three_ranks
def test_a_gather_of_another_size_is_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Halved(layer.weight.detach()))
    fully_shard(layer)
    rank = dist.get_rank()
    layer.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: ((torch.ones(1 if rank == 2 else 2, 4),), {})
    if rank == 2:
        with pytest.raises(AssertionError, match=r"weight is unevenly sharded.* or this shard's 0, but .* returned 1"):
            layer(torch.ones(2, 4))


@on_four_ranks
def test_an_extension_and_an_int_are_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Halved(layer.weight.detach()))
    fully_shard(layer, reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"weight has an all-gather extension.*\(2\)"):
        layer(torch.ones(2, 4))
