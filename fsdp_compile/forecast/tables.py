"""Tables that no window is too narrow for: columns are pressed, then left out, and digits never are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ..tools.tables import ANY_WIDTH


@dataclass(frozen=True)
class Column:
    """One column: what stands above it, in a wide window and in a narrow one, and its cells."""

    heading: str
    narrow: str  # may have several lines
    cells: Sequence[str]
    is_figure: bool = False


def print_columns(
    columns: Sequence[Column], styles: Sequence[str | None], left_out_first: Sequence[str], console: Console
) -> None:
    """A table; where it is too wide, without more and more of the columns that are to be left out first."""
    left_out: list[str] = []
    table = _table(columns, styles, is_narrow=False)
    if _least_width(table) > console.width:
        table = _table(columns, styles, is_narrow=True)
        for heading in left_out_first:
            if _least_width(table) <= console.width:
                break
            left_out.append(heading)
            table = _table(columns, styles, is_narrow=True, left_out=left_out)
    print_whole(table, console)
    if left_out:
        console.print(f"Left out, as the window is narrow: {', '.join(left_out)}; --json has all.", highlight=False)


def print_whole(table: Table, console: Console) -> None:
    """With all that may not be broken: wider than the window if it must be, which leaves nothing out of a line."""
    window = console.width
    console.width = max(window, _least_width(table))
    console.print(table)
    console.width = window


def _table(
    columns: Sequence[Column], styles: Sequence[str | None], is_narrow: bool, left_out: Collection[str] = ()
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if is_narrow else (0, 1))
    shown = [one for one in columns if one.heading not in left_out]
    for one in shown:
        heading = one.narrow if is_narrow else one.heading
        widest = max(map(len, (*heading.split("\n"), *one.cells)))
        table.add_column(heading, justify="right" if one.is_figure else "left", no_wrap=True, min_width=widest)
    for cells, style in zip(zip(*(one.cells for one in shown)), styles):
        table.add_row(*cells, style=style)
    return table


def _least_width(table: Table) -> int:
    console = Console(width=ANY_WIDTH)
    return Measurement.get(console, console.options, table).minimum
