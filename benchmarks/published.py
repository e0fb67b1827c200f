"""`python -m benchmarks.published`: what `fsdp-compile plan` says of Llamas, beside what torchtitan measured of them.

Tokens a second and GiB of one GPU. Two files of torchtitan's repository have the figures:
benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB and 2.4 TB/s at 500 W; versions of December 2024) and
docs/performance.md as it was in 2024 (A100 of 80 GB). What torchtitan trained in another way is said in the last
column. The last rows are planned alone: what planning takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.forecast.forecast import Configuration, Forecast, Hardware, Planner
from fsdp_compile.forecast.joint import FULL, SELECTIVE
from fsdp_compile.forecast.sweep import forecast_of
from fsdp_compile.forecast.target import find_target
from fsdp_compile.passes import HardwareProfile, load_profile

_GIB = 2**30
_CONFIGS = Path(__file__).parent.parent / "examples" / "plan"
_H100_FILE = "benchmarks/llama3_h100_202412_torchtitan.md"
_A100_FILE = "docs/performance.md"


@dataclass(frozen=True)
class Row:
    """What is planned, and the figures that were published for it."""

    model: str
    ranks: int
    hardware: str
    batch: int
    checkpointing: str
    sequence: int = 8192
    tokens_per_s: float | None = None  # of one GPU
    gib: float | None = None
    source: str = ""
    theirs: str = ""  # how their run differs


ROWS = (
    Row("8b", 8, "h100", 2, SELECTIVE, tokens_per_s=6667, gib=77.0, source=f"{_H100_FILE}, table 1"),
    Row("8b", 128, "h100", 2, SELECTIVE, tokens_per_s=6514, gib=62.0, source=f"{_H100_FILE}, table 3"),
    Row("8b", 64, "a100", 1, SELECTIVE, tokens_per_s=2973, source=_A100_FILE),
    Row("70b", 64, "a100", 1, FULL, tokens_per_s=331, source=_A100_FILE),
    Row(
        "70b", 256, "h100", 2, FULL, tokens_per_s=829, gib=71.9, source=f"{_H100_FILE}, table 4",
        theirs="Float8, tensor parallel 8 x FSDP 32",
    ),
    Row(
        "405b", 512, "h100", 1, FULL, tokens_per_s=128, gib=72.7, source=f"{_H100_FILE}, table 5",
        theirs="Float8, pipeline 8 x tensor parallel 8 x FSDP 8, half a sequence a GPU",
    ),
    Row("70b", 512, "h100", 2, FULL),
    Row("405b", 1024, "h100", 1, FULL),
)  # fmt: skip


def profile_of(name: str) -> HardwareProfile:
    """Return the profile of the hardware of the published runs.

    Their H100 has more, but slower, memory than the one of the data sheet. The attention kernel of that time was for
    A100: sdpa reached 288 to 304 TFLOPS where matmuls reach 720 (pytorch/benchmark, pull request 2296; profiles.py).
    The limit of 500 W slows matmuls down, which is not in the profile, because nobody has published by how much.
    """
    profile = load_profile(name)
    if name == "h100":
        return dataclasses.replace(
            profile, memory_bytes=96 * 10**9, memory_bytes_per_s=2.4e12, attention_efficiency=0.4
        )
    return profile


def planned(row: Row) -> Forecast:
    profile = profile_of(row.hardware)
    hardware = Hardware(profile, profile.memory_bytes, row.ranks, "bf16", "adamw")
    configuration = Configuration((row.ranks,), row.batch, row.sequence, row.checkpointing)
    with warnings.catch_warnings(), pretended_world(row.ranks, "nccl"):
        warnings.simplefilter("ignore")
        made = find_target(str(_CONFIGS / f"llama-3-{row.model}.json")).make(row.batch, row.sequence)
        return forecast_of(Planner(made, configuration, hardware))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.partition("\n")[0])
    numbers = range(1, 1 + len(ROWS))
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, metavar="N", help="these rows alone")
    options = parser.parse_args()
    chosen = [ROWS[number - 1] for number in options.only] if options.only else list(ROWS)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("Llama 3", "ranks", "batch", "checkpointing"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "published", "ratio", "GiB", "published", "ratio", "MFU", "planned in"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("source; what differs")
    for row in chosen:
        begun = time.perf_counter()
        one = planned(row)
        seconds = time.perf_counter() - begun
        said = "; ".join(part for part in (row.source, row.theirs) if part)
        grid.add_row(
            row.model,
            f"{row.ranks:,} {row.hardware}",
            f"{row.batch}x{row.sequence}",
            row.checkpointing,
            *_beside(one.tokens_per_s_per_rank, row.tokens_per_s, ".0f"),
            *_beside(one.peak_bytes / _GIB, row.gib, ".1f"),
            f"{one.mfu:.1%}",
            f"{seconds:.1f} s",
            said or "planned alone",
        )
    console = Console(width=max(Console().width, 190))
    console.print(grid)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"peak of this process: {peak / _GIB:.1f} GiB")


def _beside(ours: float, theirs: float | None, shown: str) -> tuple[str, str, str]:
    if theirs is None:
        return format(ours, f",{shown}"), "", ""
    return format(ours, f",{shown}"), format(theirs, f",{shown}"), f"{ours / theirs:.2f}"


if __name__ == "__main__":
    main()
