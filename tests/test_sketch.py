"""Steps that are predicted from a trial of another step: they are what a trial of their own says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator

import pytest
from torch import fx

from fsdp_compile.passes import Group
from fsdp_compile.passes.budget.sketch import Sketch, saved_without
from fsdp_compile.passes.budget.trial import Decision, Figures, trial_of
from fsdp_compile.passes.cost.profiles import HardwareProfile
from fsdp_compile.passes.ir.markers import change_spec
from fsdp_compile.passes.ir.provenance import unshard_nodes
from fsdp_compile.passes.schedule.activations import activations_of, matrices_of
from tests.test_budget import GROUPS, KIB, WEIGHTS, five_products
from tests.test_chosen_slices import GROUPS as OF_NODES
from tests.test_chosen_slices import NODES, READ, products
from tests.test_cost import TOY
from tests.test_recompute import EVERYTHING, two_blocks

Made = Callable[[], fx.Graph]


def subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain(*(itertools.combinations(names, size) for size in range(len(names) + 1)))


def both(
    make: Made,
    sketch: Sketch,
    profile: HardwareProfile,
    groups: dict[str, Group],
    kept: Collection[str] = (),
    recomputed: Collection[str] = (),
    sliced: Collection[str] = (),
    lookahead: int = 1,
    offloaded: Collection[str] = (),
) -> tuple[Figures, Figures]:
    names = map(frozenset, (kept, recomputed, sliced, offloaded))
    found = sketch.halves(Decision(*names, lookahead=lookahead))
    assert found is not None
    trial = trial_of(make(), kept, profile, groups, False, recomputed, sliced, lookahead, offloaded)
    return found.figures(), trial.halves().figures()


def assert_same(found: Figures, tried: Figures, rel: float = 1e-9) -> None:
    assert found.peak_bytes == tried.peak_bytes
    assert (found.seconds, found.exposed_s) == pytest.approx((tried.seconds, tried.exposed_s), rel=rel)
    assert (found.kept, found.recomputed, found.sliced) == (tried.kept, tried.recomputed, tried.sliced)
    assert (found.offloaded, found.offloaded_bytes) == (tried.offloaded, tried.offloaded_bytes)
    assert found.copied_s == pytest.approx(tried.copied_s)


def gathered_once() -> fx.Graph:
    """What is kept stays from one step to the next."""
    graph = five_products()
    for node in unshard_nodes(graph):
        change_spec(node, stays="kept")
    return graph


@pytest.mark.parametrize(("make", "lookahead"), [(five_products, 1), (five_products, 2), (gathered_once, 1)])
def test_a_sketch_keeps_weights_as_a_trial_does(make: Made, lookahead: int) -> None:
    sketch = Sketch(trial_of(make(), (), TOY, GROUPS), TOY, GROUPS)
    for kept in subsets(WEIGHTS[1:]):
        assert_same(*both(make, sketch, TOY, GROUPS, kept, lookahead=lookahead))


def test_what_stays_is_in_memory_from_the_begin_to_the_end() -> None:
    once, each = (trial_of(make(), WEIGHTS[4:], TOY, GROUPS).weight for make in (gathered_once, five_products))
    assert once.forward[0] == each.forward[0] + 16 * KIB
    assert once.returned_bytes == each.returned_bytes + 16 * KIB  # while backward runs
    assert once.peak_bytes == each.peak_bytes


def test_a_sketch_saves_activations_as_a_trial_does() -> None:
    again, activations = trial_of(two_blocks(), (), TOY, GROUPS), activations_of(two_blocks())
    lean = trial_of(two_blocks(), (), TOY, GROUPS, recompute=activations)
    sketch = Sketch(lean, TOY, GROUPS, saved_without(again, activations))
    for recomputed in subsets(EVERYTHING):
        assert_same(*both(two_blocks, sketch, TOY, GROUPS, recomputed=recomputed))


@pytest.mark.parametrize("lookahead", [1, 2])
def test_a_sketch_has_activations_on_the_host_as_a_trial_does(lookahead: int) -> None:
    again, activations = trial_of(two_blocks(), (), TOY, GROUPS), activations_of(two_blocks())
    matrices = {node.name: one.fqn for node, one in matrices_of(two_blocks()).items()}
    sketch = Sketch(again, TOY, GROUPS, matrices=matrices)
    assert {*sketch.leaving.values()} == {"0.down.weight", "1.down.weight", "1.up.weight"}
    for offloaded in subsets(sorted({*sketch.leaving.values()})):
        assert_same(*both(two_blocks, sketch, TOY, GROUPS, lookahead=lookahead, offloaded=offloaded))
    lean = Sketch(
        trial_of(two_blocks(), (), TOY, GROUPS, recompute=activations), TOY, GROUPS, saved_without(again, activations), matrices
    )
    for recomputed in subsets(EVERYTHING):
        found, tried = both(two_blocks, lean, TOY, GROUPS, (), recomputed, (), lookahead, EVERYTHING[2:])
        assert (found.peak_bytes, found.offloaded_bytes) == (tried.peak_bytes, tried.offloaded_bytes)
        assert found.seconds == pytest.approx(tried.seconds, rel=0.03)


def test_a_sketch_keeps_slices_as_a_trial_does() -> None:
    sketch = Sketch(trial_of(products(4), (), NODES, OF_NODES), NODES, OF_NODES)
    for sliced in subsets(READ[:3]):
        # It leaves out the copies into slices, a thousandth of this step.
        assert_same(*both(lambda: products(4), sketch, NODES, OF_NODES, sliced=sliced), rel=1e-3)
    assert_same(*both(lambda: products(4), sketch, NODES, OF_NODES, READ[:1], sliced=READ[1:3]), rel=1e-3)


def test_a_bucket_that_is_kept_in_part_is_in_no_sketch() -> None:
    sketch = Sketch(trial_of(two_blocks(), (), TOY, GROUPS), TOY, GROUPS)
    assert sketch.halves(Decision(frozenset(EVERYTHING[:1]))) is None
    assert sketch.halves(Decision(frozenset(EVERYTHING))) is not None
