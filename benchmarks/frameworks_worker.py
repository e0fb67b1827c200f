"""One rank of `benchmarks.frameworks`: joins the group once, then trains what it is given."""

from __future__ import annotations

import contextlib
import importlib.util
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
from benchmarks.framework_rows import ROWS
from benchmarks.framework_rows.common import Losses
from benchmarks.framework_rows.refused import REFUSED
from fsdp_compile.api import fully_shard as sharding
from fsdp_compile.workers import Send


@dataclass(frozen=True)
class Column:
    """The FSDP engine under a framework, and whether it compiles."""

    name: str
    adopt: Callable[[], contextlib.AbstractContextManager[object]]
    compiled: bool


COLUMNS = (
    Column("torch's FSDP", contextlib.nullcontext, compiled=False),
    Column("eager", fsdp_compile.adopt, compiled=False),
    Column("compiled", fsdp_compile.adopt, compiled=True),
)


def join(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Make this process a rank of the group, for all rows and columns."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=settings["rendezvous"],
        rank=rank,
        world_size=settings["num_ranks"],
        timeout=timedelta(seconds=settings["timeout_s"]),
    )


@dataclass(frozen=True)
class Trained:
    """The result of a row under one engine. Graphs and breaks are of both models, the one that resumed as well."""

    losses: Losses
    num_graphs: int = 0
    breaks: tuple[str, ...] = ()


def train(row_name: str, column_name: str, folder: Path) -> Trained | None:
    """Train one row under one engine; None where its package is not installed."""
    row = next(row for row in ROWS if row.name == row_name)
    column = next(column for column in COLUMNS if column.name == column_name)
    if importlib.util.find_spec(row.package) is None:
        return None
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        warnings.catch_warnings(),
        mock.patch.object(sharding, "Unit", wraps=sharding.Unit) as units,
        column.adopt() as adoption,
    ):
        warnings.simplefilter("ignore")
        losses = row.run(column.compiled, folder)
    counters = torch._dynamo.utils.counters
    num_graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"].elements()
    if (units.call_count > 0) != (adoption is not None) or (num_graphs > 0) != column.compiled:
        raise RuntimeError(f"{row.name} made {units.call_count} units of fsdp_compile's and {num_graphs} graphs.")
    dist.barrier()
    return Trained(losses, num_graphs, tuple(reason.strip().splitlines()[0] for reason in breaks))


def refusal(name: str) -> str | None:
    """Return what torch's own FSDP raises for a row; empty where it raises nothing, None without the package."""
    row = next(row for row in REFUSED if row.name == name)
    if importlib.util.find_spec(row.package) is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            row.attempt()
        except Exception as error:  # whatever it is
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""
