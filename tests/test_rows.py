"""ROWS.md says which test covers which row of FSDP2's behaviour, in the tests' own words."""

from __future__ import annotations

from tests.rows import HERE, REFUSALS, ROWS, cases_in, functions_of, named_in, split, written

NAMED = [named for one in (*ROWS, *REFUSALS) for named in one.tests]


def test_the_table_is_made_from_the_tests() -> None:
    assert (HERE / "ROWS.md").read_text() == written(), "python -m tests.rows writes it anew"


def test_the_tests_and_cases_that_rows_name_exist() -> None:
    assert len(NAMED) > 200
    missing = [named for named in NAMED if split(named)[1] not in functions_of(split(named)[0])]
    missing += [named for named in NAMED if split(named)[2] and split(named)[2] not in cases_in(split(named)[0])]
    in_notes = {test for one in (*ROWS, *REFUSALS) for test in named_in(one.note)}
    missing += [test for test in in_notes if test.partition("::")[2] not in functions_of(test.partition("::")[0])]
    assert missing == []


def test_a_row_has_a_test_or_says_why_not() -> None:
    for one in (*ROWS, *REFUSALS):
        assert one.tests or one.note.startswith("Left out:"), one


def test_no_row_is_missing() -> None:
    lengths = {"A": 23, "B": 28, "M": 9, "D": 33}
    assert [one.row for one in ROWS] == [
        f"{part}{number}" for part, length in lengths.items() for number in range(1, length + 1)
    ]
