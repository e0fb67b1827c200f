"""A byte budget: what is kept until backward is chosen by predicted bytes and seconds, once, and by one rank for all."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import configure, fully_shard, inspect
from fsdp_compile.demo.training import DemoSettings, batch_of, build_model, shard_with_ours
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import Budget, Group, Plan
from fsdp_compile.passes.budget.budget import default_profile
from fsdp_compile.passes.budget.residency import AGAIN, KEPT, choose, keepable
from fsdp_compile.passes.budget.trial import trial_of
from fsdp_compile.passes.cost.replay import Compute
from fsdp_compile.passes.cost.roofline import node_seconds
from fsdp_compile.passes.ir.aliases import tensor_bytes
from fsdp_compile.passes.ir.markers import change_spec
from fsdp_compile.passes.ir.plan import Candidate, Choice
from fsdp_compile.passes.ir.provenance import settle_names
from fsdp_compile.passes.ranks import agree
from fsdp_compile.passes.ranks.agree import Agreement
from fsdp_compile.passes.ranks.settle import Settled
from fsdp_compile.passes.schedule.calls import name_markers
from fsdp_compile.passes.schedule.planner import plan_joint
from fsdp_compile.passes.wire.ledger import GraphText, ListedLaunch
from tests.comparing import assert_same_grads
from tests.compiling import passes
from tests.models import Apart, Stack, pair, shard
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks
from tests.recording import planned, plans_made, recorded
from tests.test_cost import MEMORY, TOY
from tests.test_passes import Builder, spec

aten = torch.ops.aten
KIB, MIB = 1 << 10, 1 << 20
GROUPS = {"g": Group(2, 2)}
WEIGHTS = tuple(f"{layer}.weight" for layer in range(5))


# --- the choice, by hand ---------------------------------------------------------------------------------------------


def five_products() -> fx.Graph:
    """y1 = x @ w0, ..., y5 = y4 @ w4. Each weight is 16 KiB, its shard a half; each activation 64 KiB."""
    b = Builder()
    shards = [b.input(f"primals_{layer + 1}", 32, 64) for layer in range(5)]
    x, tangent = b.input("primals_6", 256, 64), b.input("tangents_1", 256, 64)
    its_spec = spec("weight", (64, 64))
    weights, ys = [], [x]
    for layer, one in enumerate(shards):
        weights.append(b.unshard(one, its_spec, str(layer)))
        ys.append(b.call(aten.mm.default, ys[-1], weights[-1]))
    grad, grads = tangent, []
    for layer in reversed(range(5)):
        of_weight = b.gradient(ys[layer + 1], aten.mm.default, b.call(aten.t.default, ys[layer]), grad)
        if layer:
            grad = b.gradient(ys[layer + 1], aten.mm.default, grad, b.call(aten.t.default, weights[layer]))
        grads.insert(0, b.reduce(of_weight, its_spec, of=weights[layer]))  # autograd hands both on together
    graph = b.output(ys[-1], *grads, None)  # type: ignore[arg-type]
    name_markers(graph)
    settle_names(graph)
    return graph


# The shards and x, all the time.
HELD = 5 * 8 + 64
# While backward multiplies with w4: y1 to y3 and y5, the tangent and its product; w4, and w3 on its way; w4's gradient
# and what is left of it when it is reduced.
PEAK = HELD + 6 * 64 + 2 * 16 + 16 + 8


def test_a_trial_weighs_the_step_as_it_would_be() -> None:
    graph = five_products()
    before = str(graph)
    again, kept = (trial_of(graph, which, TOY, GROUPS) for which in ((), WEIGHTS))
    assert again.plan.again == WEIGHTS  # w0 as well, though x needs no gradient
    assert (again.weight.held_bytes, again.weight.returned_bytes) == (HELD * KIB, 64 * KIB)
    assert again.peak_bytes == PEAK * KIB
    assert kept.peak_bytes == (PEAK + 2 * 16) * KIB  # w1 and w2 would not have been there yet
    assert again.forward.timeline.total_s == kept.forward.timeline.total_s and again.seconds > kept.seconds
    assert str(graph) == before


@pytest.mark.usefixtures("fake_group_of_four")
def test_backward_begins_with_what_forward_leaves() -> None:
    """A parameter that stays is a view of its bucket, which has padding where a rank has fewer rows than others."""
    with recorded() as records:
        planned(shard(Stack(2)), backend="passes")
    joint = records[0].snapshots[3]
    settle_names(joint)
    kept = keepable(joint, trial_of(joint, (), TOY).plan)
    trial = trial_of(joint, kept, TOY)
    inputs = trial.backward.graph.find_nodes(op="placeholder")
    tangents = sum(tensor_bytes(one.meta["val"]) for one in inputs if one.name.startswith("tangents"))
    assert kept and trial.weight.forward[-1] == trial.weight.backward[0] - tangents + trial.weight.returned_bytes


@pytest.mark.parametrize(
    ("budget", "kept", "peak"),
    [
        (10, WEIGHTS[4:], PEAK),
        (PEAK, WEIGHTS[4:], PEAK),  # w4's reduction is launched in front of the product that reads w4, kept or not
        (PEAK + 15, WEIGHTS[4:], PEAK),
        (PEAK + 16, WEIGHTS[2:], PEAK + 16),
        (PEAK + 32, WEIGHTS, PEAK + 32),  # nothing reads w0, so it is not kept, only not gathered
    ],
)
def test_what_was_read_last_is_kept_first(budget: int, kept: tuple[str, ...], peak: int) -> None:
    best, lost = choose(five_products(), lambda again: budget * KIB, TOY, GROUPS)
    assert (best.figures.kept, best.figures.peak_bytes) == (frozenset(kept), peak * KIB)
    names = {one.name for one in (best, *lost)}
    assert {AGAIN, KEPT} <= names and len(names) == 1 + len(lost)
    assert all(one.figures.seconds >= best.figures.seconds for one in lost if one.figures.peak_bytes <= budget * KIB)


def test_nothing_is_kept_where_no_time_is_saved() -> None:
    instant = dataclasses.replace(
        TOY, inside=dataclasses.replace(TOY.inside, latency_s=0.0, step_s=0.0, bytes_per_s=1e30)
    )
    best, _ = choose(five_products(), lambda again: 1 << 30, instant, GROUPS)
    assert best.name == AGAIN


def test_units_that_were_told_to_keep_are_gathered_again_where_the_budget_wants_it() -> None:
    graph = five_products()
    for node in graph.find_nodes(op="call_function", target=torch.ops.fsdpc.unshard.default):
        change_spec(node, regather=False)
    assert plan_joint(graph).keep == WEIGHTS
    best, _ = choose(graph, lambda again: (PEAK + 16) * KIB, TOY, GROUPS)
    assert best.figures.kept == frozenset(WEIGHTS[2:])
    assert plan_joint(graph).keep == WEIGHTS


def products_and_scales() -> fx.Graph:
    """y1 = relu((x @ w0) * g0), y2 = relu((y1 @ w1) * g1), returned doubled: two units of a matrix and a vector."""
    b = Builder()
    its = {"w": spec("weight", (64, 64), bucketing="none"), "g": spec("scale", (64,), bucketing="none")}
    shards = [b.input(f"primals_{place + 1}", *size) for place, size in enumerate([(32, 64), (32,)] * 2)]
    x, grad = b.input("primals_5", 256, 64), b.input("tangents_1", 256, 64)
    y, layers = x, []
    for place in range(2):
        w, g = (b.unshard(shards[2 * place + (one == "g")], its[one], str(place)) for one in "wg")
        product = b.call(aten.mm.default, y, w)
        read, y = y, b.call(aten.relu.default, b.call(aten.mul.Tensor, product, g))
        layers.append((read, w, product, g, y))
    result = b.call(aten.mul.Tensor, y, 2.0)
    grads = []
    for read, w, product, g, made in reversed(layers):
        grad = b.gradient(made, aten.threshold_backward.default, grad, made, 0)
        of_g = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, grad, product), [0])
        grad = b.call(aten.mul.Tensor, grad, g)
        of_w = b.gradient(product, aten.mm.default, b.call(aten.t.default, read), grad)
        grads[:0] = [b.reduce(of_w, its["w"], of=w), b.reduce(of_g, its["g"], of=g)]
        grad = b.call(aten.mm.default, grad, b.call(aten.t.default, w))
    graph = b.output(result, *grads, grad)
    name_markers(graph)
    settle_names(graph)
    return graph


HELD_BY_TWO = 2 * 8.125 + 64


def test_fsdp2_packs_a_unit_and_saves_what_a_compiler_computes_again() -> None:
    graph = products_and_scales()
    before = str(graph)
    ours, theirs = (trial_of(graph, (), TOY, GROUPS, like_fsdp2=like) for like in (False, True))
    for trial, num_buckets, activations in ((ours, 4, 1), (theirs, 2, 2)):
        assert trial.plan.forward is not None and trial.plan.backward is not None
        assert len(trial.plan.forward.gathers) == len(trial.plan.backward.reduces) == num_buckets
        saved = trial.backward.graph.find_nodes(op="placeholder")
        assert sum(one.name.startswith("relu") for one in saved) == activations
    # When backward begins: both products and both activations, the tangent and the first gradient beside what was
    # returned; the last unit, packed, on its way.
    assert theirs.peak_bytes == int((HELD_BY_TWO + 64 + 6 * 64 + 8.125 + 16.25) * KIB) > ours.peak_bytes
    # Each operator runs as a kernel of its own.
    fused, computes = (
        {node: one.seconds for node, one in events.items() if isinstance(one, Compute)}
        for events in ({**its.forward.events, **its.backward.events} for its in (ours, theirs))
    )
    assert {s for node, s in computes.items() if node.target is aten.relu.default} == {TOY.kernel_s + 2 * 64 * KIB / MEMORY}
    assert all(seconds == node_seconds(node, TOY) for node, seconds in computes.items())
    assert sum(computes.values()) > sum(fused.values())
    assert str(graph) == before


# --- what a user says ------------------------------------------------------------------------------------------------


def test_budgets_are_bytes_text_or_shares() -> None:
    said = {70 << 30: "70GiB", 800 << 20: "800MiB", 1_500_000_000: "1.5 GB", 2048: "2k", 17: "17"}
    assert all(Budget.of(text) == Budget.of(num_bytes) == Budget(num_bytes) for num_bytes, text in said.items())
    assert Budget.of(1.0) == Budget(share=1.0) and Budget.of(1) == Budget(1)
    assert Budget.of("fsdp2") == Budget(like_fsdp2=True)


@pytest.mark.parametrize("said", ["", "much", "70 GIBS", "-1GiB", "0MiB", 0, -5, 0.0, 1.5, float("nan")])
def test_what_is_no_budget_is_refused(said: Any) -> None:
    with pytest.raises(ValueError, match=r"memory_budget=.*Give bytes \(an int\), text such as '70GiB'.* or 'fsdp2'"):
        Budget.of(said)


@pytest.mark.parametrize("said", [True, [1], torch.tensor(5)])
def test_what_cannot_be_a_budget_is_refused(said: Any) -> None:
    with pytest.raises(TypeError, match=r"memory_budget is .*Give bytes"):
        Budget.of(said)


def test_configure_refuses_what_does_not_go_together(fake_group_of_four: None) -> None:
    model = shard(Stack(1))
    with pytest.raises(ValueError, match=r"A plan says what is kept .* Give one of them"):
        configure(model, memory_budget="1GiB", plan=Plan("joint"))
    with pytest.raises(ValueError, match=r"profile is what memory_budget is predicted by"):
        configure(model, profile="cpu")
    with pytest.raises(ValueError, match=r"no hardware profile 'h1000': give one of cpu, "):
        configure(model, memory_budget="1GiB", profile="h1000")
    with pytest.raises(TypeError, match=r"profile is a HardwareProfile, its name .* not int"):
        configure(model, memory_budget="1GiB", profile=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"share of free memory, and the ranks compute on 'cpu'.*Give bytes"):
        configure(model, memory_budget=0.9)
    with pytest.raises(ValueError, match=r"There is no built-in hardware profile for 'xpu'"):
        default_profile(torch.device("xpu"))
    assert not model.layers[0].up.weight.grad and manager.give_budget(Budget(1)) != manager.give_budget(Budget(1))


@pytest.mark.parametrize(
    ("called", "name", "is_it"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", True), ("NVIDIA H100 PCIe", "h100", False), ("NVIDIA H100 NVL", "h100", False),
        ("NVIDIA A100-SXM4-80GB", "a100", True), ("NVIDIA A100-SXM4-40GB", "a100", False),
        ("NVIDIA H200", "h200", True), ("NVIDIA GH200 480GB", "h200", False), ("NVIDIA B200", "b200", True),
        ("NVIDIA GB200", "gb200", True), ("NVIDIA L4", "h100", False),
    ],
)  # fmt: skip
def test_a_card_that_is_no_profiles_is_said_to_be_none(
    monkeypatch: pytest.MonkeyPatch, called: str, name: str, is_it: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: called)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert default_profile(torch.device("cuda")).name == name
    said = [str(one.message) for one in caught]
    assert [f"no built-in hardware profile for {called}, so its steps are predicted as an {name}'s" in one for one in said] == (
        [] if is_it else [True]
    )


# --- plans -----------------------------------------------------------------------------------------------------------


TOKENS = torch.zeros(2, 5, dtype=torch.long)


def test_a_budget_is_taken_back_and_its_reasons_are_printed_and_no_part_of_the_plan(fake_group_of_four: None) -> None:
    model = shard(Stack(1))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    configure(model, memory_budget="1GiB", profile="h100")
    configure(model, bucketing="size")  # says nothing of a budget
    with inspect(model) as report:
        run(TOKENS)
    within = report.joint.plan
    choice = within.choice
    assert str(choice).splitlines()[0] in str(report)
    assert choice is not None and choice.is_met and choice.budget_bytes == 1 << 30 and choice.profile == "h100"
    assert f"-> {choice.chosen.name}" in str(choice) and choice.chosen.num_kept == len(within.keep)
    assert AGAIN in {one.name for one in choice.lost}
    assert all(one.seconds >= choice.chosen.seconds > 0 and one.peak_bytes > 0 for one in choice.lost)
    bare = dataclasses.replace(within, choice=None)
    assert within == bare and within.id == bare.id
    assert Plan.from_json(within.to_json()).choice == choice
    with plans_made() as plans:
        configure(model, memory_budget=None)
        run(TOKENS)
        run(TOKENS)
        [without] = plans  # which was compiled once
        given = _keeping_too(without, "layers.0.down.weight")
        configure(model, plan=given)
        configure(model, memory_budget=None)  # there is none, and the plan stays
        run(TOKENS)
        configure(model, plan=None, bucketing="group")
        run(TOKENS)
    assert without.choice is None and '"choice"' not in without.to_json()
    assert {*without.keep} == {"embed.weight", "norm.weight", "norm.bias", "head.weight"}
    assert len(within.keep) > len(without.keep)
    assert {*plans[1].keep} == {*given.keep}
    assert {*plans[2].keep} == {*without.keep}


def _keeping_too(plan: Plan, fqn: str) -> Plan:
    return dataclasses.replace(plan, keep=(*plan.keep, fqn))


def test_a_budget_that_nothing_fits_into_is_met_as_well_as_can_be(fake_group_of_four: None) -> None:
    model = shard(Stack(1))
    configure(model, memory_budget="1KiB")
    with pytest.warns(UserWarning, match=r"1\.0 KiB \(1,024 bytes\), and the smallest plan .* checkpoint whole blocks") as seen:
        plan = planned(model)
    assert plan.choice is not None and not plan.choice.is_met
    (said,) = [str(one.message) for one in seen if "memory_budget is" in str(one.message)]
    assert f"({plan.choice.chosen.peak_bytes:,} bytes)" in said
    assert plan.choice.chosen.peak_bytes == min(one.peak_bytes for one in (plan.choice.chosen, *plan.choice.lost))


def test_a_budget_that_is_missed_says_of_how_many_units_the_shards_must_go(fake_group_of_four: None) -> None:
    model = shard(Stack(4))

    def needed(budget: int, said: str) -> int:
        configure(model, memory_budget=budget, may=("gather", "recompute", "offload"))
        with pytest.warns(UserWarning, match=re.escape(f"To come down, have {said} on the CPU (CPUOffloadPolicy)")):
            choice = planned(model).choice
        assert choice is not None
        return choice.chosen.peak_bytes

    least = needed(1 << 10, "shards")
    needed(least - 1, "the shards of 3 of 5 units")


def test_a_graph_that_is_not_the_step_is_planned_as_without_a_budget(fake_group_of_four: None) -> None:
    plans = []
    for budget in (None, "1GiB"):
        torch._dynamo.reset()
        model = Apart()
        for unit in (model.first, model.last, model):
            fully_shard(unit)
        with warnings.catch_warnings(record=True) as seen, inspect(model) as report:
            warnings.simplefilter("always")
            configure(model, memory_budget=budget)
            torch.compile(model, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
        plans.append([record.plan for record in report.records if record.stage == "joint"])
        told = [one for one in seen if "memory_budget is not applied to a graph that reads" in str(one.message)]
        assert bool(told) == (budget is not None)
    assert plans[0] == plans[1] and len(plans[0]) > 1


def test_what_one_rank_has_alone_needs_no_room(fake_group_of_four: None) -> None:
    model = Stack(1)
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicas", "shards")))
    fully_shard(model)
    configure(model, memory_budget="1GiB")
    plan = planned(model)
    assert plan.choice is not None and plan.choice.is_met
    assert plan.backward is not None and {one.num_ranks for one in plan.backward.gathers} <= {1, 4}


def test_the_partitioner_has_no_budget_beside_ours(fake_group_of_four: None) -> None:
    model = shard(Stack(1))
    configure(model, memory_budget="1GiB")
    refused = pytest.raises(Exception, match=r"activation_memory_budget are not supported together yet")
    with torch._functorch.config.patch(activation_memory_budget=0.5), refused:
        planned(model)
    refused = pytest.raises(Exception, match=r"custom_partitioner_fn are not supported together")
    with torch._inductor.config.patch(custom_partitioner_fn=object()), refused:
        planned(model)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _between(model: nn.Module, tokens: Tensor, share: float) -> int:
    """A budget so far from what the smallest plan needs to what keeping everything does."""
    configure(model, memory_budget="1TiB")
    choice = planned(model, tokens).choice
    assert choice is not None
    peaks = {one.name: one.peak_bytes for one in (choice.chosen, *choice.lost)}
    return int(peaks[AGAIN] + share * (peaks[KEPT] - peaks[AGAIN]))


def _with_other_lengths(shapes: list[list[tuple[int, int]]]) -> list[Plan]:
    """Each rank's plans, as it made them; of each step, rows and lengths on each rank, which compiles for its own."""
    unsharded, model = pair(make=partial(Stack, 1))
    configure(model, memory_budget=_between(model, TOKENS, 0.5))
    run = torch.compile(model, backend=passes, fullgraph=True, dynamic=False)
    with plans_made() as plans:
        for of_ranks in shapes:
            batches = [torch.arange(rows * length).reshape(rows, length) % 31 for rows, length in of_ranks]
            run(batches[dist.get_rank()]).pow(2).mean().backward()
            torch.stack([unsharded(one).pow(2).mean() for one in batches]).mean().backward()
            assert_same_grads(model, unsharded)
            model.zero_grad()
            unsharded.zero_grad()
    return plans


