"""`python -m benchmarks.streaming`: full weights one after another: memory, seconds and collectives of each way.

A model of 24 layers of 16 MiB, 384 MiB, is sharded over 2 and 4 ranks on loopback, or over two on a link. Every way
reads each full weight once, on all ranks unless it says otherwise. The peak is the rise of a rank's anonymous memory
above its shards; the largest of all ranks is shown. FSDP2's ways run on FSDP2. The exit code is 1 where a weight is not
what it was.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
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
from fsdp_compile.tools.link import SlowLink
from tests.processes import AnonymousPeak, give_back_freed_memory
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


def costs(way: str) -> tuple[float, int]:
    """The seconds, and the collectives of this rank."""
    fully_shard, tensors = WAYS[way]
    model = sharded(fully_shard)
    seconds = []
    with torch.no_grad():
        for _ in range(4):  # the first makes what is made once
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
    return sorted(seconds[1:])[1], launches


def peak(way: str) -> tuple[int, bool]:
    """The peak in bytes, and whether all was right."""
    fully_shard, tensors = WAYS[way]
    give_back_freed_memory()
    model = sharded(fully_shard)
    with torch.no_grad():
        is_right = read(tensors(model))  # what is made once is made
        with AnonymousPeak() as found:
            is_right &= read(tensors(model))
    return found.num_bytes, is_right


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming")
    parser.add_argument("--link", metavar="RATE", help="two ranks over a link such as 1gbit; as root")
    rate = parser.parse_args().link
    here = importlib.import_module("benchmarks.streaming")  # as workers know it
    is_right = True
    for num_ranks in (2,) if rate else (2, 4):
        shard_mib = LAYERS * ROWS * COLUMNS * 4 / num_ranks / 2**20
        columns = "way", "peak above shards", "seconds", "collectives"
        where = f"a link of {rate}" if rate else "loopback"
        table = Table(*columns, title=f"{num_ranks} ranks over {where}, shards of {shard_mib:.0f} MiB each")
        with SlowLink(rate) if rate else nullcontext() as link:
            with Ranks(num_ranks, link=link) as ranks:
                costly = {way: ranks.run(here.costs, way) for way in WAYS}
            with Ranks(num_ranks, link=link) as ranks:  # others: what malloc keeps for the timed ones would count
                peaks = {way: ranks.run(here.peak, way) for way in WAYS}
        for way in WAYS:
            seconds, launches = (max(each) for each in zip(*costly[way]))
            num_bytes = max(found for found, _ in peaks[way])
            is_right &= all(one for _, one in peaks[way])
            table.add_row(way, f"{num_bytes / 2**20:.0f} MiB", f"{seconds:.2f}", str(launches))
        Console(width=120).print(table)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
