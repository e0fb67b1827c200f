"""`python -m benchmarks.schedules`: our schedule beside FSDP2's, both replayed on GPUs that nobody has to have.

FSDP2 packs a unit into one bucket, gathers that, and copies each parameter out of it; gradients are packed likewise.
Both columns are forecasts of one compiled step by `fsdp-compile plan`: they differ in buckets and copies alone.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from rich import box
from rich.console import Console
from rich.table import Table

from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.forecast.forecast import Configuration, Forecast, Hardware, Planner
from fsdp_compile.forecast.joint import FULL, NONE
from fsdp_compile.forecast.sweep import forecast_of
from fsdp_compile.forecast.target import find_target
from fsdp_compile.passes import load_profile
from fsdp_compile.passes.wire import layout

_CONFIGS = Path(__file__).parent.parent / "examples" / "plan"
_EVERYTHING = 1 << 60


@dataclass(frozen=True)
class Row:
    model: str
    mesh: tuple[int, ...]  # replicas of shards, or shards
    hardware: str
    batch: int = 1
    sequence: int = 4096
    checkpointing: str = NONE


ROWS = (
    Row("llama-3.2-1b", (8,), "h100", 4),
    Row("llama-3.2-1b", (64,), "a100", 4),
    Row("llama-3.2-1b", (8, 64), "h100", 4),
    Row("llama-3-8b", (8,), "h100"),
    Row("llama-3-8b", (8,), "b200"),
    Row("llama-3-8b", (64,), "h200"),
    Row("llama-3-8b", (64,), "a100"),
    Row("llama-3-8b", (512,), "h100"),
    Row("llama-3-8b", (64, 8), "h100"),
    Row("llama-3-70b", (64,), "h200", 2, 8192, FULL),
    Row("llama-3-70b", (512,), "h100", 2, 8192, FULL),
    Row("llama-3-70b", (16, 64), "b200", 2, 8192, FULL),
    Row("llama-3-405b", (512,), "b200", 1, 8192, FULL),
    Row("llama-3-405b", (1024,), "h200", 1, 8192, FULL),
    Row("mixtral-8x7b", (64,), "h100", 1, 4096, FULL),
    Row("mixtral-8x7b", (512,), "h200", 1, 4096, FULL),
)


def forecast(row: Row) -> Forecast:
    """Return the forecast of a step with the schedule that is in force."""
    profile, num_ranks = load_profile(row.hardware), 1
    for size in row.mesh:
        num_ranks *= size
    hardware = Hardware(profile, profile.memory_bytes, num_ranks, "bf16", "adamw")
    configuration = Configuration(row.mesh, row.batch, row.sequence, row.checkpointing)
    with warnings.catch_warnings(), pretended_world(num_ranks, "nccl"):
        warnings.simplefilter("ignore")
        made = find_target(str(_CONFIGS / f"{row.model}.json")).make(row.batch, row.sequence)
        return forecast_of(Planner(made, configuration, hardware))


@contextlib.contextmanager
def fsdp2() -> Iterator[None]:
    """Have a unit packed into one bucket."""
    with mock.patch.object(layout, "_PACK", {"nccl"}), mock.patch.dict(layout._LIMITS, nccl=(_EVERYTHING, 0, 1, 0)):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__.partition("\n")[0])
    numbers = range(1, 1 + len(ROWS))
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, metavar="N", help="these rows alone")
    options = parser.parse_args()
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "mesh", "GPU", "batch", "checkpointing"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("FSDP2 ms", "exposed", "GiB", "ours ms", "exposed", "GiB", "time", "memory"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for number in options.only or numbers:
        row = ROWS[number - 1]
        with fsdp2():
            theirs = forecast(row)
        ours = forecast(row)
        figures = [
            said
            for one in (theirs, ours)
            for said in (f"{one.step_s * 1e3:,.1f}", f"{one.exposed_s * 1e3:.1f}", f"{one.peak_bytes / 2**30:.2f}")
        ]
        mesh, batch = "x".join(map(str, row.mesh)), f"{row.batch}x{row.sequence}"
        ratios = f"{ours.step_s / theirs.step_s:.3f}", f"{ours.peak_bytes / theirs.peak_bytes:.3f}"
        grid.add_row(row.model, mesh, row.hardware, batch, row.checkpointing, *figures, *ratios)
        print(row.model, mesh, row.hardware, *figures, *ratios, flush=True)
    Console(width=160).print(grid)


if __name__ == "__main__":
    main()
