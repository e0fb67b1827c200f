"""For the site: paragraphs of docstrings that are drawn, by spaces, become blocks of code, so that they stay drawn."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DRAWN = re.compile(r"\S {3,}\S|^ {4,}\S", flags=re.MULTILINE)


def fenced(text: str) -> str:
    """The text with each run of drawn paragraphs in a fence."""
    out: list[str] = []
    drawn: list[str] = []

    def close() -> None:
        if drawn:
            out.append("```text\n" + "\n\n".join(drawn) + "\n```")
            drawn.clear()

    for paragraph in re.split(r"\n\s*\n", text):
        if _DRAWN.search(paragraph):
            drawn.append(paragraph)
        else:
            close()
            out.append(paragraph)
    close()
    return "\n\n".join(out)


class Pictures(griffe.Extension):
    """Told of every object that mkdocstrings may show."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