@pytest.mark.filterwarnings("ignore:memory_budget is")
def test_the_first_rank_chooses_and_a_rank_that_compiles_again_asks_nobody(two_ranks: Ranks) -> None:
    """Rank 1 has a longer batch, and then, alone, another one."""
    (chosen,), adopted = two_ranks.run(_with_other_lengths, [[(3, 5), (3, 9)], [(3, 5), (3, 11)]])
    assert chosen.choice is not None and chosen.choice.rank == 0 and chosen.keep
    assert adopted == [chosen, chosen] and {one.choice for one in adopted} == {chosen.choice}


@on_two_ranks
def test_a_budget_of_a_rank_that_adopts_is_said_to_have_no_effect() -> None:
    rank = dist.get_rank()
    _, model = pair(make=partial(Stack, 1))
    configure(model, memory_budget=f"{rank + 1}GiB")
    message = r"memory_budget is 2\.0 GiB on this rank, and 1\.0 GiB on rank 0, which chooses for all"
    with pytest.warns(UserWarning, match=message) if rank else nullcontext():
        torch.compile(model, backend="aot_eager", fullgraph=True)(TOKENS)


def _alone() -> str:
    """Rank 1 compiles what rank 0 never does."""
    if dist.get_rank() == 0:
        return ""
    _, model = pair()
    manager.settled.timeout_s = 0.3
    manager.give_budget(Budget(1))  # rank 0 has none of this name
    configure(model, memory_budget="1GiB")
    try:
        torch.compile(model, backend="aot_eager", fullgraph=True)(TOKENS)
    except Exception as error:
        return str(error)
    return "nothing"


