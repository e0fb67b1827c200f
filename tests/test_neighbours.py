"""Small units that travel together: which, in which order, and that nothing but the collectives changes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_compile import configure, explain, inspect
from fsdp_compile.passes import Plan
from fsdp_compile.passes.wire import layout
from tests.comparing import train_and_compare
from tests.compiling import passes
from tests.models import Stack, pair, shard
from tests.ranks import Ranks
from tests.recording import planned

TOKENS = torch.arange(10).view(2, 5)
# Of a layer of the model here 4.6 KiB are gathered, of its embedding 2 and of its head 2.1.
KIB = 1 << 10


def together(num_bytes: int) -> Any:
    """Units travel together up to so many bytes."""
    return {"gloo": (0, 256 << 10, 16, num_bytes), "nccl": (256 << 20, 0, 4, num_bytes)}


def units_of(plan: Plan | None, of: str = "gathers") -> list[str]:
    assert plan is not None
    return [bucket.unit for bucket in getattr(plan, of)]


def test_small_units_travel_together_but_for_what_nothing_hides_and_large_ones_do_not(
    fake_group_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shard(Stack(6), reshard_after_forward=True)
    apart = planned(model)
    configure(model, bucketing="neighbours")
    monkeypatch.setattr(layout, "_LIMITS", together(24 * KIB))
    plan = planned(model)
    sizes = {unit: 0 for unit in units_of(plan.forward)}
    for bucket in plan.forward.gathers:  # type: ignore[union-attr]
        sizes[bucket.unit] += bucket.num_bytes * bucket.num_ranks
    assert len(units_of(apart.forward)) > len(sizes) > 2
    assert max(sizes.values()) <= 24 * KIB
    assert len(units_of(apart.backward)) > len(units_of(plan.backward))
    reduces = [unit.split(":")[1] for unit in units_of(plan.backward, "reduces")]
    assert reduces == ["layers.5", "layers.4 to layers.0", ""]  # nothing hides the last one, so it is a unit alone
    assert {*apart.regather} == {*plan.regather} and apart.again == plan.again
    monkeypatch.setattr(layout, "_LIMITS", together(4))
    large = planned(model)
    assert (units_of(large.forward), units_of(large.backward)) == (units_of(apart.forward), units_of(apart.backward))
    everything = sorted(fqn for bucket in plan.backward.reduces for fqn in bucket.fqns)  # type: ignore[union-attr]
    assert everything == sorted(fqn for bucket in apart.backward.reduces for fqn in bucket.fqns)  # type: ignore[union-attr]


def test_reductions_do_not_wait_for_the_last_gradient_of_a_unit_that_has_its_first_one_early(
    fake_group_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shard(Stack(6), reshard_after_forward=True)
    configure(model, bucketing="neighbours")
    # The root would fit beside five of the layers, whose gradients come soon after that of its head.
    monkeypatch.setattr(layout, "_LIMITS", together(32 * KIB))
    reduces = planned(model).backward.reduces  # type: ignore[union-attr]
    assert [bucket.unit.split(":")[1] for bucket in reduces] == ["layers.5 to layers.0", ""]
    assert {"embed.weight", "head.weight"} <= {*reduces[-1].fqns}


def test_members_of_a_unit_stand_together_in_the_order_of_the_model(fake_group_of_four: None) -> None:
    model = shard(Stack(3), reshard_after_forward=True)
    configure(model, bucketing="neighbours")
    [everything] = [bucket.fqns for bucket in planned(model).forward.gathers]  # type: ignore[union-attr]
    assert [fqn.split(".")[1] for fqn in everything if fqn.startswith("layers")] == [*"000000111111222222"]


def test_who_did_not_ask_travels_alone(fake_group_of_four: None) -> None:
    model = shard(Stack(3), reshard_after_forward=True)
    configure(model.layers[0], bucketing="neighbours")
    configure(model.layers[1], bucketing="neighbours")
    assert [bucket.unit.split(":")[1] for bucket in planned(model).forward.gathers] == [  # type: ignore[union-attr]
        "", "layers.0 to layers.1", "layers.2"
    ]  # fmt: skip


def _trained(backend: str, tied: bool) -> Plan:
    unsharded, model = pair(make=lambda: Stack(3, tied=tied), reshard_after_forward=True)
    configure(model, bucketing="neighbours")
    with mock.patch.object(layout, "_LIMITS", together(24 * KIB)), inspect(model) as report:
        train_and_compare(torch.compile(model, backend=backend, fullgraph=True), model, unsharded)
    return report.joint.plan


@pytest.mark.parametrize(
    ("backend", "tied"),
    [("aot_eager", False), pytest.param("inductor", True, marks=[pytest.mark.slow, pytest.mark.compat])],
)
def test_they_train_like_the_unsharded_model(two_ranks: Ranks, backend: str, tied: bool) -> None:
    here, there = two_ranks.run(_trained, backend, tied)
    assert here == there
    assert here.backward is not None and 1 < len(here.backward.reduces) < 4


def _says_what_the_pass_does(limit: int) -> None:
    model = shard(Stack(6), reshard_after_forward=True)
    with mock.patch.object(layout, "_LIMITS", together(limit)):
        torch._dynamo.reset()
        found = explain(torch.compile(model, backend=passes, fullgraph=True), TOKENS)
        configure(model, bucketing="neighbours")
        plan = planned(model)
    apart = 0
    for stage, of in (("forward", "gathers"), ("backward", "gathers"), ("backward", "reduces")):
        gathers = of == "gathers"
        said = [one for one in found.buckets if one.stage == stage and (one.launch.kind == "all_gather") == gathers]
        travels_in = {fqn: bucket.unit for bucket in getattr(getattr(plan, stage), of) for fqn in bucket.fqns}
        units = [travels_in[one.launch.fqns[0]] for one in said]
        assert len(said) > 5
        for one, unit, following in zip(said, units, units[1:]):
            assert one.apart.endswith("which bucketing='neighbours' allows") == (unit == following), (limit, stage, of)
            apart += unit != following
    assert apart >= 3


@pytest.mark.slow
def test_explain_says_where_units_could_travel_together(fake_group_of_four: None) -> None:
    torch._dynamo.reset()
    model = shard(Stack(2), reshard_after_forward=True)
    found = explain(torch.compile(model, backend=passes, fullgraph=True), TOKENS)
    said = [one.apart for one in found.buckets if "another unit" in one.apart]
    assert said and all(words.endswith(", which bucketing='neighbours' allows") for words in said)
    _says_what_the_pass_does(24 * KIB)
    _says_what_the_pass_does(160 * KIB)
    wide = shard(Stack(2, dim=1024), reshard_after_forward=True)
    torch._dynamo.reset()
    found = explain(torch.compile(wide, backend=passes, fullgraph=True), TOKENS)
    of_layers = [one.apart for one in found.buckets if "layers.0.down.weight" in one.launch.fqns and one.stage == "forward"]
    assert of_layers and all("neighbours" not in words for words in of_layers)
