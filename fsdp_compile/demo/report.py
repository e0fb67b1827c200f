"""The parent's half of the demo: start the workers, follow them, compare and print what they found.

Each stage of the work has a line: its name when it begins, its duration when it ends.

    start 2 ranks ... 6 s
    fsdp_compile: C++ kernels of the forward graph ... 14 s
    train all four in turn: step 12 of 30 ... 0:00:07          <- a terminal shows the last line's clock

In a file the lines are the same, without the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._torch_compat import inductor
from ..tools.measure import own_device
from ..workers import Workers
from .training import FSDP2, FSDP2_BLOCKS, OURS, UNSHARDED, DemoSettings

TOLERANCE = 5e-4  # largest difference of a step's mean loss from the unsharded model's; about 2e-5 is rounding
WORK = "fsdp_compile.demo.training:work"
SILENCE_S = 400.0  # workers send nothing for longest while they compile; gloo gives up on a lost peer after 300
_VARIANTS = (UNSHARDED, FSDP2, FSDP2_BLOCKS, OURS)
_SHOWN_STEPS = 6  # the first and the last one, and some between
_NONE = "-"

Stage = tuple[str, int, int]  # its name, the step that begins, the number of its steps (0: it has none)


def run_demo(settings: DemoSettings, console: Console) -> int:
    """Train, print, and return whether the numbers agree: 0 if they do, 1 if not."""
    start = time.monotonic()
    where = "GPUs, over NCCL" if own_device(settings.ranks, 0).type == "cuda" else "the CPU, over gloo"
    console.print(f"{settings.ranks} processes on {where}.", _how_long(settings.backend), highlight=False)
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-demo-") as scratch:
        results = _train(settings, Path(scratch), console)
    for table in (losses_table(results), graphs_table(results, settings), cost_table(results)):
        console.print(table)
    difference = largest_difference(results)
    agree = difference <= TOLERANCE
    verdict = "agree" if agree else "DISAGREE"
    console.print(
        f"The losses {verdict}: largest difference over {settings.steps} steps {difference:.1e}, "
        f"tolerance {TOLERANCE:.1e}. Took {time.monotonic() - start:.0f} s."
    )
    page = results[0]["page"]
    console.print(f"The planned step, to look at in a browser: {page}", highlight=False, soft_wrap=True)
    if settings.save is not None:
        _save(settings, results, difference)
        console.print(f"Saved results, plans, and every graph as a file that runs by itself, in {settings.save}.")
    return 0 if agree else 1


def missing_tools(settings: DemoSettings) -> str | None:
    """Say what this machine lacks for the demo, what to install and what runs without it; None if it lacks nothing."""
    if settings.backend != "inductor":
        return None
    missing = inductor.missing_compiler(own_device(settings.ranks, 0).type)
    if missing is None:
        return None
    return (
        f"torch.compile's default backend, Inductor, needs {missing}. To install it:\n"
        "    apt install g++ python3-dev            Debian, Ubuntu\n"
        "    dnf install gcc-c++ python3-devel      Fedora\n"
        "    xcode-select --install                 macOS\n"
        "Without it, the same training with graphs that are not compiled to kernels:\n"
        "    fsdp-compile demo --backend aot_eager"
    )


def _how_long(backend: str) -> str:
    if backend == "inductor":
        return "On two cores this takes one to three minutes, most of it to compile."
    return "Without kernels to compile, this takes less than a minute."


def _train(settings: DemoSettings, scratch: Path, console: Console) -> list[dict[str, Any]]:
    """Run the workers in an empty compile cache, as on a machine that never compiled this; return results by rank."""
    job = {"settings": dataclasses.asdict(settings), "rendezvous": str(scratch / "rendezvous")}
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache"),
        "TRITON_CACHE_DIR": str(scratch / "cache" / "triton"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    results: list[dict[str, Any]] = [{}] * settings.ranks
    with following(console) as stages:
        stages.at((f"start {settings.ranks} processes", 0, 0))
        with Workers(WORK, job, num_ranks=settings.ranks, log_dir=scratch, env=env) as workers:
            for rank, message in workers.messages(SILENCE_S):
                if "result" in message:
                    results[rank] = message["result"]
                else:
                    stages.at(message["stage"])
    return results


class Stages:
    """Prints the lines of the stages; ``following`` makes it."""

    def __init__(self, console: Console, clock: Progress) -> None:
        self._console = console
        self._clock = clock
        self._task = clock.add_task("", visible=False)
        self._name = ""
        self._began = 0.0

    def at(self, stage: Stage) -> None:
        """Begin this stage, or its next step; a new name ends the stage before."""
        name, step, num_steps = stage
        if name != self._name:
            self.end()
            self._name, self._began = name, time.monotonic()
            if not self._console.is_terminal:
                self._console.print(f"{name} ... ", end="", highlight=False)
            self._clock.reset(self._task, description=name, visible=True)
        if num_steps:
            self._clock.update(self._task, description=f"{name}: step {step} of {num_steps}")

    def end(self) -> None:
        """End the last stage, which took until now."""
        if not self._name:
            return
        took = f"{time.monotonic() - self._began:.0f} s"
        said = f"{self._name} ... " if self._console.is_terminal else ""
        self._console.print(f"{said}{took}", highlight=False)
        self._name = ""

    def break_off(self) -> None:
        """End a stage that failed: its line stays, without a time."""
        self._console.print(f"{self._name} ..." if self._console.is_terminal else "", highlight=False)


@contextlib.contextmanager
def following(console: Console) -> Iterator[Stages]:
    """Show stages while the block runs; an exception leaves the line of its stage unfinished."""
    columns = (SpinnerColumn(), TextColumn("{task.description} ..."), TimeElapsedColumn())
    clock = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    stages = Stages(console, clock)
    with clock:
        try:
            yield stages
        except BaseException:
            stages.break_off()
            raise
        stages.end()


def mean_losses(results: list[dict[str, Any]], variant: str) -> list[float]:
    """Return the loss of each step, as the mean over all ranks' batches."""
    by_rank = [result["runs"][variant]["losses"] for result in results]
    return [sum(losses) / len(losses) for losses in zip(*by_rank)]


