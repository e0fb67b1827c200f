"""An exception at any line of ours, Ctrl-C among them, leaves a model that can go on. ``python -m tests.faults`` has more."""

from __future__ import annotations

import pytest

from tests.faults import survive
from tests.ranks import Ranks


@pytest.mark.parametrize(
    ("mode", "error", "every"),
    [
        ("eager, no_sync", "KeyError", 601),
        ("eager, checkpointed", "KeyboardInterrupt", 307),
        pytest.param("blocks", "KeyError", 131, marks=pytest.mark.more),
        pytest.param("whole", "KeyboardInterrupt", 41, marks=pytest.mark.more),
    ],
)
def test_the_step_after_a_fault_is_right(two_ranks: Ranks, mode: str, error: str, every: int) -> None:
    for _, *wrong in two_ranks.run(survive, mode, error, every):
        assert wrong == []
