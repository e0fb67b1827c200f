"""One run of `benchmarks.boundary`: many small parameters, world size 1, forward and backward, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.settings import Job, RankResult
from benchmarks.variants import import_ours, import_simple_fsdp
from benchmarks.worker_process import Progress, join_group, prime_compiler

_BATCH = 4


class Scale(nn.Module):
    """A layer of one vector. Inductor fuses a chain of these into a few kernels, so that hardly any compute is left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _link(kind: str, width: int) -> nn.Module:
    return Scale(width) if kind == "scale" else nn.Linear(width, width, bias=False)


class Chain(nn.Module):
    """A chain of layers with `num_params` parameters, which are read one after the other."""

    def __init__(self, kind: str, num_params: int, width: int) -> None:
        super().__init__()
        self.links = nn.ModuleList(_link(kind, width) for _ in range(num_params))

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = torch.tanh(link(x))
        return x


def _unsharded(model: nn.Module, mesh: DeviceMesh) -> None:
    pass


def _ours(model: nn.Module, mesh: DeviceMesh) -> None:
    import_ours().fully_shard(model, mesh=mesh)


def _dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make DTensor parameters and read each as its local tensor. This shows the cost of AOTAutograd's own boundary."""
    for link in model.links:  # type: ignore[union-attr]
        shard = distribute_tensor(link.weight.detach(), mesh, [Shard(0)])
        link.weight = nn.Parameter(shard)
        cls: type[nn.Module] = type(link)
        link.__class__ = _READS_LOCAL.setdefault(cls, type(cls.__name__, (cls,), {"weight": property(_local_weight)}))


_READS_LOCAL: dict[type[nn.Module], type[nn.Module]] = {}


def _local_weight(link: nn.Module) -> Tensor:
    shard: Any = link._parameters["weight"]
    return shard.to_local()


def _simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    import_simple_fsdp().data_parallel(model, mesh, mode="fully_shard")


SHARDERS: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "unsharded": _unsharded,
    "ours": _ours,
    "dtensors": _dtensors,
    "simple_fsdp": _simple_fsdp,
}


def measure(job: Job, rank: int, progress: Progress) -> RankResult:
    """Time the variant `<sharder>:<kind>`; settings.layers counts parameters, settings.dim is a width."""
    sharder, kind = job.variant.split(":")
    settings = job.settings
    progress("joining the group")
    mesh = join_group(job, rank, 1)
    progress("priming the compiler")
    prime_compiler()
    torch.manual_seed(settings.seed)
    model = Chain(kind, settings.layers, settings.dim)
    x = torch.randn(_BATCH, settings.dim)
    progress("sharding")
    begin = time.perf_counter()
    SHARDERS[sharder](model, mesh)
    setup_s = time.perf_counter() - begin
    compiled = torch.compile(model)
    losses: list[float] = []

    def timed(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            loss = compiled(x).square().sum()
            loss.backward()
            model.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
        return seconds

    progress("first step")
    [first_step_s] = timed(1)
    progress("steps")
    warmup_s = timed(settings.warmup)
    step_s = timed(settings.steps)
    return RankResult(
        losses=losses[-1:],
        setup_s=setup_s,
        first_step_s=first_step_s,
        warmup_s=warmup_s,
        step_s=step_s,
        num_graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
    )
