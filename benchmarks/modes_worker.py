"""One rank of `benchmarks.modes`: joins the group once, then measures row after row."""

from __future__ import annotations

import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compile._launch import Send
from tests.matrix.runner import measure


def work(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Send a result for each row of ``settings["rows"]``; a row that raises is sent as its error, and is the last."""
    torch.set_num_threads(1)
    mended = _mend_gathers_on_gloo()  # for as long as it is referred to
    timeout = timedelta(seconds=settings["timeout_s"])
    rendezvous = f"file://{settings['rendezvous']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=settings["ranks"], timeout=timeout)
    for name in settings["rows"]:
        try:
            send({"row": name, **measure(name, settings["backend"])})
        except Exception as error:
            send({"row": name, "error": _summary(error), "traceback": traceback.format_exc(), "at": time.time()})
            raise
    dist.destroy_process_group()
    del mended


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def _mend_gathers_on_gloo() -> torch.library.Library:
    """Have torch's functional all-gather, which sequence parallelism calls, do what ours does.

    On gloo it corrupts the heap now and then (see passes/collectives.py).
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", torch.ops.fsdpc.all_gather_into_tensor.default, "CPU")
    return library
