"""`python -m benchmarks.frameworks`: the losses of frameworks on torch's FSDP, and on this package in its place.

Two local processes over gloo train small models with random weights, save, and resume. The second column differs from
the first only by `fsdp_compile.adopt()`, and the third also compiles. Below the table are the rows that torch's own
FSDP does not run on a CPU, with its errors.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.framework_rows import ROWS
from benchmarks.framework_rows.common import SAVED_AFTER, STEPS, Losses, Row
from benchmarks.framework_rows.refused import REFUSED
from benchmarks.frameworks_worker import COLUMNS, Trained, refusal, train
from fsdp_compile.workers import Crew, WorkerError, interruptible

_RANKS = 2
_WIDTH = 190


@dataclass
class Cell:
    """The result of one row in one column."""

    trained: Trained | None = None
    error: str | None = None
    done: bool = False

    @property
    def losses(self) -> Losses | None:
        return None if self.trained is None else self.trained.losses


@dataclass
class Line:
    """A row of the table."""

    row: Row
    cells: dict[str, Cell] = field(default_factory=lambda: {column.name: Cell() for column in COLUMNS})

    @property
    def reference(self) -> Losses | None:
        return self.cells[COLUMNS[0].name].losses

    def difference(self, column: str) -> float | None:
        losses, reference = self.cells[column].losses, self.reference
        return None if losses is None or reference is None else largest_difference(losses, reference)

    @property
    def problems(self) -> list[str]:
        found = []
        for name, cell in self.cells.items():
            difference = self.difference(name)
            if cell.error is not None:
                found.append(f"{name}: {cell.error}")
            elif not cell.done:
                found.append(f"{name}: did not run")
            elif difference is not None and not difference <= self.row.tolerance:
                found.append(f"{name}: losses are off by {difference:.1e}")
        return found


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of a loss from the reference's; resumed steps are compared as well."""
    if len(losses) != len(reference) or not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference))


def main() -> int:
    options = _parse(sys.argv[1:])
    rows = [row for row in ROWS if not options.rows or any(word in row.name for word in options.rows)]
    refused = [row for row in REFUSED if not options.rows or any(word in row.name for word in options.rows)]
    lines = {row.name: Line(row) for row in rows}
    reasons: dict[str, str | None] = {}
    begin = time.monotonic()
    interrupted = False
    try:
        with interruptible():
            _run(lines, reasons, [row.name for row in refused], options.timeout)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: the table holds what was finished")
    console = Console(width=max(_WIDTH, Console().width))
    console.print(_table(lines, time.monotonic() - begin))
    for row in refused:
        reason = reasons.get(row.name, "did not run")
        said = f"{row.package} is not installed" if reason is None else reason or "IT RUNS: make a row of it"
        console.print(f"not on a CPU under torch's own {row.engine}: [bold]{row.name}[/]", highlight=False)
        console.print(f"    {said[:_WIDTH - 4]}", markup=False, highlight=False)
    failed = [name for name, line in lines.items() if line.problems]
    failed += [name for name, reason in reasons.items() if reason == ""]
    if failed:
        print(f"{len(failed)} of {len(rows) + len(refused)} rows failed: {'; '.join(failed)}")
    return 130 if interrupted else int(bool(failed))


def _run(lines: dict[str, Line], reasons: dict[str, str | None], refused: list[str], timeout_s: float) -> None:
    """Train column after column of each row, in the same processes until one fails; then ask why torch refuses rows."""
    env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        tempfile.TemporaryDirectory(prefix="fsdp-compile-frameworks-") as folder,
        Crew("benchmarks.frameworks_worker:join", {"timeout_s": timeout_s}, num_ranks=_RANKS, env=env) as crew,
    ):
        for number, (row, column) in enumerate((row, column) for row, line in lines.items() for column in line.cells):
            begin = time.monotonic()
            try:
                trained = crew.run(train, row, column, Path(folder) / str(number), limit_s=timeout_s)[0]
                cell, said = Cell(trained, done=True), f"{time.monotonic() - begin:6.1f} s"
            except WorkerError as error:
                cell, said = Cell(error=error.summary, done=True), f"  failed\n{error}"
            lines[row].cells[column] = cell
            print(f"{row:54}{column:16}{said}", file=sys.stderr, flush=True)
        for name in refused:
            try:
                reasons[name] = crew.run(refusal, name, limit_s=timeout_s)[0]
            except WorkerError as error:
                reasons[name] = error.summary


def _table(lines: dict[str, Line], seconds: float) -> Table:
    grid = Table(
        title=f"Frameworks on torch's FSDP, and on fsdp_compile by adopt(): {_RANKS} ranks over gloo",
        caption=f"torch {torch.__version__}; {seconds:.0f} s. Losses: step 1, and step "
        f"{STEPS} of the run and of one that resumed from the checkpoint behind step {SAVED_AFTER}.\n"
        f"difference: the largest of all {2 * STEPS - SAVED_AFTER} losses to those with torch's FSDP, over these, and "
        "what it may be.\ngraphs: of torch.compile, for the two models of a row together; breaks between them.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    grid.add_column("framework", overflow="fold")
    grid.add_column("under")
    for column in COLUMNS:
        grid.add_column(column.name, no_wrap=True)
    grid.add_column("graphs", justify="right")
    grid.add_column("breaks", justify="right")
    grid.add_column("difference, eager / compiled", overflow="fold", min_width=30)
    for name, line in lines.items():
        problems = line.problems
        differences = [line.difference(column.name) for column in COLUMNS[1:]]
        if line.reference is None and not problems:
            said = f"{line.row.package} is not installed"
        else:
            said = " / ".join("-" if one is None else f"{one:.1e}" for one in differences)
            said += f" <= {line.row.tolerance:.0e}"
        cells = [_cell(line.cells[column.name]) for column in COLUMNS]
        trained = line.cells[COLUMNS[-1].name].trained
        counts = ("-", "-") if trained is None else (str(trained.num_graphs), str(len(trained.breaks)))
        said = "\n".join([said, *problems])
        grid.add_row(name, line.row.engine, *cells, *counts, said, style="red" if problems else None)
    return grid


def _cell(cell: Cell) -> str:
    if cell.losses is None:
        return "-"
    first, last, resumed = cell.losses[0], cell.losses[STEPS - 1], cell.losses[-1]
    return f"{first:.5f} {last:.5f} {resumed:.5f}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frameworks",
        description="Losses of frameworks on torch's FSDP and on fsdp_compile. Exit code 1 when they differ.",
        epilog="rows: " + "; ".join(row.name for row in ROWS),
    )
    add = parser.add_argument
    add("--rows", nargs="+", metavar="WORD", help="only rows with one of these in their name")
    add("--timeout", type=float, default=300.0, help="seconds that one row may take; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.rows and not any(word in row.name for row in ROWS for word in options.rows):
        parser.error(f"no row has {' or '.join(options.rows)} in its name")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
