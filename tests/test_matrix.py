"""Every way of training and every public function on Inductor, which users have by default.

The table is tests/matrix/rows.py; ``python -m benchmarks.modes`` prints what its rows compile to and send.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpu_vec_isa

import fsdp_compile
from tests.building import as_inductor_builds
from tests.matrix.rows import ROWS
from tests.matrix.runner import measure, problems
from tests.matrix.train import Row
from tests.ranks import Ranks

(PLAIN, BLOCK) = (next(row for row in ROWS if row.name == name) for name in ("fully_shard", "a penalty on gradients, eagerly"))


@pytest.fixture(scope="module")
def holds() -> Iterator[Callable[..., None]]:
    """Runs a row on the workers that it needs."""
    ranks = Ranks(2)

    def check(row: Row, measure: Callable[..., Any] = measure) -> None:
        nonlocal ranks
        if ranks.num_ranks != row.ranks:
            ranks.stop()
            ranks = Ranks(row.ranks)
        assert problems(row, ranks.run(measure, row.name, "inductor"), row.tolerance) == []

    yield check
    ranks.stop()


def _measure_vectorized(name: str, backend: str) -> dict[str, Any]:
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        # Found out, as it is by default.
        with torch._inductor.config.patch({"cpp.vec_isa_ok": None, "aot_inductor.debug_compile": False}), as_inductor_builds():
            assert cpu_vec_isa.pick_vec_isa()
            return measure(name, backend)
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row is PLAIN else pytest.mark.more)
        for row in sorted(ROWS, key=lambda row: row.ranks)
    ],
)
def test_a_row_holds_on_inductor(holds: Callable[..., None], row: Row) -> None:
    holds(row)


@pytest.mark.more
def test_a_row_holds_with_vectorized_kernels(holds: Callable[..., None]) -> None:
    """The other tests compile without them, and several at once: see tests/conftest.py and building.py."""
    holds(BLOCK, _measure_vectorized)


def test_every_public_name_has_a_row() -> None:
    exported = {
        name
        for name, value in vars(fsdp_compile).items()
        if not name.startswith("_") and not inspect.ismodule(value)
        and not (isinstance(value, type) and issubclass(value, Exception))  # which no run shows
    }
    methods = {name for name, value in vars(fsdp_compile.FSDPModule).items() if callable(value) and name[0] != "_"}
    shown = {name for row in ROWS for name in row.shows.split()}
    assert len(methods) > 20 and shown == exported | methods


def test_the_rows_use_the_names_that_they_show() -> None:
    trees = [ast.parse(path.read_text()) for path in (Path(__file__).parent / "matrix").glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {name for row in ROWS for name in row.shows.split()} <= used
