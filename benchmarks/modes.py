"""`python -m benchmarks.modes`: what each way of training in a loop compiles to, sends, and how exact it is.

Four local processes over gloo are started once for all rows; after a row that fails they are started again for the
rest. The rows are those that the tests run on fewer ranks (tests/matrix).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.report import write
from benchmarks.train_step import software_and_machine
from fsdp_compile.workers import Crew, Message, WorkerError, interruptible
from tests.matrix.meter import describe
from tests.matrix.models import DIM
from tests.matrix.rows import ROWS
from tests.matrix.runner import measure, problems
from tests.matrix.train import Row

_DEFAULT_JSON = Path(__file__).resolve().parent / "results" / "modes.json"
_TOLERANCE = 1e-4
_RANKS = 4
_WIDTH = 190


@dataclass
class Outcome:
    """The results of one row: the difference is the largest of all ranks, other figures are rank 0's."""

    row: Row
    ranks: list[Message] = field(default_factory=list)
    error: str | None = None

    @property
    def difference(self) -> float | None:
        return max((one["difference"] for one in self.ranks), default=None)

    def problems(self, tolerance: float) -> list[str]:
        """Why the row failed; empty for one that holds what it promises."""
        if self.error is not None:
            return [self.error]
        if self.difference is None:
            return ["did not run"]
        return problems(self.row, self.ranks, tolerance)


def main() -> int:
    options = _parse(sys.argv[1:])
    rows = [row for row in ROWS if not options.rows or any(word in row.name for word in options.rows)]
    outcomes = {row.name: Outcome(row) for row in rows}
    environment = software_and_machine()
    begin = time.monotonic()
    interrupted = False
    try:
        # No pass would run on graphs from an older run's cache, and they have no part in what the ranks agree on.
        with interruptible(), tempfile.TemporaryDirectory(prefix="fsdp-compile-modes-") as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            _run(outcomes, options.backend, options.timeout)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: the table holds what was finished")
    grid = _table(outcomes, options, environment, time.monotonic() - begin)
    Console(width=max(_WIDTH, Console().width)).print(grid)
    _write(options.json, grid, outcomes, options.tolerance, environment)
    failed = [name for name, one in outcomes.items() if one.problems(options.tolerance)]
    if failed:
        print(f"{len(failed)} of {len(rows)} rows failed: {'; '.join(failed)}")
    return 130 if interrupted else int(bool(failed))


def _run(outcomes: dict[str, Outcome], backend: str, timeout_s: float) -> None:
    """Measure row after row, in the same processes until one fails."""
    env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    group = {"backend": "gloo", "timeout_s": timeout_s}
    with Crew("tests.ranks:join", group, num_ranks=_RANKS, env=env) as crew:
        for name, outcome in outcomes.items():
            try:
                outcome.ranks = crew.run(measure, name, backend, limit_s=timeout_s)
                said = f"{outcome.ranks[0]['seconds']:6.1f} s"
            except WorkerError as error:
                outcome.error = error.summary
                said = f"  failed\n{error}"
            print(f"{name:60}{said}", file=sys.stderr, flush=True)


def _table(
    outcomes: dict[str, Outcome], options: argparse.Namespace, environment: dict[str, Any], seconds: float
) -> Table:
    grid = Table(
        title=f"Ways of training: blocks of width {DIM} with dropout, tied embeddings, {_RANKS} ranks over gloo",
        caption=f"torch {environment['versions']['torch']}; {seconds:.0f} s; backend {options.backend}.\n"
        "graphs: captured by Dynamo; backward: compiled regions that backward entered in the counted step.\n"
        "collectives: what rank 0 asked its process groups for in one step, from graphs or eagerly.\n"
        "difference: of gradients (or of what the row says) to an unsharded copy trained on the mean over all ranks' "
        "batches, over the reference's largest of the same parameter; "
        f"at most {options.tolerance:.0e}, or a row's own tolerance.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    grid.add_column("mode", overflow="fold")
    for heading in ("graphs", "backward"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for heading in ("collectives in forward", "collectives in backward"):
        grid.add_column(heading, overflow="fold")
    grid.add_column("difference", justify="right", no_wrap=True)
    grid.add_column("eager regions, warnings, notes", overflow="fold")
    for name, outcome in outcomes.items():
        wrong = [f"! {problem}" for problem in outcome.problems(options.tolerance)]
        style = "red" if wrong else None
        if not outcome.ranks:
            grid.add_row(name, *["-"] * 5, "\n".join(wrong), style=style)
            continue
        first = outcome.ranks[0]
        says = [*first["notes"], *(f"warning: {text}" for text in first["warnings"]), *wrong]
        grid.add_row(
            name,
            str(first["num_graphs"]),
            str(first["num_backwards"]),
            describe(first["forward"]),
            describe(first["backward"]),
            f"{outcome.difference:.1e}" + ("" if first["of"] == "gradients" else f" {first['of']}"),
            "\n".join(says),
            style=style,
        )
    return grid


def _write(
    path: Path, grid: Table, outcomes: dict[str, Outcome], tolerance: float, environment: dict[str, Any]
) -> None:
    """Write every rank's figures as JSON, and the table as text beside it."""
    rows = [
        {
            "mode": name,
            "difference": outcome.difference,
            "problems": outcome.problems(tolerance),
            "num_graphs_allowed": outcome.row.num_graphs,
            "num_backwards_allowed": outcome.row.num_backwards,
            "ranks": outcome.ranks,
        }
        for name, outcome in outcomes.items()
    ]
    write(path, {"environment": environment, "tolerance": tolerance, "rows": rows}, grid, _WIDTH)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.modes",
        description="Graphs, collectives and exactness of each way of training. Exit code 1 when a row fails.",
        epilog="rows: " + "; ".join(row.name for row in ROWS),
    )
    add = parser.add_argument
    add("--rows", nargs="+", metavar="WORD", help="only rows with one of these in their name")
    add("--backend", default="inductor", help="of torch.compile; default: %(default)s")
    add("--tolerance", type=float, default=_TOLERANCE, help="of the differences; default: %(default)s")
    add("--timeout", type=float, default=300.0, help="seconds that one row may take; default: %(default)s")
    add("--json", type=Path, default=_DEFAULT_JSON, help="all figures; the table goes beside it as .txt")
    options = parser.parse_args(arguments)
    if options.rows and not any(word in row.name for row in ROWS for word in options.rows):
        parser.error(f"no row has {' or '.join(options.rows)} in its name")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
