"""The worlds that this process was in, and what the ranks of one tell one another through its store.

    torchrun's store     init_process_group, fully_shard: keys .../1/...     destroy, init, fully_shard: keys .../2/...
    a store a world      init_process_group, fully_shard: keys .../1/...     destroy, init, fully_shard: keys .../1/...

The store may outlive a world, with all of its keys. It counts the worlds of each rank, when the rank shards its first
model in one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch

from .. import _torch_compat as compat


class World:
    """One world, and this rank's access to its store. Two worlds are two objects."""

    def __init__(self, store: Callable[[], torch.distributed.Store | None], prefix: str) -> None:
        self._find_store, self._prefix = store, prefix

    def is_current(self) -> bool:
        """Whether the process group of this world is still there."""
        return compat.default_store() is self._find_store() is not None

    def beside(self) -> World | None:
        """Return access over another connection, for another thread; None if there is none to be had."""
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            another = self._store.clone()
            return World(lambda: another, self._prefix)
        return None

    def put(self, key: str, said: str | bytes) -> None:
        self._store.set(self._prefix + key, said)  # type: ignore[arg-type]  # torch's hint leaves out bytes

    def get(self, key: str) -> bytes | None:
        """Return what was put there; None if nothing was. This does not wait."""
        return self._store.get(self._prefix + key) if self._store.check([self._prefix + key]) else None

    def put_first(self, key: str, said: str) -> str:
        """Return what was first put there, by any rank."""
        try:
            return self._store.compare_set(self._prefix + key, "", said).decode()
        except RuntimeError:
            return said  # a store of fake groups, which no other rank uses

    def count(self, key: str, more: int = 0) -> int:
        """Add to a number that all ranks share, and return it."""
        return self._store.add(self._prefix + key, more)

    @property
    def _store(self) -> torch.distributed.Store:
        store = self._find_store()
        if store is None:
            raise RuntimeError("the process group was destroyed")
        return store


_last: World | None = None


def current_world() -> World | None:
    """Return the world that this process is in; None without a process group."""
    global _last
    store = compat.default_store()
    if store is not None and (_last is None or not _last.is_current()):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        try:
            number = store.add(f"fsdp_compile/worlds/{rank}", 1)
        except RuntimeError:
            number = 0  # the store of a fake group, which keeps nothing
        _last = World(weakref.ref(store), f"fsdp_compile/{number}/")
    return _last if store is not None else None
