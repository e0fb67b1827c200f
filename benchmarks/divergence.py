"""`python -m benchmarks.divergence`: ranks that differ and should be right, and ranks that part and should be told.

Each cell is a world of its own that runs the same script: eight steps of four small blocks, in which the second rank
does something else, from the third step on where nothing else is said. "right" means gradients of the unsharded model
in every step on every rank. Gloo ends no wait: a rank that waits in it "is told" by its log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.divergence_worker import TOLERANCE
from benchmarks.report import write
from benchmarks.train_step import exit_on_sigterm, software_and_machine

_DEFAULT_JSON = Path(__file__).resolve().parent / "results" / "divergence.json"
DIFFER = {
    "lengths": "other lengths in each step",
    "dynamic": "... and dynamic shapes on one rank",
    "limit": "one rank at the limit of recompilations",
    "stance": "one rank told to run eagerly",
    "never": "... from the first step on",
    "unwrapped": "one rank that does not call torch.compile",
    "breaks": "a graph that breaks on one rank, from the first step on",
    "cache": "a warm cache on one rank, a cold one on the other",
    "tuning": "other settings of Inductor on one rank",
    "eval": "one rank in eval()",
    "slow": "one rank late by 8 s",
}
PART = {
    "branch": "a branch by rank, equal shapes",
    "shapes": "a branch by rank, other shapes",
    "unused": "a block that one rank does not use",
    "ends": "one rank ends earlier",
}
_TOLD = "This rank raises this at its next collective"
HOW = {
    "eager": "ours, eager",
    "whole": "ours, whole model compiled",
    "blocks": "ours, compiled blocks",
    "fsdp2": "FSDP2, eager",
    "fsdp2-blocks": "FSDP2, compiled blocks",
}


def main() -> int:
    options = _parse(sys.argv[1:])
    exit_on_sigterm()
    environment = software_and_machine()
    cells: dict[str, dict[str, str]] = {}
    console = Console(width=max(160, Console().width))
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-bench-") as work, Progress(console=console) as progress:
        task = progress.add_task("worlds", total=len(options.ranks) * len(options.cases) * len(options.how))
        for world in options.ranks:
            for how in options.how:  # fills the cache, so that compiling counts only in the case about it
                progress.update(task, description=f"{world} ranks, compiling, {HOW[how]}")
                _run("none", how, world, Path(work) / f"{how}-{world}", options, patience=4)
            for case in options.cases:
                row = cells.setdefault(f"{world} {case}", {})
                for how in options.how:
                    progress.update(task, description=f"{world} ranks, {case}, {HOW[how]}")
                    row[how] = _run(case, how, world, Path(work) / f"{how}-{world}", options)
                    progress.print(f"{world} ranks, {(DIFFER | PART)[case]}, {HOW[how]}: {row[how]}", highlight=False)
                    progress.advance(task)
    for title, cases in (("Ranks that differ", DIFFER), ("Ranks that part", PART)):
        table = Table("ranks", title, *(HOW[how] for how in options.how))
        for world in options.ranks:
            for case in [case for case in options.cases if case in cases]:
                table.add_row(str(world), cases[case], *cells[f"{world} {case}"].values())
        console.print(table)
    write(options.json, {"environment": environment, "cells": cells})
    return 0


def _run(case: str, how: str, world: int, cache: Path, options: argparse.Namespace, patience: int = 1) -> str:
    """Run one case in a world of its own, and return in a few words what became of its ranks."""
    limit_s = patience * options.limit
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "FSDP_COMPILE_WATCH_S": str(options.watch),
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.divergence_worker", case, how]
    begun = time.monotonic()
    processes: list[subprocess.Popen[str]] = []
    logs = [cache.with_name(f"log-{rank}") for rank in range(world)]

    def is_told(rank: int) -> bool:
        return _TOLD in logs[rank].read_text()

    try:
        for rank in range(world):
            with logs[rank].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, str(rank), str(world), str(port), "1800"],
                        env=env, text=True, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip
        while time.monotonic() < begun + limit_s:
            if all(process.poll() is not None or is_told(rank) for rank, process in enumerate(processes)):
                break
            time.sleep(0.1)
        for process in processes:  # one that waits for the end of another one does not wait for long
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3)
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    outputs = [(process.communicate()[0] or "").strip().splitlines() for process in processes]
    said = [(status, json.loads(out[-1]) if out else {}) for status, out in zip(statuses, outputs)]
    for rank, status in enumerate(statuses):
        if status is None and is_told(rank):
            said[rank][1]["waits"] = True
    return _in_words(said, limit_s)


def _in_words(said: Sequence[tuple[int | None, dict[str, Any]]], limit_s: int) -> str:
    ranks: dict[str, list[str]] = {}  # by outcome
    for rank, (status, one) in enumerate(said):
        if "off" in one:
            word = "right" if one["off"] <= TOLERANCE else f"WRONG by {one['off']:.0%}, no word"
        elif "raised" in one:
            word = f"raises {one['raised']}"
        elif "waits" in one:
            word = "is told, and waits for the timeout"
        elif status is None:
            word = f"hangs (over {limit_s} s)"
        else:
            word = f"dies: {signal.Signals(-status).name}" if status < 0 else f"exit {status}"
        ranks.setdefault(word, []).append(str(rank))
    if len(ranks) == 1:
        return next(iter(ranks))
    return "; ".join(f"{', '.join(these)}: {word}" for word, these in ranks.items())


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.divergence", description=__doc__)
    cases = [*DIFFER, *PART]
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--how", nargs="+", choices=list(HOW), default=list(HOW))
    parser.add_argument("--limit", type=int, default=90, help="seconds after which a world is said to hang")
    parser.add_argument("--watch", type=int, default=10, help="seconds after which our ranks are to compare (watch_s)")
    parser.add_argument("--json", type=Path, default=_DEFAULT_JSON)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
