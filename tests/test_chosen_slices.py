"""Within a byte budget, slices of parameters that the ranks of a node gather from in backward."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fsdp_compile import configure, fully_shard, inspect
from fsdp_compile.core.unit import units_in
from fsdp_compile.passes import Bucket, Group, Plan
from fsdp_compile.passes.budget.residency import AGAIN, KEPT, SLICED, choose
from fsdp_compile.passes.budget.trial import trial_of
from fsdp_compile.passes.ir.markers import keep_slice
from fsdp_compile.passes.ir.provenance import reduce_nodes, settle_names, unshard_nodes
from fsdp_compile.passes.schedule.calls import name_markers
from tests.comparing import batches, train_and_compare
from tests.models import Stack, pair, shard
from tests.ranks import Ranks
from tests.recording import planned
from tests.test_cost import TOY
from tests.test_passes import Builder, spec

aten = torch.ops.aten
KIB = 1 << 10

# Two ranks a node; what goes to another node takes so long that nothing hides it.
NODES = dataclasses.replace(TOY, ranks_per_node=2, between=dataclasses.replace(TOY.between, latency_s=1e-3, bytes_per_s=1e8))
GROUPS = {"g": Group(4, 2), "node": Group(2, 2)}
READ = tuple(f"{layer}.weight" for layer in range(1, 8))  # by gradients


def products(num: int = 8, rows: int = 8, name: str = "") -> fx.Graph:
    """y = x @ w0 @ w1 @ ... on four ranks. Each weight is 16 KiB, its shard 4, a slice of it for two ranks 8.

    All weights have the one name, if any is given.
    """
    b = Builder()
    shards = [b.input(f"primals_{layer + 1}", 16, 64) for layer in range(num)]
    x, grad = b.input(f"primals_{num + 1}", rows, 64), b.input("tangents_1", rows, 64)
    its = spec("weight", (64, 64), num_shards=4, local_length=16, inner_shards=2, inner_group="node", inner_offered=True)
    weights, ys = [], [x]
    for layer, shard_of in enumerate(shards):
        weights.append(b.unshard(shard_of, its, str(layer)))
        ys.append(b.call(aten.mm.default, ys[-1], weights[-1]))
    grads: list[fx.Node] = []
    for layer in reversed(range(num)):
        of_weight = b.call(aten.mm.default, b.call(aten.t.default, ys[layer]), grad)
        if layer:
            grad = b.call(aten.mm.default, grad, b.call(aten.t.default, weights[layer]))
        grads.insert(0, b.reduce(of_weight, its, of=weights[layer]))
    graph = b.output(ys[-1], *grads, None)  # type: ignore[arg-type]
    name_markers(graph)
    for node in (*unshard_nodes(graph), *reduce_nodes(graph)) if name else ():
        node.meta["fsdp_fqn"] = name
    settle_names(graph)
    return graph


def test_a_trial_with_slices_holds_them_and_gathers_among_few() -> None:
    again, sliced = (trial_of(products(3), (), NODES, GROUPS, sliced=which) for which in ((), READ[:2]))
    assert len(sliced.forward.graph.find_nodes(op="call_function", target=keep_slice)) == 0  # lowered
    assert sliced.plan.slices == READ[:2] and again.plan.slices == ()
    assert [bucket.num_ranks for bucket in sliced.plan.backward.gathers] == [2, 2, 4]
    assert [bucket.num_ranks for bucket in again.plan.backward.gathers] == [4, 4, 4]
    assert [bucket.fqns for bucket in sliced.plan.backward.gathers] == [("2.weight",), ("1.weight",), ("0.weight",)]
    # When forward ends two slices are there that were not.
    assert sliced.weight.forward[-1] - again.weight.forward[-1] == 2 * 8 * KIB
    assert sliced.seconds < again.seconds


def test_each_budget_has_the_fastest_that_fits() -> None:
    graph = products()
    steps = [
        trial_of(graph, kept, NODES, GROUPS, sliced=sliced) for kept, sliced in [((), ()), ((), READ), (READ, ())]
    ]
    assert steps[0].peak_bytes < steps[1].peak_bytes < steps[2].peak_bytes
    for place, budget in enumerate(one.peak_bytes for one in steps):
        best, lost = choose(graph, lambda _, budget=budget: budget, NODES, GROUPS)
        its = best.figures
        tried = trial_of(graph, its.kept, NODES, GROUPS, sliced=its.sliced, lookahead=its.lookahead)
        assert tried.peak_bytes == its.peak_bytes <= budget
        assert tried.seconds == pytest.approx(its.seconds, rel=1e-3) and its.seconds <= steps[place].seconds
        assert bool(its.sliced) == (place == 1)  # with room for everything, whole parameters
        assert {AGAIN, SLICED, KEPT} <= {one.name for one in (best, *lost)}


def test_where_all_ranks_are_on_a_node_nothing_is_offered(fake_group_of_four: None) -> None:
    model = shard(Stack(2))
    for profile, size in ((NODES, 2), (TOY, None), (dataclasses.replace(NODES, ranks_per_node=3), None)):
        configure(model, memory_budget="1GiB", profile=profile)
        offered = [unit.may_slice for unit in units_in(model)]
        assert [one and one.num_shards for one in offered] == [size] * 3


@pytest.mark.parametrize(
    ("buckets", "sizes"),
    [
        ({"layers.0.weight": 8, "layers.1.weight": 4}, [2, 2]),  # as in a plan without slices: the groups stay
        ({"layers.0.weight": 2, "layers.1.weight": 4}, [2, 2]),
        ({"layers.0.weight": 4, "layers.1.weight": 2}, [4, 2]),
        ({"layers.1.weight": 2}, [2, 2]),
        ({"layers.0._checkpoint_wrapped_module.weight": 4}, [4, 2]),
        ({"elsewhere.weight": 4}, [4, 2]),
    ],
)
def test_a_plan_asks_for_groups_on_each_mesh(
    fake_group_of_eight: None, buckets: dict[str, int], sizes: list[int]
) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    fully_shard(model.layers[0])
    fully_shard(model.layers[1], mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("node", "shard"))["shard"])
    configure(model, memory_budget="1GiB", profile=NODES)
    gathers = tuple(Bucket("Linear:", (fqn,), "float32", 1, num_ranks=size) for fqn, size in buckets.items())
    backward = Plan("backward", gathers=gathers)
    configure(model, plan=Plan("joint", slices=tuple(buckets), forward=Plan("forward"), backward=backward))
    assert [unit.may_slice and unit.may_slice.num_shards for unit in units_in(model)] == sizes


def test_a_plan_asks_for_groups_of_one_size_on_a_mesh(fake_group_of_eight: None) -> None:
    model = shard(Stack(1))
    names = ("layers.0.up.weight", "layers.0.down.weight")
    gathers = tuple(Bucket("Block:layers.0", (fqn,), "float32", 1, num_ranks=size) for fqn, size in zip(names, (2, 4)))
    with pytest.raises(ValueError, match=r"slices of \[2, 4\] ranks on one mesh\. Have as many ranks in each bucket"):
        configure(model, plan=Plan("joint", slices=names, backward=Plan("backward", gathers=gathers)))


# --- models ----------------------------------------------------------------------------------------------------------


TOKENS = torch.arange(10).view(2, 5)


def budget_of(model: Any, batch: Tensor) -> int:
    """What keeping slices of everything takes."""
    configure(model, memory_budget=1, profile=NODES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing fits into a byte
        choice = planned(model, batch).choice
    torch._dynamo.reset()
    assert choice is not None
    return next(one.peak_bytes for one in (choice.chosen, *choice.lost) if one.name == SLICED)


def planned_with(model: Any, **options: Any) -> Plan:
    configure(model, **options)
    return planned(model)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))


class OtherOwn(Own): ...


class ThirdOwn(Own): ...


class ReadsOthers(nn.Module):
    """No reader says whose these weights are, so they share a name."""

    def __init__(self, *owns: Own) -> None:
        super().__init__()
        self.owns = nn.ModuleList(owns)
        for own in owns:
            fully_shard(own)
        fully_shard(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens, 64).float()
        for own in self.owns:
            x = F.linear(x, own.weight).relu()  # type: ignore[arg-type]
        return x


def test_parameters_that_share_a_name_may_be_kept_as_slices(fake_group_of_four: None) -> None:
    model = ReadsOthers(Own(), OtherOwn(), ThirdOwn())
    plan = planned_with(model)
    assert sorted(plan.params) == ["weight", "weight@2", "weight@3"] and not plan.slices
    planned_with(model, memory_budget="1GiB", profile=NODES)  # tries slices, and makes the groups for them
    sliced = planned_with(model, plan=dataclasses.replace(plan, slices=("weight@2",)))
    assert sliced.slices == ("weight@2",) and sliced.backward is not None
    ranks = {fqn: bucket.num_ranks for bucket in sliced.backward.gathers for fqn in bucket.fqns}
    assert ranks == {"weight": 4, "weight@2": 2, "weight@3": 4}
    assert planned_with(model, plan=sliced).id == sliced.id


def test_units_that_share_a_name_are_two_to_a_budget(fake_group_of_four: None) -> None:
    plan = planned_with(ReadsOthers(Own(), Own()), memory_budget="1GiB", profile=NODES)
    assert plan.choice is not None, "the graph was taken for less than the step"


@pytest.mark.slow
def test_the_plan_names_its_slices_comes_back_and_may_have_one_taken_out(fake_group_of_four: None) -> None:
    model = shard(Stack(6))
    before = planned_with(model)
    configure(model, memory_budget=budget_of(model, TOKENS), profile=NODES)
    with inspect(model) as report:
        torch.compile(model, backend="aot_eager", fullgraph=True)(TOKENS).sum().backward()
    plan, text = report.joint.plan, str(report)
    assert {"layers.0.up.weight", "layers.0.down.weight"} <= {*plan.slices}
    assert "memory budget; from the slices that are kept" in text and f" kept, slices of {len(plan.slices)}" in text
    assert plan.choice is not None and f"{len(plan.slices)} sliced" in str(plan.choice)
    assert planned_with(model, memory_budget=None).id == before.id, "a budget that is taken back leaves no slices"
    other = shard(Stack(6))  # that had no budget: the plan says how many ranks
    assert planned_with(model, plan=plan).id == planned_with(other, plan=plan).id == plan.id
    fewer = dataclasses.replace(plan, slices=tuple(fqn for fqn in plan.slices if "layers.0" not in fqn))
    followed = planned_with(model, plan=fewer)
    assert followed.slices == fewer.slices and followed.backward is not None
    ranks = {fqn: bucket.num_ranks for bucket in followed.backward.gathers for fqn in bucket.fqns}
    assert (ranks["layers.0.up.weight"], ranks["layers.1.up.weight"]) == (4, 2)


def _trained() -> tuple[Plan, list[int]]:
    unsharded, model = pair(make=lambda: Stack(8), reshard_after_forward=True)
    # The budget is so small that slices do better than whole parameters.
    configure(model, memory_budget=budget_of(model, batches(0)[dist.get_rank()]) * 72 // 100, profile=NODES)
    with inspect(model) as report:
        train_and_compare(torch.compile(model, fullgraph=True), model, unsharded)
    backward = report.joint.plan.backward
    assert backward is not None
    return report.joint.plan, [bucket.num_ranks for bucket in backward.gathers]


@pytest.mark.slow
def test_slices_train_like_the_unsharded_model(four_ranks: Ranks) -> None:
    found = four_ranks.run(_trained)
    assert all(plan.slices == found[0][0].slices and plan.slices for plan, _ in found)
    assert {*found[0][1]} >= {2}
