"""Check that a command can write its output before it begins its work."""

from __future__ import annotations

import os
from pathlib import Path


def may_write(path: Path) -> bool:
    """Whether a file or folder can be written, or created together with its missing parent folders."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)
