"""Number the worlds that this process was in: the store of a world may outlive it, with all of its keys.

    torchrun's store     init_process_group, fully_shard: keys .../1/...     destroy, init, fully_shard: keys .../2/...
    a store a world      init_process_group, fully_shard: keys .../1/...     destroy, init, fully_shard: keys .../1/...

The store itself counts the worlds of each rank, when the rank shards its first model in one.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch


class World(NamedTuple):
    """One world. Two are never equal."""

    serial: int  # in this process
    number: int  # in its store, alike on all ranks: for keys


_last: weakref.ref[Any] | None = None  # the store of the last world
_world = World(0, 0)


def world_of(store: Any) -> World:
    """Return the world with this store, which is the current one."""
    global _last, _world
    if _last is None or _last() is not store:
        serial = _world.serial + 1
        try:
            number = store.add(f"fsdp_compile/worlds/{torch.distributed.get_rank()}", 1)
        except (RuntimeError, NotImplementedError, ValueError):  # fake groups, or no group
            number = serial
        _last, _world = weakref.ref(store), World(serial, number)
    return _world
