"""The passes' source as a hash, for cache keys: changed passes never get what the old ones made."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def source_hash() -> str:
    """Hash of the passes' source: a graph compiled by other passes is never served from a cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
