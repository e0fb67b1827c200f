"""Tables for windows of any width: columns get narrower, then some are left out; digits are never cut."""

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
    """One column: its heading in a wide window and in a narrow one, and its cells."""

    heading: str
    narrow: str  # may have several lines
    cells: Sequence[str]
    is_figure: bool = False


def print_columns(
    columns: Sequence[Column], styles: Sequence[str | None], left_out_first: Sequence[str], console: Console
) -> None:
    """Print a table; where it is too wide, leave out columns of ``left_out_first``, one by one, until it fits."""
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
    """Print a table with unbroken cells, if need be wider than the window, so that nothing is left out of a line."""
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