def largest_difference(results: list[dict[str, Any]]) -> float:
    """Return the largest difference of ours from the unsharded model's losses; infinite when a loss is not a number."""
    pairs = zip(mean_losses(results, OURS), mean_losses(results, UNSHARDED))
    differences = [abs(ours - reference) for ours, reference in pairs]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


def losses_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="Loss, mean over the ranks' batches")
    for name in ("step", UNSHARDED, OURS, "difference"):
        table.add_column(name, justify="right")
    reference, ours = mean_losses(results, UNSHARDED), mean_losses(results, OURS)
    last, between = len(reference) - 1, _SHOWN_STEPS - 1
    for step in sorted({round(last * index / between) for index in range(_SHOWN_STEPS)}):
        a, b = reference[step], ours[step]
        table.add_row(str(step + 1), f"{a:.5f}", f"{b:.5f}", f"{abs(b - a):.1e}")
    table.add_section()
    table.add_row("all", "", "largest", f"{largest_difference(results):.1e}")
    table.add_row("", "", "tolerance", f"{TOLERANCE:.1e}")
    return table


def graphs_table(results: list[dict[str, Any]], settings: DemoSettings) -> Table:
    """Show into how many collectives our variant's markers were bucketed; with aot_eager each one runs as it is."""
    captured = results[0]["captured"]
    table = Table(title=f"torch.compile(model, fullgraph=True, backend={settings.backend!r})")
    if settings.backend == "inductor":
        header = ["fsdp_compile", "before bucketing", "after"]
        rows = _bucketed_rows(captured["stages"])
    else:
        header = ["fsdp_compile", ""]
        rows = [["parameters, each gathered and reduced by itself", str(captured["stages"]["joint"]["params"])]]
        table.caption = "Buckets, and communication beside compute: with --backend inductor."
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    table.add_section()
    empty = [""] * (len(header) - 2)
    table.add_row("graphs captured by Dynamo", *empty, str(captured["num_graphs"]))
    table.add_row("graph breaks", *empty, str(captured["num_graph_breaks"]))
    return table


def _bucketed_rows(stages: dict[str, Any]) -> list[list[str]]:
    counted = (
        ("all-gathers", "forward", "gathers"),
        ("all-gathers", "backward", "gathers"),
        ("gradient reductions", "backward", "reduces"),
    )
    return [[f"{label} in {stage}", *map(str, stages[stage][what])] for label, stage, what in counted]


def cost_table(results: list[dict[str, Any]]) -> Table:
    """Show the time of the slowest rank, and the memory of the heaviest."""
    first = results[0]
    table = Table(
        title=f"{first['num_params'] / 1e6:.1f}M parameters, {len(results)} ranks, {first['group']}, {first['device']}",
        caption="a rank's memory. held: parameters and optimizer state, counted; these stand between steps. peak: what "
        "a step needs above that, gradients included, measured. unsharded: weighed with one rank's batch; not timed, "
        "since it trains on every rank's.",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in ("median step", "held", "+ peak", "= total"):
        table.add_column(name, justify="right", no_wrap=True)
    for variant in _VARIANTS:
        runs = [result["runs"][variant] for result in results]
        seconds = None if variant == UNSHARDED else _worst(runs, "step_s")
        held, peak = _worst(runs, "held_bytes"), _worst(runs, "peak_bytes")
        table.add_row(
            variant,
            _NONE if seconds is None else f"{seconds * 1e3:.1f} ms",
            _mib(held),
            _mib(peak),
            _mib(None if held is None or peak is None else held + peak),
        )
    return table


def _worst(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs]
    return None if None in values else max(values)


def _mib(num_bytes: float | None) -> str:
    return _NONE if num_bytes is None else f"{num_bytes / 2**20:.1f} MiB"


def _save(settings: DemoSettings, results: list[dict[str, Any]], difference: float) -> None:
    assert settings.save is not None
    report = {
        "settings": dataclasses.asdict(settings),
        "tolerance": TOLERANCE,
        "largest_difference": difference,
        "ranks": results,
    }
    (Path(settings.save) / "report.json").write_text(json.dumps(report, indent=1))
