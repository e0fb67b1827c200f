"""`python -m benchmarks.muon`: an optimizer step of Muon on gloo: collectives, bytes, seconds, and what it differs by.

The matrices are those of a model of ``--layers`` transformer blocks of width ``--dim``. torch's optimizer works on
DTensors, as FSDP2 and this package make them; ours works on the same ones. ``differs`` is the largest difference of a
parameter from that of the unsharded model after 20 steps with equal gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.worker import bytes_sent_through
from fsdp_compile.optim import Muon
from tests.ranks import Ranks

STEPS = 20
OPTIMIZERS: dict[str, Any] = {"torch.optim.Muon": torch.optim.Muon, "fsdp_compile.optim.Muon": Muon}


def sizes(num_layers: int, dim: int) -> list[tuple[int, int]]:
    return [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)] * num_layers


def values(shapes: list[tuple[int, int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) / shape[1] ** 0.5 for shape in shapes]


def measure(name: str, num_layers: int, dim: int, num_timed: int) -> dict[str, Any]:
    """Steps of one optimizer on this rank."""
    shapes = sizes(num_layers, dim)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values(shapes, 0)]
    optimizer = OPTIMIZERS[name](params, lr=0.02)
    seconds: list[float] = []
    launches: dict[str, int] = {}
    num_bytes = 0
    for step in range(num_timed + 1):
        for param, grad in zip(params, values(shapes, 1 + step)):
            param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        dist.barrier()
        if step == num_timed:
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                optimizer.step()
            for event in trace.events() or []:
                if event.name.startswith("gloo:"):
                    launches[event.name[5:]] = launches.get(event.name[5:], 0) + 1
        else:
            num_bytes, begun = bytes_sent_through("lo"), time.perf_counter()
            optimizer.step()
            dist.barrier()
            seconds.append(time.perf_counter() - begun)
            num_bytes = bytes_sent_through("lo") - num_bytes
    return {"seconds": statistics.median(seconds[1:] or seconds), "launches": launches, "bytes": num_bytes}


def difference(name: str, num_layers: int, dim: int) -> float:
    """Train matrices with gradients that do not depend on them; return the largest difference from unsharded ones."""
    shapes = sizes(num_layers, dim)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values(shapes, 0)]
    whole = [nn.Parameter(value) for value in values(shapes, 0)]
    ours, theirs = OPTIMIZERS[name](sharded, lr=0.02), torch.optim.Muon(whole, lr=0.02)
    for step in range(STEPS):
        for param, other, grad in zip(sharded, whole, values(shapes, 1 + step)):
            param.grad, other.grad = distribute_tensor(grad, mesh, [Shard(0)]), grad
        ours.step()
        theirs.step()
    largest = 0.0
    for param, other in zip(sharded, whole):
        assert isinstance(param, DTensor)
        largest = max(largest, float((param.full_tensor() - other).detach().abs().max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--timed", type=int, default=3)
    given = parser.parse_args()
    columns = "", "launches of a step on a rank", "MiB sent by all", "seconds a step", f"differs after {STEPS} steps"
    table = Table(*columns)
    ranks = Ranks(given.ranks)
    try:
        for name in OPTIMIZERS:
            measured = ranks.run(measure, name, given.layers, given.dim, given.timed)[0]
            launches = ", ".join(f"{count} {kind}" for kind, count in sorted(measured["launches"].items()))
            differs = ranks.run(difference, name, 1, 64)[0]
            sent = f"{measured['bytes'] / 2**20:.1f}"
            table.add_row(name, launches, sent, f"{measured['seconds']:.3f}", f"{differs:.1e}")
    finally:
        ranks.stop()
    console = Console()
    console.print(f"{given.layers} layers of width {given.dim}: {4 * given.layers} matrices, {given.ranks} ranks, gloo")
    console.print(table)


if __name__ == "__main__":
    main()
