"""Accumulation of gradients without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..core.unit import Unit, units_in
from ..graph.sink import follow_mode


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards in this context add gradients up and send nothing; the first one after it reduces the sum.

    with no_sync(model):
        for batch in batches[:-1]:
            model(batch).sum().backward()
    model(batches[-1]).sum().backward()
    """
    units = units_in(model)
    if not units:
        raise ValueError(f"no_sync got a {type(model).__name__} without sharded modules. Call fully_shard first.")
    before = [(unit, unit.accumulation.sync) for unit in units]
    try:
        for unit, _ in before:
            set_sync(unit, False)
        yield
    finally:
        for unit, sync in before:
            set_sync(unit, sync)


def set_sync(unit: Unit, sync: bool) -> None:
    """Set whether backward reduces the unit's gradients, or holds them back."""
    unit.accumulation.sync = sync
    unit.accumulation.may_hold |= not sync
    follow_mode(unit)


def set_all_reduce(unit: Unit, all_reduce: bool) -> None:
    """Set whether backward sums gradients over the replicas, or holds back their sums over the shards."""
    unit.accumulation.all_reduce = all_reduce
    unit.accumulation.may_hold_partials |= not all_reduce
    follow_mode(unit)
