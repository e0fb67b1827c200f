"""ROWS.md and ROWS_FSDP1.md say which test covers which row of FSDP2's and FSDP1's behaviour, in the tests' own words."""

from __future__ import annotations

from tests import rows_fsdp1
from tests.rows import HERE, ROWS, cases_in, functions_of, named_in, split, written

ALL = (*ROWS, *rows_fsdp1.ROWS)
NAMED = [named for one in ALL for named in one.tests]


def test_the_table_is_made_from_the_tests() -> None:
    assert (HERE / "ROWS.md").read_text() == written(), "python -m tests.rows writes it anew"
    fsdp1 = (HERE / "ROWS_FSDP1.md").read_text()
    assert fsdp1 == rows_fsdp1.written(), "python -m tests.rows_fsdp1 writes it anew"


def test_the_tests_and_cases_that_rows_name_exist() -> None:
    assert len(NAMED) > 200
    missing = [named for named in NAMED if split(named)[1] not in functions_of(split(named)[0])]
    missing += [named for named in NAMED if split(named)[2] and split(named)[2] not in cases_in(split(named)[0])]
    in_notes = {test for one in ALL for test in named_in(one.note)}
    missing += [test for test in in_notes if test.partition("::")[2] not in functions_of(test.partition("::")[0])]
    assert missing == []


def test_a_row_has_a_test_or_says_why_not() -> None:
    for one in ALL:
        assert one.tests or one.note.startswith("Left out:"), one


def test_no_row_is_missing() -> None:
    lengths = {"A": 23, "B": 28, "M": 9, "D": 33}
    assert [one.row for one in ROWS] == [
        f"{part}{number}" for part, length in lengths.items() for number in range(1, length + 1)
    ]
    assert [one.row for one in rows_fsdp1.ROWS] == [
        f"2{part}{number}" for part, length in rows_fsdp1.LENGTHS.items() for number in range(1, length + 1)
    ]
