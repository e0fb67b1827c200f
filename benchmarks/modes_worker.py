"""One rank of `benchmarks.modes`: joins the group once, then measures row after row."""

from __future__ import annotations

import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.modes_meter import Meter
from benchmarks.modes_rows import ROWS
from benchmarks.modes_train import Row
from fsdp_compile._launch import Send


def work(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Send a result for each row of ``settings["rows"]``; a row that raises is sent as its error, and is the last."""
    torch.set_num_threads(1)
    mended = _mend_gathers_on_gloo()  # for as long as it is referred to
    timeout = timedelta(seconds=settings["timeout_s"])
    rendezvous = f"file://{settings['rendezvous']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=settings["ranks"], timeout=timeout)
    rows = {row.name: row for row in ROWS}
    for name in settings["rows"]:
        try:
            send({"row": name, **_measure(rows[name])})
        except Exception as error:
            send({"row": name, "error": _summary(error), "traceback": traceback.format_exc(), "at": time.time()})
            raise
    dist.destroy_process_group()
    del mended


def _measure(row: Row) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    meter = Meter(backward_inside=row.compiled_autograd)
    begin = time.perf_counter()
    with (
        warnings.catch_warnings(record=True) as caught,
        torch._dynamo.config.patch(compiled_autograd=row.compiled_autograd),
        meter.watching_reads(),
    ):
        warnings.simplefilter("always")
        row.run(meter)
    dist.barrier()
    return {**meter.result(), "warnings": _ours(caught), "seconds": time.perf_counter() - begin}


def _ours(caught: list[warnings.WarningMessage]) -> list[str]:
    """What this package warned of; each text once."""
    words = ("inside compiled code", "has no effect where", "fsdp_compile", "collectives in this")
    texts = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    return list(dict.fromkeys(text for text in texts if any(word in text for word in words)))


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
