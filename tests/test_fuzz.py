"""Random modules with random options train as they do unsharded; see tests/fuzz, which plays more of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.cases import MODES, cases
from tests.fuzz.play import Crews, check


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    crews = Crews()
    yield crews
    crews.stop()


def test_eager_models_train_as_unsharded(crews: Crews) -> None:
    check(crews, cases(among=("eager",)), 82)


@pytest.mark.more
def test_compiled_models_train_as_unsharded(crews: Crews) -> None:
    """On the graphs that Inductor gets."""
    check(crews, cases(ranks=(1, 2, 3), backends=("passes",), among=MODES[1:], most=3), 8)


@pytest.mark.more
def test_ranks_in_any_mix_of_modes_train_as_unsharded(crews: Crews) -> None:
    check(crews, cases(ranks=(2, 3), backends=("passes",), mixed=True, most=2), 8)


@pytest.mark.more
def test_models_on_inductor_train_as_unsharded(crews: Crews) -> None:
    """Two of them, since what Inductor adds to those above is its code, which each row of tests/matrix runs."""
    check(crews, cases(ranks=(2,), backends=("inductor",), among=("whole", "blocks"), most=2), 2)
