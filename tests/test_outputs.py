"""Outputs that are more than a piece of memory: nested, sparse and wrapped tensors, and those of tensor parallelism."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import return_and_correct_aliasing

from fsdp_compile import fully_shard
from tests.comparing import assert_same_grads
from tests.compiling import compiled
from tests.models import mesh_of, twins
from tests.on_ranks import on_four_ranks, on_two_ranks


def _ragged(rank: int) -> Tensor:
    torch.manual_seed(rank)
    parts = [torch.randn(2, 8), torch.randn(3 + rank, 8)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_jagged_outputs(backend: str | None) -> None:
    unsharded, model = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    fully_shard(model[0])
    fully_shard(model)
    run = compiled(model, backend, fullgraph=False)
    for _ in range(2):
        out = run(_ragged(dist.get_rank()))
        assert out.layout is torch.jagged
        out.values().square().sum().backward()
        total = sum(unsharded(_ragged(rank)).values().square().sum() for rank in range(2)) / 2
        total.backward()
        assert_same_grads(model, unsharded, atol=1e-5)


class Parallel(nn.Module):
    """Ends in the row-wise half, whose output is still on its way when it is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@on_four_ranks
def test_a_unit_that_ends_in_rowwise_parallel() -> None:
    mesh = mesh_of("dp", "tp")
    torch.manual_seed(0)
    unsharded = nn.Sequential(Parallel(), Parallel())
    models = []
    for api in (fully_shard, fsdp2):
        model = copy.deepcopy(unsharded)
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            api(block, mesh=mesh["dp"])
        models.append(api(model, mesh=mesh["dp"]))
    inputs = torch.randn(2, 3, 8)
    mine = inputs[mesh["dp"].get_local_rank()]
    for _ in range(2):
        for model in models:
            model(mine).square().sum().backward()
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor(), msg=name)


class Opaque(Tensor):
    """A user's subclass around a tensor, which tells nobody what it wraps."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Opaque) else value

        result = func(*map(unwrap, args), **(kwargs or {}))
        wrapped = cls(result) if isinstance(result, Tensor) else result
        return return_and_correct_aliasing(func, args, kwargs or {}, wrapped)


class Wrapped(Opaque):
    """One that compilers see through."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inner"])


class Giver(nn.Module):
    """Gives its weight away, in some wrapping."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.arange(12.0).view(6, 2))

    def forward(self) -> Any:
        weight = self.weight.detach()
        if self.kind == "wrapped":
            return {"weight": Wrapped(weight)}
        if self.kind == "opaque":
            return Opaque(weight)
        if self.kind == "coo":
            places = torch.arange(6).view(1, 6)
            return torch.sparse_coo_tensor(places, weight, (6, 2))
        if self.kind == "csr":
            return torch.sparse_csr_tensor(torch.tensor([0, 6, 12]), torch.arange(6).repeat(2), weight.view(-1), (2, 6))
        if self.kind == "jagged":
            return torch.nested.nested_tensor_from_jagged(weight, torch.tensor([0, 2, 6]))
        return weight.to("meta")


def _values(given: Any) -> Tensor:
    if isinstance(given, dict):
        given = given["weight"]
    if isinstance(given, Opaque):
        return given.inner
    return given._values() if given.layout is torch.sparse_coo else given.values()


@pytest.mark.filterwarnings("ignore:Sparse (invariant checks|CSR tensor support)")
@on_two_ranks
def test_weights_given_away_inside_of_other_tensors() -> None:
    expected = torch.arange(12.0)
    for kind in ("wrapped", "opaque", "coo", "csr", "jagged"):
        model = fully_shard(Giver(kind), reshard_after_forward=True)
        given = _values(model())
        torch.testing.assert_close(given.reshape(-1), expected, msg=kind)
        with torch.no_grad():
            model.weight.mul_(2)
        again = _values(model())
        torch.testing.assert_close(given.reshape(-1), expected, msg=kind)
        torch.testing.assert_close(again.reshape(-1), 2 * expected, msg=kind)
    assert fully_shard(Giver("meta"))().is_meta
