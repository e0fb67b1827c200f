"""`python -m benchmarks.predicted`: what reports predict of steps on this machine, against what the steps then took.

The machine is measured first, as `fsdp-compile calibrate` does, on loopback and, as root, over a link of 1 Gbit/s. Then
eight configurations train on two ranks, and one of them within three budgets, at three places between the least that a
plan needs and what keeping everything needs. Seconds are those of forward and backward, which a report predicts; the
optimizer's are in a column of their own. Bytes are the peak of a step above what is held between steps. The machine
should be quiet.

With `--budgets`, one model trains within four budgets instead, which choose what is gathered again, recomputed or sent
to the host's memory. FSDP2 trains it as well, its blocks compiled, with and without checkpointing. On the CPU, the
host's memory is the device's: what is sent there is in the measured bytes, and in the ratio beside them, but not in the
predicted ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.launch import Outcome, launch
from benchmarks.predicted_worker import CHECKPOINTED, SAVED, Figures, PredictedJob
from benchmarks.settings import Settings
from benchmarks.train_step import MALLOC_GIVES_BACK, exit_on_sigterm
from fsdp_compile.passes.budget.residency import GATHER, MAY, RECOMPUTE
from fsdp_compile.tools import calibrate
from fsdp_compile.tools.link import LinkError, SlowLink, check_possible

LOOPBACK, RATE = "loopback", "1gbit"
_LIMIT_S = 600.0
_WIDTH = 210


@dataclass(frozen=True)
class Configuration:
    """A model, its batch, the wire, and what is kept from forward to backward."""

    dim: int
    layers: int
    batch: int
    seq: int
    over: str = LOOPBACK
    reshard: bool | None = None
    budget: str | None = None
    between: float | None = None
    may: tuple[str, ...] = (GATHER, RECOMPUTE)
    theirs: str | None = None  # FSDP2 with what it does with activations

    def __str__(self) -> str:
        keeps = {None: "gathered again", False: "kept", True: "all gathered again"}[self.reshard]
        keeps = f"budget {self.budget}" if self.budget else keeps
        keeps = f"budget at {self.between:.0%}" if self.between is not None else keeps
        keeps = f"FSDP2, activations {self.theirs}" if self.theirs else keeps
        return f"dim {self.dim}, {self.layers} layers, {self.batch} x {self.seq}, {self.over}, {keeps}"


CONFIGURATIONS = (
    Configuration(512, 6, 2, 128),
    Configuration(512, 6, 2, 128, reshard=False),
    Configuration(512, 6, 4, 256),
    Configuration(256, 8, 4, 128),
    Configuration(768, 4, 1, 256),
    Configuration(512, 6, 4, 256, over=RATE),
    Configuration(512, 6, 4, 256, over=RATE, reshard=False),
    Configuration(512, 6, 4, 256, over=RATE, budget="fsdp2"),
    *(Configuration(512, 6, 4, 256, over=RATE, between=share) for share in (0.2, 0.5, 0.8)),
)

_BUDGETS = 0.0, 0.3, 0.6, 1.0
WITHIN = (
    *(Configuration(512, 6, 4, 256, between=share, may=MAY) for share in _BUDGETS),
    *(Configuration(512, 6, 4, 256, theirs=how) for how in (SAVED, CHECKPOINTED)),
)


def main() -> int:
    options = _parse(sys.argv[1:])
    exit_on_sigterm()
    console = Console(width=max(_WIDTH, Console().width))
    known = WITHIN if options.budgets else CONFIGURATIONS
    chosen = [known[number - 1] for number in options.only] if options.only else list(known)
    settings = Settings(steps=options.steps)
    usable = sorted(os.sched_getaffinity(0))
    cores = tuple(usable[rank % len(usable)] for rank in range(settings.ranks))
    if len(usable) < settings.ranks:
        print(f"note: {settings.ranks} ranks share {len(usable)} cores, which no profile knows of")
    if any(one.over != LOOPBACK for one in chosen):
        check_possible()  # before anything takes minutes
    load = os.getloadavg()[0]
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers that calibrate, as for those that train
    grid = grid_of(f"predicted and measured; load {load:.1f} before the first run")
    failed = False
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-compile-predicted-"))
        stack.callback(console.print, grid)  # prints what was finished
        for over in dict.fromkeys(one.over for one in chosen):
            profile = options.profile or f"{folder}/{over}.json"
            rate = None if over == LOOPBACK else over
            if not options.profile:
                calibrate.run_calibrate(calibrate.CalibrationSettings(name=over, out=profile, link=rate), console)
            for number, one in enumerate(chosen):
                if one.over == over:
                    outcome = _run(one, settings, profile, cores, Path(folder), number)
                    failed |= outcome.error is not None
                    add_row(grid, one, outcome)
    return int(failed)


def _run(
    one: Configuration, settings: Settings, profile: str, cores: tuple[int, ...], work: Path, number: int
) -> Outcome:
    begun = time.monotonic()
    with ExitStack() as stack:
        link = stack.enter_context(SlowLink(one.over)) if one.over != LOOPBACK else None
        job = PredictedJob(
            variant="ours",
            mode="time",
            settings=dataclasses.replace(settings, dim=one.dim, layers=one.layers, batch=one.batch, seq=one.seq),
            run_dir=str(work / f"run{number}"),
            address=link.address if link else "127.0.0.1",
            interfaces=link.interfaces if link else ("lo",) * settings.ranks,
            cores=cores,
            timeout_s=_LIMIT_S,
            profile=profile,
            reshard=one.reshard,
            budget=one.budget,
            between=one.between,
            may=one.may,
            theirs=one.theirs,
        )
        outcome = launch(
            "benchmarks.predicted_worker",
            job,
            settings.ranks,
            env=MALLOC_GIVES_BACK,
            cache_dir=work / "cache",  # shared by all configurations: many kernels are the same
            prefixes=link.prefixes if link else (),
        )
    print(f"{one}: {time.monotonic() - begun:.1f} s  {outcome.error or 'done'}", file=sys.stderr, flush=True)
    if outcome.error:
        print(outcome.log_tail, file=sys.stderr)
    return outcome


def grid_of(title: str) -> Table:
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("configuration", no_wrap=True)
    for heading in ("kept", "again", "predicted s", "waiting", "measured s", "ratio", "of processor s", "optimizer s"):
        grid.add_column(heading, justify="right")
    for heading in ("predicted MB", "on the host", "measured MB", "ratio", "budget MB", "of it"):
        grid.add_column(heading, justify="right")
    return grid


def add_row(grid: Table, one: object, outcome: Outcome) -> None:
    if outcome.error:
        grid.add_row(str(one), f"! {outcome.error}")
        return
    ranks: list[Figures] = list(outcome.ranks)  # type: ignore[arg-type]
    # The slowest rank sets the pace, and the largest rank says how much memory is needed.
    step_s = max(statistics.median(rank.step_s) for rank in ranks)
    optimizer_s = max(statistics.median(rank.optimizer_s) for rank in ranks)
    predicted_s = max(rank.predicted_s for rank in ranks)
    predicted_bytes = max(rank.predicted_bytes for rank in ranks)
    peak_bytes = max(statistics.median(rank.peak_bytes) for rank in ranks)
    budget_bytes = ranks[0].budget_bytes
    grid.add_row(
        str(one),
        str(ranks[0].num_kept),
        str(ranks[0].num_recomputed),
        f"{predicted_s:.3f}" if predicted_s else "-",
        f"{max(rank.predicted_exposed_s for rank in ranks):.3f}" if predicted_s else "-",
        f"{step_s:.3f}",
        f"{predicted_s / step_s:.2f}" if predicted_s else "-",
        f"{max(statistics.median(rank.cpu_s) for rank in ranks):.3f}",
        f"{optimizer_s:.3f}",
        f"{predicted_bytes / 1e6:.1f}" if predicted_s else "-",
        f"{ranks[0].offloaded_bytes / 1e6:.1f}",
        f"{peak_bytes / 1e6:.1f}",
        # On the CPU both are in one memory. 0 bytes are less than a page.
        f"{(predicted_bytes + ranks[0].offloaded_bytes) / peak_bytes:.2f}" if peak_bytes and predicted_s else "-",
        "-" if budget_bytes is None else f"{budget_bytes / 1e6:.1f}",
        "-" if budget_bytes is None else f"{peak_bytes / budget_bytes:.2f}",
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predicted",
        description="What reports predict of steps on this machine, against what the steps then took.",
        epilog="configurations: " + "; ".join(f"{place}: {one}" for place, one in enumerate(CONFIGURATIONS, start=1)),
    )
    numbers = range(1, 1 + len(CONFIGURATIONS))
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, metavar="N", help="these configurations alone")
    parser.add_argument("--budgets", action="store_true", help="one model within four budgets, beside FSDP2")
    parser.add_argument("--steps", type=int, default=9, help="that are timed; default: %(default)s")
    parser.add_argument("--profile", metavar="FILE", help="of this machine and wire, in place of measuring it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except LinkError as error:
        raise SystemExit(str(error)) from error
