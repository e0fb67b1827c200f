"""Gathered buckets that stay for later launches: a launch that finds its bucket here returns it, and sends nothing.

    micro-batch 1       launch: nothing is here     -> gathers, and the result stays
    micro-batch 2 ...   launch: the bucket is here  -> returns it
    the last one        launch: the bucket is here  -> returns it, and the graph frees it after its last use
    optimizer.step()    writes to the shards: what was gathered of them is stale

So one graph serves all micro-batches. Whether a bucket stays depends on the unit's settings and on whether gradients
are synchronized, and whether it is stale on how often shards were written to: both are equal on all ranks, so all of
them launch or none. ``begin`` (ledger.py) calls ``free_stale`` before a graph's first launch, for all of them, since
what it records has to leave out the launches that send nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

Look = list[tuple[int, ...]]  # of each shard: its address, and how often it was written to


class Keeper:
    """The gathered buckets of one unit that stay. The unit owns it, so they are freed with the model."""

    def __init__(self, keeps: Callable[[], bool], look: Callable[[], Look]) -> None:
        self.keeps = keeps  # whether what is gathered now is to stay
        self.buckets: dict[str, Tensor] = {}
        self._look = look
        self._seen: Look = []
        _keepers.add(self)

    def follow(self) -> None:
        """Free everything if a shard was written to, or moved, since this was last called."""
        seen = self._look()
        if seen == self._seen:
            return
        self.free()
        for address, *_ in self._seen:
            if _at.get(address) is self:
                del _at[address]
        self._seen = seen
        _at.update({address: self for address, *_ in seen if address})  # a shard without rows is at 0

    def free(self) -> None:
        self.buckets.clear()


_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
_at: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()  # by the addresses of their shards


def free_stale(addresses: Iterable[int]) -> None:
    """Free what is stale of the units with shards at these addresses."""
    for address in addresses:
        keeper = _at.get(address)
        if keeper is not None:
            keeper.follow()
        if address not in _at:  # the unit is new, or its shards were moved
            for one in list(_keepers):
                one.follow()


def find(addresses: Sequence[int], key: str) -> Tensor | None:
    """Return the bucket with this key if it is here; ``addresses`` has that of one shard of each unit in the bucket."""
    found = [None if (keeper := _at.get(one)) is None else keeper.buckets.get(key) for one in addresses]
    return found[0] if all(one is found[0] for one in found) else None


def take(owners: Sequence[Tensor], key: str, stays: bool) -> Tensor | None:
    """Return the bucket if it is here; it remains here only if it ``stays`` and all its units keep what they gather."""
    addresses = [shard.data_ptr() for shard in owners]
    bucket = find(addresses, key)
    if bucket is not None:
        keepers = [_at[one] for one in addresses]
        if not (stays and all(keeper.keeps() for keeper in keepers)):
            for keeper in keepers:
                del keeper.buckets[key]
    return bucket


def keep_bucket(owners: Sequence[Tensor], key: str, gathered: Tensor) -> None:
    """Have a bucket stay, if all its units keep what they gather now."""
    keepers = [_at.get(shard.data_ptr()) for shard in owners]
    if all(keeper is not None and keeper.keeps() for keeper in keepers):
        for keeper in keepers:
            keeper.buckets[key] = gathered  # type: ignore[union-attr]
