"""Worlds that this process was in, counted: the store of one may outlive it, with all that was said in it.

    torchrun's store     init_process_group, fully_shard: keys .../1/...     destroy, init, fully_shard: keys .../2/...
    a store a world      init_process_group, fully_shard: keys .../1/...     destroy, init, fully_shard: keys .../1/...

The store itself counts for each rank, once a world, when the rank shards its first model there.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_last: weakref.ref[Any] | None = None  # the store of the last one
_number = 0


def number_of(store: Any) -> int:
    """The place among the worlds of its store of the one that is there now."""
    global _last, _number
    if _last is None or _last() is not store:
        try:
            _number = store.add(f"fsdp_compile/worlds/{torch.distributed.get_rank()}", 1)
        except (RuntimeError, NotImplementedError, ValueError):  # of fake groups, or none: a world each
            _number += 1
        _last = weakref.ref(store)
    return _number
