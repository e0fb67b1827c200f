"""Make the page: one file that contains template, style, script and data.

    page.html   {title} {policy} {style} {data} {script}
    script      elements.js, timeline.js, tables.js and page.js, as one function
    data        <script type="application/json">, in which no "<", ">" or "&" is left
    policy      nothing is loaded from anywhere, and no script runs but ours, known by its hash

A model may call a module ``</script><img onerror=...>``: names reach the page as JSON and as text nodes, never as HTML.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
from pathlib import Path

from ..passes.cost.owners import KINDS
from .picture import Picture

_FOLDER = Path(__file__).parent
_SCRIPTS = ("elements.js", "timeline.js", "tables.js", "page.js")
_SPELLED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page_of(picture: Picture) -> str:
    """Return the text of the file."""
    style, script = _read("page.css"), "(() => {\n\"use strict\";\n" + "\n".join(map(_read, _SCRIPTS)) + "})();"
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:"
    parts = {
        "title": html.escape(f"{picture.model}: planned step"),
        "policy": policy,
        "style": style,
        "data": embedded({"picture": dataclasses.asdict(picture), "kinds": KINDS}),
        "script": script,
    }
    before, *holes = _read("page.html").split("{{")
    return before + "".join(parts[name] + after for name, after in (hole.split("}}", 1) for hole in holes))


def embedded(value: object) -> str:
    """Return JSON that ends no element, and begins no comment, wherever it stands in HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return "".join(_SPELLED.get(letter, letter) for letter in text)


def _read(name: str) -> str:
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
