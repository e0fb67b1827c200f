"""Tables in plain text, and how names, dtypes and bytes are written in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_NAMES_WIDTH = 44


def table(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines with aligned columns, those in ``right`` to the right."""
    from rich.console import Console  # here, for most programs never print one
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(len(rows[0]) if rows else 0):
        grid.add_column(justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*[Text(on_one_line(cell)) for cell in row])
    console = Console(width=100_000, color_system=None)
    with console.capture() as printed:
        console.print(grid)
    return [line.rstrip() for line in printed.get().splitlines()]


def on_one_line(text: str) -> str:
    """What names may hold that would end a line, or a file, is spelled out."""
    return text if text.isprintable() else repr(text)[1:-1]


def shorten(fqns: Sequence[str], unit: str) -> str:
    """As many names as fit, without the unit's own path."""
    prefix = unit.partition(" ")[0] + "."
    names = [fqn.removeprefix(prefix) for fqn in fqns]
    shown = names[:1]
    for name in names[1:]:
        if len(" ".join([*shown, name])) > _NAMES_WIDTH - len(" +999"):
            break
        shown.append(name)
    hidden = len(names) - len(shown)
    return " ".join(shown) + (f" +{hidden}" if hidden else "")


def format_unit(unit: str) -> str:
    """ "Block:layers.0" of a plan as "layers.0 (Block)"; the root, which has no path, as "(Model)"."""
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
