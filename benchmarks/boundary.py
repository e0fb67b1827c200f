"""`python -m benchmarks.boundary`: what each sharded parameter costs at the boundary of a compiled graph.

World size is 1 and parameters are tiny, so neither bytes nor compute count. What is left is the cost of
passing a parameter into the graph and its gradient out of it, and of compiling that.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.boundary_worker import SHARDERS
from benchmarks.launch import launch
from benchmarks.records import Record
from benchmarks.report import write
from benchmarks.settings import Job, Settings
from benchmarks.train_step import exit_on_sigterm, software_and_machine

_DEFAULT_JSON = Path(__file__).resolve().parent / "results" / "boundary.json"
_ABOUT = {
    "unsharded": "plain parameters under torch.compile",
    "ours": "fsdp_compile.fully_shard(model) under torch.compile",
    "dtensors": "DTensor parameters, read as param.to_local()",
    "simple_fsdp": "SimpleFSDP under torch.compile",
}


def main() -> int:
    options = _parse(sys.argv[1:])
    exit_on_sigterm()
    settings = Settings(
        dim=options.width, layers=options.params, steps=options.steps, warmup=options.warmup, ranks=1
    )
    records = {name: Record(name, _ABOUT[name]) for name in SHARDERS}
    environment = software_and_machine()
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-bench-") as work:
        for repeat in range(options.repeat):
            for record in records.values():
                if not record.problems:
                    _run(record, options, settings, Path(work) / f"{record.name}{repeat}")
    _check_losses(records)
    grid = _table(records, options)
    Console(width=max(120, Console().width)).print(grid)
    rows = [
        dataclasses.asdict(record)
        | {"step_s": record.step_s, "over_unsharded_us": _over_us(records, record, options.params)}
        for record in records.values()
    ]
    document = {
        "environment": environment,
        "options": {name: str(value) for name, value in vars(options).items()},
        "rows": rows,
    }
    write(options.json, document)
    return int(any(record.problems for record in records.values()))


def _run(record: Record, options: argparse.Namespace, settings: Settings, folder: Path) -> None:
    """Run one variant on the first core, with an empty compile cache, and add its figures to the record."""
    job = Job(
        variant=f"{record.name}:{options.kind}",
        mode="time",
        settings=settings,
        run_dir=str(folder / "run"),
        address="127.0.0.1",
        interfaces=("lo",),
        cores=(min(os.sched_getaffinity(0)),),
        timeout_s=options.timeout,
    )
    begin = time.monotonic()
    outcome = launch("benchmarks.boundary_worker", job, 1, env={}, cache_dir=folder / "cache")
    line = f"{record.name:16}{time.monotonic() - begin:6.1f} s  {outcome.error or 'done'}"
    print(line, file=sys.stderr, flush=True)
    if outcome.error is not None:
        record.problems.append(outcome.error)
        record.log_tail = outcome.log_tail
        return
    record.runs.append(outcome.ranks)
    record.cold_first_step_s.append(outcome.ranks[0].first_step_s)


def _check_losses(records: dict[str, Record]) -> None:
    """Check that the last output is that of the unsharded model: nothing is trained here."""
    if not records["unsharded"].runs:
        return
    [expected] = records["unsharded"].losses[0]
    for record in records.values():
        for [loss] in record.losses:
            if not abs(loss - expected) <= 1e-5 * abs(expected):
                record.problems.append(f"WRONG LOSS: {loss} and not {expected}")


def _table(records: dict[str, Record], options: argparse.Namespace) -> Table:
    grid = Table(
        title=f"{options.params} parameters ({options.kind}, width {options.width}), world size 1, fp32",
        caption=f"forward and backward; {options.repeat} runs of {options.steps} steps, median; "
        "first step: with compilation, empty cache, C++ toolchain primed",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    grid.add_column("variant", no_wrap=True)
    for heading in ("step ms", "min..max", "us per parameter over unsharded", "first step s", "graphs"):
        grid.add_column(heading, justify="right", overflow="fold")
    grid.add_column("what it is")
    for record in records.values():
        about = record.about + "".join(f"\n! {problem}" for problem in record.problems)
        if record.step_s is None or record.spread_s is None:
            grid.add_row(record.name, *["-"] * 5, about, style="red")
            continue
        over_us = _over_us(records, record, options.params)
        grid.add_row(
            record.name,
            f"{record.step_s * 1e3:.2f}",
            "{:.2f}..{:.2f}".format(*(second * 1e3 for second in record.spread_s)),
            "-" if over_us is None else f"{over_us:.2f}",
            f"{statistics.median(record.cold_first_step_s):.1f}",
            str(record.runs[-1][0].num_graphs),
            about,
            style="red" if record.problems else None,
        )
    return grid


def _over_us(records: dict[str, Record], record: Record, num_params: int) -> float | None:
    base = records["unsharded"].step_s
    if record.step_s is None or base is None or record.name == "unsharded":
        return None
    return (record.step_s - base) / num_params * 1e6


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.boundary",
        description="Microseconds per parameter and step of crossing the graph boundary, over unsharded.",
    )
    add = parser.add_argument
    add("--params", type=int, default=300, help="number of parameters; default: %(default)s")
    add("--kind", choices=("linear", "scale"), default="linear", help="a small matrix each, or a vector each")
    add("--width", type=int, default=8, help="default: %(default)s")
    add("--steps", type=int, default=200, help="default: %(default)s")
    add("--warmup", type=int, default=20, help="default: %(default)s")
    add("--repeat", type=int, default=3, help="runs of each variant, interleaved; default: %(default)s")
    add("--timeout", type=float, default=600.0, help="seconds that one run may take; default: %(default)s")
    add("--json", type=Path, default=_DEFAULT_JSON, help="all figures; default: benchmarks/results")
    options = parser.parse_args(arguments)
    if min(options.params, options.width, options.steps, options.repeat) < 1 or options.warmup < 0:
        parser.error("--params, --width, --steps and --repeat must be at least 1, --warmup not negative")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
