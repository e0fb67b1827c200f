"""Runs the pages of docs/ as they stand: a page's python blocks, in order, in one namespace.

What a reader need not see stands in comments of the page, which say what is true of the next python block:

    <!-- run: code -->      runs, before or behind a block: a model to begin with, what must hold afterwards
    <!-- prints -->         the block prints the text block behind it
    <!-- raises -->         it raises the exception that the text block behind it shows
    <!-- warns -->          it warns so

Where a text block has ``...``, anything may stand; white space does not count.
"""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"

_PIECES = re.compile(
    r"^<!-- (?P<key>run|prints|raises|warns)\b:?(?P<said>.*?)-->$|^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Piece:
    """A block of a page, or what a comment says: its kind is a language, or the key of the comment."""

    kind: str
    text: str
    line: int


def pieces(page: str) -> list[Piece]:
    text = (DOCS / page).read_text()
    found = []
    for match in _PIECES.finditer(text):
        line = text[: match.start()].count("\n") + 1
        if match["key"]:
            found.append(Piece(match["key"], textwrap.dedent(match["said"]).strip(), line))
        else:
            found.append(Piece(match["language"], match["code"], line))
    return found


def blocks(page: str, language: str) -> list[str]:
    return [piece.text for piece in pieces(page) if piece.kind == language]


def play(page: str, **names: Any) -> dict[str, Any]:
    """Run the page among these names; all names afterwards."""
    expected: str | None = None
    said: str | None = None
    for piece in pieces(page):
        where = f"docs/{page}:{piece.line}"
        if piece.kind == "run":
            exec(compile(piece.text, where, "exec"), names)
        elif piece.kind in ("prints", "raises", "warns"):
            assert expected is None and said is None, f"{where}: what was expected before was not shown"
            expected = piece.kind
        elif piece.kind == "python":
            code = compile(piece.text, where, "exec")
            if expected is None:
                exec(code, names)
            else:
                said, expected = _hear(expected, code, names, where), None
        elif piece.kind == "text" and said is not None:
            assert has_in_order(said, piece.text), f"{where} shows\n{piece.text}\nbut it says\n{said}"
            said = None
    assert expected is None and said is None, f"docs/{page}: the last block shows no text"
    return names


def _hear(kind: str, code: Any, names: dict[str, Any], where: str) -> str:
    if kind == "prints":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        return printed.getvalue()
    if kind == "warns":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(code, names)
        return "\n".join(f"{one.category.__name__}: {one.message}" for one in caught)
    try:
        exec(code, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{where} raises nothing")


def plain(text: str) -> str:
    """A text but for white space."""
    return " ".join(text.split())


def has_in_order(said: str, shown: str) -> bool:
    """Whether a text says what a page shows, in which three dots stand for anything."""
    text, begin = plain(said), 0
    for part in re.split(r" ?\.\.\. ?", plain(shown)):
        found = text.find(part, begin)
        if found < 0:
            return False
        begin = found + len(part)
    return True
