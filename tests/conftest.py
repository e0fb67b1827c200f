"""Fixtures that every test module shares: worker processes, started once a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

SteadyRanks = Ranks  # what many test modules call them


def _ranks(num_ranks: int) -> Iterator[Ranks]:
    ranks = Ranks(num_ranks)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Two workers: shards are even where a size is."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    """Three workers: most shards are uneven, and the last one is often empty."""
    yield from _ranks(3)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four workers: two meshes of two."""
    yield from _ranks(4)


@pytest.fixture
def fake_group_of_four() -> Iterator[None]:
    """Rank 0 of a group that moves no data: for errors, shapes and graphs."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()
