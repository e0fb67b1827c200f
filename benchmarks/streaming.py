"""`python -m benchmarks.streaming`: full weights one after another: memory, seconds and collectives of each way.

A model of 24 layers of 16 MiB, 384 MiB, is sharded over 2 and 4 ranks on loopback. Every way reads each full weight
once, on all ranks unless it says otherwise. The peak is the rise of a rank's anonymous memory above its shards; the
largest of all ranks is shown. FSDP2's ways run on FSDP2. The exit code is 1 where a weight is not what it was.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import fsdp_compile
from tests.processes import AnonymousPeak
from tests.ranks import Ranks

LAYERS, ROWS, COLUMNS = 24, 1024, 4096
Tensors = Iterable[tuple[str, Tensor]]


def sharded(fully_shard: Callable[..., Any]) -> nn.Module:
    """The model, whose layers have their number as their values."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for number, param in enumerate(model.parameters()):
        assert isinstance(param, DTensor)
        param.to_local().detach().fill_(number)
    return model


def stream(model: nn.Module, **settings: Any) -> Tensors:
    return fsdp_compile.stream_full_params(model, **settings)


def full_tensors(model: nn.Module) -> Tensors:
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        yield name, param.full_tensor()


def full_state_dict(model: nn.Module) -> Tensors:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items()


def unsharded(model: Any) -> Tensors:
    for name, layer in model.named_children():
        layer.unshard()
        yield f"{name}.weight", layer.weight
        layer.reshard()


WAYS: dict[str, tuple[Callable[..., Any], Callable[[nn.Module], Tensors]]] = {
    **{
        f"stream_full_params({', '.join(f'{name}={value!r}' for name, value in settings.items())})": (
            fsdp_compile.fully_shard,
            partial(stream, **settings),
        )
        for settings in (
            {"max_bytes": "16MiB"},
            {"max_bytes": "64MiB"},
            {"max_bytes": "256MiB"},
            {"max_bytes": "64MiB", "dtype": torch.bfloat16},
            {"max_bytes": "64MiB", "dst": 0},
        )
    },
    "full_tensor() of each parameter": (torch_fsdp.fully_shard, full_tensors),
    "get_model_state_dict(full_state_dict=True)": (torch_fsdp.fully_shard, full_state_dict),
    "unshard() of each unit": (torch_fsdp.fully_shard, unsharded),
}


def read(tensors: Tensors) -> bool:
    """Whether each weight has its number as its values; those on the meta device are with another rank."""
    ranges = [(int(name.split(".")[0]), one.aminmax()) for name, one in tensors if not one.is_meta]
    return all(least == most == number for number, (least, most) in ranges)


def measure(way: str) -> tuple[int, float, int, bool]:
    """The peak in bytes, seconds, collectives of this rank, and whether all was right."""
    fully_shard, tensors = WAYS[way]
    model = sharded(fully_shard)
    with torch.no_grad():
        is_right = read(tensors(model))  # what is made once is made
        with AnonymousPeak() as peak:
            is_right &= read(tensors(model))
        seconds = []
        for _ in range(3):
            dist.barrier()
            begun = time.perf_counter()
            for _ in tensors(model):
                pass
            dist.barrier()
            seconds.append(time.perf_counter() - begun)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            for _ in tensors(model):
                pass
    launches = sum(event.name.startswith("gloo:") for event in trace.events() or [])
    return peak.num_bytes, sorted(seconds)[1], launches, is_right


def main() -> None:
    is_right = True
    for num_ranks in (2, 4):
        shard_mib = LAYERS * ROWS * COLUMNS * 4 / num_ranks / 2**20
        columns = "way", "peak above shards", "seconds", "collectives"
        table = Table(*columns, title=f"{num_ranks} ranks, shards of {shard_mib:.0f} MiB each")
        ranks = Ranks(num_ranks)
        try:
            for way in WAYS:
                measured = ranks.run(measure, way)
                peak, seconds, launches = (max(one[place] for one in measured) for place in range(3))
                is_right &= all(one[3] for one in measured)
                table.add_row(way, f"{peak / 2**20:.0f} MiB", f"{seconds:.2f}", str(launches))
        finally:
            ranks.stop()
        Console(width=120).print(table)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
