"""Worker processes that talk over gloo on loopback, started once for a test module.

ranks.run(fn, *args)    calls the module-level function fn(*args) on every rank; returns the results by rank
"""

from __future__ import annotations

import datetime
import functools
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _pytest.config import parse_warning_filter  # pytest 8 and 9

from benchmarks.worker_process import take_gpu
from fsdp_compile.lookout.lookout import lookout
from fsdp_compile.passes.wire import collectives
from fsdp_compile.tools.link import SlowLink
from fsdp_compile.workers import Crew, Send
from tests.building import build_graphs_at_once

#: What nearly every test imports. Nothing here may start a thread or a GPU's runtime: they do not survive a fork.
PRELOAD = ("torch", "torch.distributed.tensor", "torch._inductor.compile_fx", "fsdp_compile", "pytest", "sympy.combinatorics")

#: What pyproject.toml and the marks of the test that runs say of warnings; conftest.py puts it here.
filters_of_test: list[str] = []


class Ranks(Crew):
    """``num_ranks`` processes with one group, started when first used and anew after a failure; with NCCL, on GPUs.

    With a ``link`` there are two ranks, which send to each other over that link. Other ranks use the loopback device.
    """

    def __init__(self, num_ranks: int, backend: str = "gloo", link: SlowLink | None = None) -> None:
        # torch looks for a GPU when it imports Inductor (2.11), and a process that was forked after that cannot use one.
        preload = () if backend == "nccl" or link else PRELOAD
        settings = {"backend": backend, "interfaces": link.interfaces if link else None}
        prefixes = link.prefixes if link else ()
        super().__init__("tests.ranks:join", settings, num_ranks=num_ranks, prefixes=prefixes, preload=preload)

    def run(self, fn: Callable[..., Any], *args: Any, limit_s: float = 400) -> list[Any]:
        return super().run(_call, filters_of_test, fn, *args, limit_s=limit_s)


def join(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Make this process a rank of the group."""
    gc.freeze()  # what was imported stays: to look through it again and again is a tenth of a compilation
    torch.set_num_threads(1)
    build_graphs_at_once()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # launches that recording.Wire can look back on
    os.environ.pop("COLUMNS", None)  # readline, which pdb imports, tells children of a process without a terminal 80
    mend_gathers_on_gloo()
    if settings.get("interfaces"):
        os.environ["GLOO_SOCKET_IFNAME"] = settings["interfaces"][rank]
    if settings["backend"] == "nccl":
        take_gpu(rank, settings["num_ranks"])
    dist.init_process_group(
        settings["backend"],
        init_method=settings["rendezvous"],
        rank=rank,
        world_size=settings["num_ranks"],
        timeout=datetime.timedelta(seconds=settings.get("timeout_s", 120)),
    )


def _call(filters: list[str], fn: Callable[..., Any], *args: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with warnings.catch_warnings():  # filters as pytest has them around each test
        for one in filters:
            warnings.filterwarnings(*parse_warning_filter(one, escape=False))
        result = fn(*args)
    if lookout.failure is not None:
        raise lookout.failure  # on its thread it is only logged
    return result


@functools.cache  # it holds as long as the library is referred to
def mend_gathers_on_gloo() -> torch.library.Library:
    """Have torch's functional all-gather, which ``DTensor.full_tensor`` calls, do what ours does.

    On gloo it corrupts the heap now and then (see passes/wire/collectives.py), and tests gather to compare all the time.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", collectives._all_gather_kernel, "CPU")
    return library
