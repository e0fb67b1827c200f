"""Tables without loss, in plain text or in a terminal, and the names, dtypes and bytes in them.

    collective        took   exposed            gather emb.weight +1
    ────────────────────────────────    or        took 2.02, exposed 17.28
    gather emb.w...   2.02     17.28

Where a window is too narrow for the columns, each row is printed as lines instead.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..passes.wire.spec import without_use

if TYPE_CHECKING:  # else it is imported in functions, because most programs never print a table
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
    from rich.table import Table

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_NAMES_WIDTH = 44
_LEAST_NAME = 16  # letters of a name in a line; the rest goes on in the next one
_BETWEEN = 3  # letters between two columns
WIDTH = 110  # of text; tables are as wide as the terminal, or as they need to be
_ANY_WIDTH = 10_000  # columns


@dataclass(frozen=True)
class Rows:
    """Rows that print as a table where there is room, else as lines. Heads stand above cells, or in front of each.

    Rich by itself shortens cells to what fits, numbers and names alike, until a column is gone.
    """

    title: str
    heads: Sequence[str]
    cells: Sequence[Sequence[str]]
    below: str = ""
    styles: Sequence[str] = ()  # of the rows
    num_names: int = 1  # columns of words, which come before those of numbers; the first one has the names of the rows

    @property
    def _least_width(self) -> int:
        """The smallest width at which all columns are whole, except that names may continue on the next line."""
        from rich.cells import cell_len

        widths = [max(map(cell_len, column)) for column in zip(self.heads, *self.cells)]
        if self.num_names:
            widths[0] = min(widths[0], _LEAST_NAME)
        return sum(widths) + _BETWEEN * (len(widths) - 1) + 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.text import Text

        if self._least_width <= options.max_width:
            yield self._table()
        else:
            yield Text(self.title, style="bold")
            for row, style in self._styled():
                name = row[0] if self.num_names else _in_words(self.heads[:1], row)
                others = _in_words(self.heads[1:], row[1:])
                yield Text(name, style, overflow="fold")
                yield Padding(Text(others, style, overflow="fold"), (0, 0, 0, 2))
            yield Text()
        if self.below:
            yield Text(self.below)

    def _table(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for place, head in enumerate(self.heads):
            side: JustifyMethod = "left" if place < self.num_names else "right"
            table.add_column(head, justify=side, no_wrap=place > 0 or not self.num_names, overflow="fold")
        for row, style in self._styled():
            table.add_row(*map(Text, row), style=style)
        return table

    def _styled(self) -> Iterator[tuple[Sequence[str], str]]:
        return zip(self.cells, self.styles or [""] * len(self.cells))


def table(rows: Sequence[Sequence[str]], right: tuple[int, ...] = (), width: int | None = None) -> list[str]:
    """Return lines with aligned columns, those in ``right`` to the right.

    With ``width``, the first of ``rows`` has the heads. Where lines would be wider, each other row is written as words,
    each cell behind its head. Nothing is cut.
    """
    from rich.cells import cell_len

    rows = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows)]
    if width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        return [line for row in rows[1:] for line in wrapped(_in_words(rows[0], row), width)]
    spaces = [[" " * (size - cell_len(cell)) for cell, size in zip(row, widths)] for row in rows]
    aligned = [
        [space + cell if place in right else cell + space for place, (cell, space) in enumerate(zip(row, its))]
        for row, its in zip(rows, spaces)
    ]
    return ["  ".join(row).rstrip() for row in aligned]


def _in_words(heads: Sequence[str], row: Sequence[str]) -> str:
    """Return a text that has each cell of a row behind the head of its column."""
    return ", ".join(f"{head} {cell}".strip() for head, cell in zip(heads, row) if cell)


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Wrap text between words. Names stay whole, however long they are."""
    return textwrap.wrap(
        text, min(width or WIDTH, WIDTH), initial_indent=indent, subsequent_indent=f"{indent}  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def terminal_width() -> int | None:
    """Return the value of COLUMNS, else the width of the terminal that is printed to, else None."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said):
        return int(said)
    try:
        return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None
    except (AttributeError, OSError, ValueError):  # a replacement for stdout may have no file, or a closed one
        return None


def console_for_output() -> Console:
    """Return a console for the standard output. In a pipe or a file its lines may be of any width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_ANY_WIDTH)


def on_one_line(text: str) -> str:
    """Escape characters in a name that would end a line or a file."""
    return text if text.isprintable() else repr(text)[1:-1]


def shorten(fqns: Sequence[str], unit: str) -> str:
    """Return as many names as fit, without the unit's own path."""
    prefix = without_use(unit.rpartition(" (")[0]) + "."
    return _first_of([fqn.removeprefix(prefix) for fqn in fqns], _NAMES_WIDTH)


def located(fqns: Sequence[str], unit: str) -> str:
    """Return as many names as fit behind the unit's path, for tables in which nothing else tells layers apart."""
    path = unit.rpartition(" (")[0]
    prefix = f"{without_use(path)}."
    if not path or not all(fqn.startswith(prefix) for fqn in fqns):
        return _first_of(fqns, _NAMES_WIDTH)
    return f"{path}: {_first_of([fqn.removeprefix(prefix) for fqn in fqns], _NAMES_WIDTH - len(path) - 2)}"


def _first_of(names: Sequence[str], width: int) -> str:
    """Return as many names as fit, but at least one, and how many others there are."""
    shown = list(names[:1])
    for name in names[1:]:
        if len(" ".join([*shown, name])) > width - len(" +999"):
            break
        shown.append(name)
    hidden = len(names) - len(shown)
    return " ".join(shown) + (f" +{hidden}" if hidden else "")


def format_unit(unit: str) -> str:
    """Rewrite "Block:layers.0" of a plan to "layers.0 (Block)", and the root, which has no path, to "(Model)"."""
    name, _, path = unit.partition(":")
    return f"{path} ({name})" if path else f"({name})"


def format_dtype(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def format_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for suffix in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{num_bytes} B" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    return f"{size:.1f} GiB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
