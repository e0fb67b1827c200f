"""Complex parameters travel as real numbers, on both paths and in every reduction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile import configure, fully_shard, no_sync


def _assert_same(sharded: nn.Module, unsharded: nn.Module, what: str) -> None:
    """Shard by shard: gloo gathers no complex numbers."""
    for (fqn, ours), (_, theirs) in zip(sharded.named_parameters(), unsharded.named_parameters()):
        shard, full = (ours, theirs) if what == "params" else (ours.grad, theirs.grad)
        assert isinstance(shard, DTensor), fqn
        expected = distribute_tensor(full.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
        torch.testing.assert_close(shard.to_local(), expected.to_local(), msg=lambda text: f"{fqn}: {text}")  # noqa: B023


class Wave(nn.Module):
    """Conjugated in forward, and cut unevenly by two ranks; a real layer beside it, in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.filter.conj() + self.shift
        return self.out((y * self.phase).abs())


def _train(backend: str | None, compiled_autograd: bool, replicas: int, **options: str) -> None:
    torch.manual_seed(0)
    unsharded = Wave()
    sharded = copy.deepcopy(unsharded)
    size = dist.get_world_size()
    names = ("replicate", "shard")
    mesh = (
        {} if replicas == 1 else {"mesh": init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=names)}
    )
    fully_shard(sharded, **mesh)
    configure(sharded, **options)
    inputs = torch.randn(size, 4, 5, generator=torch.Generator().manual_seed(1))

    def step(x: Tensor) -> None:
        sharded(x).square().mean().backward()

    run = step if backend is None else torch.compile(step, backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, unsharded)]
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        for number in range(2):
            if number == 1:  # what is held back is complex too
                with no_sync(sharded):
                    run(inputs[dist.get_rank()])
                torch.stack([unsharded(x).square().mean() for x in inputs]).mean().backward()
            run(inputs[dist.get_rank()])
            torch.stack([unsharded(x).square().mean() for x in inputs]).mean().backward()
            _assert_same(sharded, unsharded, "grads")
            for one in optimizers:
                one.step()
                one.zero_grad()
    _assert_same(sharded, unsharded, "params")


def test_in_eager_mode(two_ranks: Any) -> None:
    two_ranks.run(_train, None, False, 1)


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_compiled(two_ranks: Any, compiled_autograd: bool) -> None:
    two_ranks.run(_train, "aot_eager", compiled_autograd, 1)


def _reduce_otherwise() -> None:
    for backend in (None, "aot_eager"):
        for bucketing in ("none", "group"):
            configure_to = {"reduction": "reduce_scatter", "bucketing": bucketing}
            torch._dynamo.reset()
            _train(backend, False, 1, **configure_to)


@pytest.mark.more
def test_other_reductions_and_buckets(two_ranks: Any) -> None:
    two_ranks.run(_reduce_otherwise)


def _replicate() -> None:
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        _train(backend, False, 2)


def test_replicas(four_ranks: Any) -> None:
    four_ranks.run(_replicate)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.more
@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_on_inductor(two_ranks: Any, compiled_autograd: bool) -> None:
    two_ranks.run(_train, "inductor", compiled_autograd, 1)
