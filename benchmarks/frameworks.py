"""`python -m benchmarks.frameworks`: the losses of frameworks on torch's FSDP2, and on this package in its place.

Two local processes over gloo train small models with random weights, save, and resume; `fsdp_compile.adopt()` is all
that differs between the first column and the others.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.frameworks_rows import ROWS, SAVED_AFTER, STEPS, Losses, Row
from benchmarks.frameworks_worker import COLUMNS
from fsdp_compile._launch import Message, WorkerError, Workers, interruptible

_RANKS = 2
TOLERANCE = 1e-4
_WIDTH = 170


@dataclass
class Cell:
    """What one row did in one column."""

    losses: Losses | None = None
    error: str | None = None
    done: bool = False
    seconds: float = 0.0


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

    def problems(self, tolerance: float) -> list[str]:
        found = []
        for name, cell in self.cells.items():
            difference = self.difference(name)
            if cell.error is not None:
                found.append(f"{name}: {cell.error}")
            elif not cell.done:
                found.append(f"{name}: did not run")
            elif difference is not None and not difference <= tolerance:
                found.append(f"{name}: losses are off by {difference:.1e}")
        return found


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Between losses of the same steps, over the reference's; those that were resumed are compared as well."""
    if len(losses) != len(reference) or not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference))


def main() -> int:
    options = _parse(sys.argv[1:])
    rows = [row for row in ROWS if not options.rows or any(word in row.name for word in options.rows)]
    lines = {row.name: Line(row) for row in rows}
    begin = time.monotonic()
    interrupted = False
    try:
        with interruptible():
            while todo := [
                (name, column) for name, line in lines.items() for column, cell in line.cells.items() if not cell.done
            ]:
                _run(lines, todo, options.timeout)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: the table holds what was finished")
    console = Console(width=max(_WIDTH, Console().width))
    console.print(_table(lines, options.tolerance, time.monotonic() - begin))
    failed = [name for name, line in lines.items() if line.problems(options.tolerance)]
    if failed:
        print(f"{len(failed)} of {len(rows)} rows failed: {'; '.join(failed)}")
    return 130 if interrupted else int(bool(failed))


def _run(lines: dict[str, Line], todo: list[tuple[str, str]], timeout_s: float) -> None:
    """Train ``todo`` in one set of processes, until something fails."""
    arrived: defaultdict[tuple[str, str], dict[int, Message]] = defaultdict(dict)
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-frameworks-") as folder:
        settings = {
            "todo": todo,
            "ranks": _RANKS,
            "rendezvous": f"{folder}/rendezvous",
            "folder": f"{folder}/checkpoints",
            "timeout_s": timeout_s,
        }
        workers = Workers(
            "benchmarks.frameworks_worker:work",
            settings,
            num_ranks=_RANKS,
            log_dir=Path(folder),
            env={"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            with workers:
                for rank, message in workers.messages(silence_s=timeout_s):
                    place = (message["row"], message["column"])
                    arrived[place][rank] = message
                    if len(arrived[place]) == _RANKS and not any("error" in one for one in arrived[place].values()):
                        losses, seconds = arrived[place][0]["losses"], arrived[place][0]["seconds"]
                        lines[place[0]].cells[place[1]] = Cell(losses, done=True, seconds=seconds)
                        print(f"{place[0]:44}{place[1]:16}{seconds:6.1f} s", file=sys.stderr, flush=True)
        except WorkerError as error:
            row, column = next(place for place in todo if not lines[place[0]].cells[place[1]].done)
            said = [one for one in arrived[row, column].values() if "error" in one]
            last_line = str(error).strip().rpartition("\n")[2]
            text = min(said, key=lambda one: one["at"])["error"] if said else last_line[:200]
            lines[row].cells[column] = Cell(error=text, done=True)
            print(f"{row:44}{column:16}  failed\n{error}", file=sys.stderr, flush=True)


def _table(lines: dict[str, Line], tolerance: float, seconds: float) -> Table:
    grid = Table(
        title=f"Frameworks on torch's FSDP2, and on fsdp_compile by adopt(): {_RANKS} ranks over gloo",
        caption=f"torch {torch.__version__}; {seconds:.0f} s. Losses: step 1, and step "
        f"{STEPS} of the run and of one that resumed from the checkpoint behind step {SAVED_AFTER}.\n"
        f"difference: the largest of all {2 * STEPS - SAVED_AFTER} losses to those with torch's FSDP2, over these; at "
        f"most {tolerance:.0e}.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    grid.add_column("framework", overflow="fold")
    for column in COLUMNS:
        grid.add_column(column.name, no_wrap=True)
    grid.add_column("difference, eager / compiled", overflow="fold", min_width=40)
    for name, line in lines.items():
        problems = line.problems(tolerance)
        differences = [line.difference(column.name) for column in COLUMNS[1:]]
        if line.reference is None and not problems:
            said = f"{line.row.package} is not installed"
        else:
            said = " / ".join("-" if one is None else f"{one:.1e}" for one in differences)
        cells = [_cell(line.cells[column.name]) for column in COLUMNS]
        grid.add_row(name, *cells, "\n".join([said, *problems]), style="red" if problems else None)
    return grid


def _cell(cell: Cell) -> str:
    if cell.losses is None:
        return "-"
    first, last, resumed = cell.losses[0], cell.losses[STEPS - 1], cell.losses[-1]
    return f"{first:.5f} {last:.5f} {resumed:.5f}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frameworks",
        description="Losses of frameworks on FSDP2 and on fsdp_compile. Exit code 1 when they differ.",
        epilog="rows: " + "; ".join(row.name for row in ROWS),
    )
    add = parser.add_argument
    add("--rows", nargs="+", metavar="WORD", help="only rows with one of these in their name")
    add("--tolerance", type=float, default=TOLERANCE, help="of the differences; default: %(default)s")
    add("--timeout", type=float, default=300.0, help="seconds that one row may take; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.rows and not any(word in row.name for row in ROWS for word in options.rows):
        parser.error(f"no row has {' or '.join(options.rows)} in its name")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
