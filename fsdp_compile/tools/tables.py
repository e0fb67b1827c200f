"""Format tables in plain text, and the names, dtypes and bytes in them."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..passes.wire.spec import without_use

if TYPE_CHECKING:  # else it is imported in functions, because most programs never print a table
    from rich.console import Console

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_NAMES_WIDTH = 44
ANY_WIDTH = 10_000  # columns


def table(
    rows: Sequence[Sequence[str]], right: tuple[int, ...] = (), width: int | None = None, wraps: tuple[int, ...] = ()
) -> list[str]:
    """Return lines with aligned columns, those in ``right`` to the right.

    Where lines are wider than ``width``, cells of the columns in ``wraps`` break between words and after dots, and
    continue on the next line. Nothing is cut.
    """
    from rich.console import Console  # imported here, because most programs never print a table
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(len(rows[0]) if rows else 0):
        grid.add_column(justify="right" if column in right else "left", no_wrap=True)
    for row in _wrapped([[on_one_line(cell) for cell in row] for row in rows], width, wraps):
        grid.add_row(*map(Text, row))
    console = Console(width=100_000, color_system=None)
    with console.capture() as printed:
        console.print(grid)
    return [line.rstrip() for line in printed.get().splitlines()]


def _wrapped(rows: list[list[str]], width: int | None, wraps: tuple[int, ...]) -> list[list[str]]:
    """Split each row into as many lines as its tallest cell takes."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows)]
    least = {at: max((cell_len(word) for row in rows for word in _words(row[at])), default=0) for at in wraps}
    while width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        wide = [at for at in wraps if widths[at] > least[at]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    found = []
    for row in rows:
        cells = [_lines(cell, widths[at]) if at in wraps else [cell] for at, cell in enumerate(row)]
        found += [list(line) for line in itertools.zip_longest(*cells, fillvalue="")]
    return found


def _lines(cell: str, width: int) -> list[str]:
    from rich.cells import cell_len

    lines = [""]
    for word in _words(cell):
        if lines[-1] and cell_len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _words(cell: str) -> list[str]:
    """Return the pieces that do not break: words, and the steps of a path."""
    return re.findall(r"[^ .]*[ .]|[^ .]+", cell)


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
    return console if console.is_terminal else Console(width=ANY_WIDTH)


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
