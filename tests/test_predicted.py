"""What a report predicts of a step, against figures worked out by hand, and why parameters stay or come again."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import fully_shard, inspect
from fsdp_compile._torch_compat import inductor
from fsdp_compile.passes.budget.trial import trial_of
from fsdp_compile.passes.cost.predicted import Prediction, predict
from fsdp_compile.passes.cost.replay import LATE, LONG, QUEUED
from fsdp_compile.tools.inspect import Report
from tests.compiling import passes
from tests.test_budget import GROUPS, KIB, PEAK, five_products
from tests.test_cost import TOY

# On TOY, in seconds: a gather of 16 KiB on two ranks of a node, and a product that reads 64 KiB and what was gathered.
GATHER = 1e-5 + 1e-6 + 16 * KIB / 2 / (100e9 * 0.5)
PRODUCT = 1e-6 + 2 * 256 * 64 * 64 / (1e12 * 0.5)


@pytest.fixture(scope="module")
def by_hand() -> Prediction:
    trial = trial_of(five_products(), (), TOY, GROUPS)
    assert trial.plan.forward is not None and trial.plan.backward is not None
    halves = [(trial.forward.graph, trial.plan.forward), (trial.backward.graph, trial.plan.backward)]
    return predict(halves, TOY, GROUPS)


def test_a_forward_waits_for_gathers_that_take_longer_than_its_products(by_hand: Prediction) -> None:
    forward = by_hand.of("forward")
    assert forward.seconds == pytest.approx(5 * GATHER + PRODUCT)  # one behind the other, and the last product
    assert forward.exposed_s == pytest.approx(5 * GATHER - 4 * PRODUCT)
    assert [one.seconds for one in forward.collectives] == pytest.approx([GATHER] * 5)
    assert [one.exposed_s for one in forward.collectives] == pytest.approx([GATHER, *[GATHER - PRODUCT] * 4])
    first, *others = forward.collectives
    assert first.why.startswith(LONG)
    for before, one in zip(forward.collectives, others):
        assert one.why.startswith(QUEUED) and f"behind all_gather of {before.fqns[0]}" in one.why
        assert one.beside_s == pytest.approx(PRODUCT) and not one.is_hidden


def test_places_are_told_by_what_is_read_there(by_hand: Prediction) -> None:
    said = {stage: [] for stage in ("forward", "backward")}  # type: dict[str, list[tuple[str, ...]]]
    for graph in by_hand.graphs:
        for one in graph.collectives:
            places = (one.launched_behind, one.launched_before, one.waited_behind, one.waited_before)
            said[graph.stage].append((one.fqns[0], *places))
    w = [f"{layer}.weight" for layer in range(5)]
    assert said["forward"] == [
        (w[0], "begin", w[0], "begin", w[0]),
        (w[1], "begin", w[0], w[0], w[1]),  # a unit ahead
        (w[2], w[0], w[1], w[1], w[2]),
        (w[3], w[1], w[2], w[2], w[3]),
        (w[4], w[2], w[3], w[3], w[4]),
    ]
    gathers = [row for row in said["backward"] if row[3] != "end" and row[4] == row[0]]
    assert [row[0] for row in gathers] == w[:0:-1]
    # A gradient is reduced when it is there, and waited for behind the next one's launch, or at the end.
    last = said["backward"][-1]
    assert last == (w[0], f"grad {w[0]}", "end", f"grad {w[0]}", "end")


def test_the_peak_is_that_of_forward_and_backward(by_hand: Prediction) -> None:
    assert by_hand.peak_bytes == PEAK * KIB
    assert by_hand.seconds == sum(graph.seconds for graph in by_hand.graphs)
    assert f"peak {PEAK / 1:.1f} KiB" in str(by_hand)


def test_a_hidden_gather_says_behind_what() -> None:
    quick = dataclasses.replace(
        TOY, inside=dataclasses.replace(TOY.inside, latency_s=0.0, step_s=0.0, bytes_per_s=1e12)
    )
    trial = trial_of(five_products(), (), quick, GROUPS)
    assert trial.plan.forward is not None
    first, *others = predict([(trial.forward.graph, trial.plan.forward)], quick, GROUPS).graphs[0].collectives
    assert not first.is_hidden and all(one.is_hidden for one in others)
    assert {one.why for one in others} == {f"{PRODUCT * 1e3:.3f} ms of compute stand beside it"}


class Layer(nn.Module):
    """A product with a bias behind a norm, and one with a weight that is made of two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.low, self.rank = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(self.norm(x))) @ (self.w + self.low @ self.rank) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.first, self.layer, self.again = nn.Linear(8, 8), Layer(), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.first(self.frozen(x)))
        x = checkpoint(lambda y: torch.sin(self.again(y)), x, use_reentrant=False)
        return self.last(x)