def test_a_rank_that_nobody_answers_says_what_it_waited_for() -> None:
    ranks = Ranks(2)
    try:
        _, said = ranks.run(_alone)
    finally:
        ranks.stop()
    assert "waited 0 s for what rank 0 chooses for memory_budget in a graph of " in said
    assert "Call configure with the same memory_budget on every rank" in said


def _in_a_corner(slow_s: float) -> tuple[int, float]:
    """Of replicas of shards: rank 3 shares no group with rank 0, which takes long to choose."""
    rank, settled = dist.get_rank(), Settled()
    chosen = Candidate("kept", 1, 90, 0.5, 0.25)

    def decide(rank: int) -> Plan:
        time.sleep(slow_s)
        return Plan("joint", keep=("w",), lookahead=2, choice=Choice(100, "toy", rank, chosen, ()))

    dist.barrier()
    began = time.monotonic()
    decision = settled.decision("corner", ("w",), [{rank, rank ^ 1}, {rank, rank ^ 2}], decide)
    assert decision.choice is not None and decision.choice.chosen == chosen and decision.keep == ("w",)
    return decision.choice.rank, time.monotonic() - began


def test_ranks_that_follow_others_wait_for_the_one_that_chooses(four_ranks: Ranks) -> None:
    found = four_ranks.run(_in_a_corner, 3.0)
    assert [rank for rank, _ in found] == [0] * 4 and min(seconds for _, seconds in found) > 2.0


