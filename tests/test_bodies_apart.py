"""Branches and loops in a graph, whose bodies run on one rank and not on the next: what they read is gathered before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop

from fsdp_compile import fully_shard
from tests.comparing import assert_same_grads, batches
from tests.models import Block, Stack, pair, twins
from tests.on_ranks import on_two_ranks


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


class Branches(Three):
    """The branch is another one for each rank."""

    def forward(self, x: Tensor) -> Tensor:
        small = x.abs().mean() < 10
        return self.c(torch.cond(small, lambda y: torch.tanh(self.a(y)), lambda y: torch.tanh(self.b(y)), (x,)))


class Loops(Three):
    """One rank goes round more often than the next."""

    def forward(self, x: Tensor) -> Tensor:
        (y,) = while_loop(lambda y: y.abs().mean() > 0.1, lambda y: (torch.tanh(0.5 * self.a(y)),), (x,))
        return self.c(y)


class Scans(Three):
    def forward(self, x: Tensor) -> Tensor:
        last, each = scan(lambda carry, y: (torch.tanh(self.a(carry + y)), torch.tanh(self.b(y))), x[0], x)
        return self.c(each) + last


def _inputs() -> list[Tensor]:
    """Of every rank; the last one's are 100 times as large."""
    size = dist.get_world_size()
    scale = [100.0 if rank == size - 1 else 1.0 for rank in range(size)]
    return [scale[rank] * torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


AOT = "aot_eager"


@pytest.mark.parametrize(
    ("make", "units", "backend", "trains"),
    [
        pytest.param(Branches, True, AOT, True, marks=pytest.mark.compat),
        pytest.param(Branches, True, "inductor", True, marks=pytest.mark.slow),
        pytest.param(Scans, False, AOT, True, marks=pytest.mark.slow),
        pytest.param(Loops, True, "inductor", False, marks=pytest.mark.slow),
    ],
)
@on_two_ranks
def test_bodies_run_as_each_rank_likes(make: type[Three], units: bool, backend: str, trains: bool) -> None:
    unsharded, sharded = twins(make)
    if units:
        fully_shard(sharded.a)
        fully_shard(sharded.b)
    fully_shard(sharded)
    compiled = torch.compile(sharded, backend=backend, fullgraph=True)
    inputs = _inputs()
    with torch.set_grad_enabled(trains):
        ours = compiled(inputs[dist.get_rank()])
        torch.testing.assert_close(ours, unsharded(inputs[dist.get_rank()]))
    if trains:
        ours.sum().backward()
        torch.stack([unsharded(x).sum() for x in inputs]).mean().backward()
        assert_same_grads(sharded, unsharded, atol=1e-4)


class Region(Block):
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("backend", [AOT, pytest.param("inductor", marks=pytest.mark.slow)])
@on_two_ranks
def test_compiled_regions_are_evaluated_and_refuse_to_train(backend: str) -> None:
    unsharded, sharded = pair(make=lambda: Stack(block=Region))
    compiled = torch.compile(sharded, backend=backend)
    tokens = batches(0)[dist.get_rank()]
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), unsharded(tokens))
    with pytest.raises(RuntimeError, match=r"norm\.weight is read in a torch\.compiler\.nested_compile_region"):
        compiled(tokens)
