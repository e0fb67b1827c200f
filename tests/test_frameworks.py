"""Frameworks train, save and resume on our units as on torch's FSDP: the rows of benchmarks.frameworks."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.framework_rows import ROWS
from benchmarks.framework_rows.common import SAVED_AFTER, STEPS
from benchmarks.framework_rows.refused import REFUSED
from benchmarks.frameworks import Line, largest_difference
from benchmarks.frameworks_worker import COLUMNS, Trained, refusal, train
from tests import compiling  # noqa: F401  which registers the backend "passes"
from tests.ranks import Ranks

# torchtitan's dependencies clash with those of the others: its row is for the command alone. TRL's are large: its rows run
# where it is installed, by the extra ``frameworks``.
TESTED = {
    row.name: row
    for row in ROWS
    if row.package != "torchtitan" and (row.package != "trl" or importlib.util.find_spec("trl") is not None)
}

# CI does not run these rows, each a variant of another row. ``pytest -m frameworks`` runs every row.
SLOW = {
    "accelerate, bf16",
    "accelerate, regions compiled",
    "transformers.Trainer",
    "PEFT LoRA",
    "accelerate, FSDP1 plugin, checkpointed activations",
    "accelerate, FSDP1 plugin, bf16",
    "trl.SFTTrainer",
    "trl.SFTTrainer, LoRA",
    "trl.SFTTrainer, full_shard auto_wrap",
    "Lightning Fabric, FSDPStrategy",
    "loop by hand, FSDP1",
    "loop by hand, async_save",
    "PEFT LoRA over int8 weights",
}
REASONS = {row.name: row for row in REFUSED}


def _train(row: str, column: int, folder: str) -> Trained | None:
    """On the graphs that Inductor gets: what its code computes has nothing to do with who called it."""
    importlib.import_module(TESTED[row].package)  # Lightning puts a function of its own in the place of torch.compile
    compile = torch.compile

    def with_passes(*args: Any, backend: str = "inductor", **kwargs: Any) -> Any:
        return compile(*args, backend="passes", **kwargs)

    with mock.patch.object(torch, "compile", with_passes):
        return train(row, COLUMNS[column].name, Path(folder) / str(column))


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow if row in SLOW else pytest.mark.more) for row in TESTED]
)
def test_a_framework_trains_as_with_torchs_fsdp(two_ranks: Ranks, tmp_path: Path, row: str) -> None:
    theirs, eager, compiled = (two_ranks.run(_train, row, column, str(tmp_path))[0] for column in range(3))
    reference, tolerance = theirs.losses, TESTED[row].tolerance
    assert len(reference) == 2 * STEPS - SAVED_AFTER
    assert largest_difference(reference[STEPS:], reference[SAVED_AFTER:STEPS]) < max(
        tolerance, TESTED[row].resumed_within
    ), "it resumed"
    assert reference[-1] != reference[0]
    assert largest_difference(eager.losses, reference) < tolerance
    assert largest_difference(compiled.losses, reference) < tolerance
    assert compiled.num_graphs > 0 == eager.num_graphs == theirs.num_graphs


@pytest.mark.more
@pytest.mark.frameworks
@pytest.mark.parametrize("row", REASONS)
def test_what_is_said_not_to_run_does_not(two_ranks: Ranks, row: str) -> None:
    assert two_ranks.run(refusal, row)[0], "it runs now: make it a row of the table"


def test_a_difference_and_a_missing_step_are_seen() -> None:
    assert largest_difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert largest_difference([1.0], [1.0, 2.0]) == largest_difference([float("nan")], [1.0]) == float("inf")
    line = Line(ROWS[0])
    assert len(line.problems) == len(COLUMNS)
    for cell in line.cells.values():
        cell.trained, cell.done = Trained([1.0, 2.0]), True
    assert not line.problems
    line.cells["compiled"].trained = Trained([1.0, 2.1])
    assert line.problems == ["compiled: losses are off by 5.0e-02"]
