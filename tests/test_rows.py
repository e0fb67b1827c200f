"""Each test that ROWS.md and ROWS_FSDP1.md name exists. These tables list the tests of each behaviour of FSDP."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The parts of each table, and how many rows a part has.
TABLES = {
    "ROWS.md": {"A": 23, "B": 28, "M": 9, "D": 33},
    "ROWS_FSDP1.md": {"2A": 16, "2B": 9, "2C": 6, "2D": 18, "2E": 7, "2F": 6},
}
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)(?: \[([^`]*)\])?`")


def rows_of(table: str) -> list[list[str]]:
    """The cells of each row: its number, what it is about, its tests, a note."""
    lines = [line for line in (HERE / table).read_text().splitlines() if re.match(r"\| \d?[A-Z]\d+ \|", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@functools.cache
def source_of(file: str) -> ast.Module:
    return ast.parse((HERE / file).read_text())


def is_there(file: str, test: str, case: str) -> bool:
    """Whether the file has that test, and its table, which may be messages.py, has such a case."""
    functions = {node.name for node in source_of(file).body if isinstance(node, ast.FunctionDef)}
    table = source_of("messages.py" if file == "test_messages.py" else file)
    strings = {node.value for node in ast.walk(table) if isinstance(node, ast.Constant)}
    return test in functions and (not case or case in strings)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_names_tests_that_exist_or_says_why_it_has_none(table: str) -> None:
    rows = rows_of(table)
    assert [row for row, *_ in rows] == [
        f"{part}{number}" for part, length in TABLES[table].items() for number in range(1, length + 1)
    ]
    for row, _, tests, note in rows:
        assert TEST.fullmatch(tests.partition("<br>")[0]) or note.startswith("Left out:"), row
        assert [named for named in TEST.findall(f"{tests} {note}") if not is_there(*named)] == [], row
