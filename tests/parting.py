"""A rank of a world whose ranks part in one way or another. It ends as a process does, however that is: test_lookout.py
forks one for each rank of each case.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import configure, fully_shard, stream_full_params
from fsdp_compile.lookout import lookout
from fsdp_compile.passes._torch_compat import default_store
from fsdp_compile.passes.wire.ledger import ledger
from tests.building import build_graphs_at_once


class Branching(nn.Module):
    """A model with two blocks, ``a`` and ``b``, of which those run that the argument ``branch`` names."""

    def __init__(self, width_of_b: int) -> None:
        super().__init__()
        self.front, self.a, self.b, self.back = (nn.Linear(16, width) for width in (16, 16, width_of_b, 16))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        x = self.front(x)
        if "a" in branch:
            x = self.a(x)
        if "b" in branch:
            x = self.b(x)[:, :16]
        return self.back(x)


STREAMS = "streams alone", "reads alone", "closes alone", "raises alone", "two streams"


def stream(case: str, model: nn.Module, rank: int) -> object:
    """Return what a rank holds of a stream while it trains on."""
    if case == "streams alone":
        return list(stream_full_params(model)) if rank == 1 else None
    held = stream_full_params(model, max_bytes=1)
    next(held)
    if case == "two streams" and rank == 0:
        return stream_full_params(model)
    if case == "raises alone" and rank == 1:
        raise ArithmeticError("the engine is full")
    if case == "closes alone" and rank == 1:
        return held.close()
    if case == "raises alone" or rank == 1:
        list(held)
    return held


def branch_of(case: str, rank: int, step: int) -> str:
    if case == "chooses alone":
        return "ab"
    if step < 2 or case in ("fewer", "first run", "slow", "off", "alone", *STREAMS):
        return "a"
    if case == "one":
        return "a" if rank == 0 else ""
    return "a" if rank == 0 else "b"


def train(case: str, mode: str, rank: int) -> None:
    torch.manual_seed(0)
    model = Branching(32 if case in ("sizes", "lost") else 16)
    for layer in (model.front, model.a, model.b, model.back):
        fully_shard(layer)
    fully_shard(model)
    run = model if mode == "eager" or (case == "alone" and rank == 1) else torch.compile(model, backend=mode)
    for step in range(400 if case == "equal" else 5):
        if case in ("fewer", "first run") and rank == 1 and step == 3:
            default_store().wait(["launched"])
            return
        if case in ("fewer", "first run") and step == 3:  # rank 1 leaves when rank 0 has launched, however long that takes
            ledger.hear = lambda _: default_store().set("launched", "")
        if case == "first run" and step == 3:  # of the graph that evaluates
            with torch.no_grad():
                run(torch.randn(4, 16), "a")
        if case == "chooses alone" and rank == 1 and step == 0:
            configure(model, memory_budget="1GiB")
        if case == "off" and step == 1:
            configure(model, watch_s=0)
        if case in ("slow", "off") and rank == 1 and step == 2:
            time.sleep(6)
        held = stream(case, model, rank) if case in STREAMS and step == 3 else None
        length = 4 + rank * step if case == "slow" else 4
        run(torch.randn(length, 16), branch_of(case, rank, step)).sum().backward()
        if case == "equal":
            time.sleep(0.02)  # a step that somebody would wait for
        del held


def main(case: str, mode: str, rank: int, world: int, port: int, watch_s: float, said_to: Path, log: Path) -> None:
    """Write JSON to ``said_to`` when it has trained, or raised; ``log`` has what it writes to stderr.

    Another process keeps the store, as torchrun does, but for the case "lost".
    """
    with log.open("w") as output:
        os.dup2(output.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    build_graphs_at_once()
    lookout.lookout.timeout_s = watch_s
    if case == "sizes" and rank == 0:
        lookout._PAUSE_S = watch_s  # on a busy machine it would say where it is before it dies
    store = dist.TCPStore("127.0.0.1", port, is_master=case == "lost" and rank == 0, wait_for_workers=False)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    said = {"raised": "", "text": ""}
    try:
        train(case, mode, rank)
    except Exception as error:
        said = {"raised": type(error).__name__, "text": str(error)}
    said_to.write_text(json.dumps(said))
    atexit._run_exitfuncs()  # a forked process ends without them
