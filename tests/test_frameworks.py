"""Frameworks train, save and resume on our units as on torch's FSDP2: the rows of benchmarks.frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.frameworks import TOLERANCE, Line, largest_difference
from benchmarks.frameworks_rows import ROWS, SAVED_AFTER, STEPS, Losses
from benchmarks.frameworks_worker import COLUMNS, train
from tests.ranks import Ranks

# torchtitan's dependencies clash with those of the others: its row is for the command alone.
TESTED = {row.name: row for row in ROWS if row.package != "torchtitan"}


def _train(row: str, column: int, folder: str) -> Losses | None:
    return train(row, COLUMNS[column].name, Path(folder) / str(column))


@pytest.mark.more
@pytest.mark.parametrize("row", TESTED)
def test_a_framework_trains_as_with_fsdp2(two_ranks: Ranks, tmp_path: Path, row: str) -> None:
    reference, eager, compiled = (two_ranks.run(_train, row, column, str(tmp_path))[0] for column in range(3))
    assert len(reference) == 2 * STEPS - SAVED_AFTER
    assert largest_difference(reference[STEPS:], reference[SAVED_AFTER:STEPS]) < TOLERANCE, "it resumed"
    assert reference[-1] != reference[0]
    assert largest_difference(eager, reference) < TOLERANCE
    assert largest_difference(compiled, reference) < TOLERANCE


def test_a_difference_and_a_missing_step_are_seen() -> None:
    assert largest_difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert largest_difference([1.0], [1.0, 2.0]) == largest_difference([float("nan")], [1.0]) == float("inf")
    line = Line(ROWS[0])
    assert len(line.problems(TOLERANCE)) == len(COLUMNS)
    for cell in line.cells.values():
        cell.losses, cell.done = [1.0, 2.0], True
    assert not line.problems(TOLERANCE)
    line.cells["compiled"].losses = [1.0, 2.1]
    assert line.problems(TOLERANCE) == ["compiled: losses are off by 5.0e-02"]
