"""Small units that travel together: which, in which order, and that nothing but the collectives changes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_compile import configure, inspect
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
    model = shard(Stack(4), reshard_after_forward=True)
    apart = planned(model)
    configure(model, bucketing="neighbours")
    monkeypatch.setattr(layout, "_LIMITS", together(15 * KIB))
    plan = planned(model)
    sizes = {unit: 0 for unit in units_of(plan.forward)}
    for bucket in plan.forward.gathers:  # type: ignore[union-attr]
        sizes[bucket.unit] += bucket.num_bytes * bucket.num_ranks
    assert len(units_of(apart.forward)) > len(sizes) > 2
    assert max(sizes.values()) <= 15 * KIB
    assert len(units_of(apart.backward)) > len(units_of(plan.backward))
    reduces = [unit.split(":")[1] for unit in units_of(plan.backward, "reduces")]
    assert reduces == ["layers.3", "layers.2 to layers.0", ""]  # nothing hides the last one, so it is a unit alone
    assert ({*apart.params}, {*apart.keep}) == ({*plan.params}, {*plan.keep}) and apart.again == plan.again
    monkeypatch.setattr(layout, "_LIMITS", together(4))
    large = planned(model)
    assert (units_of(large.forward), units_of(large.backward)) == (units_of(apart.forward), units_of(apart.backward))
    everything = sorted(fqn for bucket in plan.backward.reduces for fqn in bucket.fqns)  # type: ignore[union-attr]
    assert everything == sorted(fqn for bucket in apart.backward.reduces for fqn in bucket.fqns)  # type: ignore[union-attr]


def test_reductions_do_not_wait_for_the_last_gradient_of_a_unit_that_has_its_first_one_early(
    fake_group_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shard(Stack(4), reshard_after_forward=True)
    configure(model, bucketing="neighbours")
    # The root would fit beside three of the layers, whose gradients come soon after that of its head.
    monkeypatch.setattr(layout, "_LIMITS", together(20 * KIB))
    reduces = planned(model).backward.reduces  # type: ignore[union-attr]
    assert [bucket.unit.split(":")[1] for bucket in reduces] == ["layers.3 to layers.0", ""]
    assert {"embed.weight", "head.weight"} <= {*reduces[-1].fqns}


def test_members_of_a_unit_stand_together_in_the_order_of_the_model(fake_group_of_four: None) -> None:
    model = shard(Stack(2), reshard_after_forward=True)
    configure(model, bucketing="neighbours")
    table, others = [bucket.fqns for bucket in planned(model).forward.gathers]  # type: ignore[union-attr]
    assert table == ("embed.weight",)
    assert [fqn.split(".")[1] for fqn in others if fqn.startswith("layers")] == [*"000000111111"]


def test_who_did_not_ask_travels_alone(fake_group_of_four: None) -> None:
    model = shard(Stack(3), reshard_after_forward=True)
    configure(model.layers[0], bucketing="neighbours")
    configure(model.layers[1], bucketing="neighbours")
    assert [bucket.unit.split(":")[1] for bucket in planned(model).forward.gathers] == [  # type: ignore[union-attr]
        "", "layers.0 to layers.1", "layers.2", ""
    ]  # fmt: skip


def _trained() -> Plan:
    unsharded, model = pair(make=lambda: Stack(3, tied=True), reshard_after_forward=True)
    configure(model, bucketing="neighbours")
    with mock.patch.object(layout, "_LIMITS", together(24 * KIB)), inspect(model) as report:
        train_and_compare(torch.compile(model, backend=passes, fullgraph=True), model, unsharded)
    return report.joint.plan


def test_they_train_like_the_unsharded_model(two_ranks: Ranks) -> None:
    here, there = two_ranks.run(_trained)
    assert here == there
    assert here.backward is not None and 1 < len(here.backward.reduces) < 4
