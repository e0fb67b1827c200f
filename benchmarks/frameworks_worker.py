"""One rank of `benchmarks.frameworks`: joins the group once, then trains column after column of each row."""

from __future__ import annotations

import contextlib
import importlib.util
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fsdp_compile
from benchmarks.frameworks_rows import ROWS, Losses, Row
from fsdp_compile._launch import Send
from fsdp_compile.api import fully_shard as sharding


@dataclass(frozen=True)
class Column:
    """An engine under a framework."""

    name: str
    adopt: Callable[[], contextlib.AbstractContextManager[object]]
    compiled: bool


COLUMNS = (
    Column("torch's FSDP2", contextlib.nullcontext, compiled=False),
    Column("eager", fsdp_compile.adopt, compiled=False),
    Column("compiled", fsdp_compile.adopt, compiled=True),
)


def work(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Send the losses of each row and column in ``settings``; one that raises is sent as its error, and is the last."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=settings["timeout_s"])
    rendezvous = f"file://{settings['rendezvous']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=settings["ranks"], timeout=timeout)
    rows, columns = {row.name: row for row in ROWS}, {column.name: column for column in COLUMNS}
    for number, (row, column) in enumerate(settings["todo"]):
        said: dict[str, Any] = {"row": row, "column": column}
        begin = time.perf_counter()
        try:
            folder = Path(settings["folder"]) / str(number)
            losses = train(rows[row], columns[column], folder)
            send({**said, "losses": losses, "seconds": time.perf_counter() - begin})
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            text = f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
            send({**said, "error": text, "traceback": traceback.format_exc(), "at": time.time()})
            raise
    dist.destroy_process_group()


def train(row: Row, column: Column, folder: Path) -> Losses | None:
    """The losses of one row under one engine; None where its package is not installed."""
    if importlib.util.find_spec(row.package) is None:
        return None
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        warnings.catch_warnings(),
        mock.patch.object(sharding, "make_unit", wraps=sharding.make_unit) as units,
        column.adopt() as adoption,
    ):
        warnings.simplefilter("ignore")
        losses = row.run(column.compiled, folder)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if (units.call_count > 0) != (adoption is not None) or (num_graphs > 0) != column.compiled:
        raise RuntimeError(f"{row.name} made {units.call_count} units of fsdp_compile's and {num_graphs} graphs.")
    dist.barrier()
    return losses