def inspected(reshard_after_forward: bool | int | None = None, **options: Any) -> Report:
    torch._dynamo.reset()
    model = Model()
    for part in (model.frozen, model.first, model.layer, model.again):
        fully_shard(part, reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    fsdp_compile.configure(model, **options)
    with inspect(model) as report:
        torch.compile(model, backend=passes, fullgraph=True)(torch.randn(4, 8)).sum().backward()
    return report


@functools.cache
def inspected_once() -> Report:
    return inspected()


def becomes(report: Report) -> dict[str, tuple[str, str]]:
    return {fqn: (one.becomes, one.why) for fqn, one in report.joint.predicted.residency.items()}


@pytest.mark.usefixtures("fake_group_of_four")
def test_each_parameter_says_why_it_stays_or_comes_again() -> None:
    read = ("gathered again", "a gradient reads it")
    made = ("gathered again", "what is made of it is made again")
    region = ("gathered again", "a checkpointed region reads it")
    unit = ("gathered again", "its unit is gathered again")
    assert becomes(inspected_once()) == {
        "frozen.weight": ("not needed", "no gradient comes to its unit"),
        "frozen.bias": ("not needed", "no gradient comes to its unit"),
        "first.weight": unit,
        "first.bias": unit,
        "layer.norm.weight": read,
        "layer.norm.bias": read,
        "layer.up.weight": read,
        "layer.up.bias": unit,
        "layer.w": made,
        "layer.low": made,
        "layer.rank": made,
        "again.weight": region,
        "again.bias": region,
        "last.weight": ("kept", "reshard_after_forward=False"),
        "last.bias": ("kept", "reshard_after_forward=False"),
    }


@pytest.mark.usefixtures("fake_group_of_four")
def test_slices_say_so() -> None:
    found = becomes(inspected(reshard_after_forward=2))
    assert found["layer.up.weight"] == ("not needed", "a slice of it is kept")
    assert found["layer.up.weight@2"] == ("gathered again", "from the slices that are kept")
    assert found["last.weight"] == ("kept", "reshard_after_forward=False")


@pytest.mark.usefixtures("fake_group_of_four")
def test_what_a_user_or_a_budget_decided_is_said() -> None:
    ours = inspected_once().joint.plan
    kept = ("layer.up.weight",)
    edited = dataclasses.replace(ours, keep=ours.keep + kept)
    given = becomes(inspected(plan=edited))
    assert given["layer.up.weight"] == ("kept", "given plan")
    assert given["layer.w"] == ("gathered again", "given plan; what is made of it is made again")
    assert given["frozen.weight"] == ("not needed", "no gradient comes to its unit")
    budget = inspected(memory_budget="1GiB", profile=TOY)
    assert becomes(budget)["layer.up.weight"] == ("kept", "memory budget")
    predicted = budget.joint.predicted
    assert predicted.profile == "toy", "not on what the budget was planned for"
    assert budget.joint.plan.choice is not None
    # The same graphs, before they were cut and after.
    assert predicted.peak_bytes == budget.joint.plan.choice.chosen.peak_bytes
    assert predicted.seconds == pytest.approx(budget.joint.plan.choice.chosen.seconds)


class OfWords(nn.Module):
    """A loss over many words, whose scores are what a step needs most of its memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4096)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(torch.relu(self.first(x))), words)


@pytest.mark.usefixtures("fake_group_of_four")
def test_the_budgets_trial_knows_what_inductor_makes_of_a_cross_entropy() -> None:
    torch._dynamo.reset()
    model = OfWords()
    fully_shard(model.first)
    fully_shard(model)
    fsdp_compile.configure(model, memory_budget="1GiB")
    with inspect(model) as report, inductor.no_compile_caches():
        torch.compile(model, fullgraph=True)(torch.randn(64, 16), torch.arange(64)).backward()
    choice = report.joint.plan.choice
    assert choice is not None
    # The graph before Inductor's patterns, and what it compiled. A buffer of scores more is a third of it.
    assert choice.chosen.peak_bytes == pytest.approx(report.joint.predicted.peak_bytes, rel=0.02)


class WithOwn(nn.Module):
    """Sums over other ranks, by itself, what nobody's gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.group = nn.Linear(8, 8), nn.Linear(8, 8), dist.new_group([0, 1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y + all_reduce(y.detach(), "sum", self.group))


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_users_own_collectives_are_waited_for_as_well() -> None:
    model = WithOwn()
    fully_shard(model.first)
    fully_shard(model)
    with inspect(model) as report:
        torch.compile(model, backend=passes, fullgraph=True)(torch.randn(4, 8)).sum().backward()
    forward = report.joint.predicted.of("forward")
    assert [one.fqns[0] for one in forward.collectives] == ["first.weight", "last.weight"]
    # What hides behind the user's sum is not what is waited for.
    assert forward.collectives[1].is_hidden
    assert forward.exposed_s > sum(one.exposed_s for one in forward.collectives) > 0
    reductions = [one for one in report.joint.predicted.of("backward").collectives if one.kind != "all_gather"]
    assert reductions[0].why.startswith(f"{LATE}: right after grad last.")


@pytest.mark.usefixtures("fake_group_of_four")
def test_predictions_are_made_when_somebody_looks_and_are_no_part_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    real = predict
    monkeypatch.setattr("fsdp_compile.tools.predicted.predict", lambda *args: calls.append(args) or real(*args))
    report = inspected()
    plan_id = report.joint.plan.id
    assert calls == []
    slow, fast = report.joint.predicted, report.joint.predict("h100")
    assert (slow.profile, fast.profile) == ("cpu", "h100") and fast.seconds < slow.seconds
    assert report.forward.predicted == report.backward.predicted == slow
    assert report.joint.plan.id == plan_id == type(report.joint.plan).from_json(report.joint.plan.to_json()).id
    dist.destroy_process_group()  # a report may be printed after
    try:
        assert "predicted on 'cpu': forward" in str(report)
        assert report.joint.predict("a100").profile == "a100"
    finally:
        dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_step_without_its_graphs_says_what_to_do() -> None:
    model = fully_shard(nn.Linear(8, 8))
    with inspect(model) as report:
        torch.compile(model, backend="aot_eager")(torch.randn(4, 8))
    with pytest.raises(LookupError, match="compile on Inductor, and run backward in the block"):
        _ = report.joint.predicted
    assert "predicted" not in str(report)
