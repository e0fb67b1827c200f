"""`python -m benchmarks.schedules`: our schedule beside FSDP2's, both replayed on GPUs that nobody has to have.

FSDP2 packs a unit into one bucket, gathers that, and copies each parameter out of it; gradients are packed likewise.
Both columns are forecasts of one compiled step by `fsdp-compile plan`: they differ in buckets and copies alone. The
stacked matrices of Mixtral's 8 experts are sharded over their rows: over 64 ranks, 8 experts are padded to 64.

With `--within-memory`, no row is checkpointed, and its batch is doubled until it does not fit. Then the row says what a
budget of the whole memory makes of it, where gathers, recomputation and offloading are chosen among, and what FSDP2
takes with every layer checkpointed and CPUOffloadPolicy. Gathers then copy shards from the host first, and reductions
copy gradients to the host last. Seconds are of forward and backward: FSDP2's optimizer on the host is not counted. Four
more rows are of one machine, where the optimizer's states and layers' shards may be on the host as well: there, our
optimizer is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rich import box
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.distributed.tensor import Shard

from fsdp_compile import auto_shard
from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.forecast import joint
from fsdp_compile.forecast.forecast import OPTIMIZER, Configuration, Forecast, Hardware, Planner
from fsdp_compile.forecast.joint import FULL, NONE
from fsdp_compile.forecast.target import find_target
from fsdp_compile.passes import load_profile
from fsdp_compile.passes.budget.residency import MAY, SHARDS
from fsdp_compile.passes.cost import events
from fsdp_compile.passes.cost.profiles import HardwareProfile
from fsdp_compile.passes.cost.roofline import Group, copy_seconds, launch_seconds, sent_by
from fsdp_compile.passes.ir.aliases import tensors_of
from fsdp_compile.passes.schedule import buckets
from fsdp_compile.passes.schedule.buckets import gather_key
from fsdp_compile.passes.wire import layout
from fsdp_compile.passes.wire.spec import ParamSpec

_CONFIGS = Path(__file__).parent.parent / "examples" / "plan"
_EVERYTHING = 1 << 60
_COLUMNS = "FSDP2 ms", "exposed", "GiB", "ours ms", "exposed", "GiB", "time", "memory"
_WITHIN = (
    "needs GiB", "ms", "has", "takes", "ms", "again", "host", "link ms", "shards", "FSDP2 GiB", "ms", "exposed", "time"
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    model: str
    mesh: tuple[int, ...]  # replicas of shards, or shards
    hardware: str
    batch: int = 1
    sequence: int = 4096
    checkpointing: str = NONE
    optimizer: str = "adamw"


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
ON_ONE_MACHINE = (
    Row("llama-3-70b", (8,), "h200", optimizer="adamw-on-host"),
    Row("mixtral-8x7b", (8,), "h100", optimizer="adamw-on-host"),
    Row("llama-3-70b", (4,), "h200", optimizer="adamw-on-host"),
    Row("llama-3-70b", (2,), "h200", optimizer="adamw-on-host"),
)


def forecast(row: Row, **said: Any) -> Forecast:
    """Return the forecast of a step with the schedule that is in force, and a budget if one is ``said``."""
    profile, num_ranks = load_profile(row.hardware), 1
    for size in row.mesh:
        num_ranks *= size
    hardware = Hardware(profile, profile.memory_bytes, num_ranks, "bf16", row.optimizer)
    configuration = Configuration(row.mesh, row.batch, row.sequence, row.checkpointing, **said)
    sharded = functools.partial(auto_shard, shard_placement_fn=_experts_by_rows)
    with warnings.catch_warnings(), pretended_world(num_ranks, "nccl"), mock.patch.object(joint, "auto_shard", sharded):
        warnings.simplefilter("ignore")
        made = find_target(str(_CONFIGS / f"{row.model}.json")).make(row.batch, row.sequence)
        return Planner(made, configuration, hardware).forecast()


def _experts_by_rows(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 3 else None


@contextlib.contextmanager
def fsdp2() -> Iterator[None]:
    """Have a unit packed into one bucket, tables and all."""

    def key(spec: ParamSpec) -> tuple[object, ...]:
        return gather_key(dataclasses.replace(spec, is_table=False))

    with (
        mock.patch.object(layout, "_PACK", {"nccl"}),
        mock.patch.dict(layout._LIMITS, nccl=(_EVERYTHING, 0, 1, 0)),
        mock.patch.object(buckets, "gather_key", key),
    ):
        yield


@contextlib.contextmanager
def fsdp2_with_offloading() -> Iterator[None]:
    """Have float32 shards and gradients travel to and from the host, in the lanes of the collectives as with FSDP2."""

    def seconds(node: fx.Node, group: Group, profile: HardwareProfile) -> float:
        sent, alone_s = sent_by(node), launch_seconds(node, group, profile)
        if sent.kind == "all_reduce":  # between replicas
            return alone_s
        itemsize = next(tensors_of(source)[0].dtype.itemsize for source in node.all_input_nodes)
        return alone_s + copy_seconds(sent.num_bytes // itemsize * 4 // group.num_ranks, profile)

    with fsdp2(), mock.patch.object(events, "launch_seconds", seconds):
        yield


def beside_fsdp2(row: Row) -> list[str]:
    """Return the figures of both schedules."""
    with fsdp2():
        theirs = forecast(row)
    ours = forecast(row)
    figures = [
        said
        for one in (theirs, ours)
        for said in (f"{one.step_s * 1e3:,.1f}", f"{one.exposed_s * 1e3:.1f}", f"{one.peak_bytes / 2**30:.2f}")
    ]
    return [*figures, f"{ours.step_s / theirs.step_s:.3f}", f"{ours.peak_bytes / theirs.peak_bytes:.3f}"]


def within_memory(row: Row) -> tuple[Row, list[str]]:
    """Return the row with the first batch that does not fit, and its figures."""
    row = dataclasses.replace(row, checkpointing=NONE)
    while (plain := forecast(row)).fits and not plain.states_away:
        row = dataclasses.replace(row, batch=2 * row.batch)
    memory_bytes = plain.hardware.memory_bytes
    may = (*MAY, SHARDS) if plain.states_away else MAY
    ours = forecast(row, budget=memory_bytes - plain.peak[OPTIMIZER], may=may)
    with fsdp2_with_offloading():
        theirs = forecast(dataclasses.replace(row, checkpointing=FULL))
    assert ours.choice is not None
    its = ours.choice.chosen
    away = sum(theirs.peak[kind] for kind in (OPTIMIZER, "shards", "gradients"))  # all gradients: in FSDP2's favour
    gib = [f"{num_bytes / 2**30:.1f}" for num_bytes in (plain.peak_bytes, memory_bytes, ours.peak_bytes)]
    plain_s, ours_s, theirs_s = (one.forward_s + one.backward_s for one in (plain, ours, theirs))
    if plain.states_away:
        plain_s, ours_s = plain.step_s, ours.step_s
    return row, [
        gib[0], f"{plain_s * 1e3:,.1f}", gib[1], gib[2] + ("" if ours.fits else " (over)"), f"{ours_s * 1e3:,.1f}",
        f"{its.num_recomputed}", f"{its.offloaded_bytes / 2**30:.1f}", f"{its.copied_s * 1e3:,.1f}",
        f"{ours.shards_away / 2**30:.1f}",
        f"{(theirs.peak_bytes - away) / 2**30:.1f}", f"{theirs_s * 1e3:,.1f}", f"{theirs.exposed_s * 1e3:,.1f}",
        f"{ours_s / theirs_s:.3f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__.partition("\n")[0])
    numbers = range(1, 1 + len(ROWS) + len(ON_ONE_MACHINE))
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, metavar="N", help="these rows alone")
    parser.add_argument("--within-memory", action="store_true", help="what does not fit without a budget")
    options = parser.parse_args()
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "mesh", "GPU", "batch", "checkpointing"):
        grid.add_column(heading, no_wrap=True)
    for heading in _WITHIN if options.within_memory else _COLUMNS:
        grid.add_column(heading, justify="right", no_wrap=True)
    for number in options.only or (numbers if options.within_memory else numbers[: len(ROWS)]):
        row = (*ROWS, *ON_ONE_MACHINE)[number - 1]
        row, figures = within_memory(row) if options.within_memory else (row, beside_fsdp2(row))
        mesh, batch = "x".join(map(str, row.mesh)), f"{row.batch}x{row.sequence}"
        grid.add_row(row.model, mesh, row.hardware, batch, row.checkpointing, *figures)
        print(row.model, mesh, row.hardware, batch, *figures, flush=True)
    Console(width=160).print(grid)


if __name__ == "__main__":
    main()
