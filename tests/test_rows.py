"""ROWS.md says which test covers which row of FSDP2's behaviour: the tests that it names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "ROWS.md").read_text()


def _functions(file: str) -> set[str]:
    return {node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_tests_that_rows_name_exist() -> None:
    named = set(re.findall(r"(test_\w+\.py)::(test_\w+)", TABLE))
    assert len(named) > 100
    assert {(file, test) for file, test in named if test not in _functions(file)} == set()


def test_no_row_is_missing() -> None:
    rows = re.findall(r"^\| ([A-Z])(\d+) \|", TABLE, flags=re.MULTILINE)
    lengths = {"A": 23, "B": 28, "M": 9, "D": 33}
    assert [f"{part}{number}" for part, number in rows] == [
        f"{part}{number}" for part, length in lengths.items() for number in range(1, length + 1)
    ]
