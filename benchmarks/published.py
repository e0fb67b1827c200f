"""`python -m benchmarks.published`: what `fsdp-compile plan` says of training steps, beside what others measured.

Tokens a second and GiB of one GPU. The table is ROWS, each with its source; what was trained in another way than it is
planned is said in the last column. The last two rows are planned alone: what planning takes.

No constant was fitted to these rows. But those of A100 and of `_machines` were replaced by better measurements when
rows 1 to 17 had been planned. Rows 19 to 23 were planned for the first time after that.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
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
from fsdp_compile.forecast.joint import FULL, NONE, SELECTIVE
from fsdp_compile.forecast.target import find_target
from fsdp_compile.passes import HardwareProfile, load_profile

_GIB = 2**30
_CONFIGS = Path(__file__).parent.parent / "examples" / "plan"


def _machines() -> dict[str, HardwareProfile]:
    """Return the profiles of the machines that the rows were measured on."""
    a100, h100, h200, b200 = map(load_profile, ("a100", "h100", "h200", "b200"))
    # Libraries of 2024: Llama 7B's MLP, forward and backward, reaches 0.67 to 0.68 of the peak on 8,192 to 32,768
    # tokens (linkedin/Liger-Kernel, benchmark/swiglu_speed/nvidia_h100_80gb_hbm3, without its pointwise part), and
    # FlashAttention-2 322 TFLOPS (profiles.py).
    then = dataclasses.replace(h100, matmul_efficiency=0.675, attention_efficiency=322 / (989.5 * 0.675))
    # Meta's H100 has 96 GB at 2.4 TB/s and runs at 500 W. Matmuls of three shapes reach 585, 575 and 546 TFLOPS, 0.575
    # of the peak on average (pytorch/FBGEMM, pull request 2546), and attention 288 to 304 (pytorch/benchmark, pull
    # request 2296).
    meta = dataclasses.replace(
        h100,
        memory_bytes=96 * 10**9,
        memory_bytes_per_s=2.4e12,
        matmul_efficiency=0.575,
        attention_efficiency=296 / (989.5 * 0.575),
    )
    # IBM's A100 nodes have 400 Gb/s for eight GPUs.
    ibm = dataclasses.replace(a100, between=dataclasses.replace(a100.between, bytes_per_s=50e9 / 8))
    return {"a100": a100, "a100 IBM": ibm, "h100 2024": then, "h100 Meta": meta, "h200": h200, "b200": b200}


@dataclass(frozen=True)
class Row:
    """What is planned, and the figures that were published for it."""

    model: str
    mesh: tuple[int, ...]  # replicas of shards, or shards
    machine: str
    batch: int
    sequence: int
    checkpointing: str
    tokens_per_s: float | None = None  # of one GPU
    gib: float | None = None
    source: str = ""
    theirs: str = ""  # how their run differs
    is_eager: bool = False


_TITAN = "pytorch/torchtitan, "
_H100_FILE = f"{_TITAN}benchmarks/llama3_h100_202412_torchtitan.md"
_A100_FILE = f"{_TITAN}docs/performance.md of 2024"
_H200_FILE = f"{_TITAN}benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
# This page has MFU; tokens are those of its formula, 6 x parameters + 12 x layers x width x sequence for each.
_IBM = "pytorch.org/blog/maximizing-training-throughput"
_MOSAIC = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
_ALIBI = "ALiBi instead of rotary positions"
# The files of these runs in train_configs/, "a preset for 64 A100 GPUs", say that they are not compiled.
_EAGER_A100 = f"{_A100_FILE}; compile = false in train_configs/"

ROWS = (
    Row("llama-3-8b", (8,), "h100 Meta", 2, 8192, SELECTIVE, 6667, 77.0, f"{_H100_FILE}, table 1"),
    Row("llama-3-8b", (128,), "h100 Meta", 2, 8192, SELECTIVE, 6514, 62.0, f"{_H100_FILE}, table 3"),
    Row("llama-3-8b", (8,), "h100 Meta", 1, 8192, SELECTIVE, 6150, 47.65, "pytorch/ao, torchao/float8/README.md"),
    Row("llama-3-70b", (256,), "h100 Meta", 2, 8192, FULL, 829, 71.9, f"{_H100_FILE}, table 4",
        "Float8, tensor parallel 8 x FSDP 32"),
    Row("llama-3-405b", (512,), "h100 Meta", 1, 8192, FULL, 128, 72.7, f"{_H100_FILE}, table 5",
        "Float8, pipeline 8 x tensor parallel 8 x FSDP 8, half a sequence a GPU"),
    Row("llama-3-8b", (32,), "h200", 2, 8192, SELECTIVE, 10938, 47.96, _H200_FILE, "Float8"),
    Row("llama-3-8b", (8,), "b200", 1, 8192, SELECTIVE, 8307.5, 33.71,
        "pytorch/ao, torchao/prototype/mx_formats/README.md", "B200 with a lower limit of power, which is not said"),
    Row("llama-3-8b", (64,), "a100", 1, 8192, SELECTIVE, 2973, None, _EAGER_A100, is_eager=True),
    Row("llama-3-70b", (64,), "a100", 1, 8192, FULL, 331, None, _EAGER_A100, is_eager=True),
    Row("llama-2-13b", (64,), "a100", 2, 4096, NONE, 2162, None, _EAGER_A100, is_eager=True),
    Row("llama-2-70b", (64,), "a100", 2, 4096, FULL, 353, None, _EAGER_A100, is_eager=True),
    Row("llama-2-7b", (16, 8), "a100 IBM", 2, 4096, NONE, 4527, None, f"{_IBM}, MFU 0.68"),
    Row("llama-2-70b", (128,), "a100 IBM", 2, 4096, FULL, 385, None, f"{_IBM}, MFU 0.55"),
    Row("llama-2-7b", (58, 8), "h100 2024", 2, 4096, NONE, 9495, None, f"{_IBM}, MFU 0.45"),
    Row("llama-2-70b", (464,), "h100 2024", 2, 4096, FULL, 842, None, f"{_IBM}, MFU 0.38"),
    Row("mpt-7b", (8,), "a100", 6, 2048, NONE, 4641, None, _MOSAIC, _ALIBI, is_eager=True),
    Row("mpt-7b", (8,), "h100 2024", 6, 2048, NONE, 10643, None, _MOSAIC, _ALIBI, is_eager=True),
    Row("llama-3-8b", (8,), "h100 Meta", 2, 8192, SELECTIVE, 5762, 82.4, f"{_H100_FILE}, table 1", is_eager=True),
    Row("llama-3-8b", (128,), "h100 Meta", 2, 8192, SELECTIVE, 5605, 67.0, f"{_H100_FILE}, table 3", is_eager=True),
    Row("mpt-13b", (8,), "a100", 2, 2048, NONE, 2262, None, _MOSAIC, _ALIBI, is_eager=True),
    Row("mpt-30b", (8,), "a100", 3, 2048, FULL, 916, None, _MOSAIC, _ALIBI, is_eager=True),
    Row("mpt-13b", (8,), "h100 2024", 2, 2048, NONE, 4792, None, _MOSAIC, _ALIBI, is_eager=True),
    Row("mpt-30b", (32,), "h100 2024", 14, 2048, FULL, 2308, None, _MOSAIC, _ALIBI, is_eager=True),
    Row("llama-3-70b", (512,), "h100 Meta", 2, 8192, FULL),
    Row("llama-3-405b", (1024,), "h100 Meta", 1, 8192, FULL),
)  # fmt: skip


def planned(row: Row) -> Forecast:
    profile, num_ranks = _machines()[row.machine], math.prod(row.mesh)
    hardware = Hardware(profile, profile.memory_bytes, num_ranks, "bf16", "adamw")
    configuration = Configuration(row.mesh, row.batch, row.sequence, row.checkpointing, is_eager=row.is_eager)
    with warnings.catch_warnings(), pretended_world(num_ranks, "nccl"):
        warnings.simplefilter("ignore")
        made = find_target(str(_CONFIGS / f"{row.model}.json")).make(row.batch, row.sequence)
        return Planner(made, configuration, hardware).forecast()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.partition("\n")[0])
    numbers = range(1, 1 + len(ROWS))
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, metavar="N", help="these rows alone")
    options = parser.parse_args()
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("row", "model", "mesh", "machine", "batch", "checkpointing", "how"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "published", "ratio", "GiB", "published", "ratio", "MFU", "waiting", "planned in"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("source; what differs")
    for number in options.only or numbers:
        row, begun = ROWS[number - 1], time.perf_counter()
        one = planned(row)
        said = "; ".join(part for part in (row.source, row.theirs) if part)
        cells = (
            str(number), row.model, "x".join(map(str, row.mesh)), row.machine, f"{row.batch}x{row.sequence}",
            row.checkpointing, "eager" if row.is_eager else "compiled",
            *_beside(one.tokens_per_s_per_rank, row.tokens_per_s, ".0f"),
            *_beside(one.peak_bytes / _GIB, row.gib, ".1f"), f"{one.mfu:.1%}", f"{one.exposed_s / one.step_s:.1%}",
            f"{time.perf_counter() - begun:.1f} s", said or "planned alone",
        )  # fmt: skip
        grid.add_row(*cells)
        print(*cells, sep=" | ", flush=True)
    console = Console(width=max(Console().width, 220))
    console.print(grid)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"peak of this process: {peak / _GIB:.1f} GiB")


def _beside(ours: float, theirs: float | None, shown: str) -> tuple[str, str, str]:
    if theirs is None:
        return format(ours, f",{shown}"), "", ""
    return format(ours, f",{shown}"), format(theirs, f",{shown}"), f"{ours / theirs:.2f}"


if __name__ == "__main__":
    main()