@pytest.mark.parametrize("outlives", [True, False])
def test_what_was_settled_in_a_world_that_is_gone_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, outlives: bool
) -> None:
    served = dist.HashStore()  # by torchrun, for all worlds of a job
    asked: list[int] = []

    def world() -> None:
        store = dist.PrefixStore("", served if outlives else dist.HashStore())
        monkeypatch.setattr(agree.compat, "default_store", lambda: store)

    def decide(rank: int) -> Plan:
        asked.append(rank)
        return Plan("joint", keep=(f"w{len(asked)}",), lookahead=2)

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(agree.compat, "group_ranks", lambda group: (0, 1))
    settled, other = Settled(), Settled()
    agreement, others = Agreement(), Agreement()
    for number in (1, 2):
        world()
        assert settled.decision("world", ("w",), [{0, 1}], decide).keep == (f"w{number}",)
        assert settled.decision("world", ("w",), [{0, 1}], decide).keep == (f"w{number}",)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        assert other.decision("world", ("w",), [{0, 1}], decide).keep == (f"w{number}",)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        for one in (agreement, others):
            one.check(GraphText("backward", "", (), (ListedLaunch("all_gather", "g", "float32", 8, ("w",), ()),) * number))
    assert asked == [0, 0]



def _beside_fsdp2() -> tuple[int, int, int]:
    """What FSDP2 was predicted to need, what was chosen to be needed instead, and what FSDP2 did need, eagerly."""
    settings = DemoSettings(layers=3, dim=256, batch=4, seq=256, head_dim=64)
    mesh, batch = init_device_mesh("cpu", (2,)), batch_of(settings, dist.get_rank())
    model = shard_with_ours(build_model(settings), mesh)
    configure(model, memory_budget="fsdp2")
    choice = planned(model, batch).choice
    assert choice is not None
    theirs = build_model(settings)
    for block in theirs.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    torch.distributed.fsdp.fully_shard(theirs, mesh=mesh)

    def step() -> None:
        theirs.zero_grad()
        theirs(batch).backward()

    step()
    step()  # the first one leaves what the second frees
    shards = sum(one.to_local().nbytes for one in theirs.parameters())
    return choice.budget_bytes, choice.chosen.peak_bytes, shards + _peak_above(step)


