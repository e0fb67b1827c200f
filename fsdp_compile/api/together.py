"""Tell all ranks what each has, and raise an error of one rank on all, because the others would wait for that rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def raised_on_all(function: str) -> Iterator[None]:
    """At the end of the block, raise on every rank if one raised: there its own error, elsewhere a RuntimeError."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    said = told(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text is not None:
            raise RuntimeError(f"{function}: rank {rank} raised {text}")


def told(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the ``mine`` of every rank, by rank; in a process without others, only its own."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said
