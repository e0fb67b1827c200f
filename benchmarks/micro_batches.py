"""`python -m benchmarks.micro_batches`: bytes and seconds of a step with 1, 4 and 16 micro-batches.

Two local processes over gloo train a stack of linear layers on Inductor, on loopback or on a link. Bytes are those
that a rank receives.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import fsdp_compile
from fsdp_compile.core.settings import GATHERS
from fsdp_compile.tools.link import SlowLink
from tests.models import Stack, shard
from tests.ranks import Ranks
from tests.recording import Wire

_MICRO_BATCHES = (1, 4, 16)
_REPEAT = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro_batches")
    parser.add_argument("--link", metavar="RATE", help="a link such as 1gbit, in place of loopback; as root")
    rate = parser.parse_args().link
    measure = importlib.import_module("benchmarks.micro_batches").measure  # as workers know it
    where = f"a link of {rate}" if rate else "loopback"
    print(f"torch {torch.__version__}, 2 ranks over gloo on {where}; median of {_REPEAT} steps\n")
    print("| micro-batches | gather | gathered MB | reduced MB | step s |\n|---|---|---|---|---|")
    with SlowLink(rate) if rate else nullcontext() as link:
        for gather in GATHERS:
            with Ranks(2, link=link) as ranks:
                for row in ranks.run(measure, gather, limit_s=600)[0]:
                    print("| {} | {} | {:.0f} | {:.0f} | {:.2f} |".format(*row))


def measure(gather: str) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    model = shard(Stack(4, dim=1024, vocab=2048))
    fsdp_compile.configure(model, gather=gather)
    run = torch.compile(model, fullgraph=True)
    tokens = torch.randint(0, 2048, (1, 128))
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(num: int) -> None:
        for micro in range(num):
            model.set_requires_gradient_sync(micro == num - 1)
            run(tokens).square().mean().backward()
        optim.step()
        optim.zero_grad()

    rows = []
    for num in _MICRO_BATCHES:
        step(num)
        with Wire() as wire:
            step(num)
        sent = {kind: sum(4 * math.prod(size) for name, sizes in wire.launches if kind in name for size in sizes)
                for kind in ("gather", "all_to_all")}  # fmt: skip
        seconds = []
        for _ in range(_REPEAT):
            dist.barrier()
            begin = time.perf_counter()
            step(num)
            seconds.append(time.perf_counter() - begin)
        world = dist.get_world_size()
        received = sent["gather"] * (world - 1), sent["all_to_all"] * (world - 1) / world
        rows.append((num, gather, *(one / 1e6 for one in received), median(seconds)))
    return rows


if __name__ == "__main__":
    main()
