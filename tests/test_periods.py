"""A search over few of a step's layers chooses what the whole step then takes."""

from __future__ import annotations

import pytest

from fsdp_compile.passes.budget.periods import FEW, periods_of
from fsdp_compile.passes.budget.residency import choose
from fsdp_compile.passes.budget.trial import trial_of
from tests.test_chosen_slices import GROUPS, NODES, products

LAYERS = 30


@pytest.mark.parametrize("share", [0.3, pytest.param(0.7, marks=pytest.mark.slow)])
def test_figures_of_few_layers_are_those_of_a_trial_of_all(share: float) -> None:
    graph = products(LAYERS)
    periods = periods_of(graph)
    assert len(periods.few) == FEW < len(periods.names) and len(periods.graph.nodes) < len(graph.nodes)
    everything = tuple(f"{layer}.weight" for layer in range(LAYERS))
    least, most = (trial_of(graph, kept, NODES, GROUPS).peak_bytes for kept in ((), everything))
    budget = int(least + share * (most - least))
    best, lost = choose(graph, lambda _: budget, NODES, GROUPS)
    assert best.figures.peak_bytes <= budget
    ahead = [one for one in lost if one.figures.lookahead > 1]  # so the layers beside another kind differ
    for one in (best, *lost[:3], *ahead):
        its = one.figures
        tried = trial_of(graph, its.kept, NODES, GROUPS, sliced=its.sliced, lookahead=its.lookahead)
        assert tried.peak_bytes == its.peak_bytes, one.name
        assert tried.seconds == pytest.approx(its.seconds, rel=0.01), one.name


def test_few_layers_stand_for_some_blocks_and_not_for_layers_that_alternate() -> None:
    periods = periods_of(products(LAYERS))
    names = [name for its in periods.names for name in its]
    found = periods.compressed(names[:8], names[:20])
    assert found is not None
    sets, more = found
    assert len(sets[0]) >= 4 and len(sets[1]) >= 8 and sum(more.values()) == len(names) - FEW
    assert periods.compressed(names[::2]) is None