def _peak_above(step: Callable[[], None]) -> int:
    """What PyTorch's allocator had given out at most, on any thread, and not taken back; by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    changes: list[tuple[int, int]] = []
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(itertools.accumulate(change for _, change in sorted(changes, key=lambda one: one[0])))


@pytest.mark.slow
def test_what_fsdp2_needs_is_predicted(two_ranks: Ranks) -> None:
    for predicted, chosen, measured in two_ranks.run(_beside_fsdp2):
        # 1 to 10 % off where this was written: autograd holds a result here and there for longer.
        assert predicted == pytest.approx(measured, rel=0.15)
        assert chosen <= predicted


# --- how far ahead ---------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """What takes long, then what takes nothing, then a weight that is large for what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.tiny, self.large = nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.tiny(self.long(x)[:4])).sum()


class Wide(Steps):
    """What takes long is not trained, and holds the most of all."""

    def __init__(self) -> None:
        super().__init__()
        self.long.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.tiny(x[:, :4].t() @ self.long(x))).sum()


def _of_steps(make: type[Steps], budget: int | None) -> tuple[Plan, float]:
    """The plan, and for how long forward waits."""
    torch._dynamo.reset()
    model = make()
    for part in model.children():
        fully_shard(part)
    fully_shard(model)
    if budget is not None:
        configure(model, memory_budget=budget, profile=TOY)
    with inspect(model) as report:
        run = torch.compile(model, backend=passes, fullgraph=True)
        run(torch.randn(8192, 256, requires_grad=make is Steps)).backward()
    return report.joint.plan, report.joint.predict(TOY).of("forward").exposed_s


