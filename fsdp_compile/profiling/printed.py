"""Print tables without loss: where the terminal is too narrow for the columns, each row is printed as lines instead.

    collective        took   exposed            gather emb.weight +1
    ────────────────────────────────    or        took 2.02
    gather emb.w...   2.02     17.28              exposed 17.28

Rich by itself shortens cells to what fits, numbers and names alike, until a column is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # else it is imported in functions, because most programs never print a table
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
    from rich.table import Table

_LEAST_NAME = 16  # letters of a name in a line; the rest goes on in the next one
_BETWEEN = 3  # letters between two columns


@dataclass(frozen=True)
class Column:
    """One column. Its head stands above its cells in a table, or in front of each cell in lines."""

    head: str
    is_number: bool = True


@dataclass(frozen=True)
class Rows:
    """Rows that print as a table where there is room, else as lines; the first cell of a row is its name."""

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]
    below: str = ""

    @property
    def least_width(self) -> int:
        """The smallest width at which all columns are whole, except that names may continue on the next line."""
        from rich.cells import cell_len

        widths = [
            max(cell_len(column.head), *(cell_len(row[place]) for row in self.cells), 0)
            for place, column in enumerate(self.columns)
        ]
        if not self.columns[0].is_number:
            widths[0] = min(widths[0], _LEAST_NAME)
        return sum(widths) + _BETWEEN * (len(widths) - 1) + 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if self.least_width <= options.max_width:
            yield self._table()
        else:
            yield Text(self.title, style="bold")
            for row in self.cells:
                yield from self._lines(row)
            yield Text()
        if self.below:
            yield Text(self.below)

    def _table(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for place, column in enumerate(self.columns):
            is_name = place == 0 and not column.is_number
            side: JustifyMethod = "right" if column.is_number else "left"
            table.add_column(column.head, justify=side, no_wrap=not is_name, overflow="fold")
        for row in self.cells:
            table.add_row(*map(Text, row))
        return table

    def _lines(self, row: Sequence[str]) -> RenderResult:
        from rich.padding import Padding
        from rich.text import Text

        name, *others = [f"{column.head} {cell}" if cell else "" for column, cell in zip(self.columns, row)]
        yield Text(name if self.columns[0].is_number else row[0], overflow="fold")
        yield Padding(Text(", ".join(filter(None, others)), overflow="fold"), (0, 0, 0, 2))
