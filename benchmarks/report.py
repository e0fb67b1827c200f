"""The table at the end of `benchmarks.train_step`, and the JSON file that holds everything behind it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.records import Record, ratio, worst_deviation
from benchmarks.variants import MEMORY_BASELINE, TIME_BASELINE, VARIANTS

_WIDTH = 200
_DASH = "-"


def check_losses(records: Mapping[str, Record], reference: Sequence[float], tolerance: float) -> None:
    """Add a problem to each record whose losses are not those of training on the mean of all ranks' batches."""
    for record in records.values():
        if not record.runs or not VARIANTS[record.name].has_loss_of_all:
            continue
        worst = max(worst_deviation(losses, reference) for losses in record.losses)
        if worst > tolerance:
            record.problems.append(
                f"WRONG LOSS: off by {worst:.1e} from the reference, allowed {tolerance:.0e}"
            )


def table(
    records: Mapping[str, Record],
    reference: Sequence[float],
    *,
    title: str,
    caption: str,
    with_sent_bytes: bool,
) -> Table:
    grid = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("variant", no_wrap=True)
    columns = ("step s", "min..max", "own+other+idle s", f"vs {TIME_BASELINE}", "peak MB", f"vs {MEMORY_BASELINE}")
    for heading in columns:
        grid.add_column(heading, justify="right", overflow="fold")
    for heading in ("first step cold s", "warm s", "last loss"):
        grid.add_column(heading, justify="right", overflow="fold")
    if with_sent_bytes:
        grid.add_column("sent MB a step", justify="right")
    grid.add_column("collectives a step (counted)", overflow="fold")
    grid.add_column("what it is")
    for record in records.values():
        cells = [
            record.name,
            _number(record.step_s, 3),
            _DASH if record.spread_s is None else "{:.3f}..{:.3f}".format(*record.spread_s),
            _DASH if record.shares_s is None else "+".join(f"{share:.2f}" for share in record.shares_s),
            _number(ratio(records, record.name, TIME_BASELINE, lambda r: r.step_s), 2),
            _number(_mb(record.peak_bytes), 0),
            _number(ratio(records, record.name, MEMORY_BASELINE, lambda r: r.peak_bytes), 2),
            _number(min(record.cold_first_step_s, default=None), 1),
            _number(min(record.warm_first_step_s, default=None), 1),
            _last_loss(record),
        ]
        if with_sent_bytes:
            cells.append(_number(_mb(record.sent_bytes_per_step), 0))
        counts = ", ".join(f"{count} {name}" for name, count in record.collectives.items())
        problems = "".join(f"\n! {problem}" for problem in record.problems)
        style = "red" if record.problems else None
        grid.add_row(*cells, counts or _DASH, record.about + problems, style=style)
    if reference:
        cells = ["reference", *[_DASH] * 8, f"{reference[-1]:.5f}"]
        cells += [_DASH] * (len(grid.columns) - 1 - len(cells))
        grid.add_row(*cells, "unsharded, eager, one process, mean of the ranks' batches", style="dim")
    return grid


def show(grid: Table) -> None:
    """Print the table."""
    Console(width=max(_WIDTH, Console().width)).print(grid)


def save(
    path: Path,
    grid: Table,
    records: Mapping[str, Record],
    reference: Sequence[float],
    environment: Mapping[str, Any],
) -> None:
    """Write everything behind the table, and the table."""
    rows = []
    for record in records.values():
        row = dataclasses.asdict(record)
        row |= {
            "step_s": record.step_s,
            "spread_s": record.spread_s,
            "shares_s": record.shares_s,
            "peak_bytes": record.peak_bytes,
            "vs_time_baseline": ratio(records, record.name, TIME_BASELINE, lambda r: r.step_s),
            "vs_memory_baseline": ratio(records, record.name, MEMORY_BASELINE, lambda r: r.peak_bytes),
        }
        rows.append(row)
    document = {"environment": environment, "reference_losses": list(reference), "rows": rows}
    write(path, document, grid)


def write(path: Path, document: Mapping[str, Any], grid: Table | None = None, width: int = _WIDTH) -> None:
    """Write figures as JSON to ``path``; a table, where one is given, as text beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    if grid is None:
        print(f"wrote {path}")
        return
    text = path.with_suffix(".txt")
    with text.open("w") as file:
        Console(file=file, width=width).print(grid)
    print(f"wrote {path} and {text}")


def _number(value: float | None, digits: int) -> str:
    return _DASH if value is None else f"{value:.{digits}f}"


def _mb(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / 1e6


def _last_loss(record: Record) -> str:
    losses = record.losses
    return f"{losses[-1][-1]:.5f}" if losses and losses[-1] else _DASH
