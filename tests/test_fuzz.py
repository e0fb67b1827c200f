"""Random modules with random options train as they do unsharded; see tests/fuzz, which plays more of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import MODES, Case, cases
from tests.fuzz.play import Crews


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    crews = Crews()
    yield crews
    crews.stop()


def check(crews: Crews, drawn: st.SearchStrategy[Case], num_cases: int) -> None:
    @settings(
        max_examples=num_cases,
        derandomize=True,  # python -m tests.fuzz draws others
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(drawn)
    def plays(case: Case) -> None:
        trouble = crews.trouble_with(case)
        assert not trouble, f"python -m tests.fuzz {repr(case)!r}\n{trouble}"

    plays()


def test_eager_models_train_as_unsharded(crews: Crews) -> None:
    check(crews, cases(among=("eager",)), 60)


@pytest.mark.more
def test_compiled_models_train_as_unsharded(crews: Crews) -> None:
    check(crews, cases(among=MODES[1:]), 16)


@pytest.mark.more
def test_models_on_inductor_train_as_unsharded(crews: Crews) -> None:
    check(crews, cases(ranks=(1, 2), backends=("inductor",)), 4)
