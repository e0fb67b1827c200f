"""Complex parameters travel as real numbers, on both paths and in every reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile import configure, fully_shard, no_sync
from tests.models import mesh_of, twins
from tests.on_ranks import on_four_ranks


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


def _train(backend: str | None, compiled_autograd: bool = False, replicas: bool = False, **options: str) -> None:
    unsharded, sharded = twins(Wave)
    size = dist.get_world_size()
    fully_shard(sharded, mesh=mesh_of("replicate", "shard") if replicas else None)
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


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    ("backend", "compiled_autograd"),
    [(None, False), ("aot_eager", True)],
)
def test_complex_parameters_train_as_unsharded(two_ranks: Any, backend: str | None, compiled_autograd: bool) -> None:
    two_ranks.run(_train, backend, compiled_autograd)


@on_four_ranks
def test_replicas() -> None:
    _train("aot_eager", replicas=True)
