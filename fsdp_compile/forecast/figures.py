"""Format figures for people: each shows three digits, however large or small it is."""

from __future__ import annotations

import math
from collections.abc import Iterable

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_COUNTS = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}


def count(number: int) -> str:
    """Format a number of parameters: 919K, 8.03B."""
    for letter, scale in _COUNTS.items():
        shown = f"{number / scale:.3g}"
        if float(shown) >= 1:  # 999,999 are 1M
            return shown + letter
    return str(number)


def size(num_bytes: int) -> str:
    """Format a number of bytes in the unit that fits it: 6.13 MiB."""
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    unit = next(name for name, scale in _UNITS.items() if num_bytes >= scale)
    return f"{in_unit(num_bytes, unit)} {unit}"


def unit_for(sizes: Iterable[int]) -> str:
    """Return one unit for a whole column, by the smallest figure in it."""
    least = min(sizes, default=0)
    return next((name for name, scale in _UNITS.items() if least >= scale / 10), "KiB")


def in_unit(num_bytes: int, unit: str) -> str:
    return _digits(num_bytes / _UNITS[unit])


def seconds(number: float) -> str:
    return f"{number:.3f} s" if number >= 1 else f"{number * 1e3:.3f} ms"


def _digits(value: float) -> str:
    if value <= 0:
        return "0"
    before = math.floor(math.log10(value)) + 1  # digits before the point
    return f"{value:.{max(3 - before, 1)}f}"