def test_gathers_are_launched_as_far_ahead_as_hides_them(fake_group_of_four: None) -> None:
    plan, exposed_s = _of_steps(Steps, None)
    ahead, less_exposed_s = _of_steps(Steps, 1 << 30)
    assert (plan.lookahead, ahead.lookahead) == (1, 2)
    assert ahead.forward is not None and ahead.backward is not None
    assert (ahead.forward.lookahead, ahead.backward.lookahead) == (2, 2)
    assert less_exposed_s < 0.8 * exposed_s
    assert ahead.choice is not None and ahead.choice.chosen.name.endswith(", gathered 2 units ahead")


def test_gathers_are_launched_ahead_where_there_is_room_for_what_they_bring(fake_group_of_four: None) -> None:
    choice = _of_steps(Wide, 1 << 30)[0].choice
    assert choice is not None and choice.chosen.name.endswith(", gathered 2 units ahead")
    held = next(one for one in choice.lost if choice.chosen.name.startswith(f"{one.name},"))
    assert held.seconds > choice.chosen.seconds and held.peak_bytes < choice.chosen.peak_bytes
    roomy, tight = (_of_steps(Wide, one.peak_bytes)[0] for one in (choice.chosen, held))
    assert (roomy.lookahead, tight.lookahead) == (2, 1)
