"""Plans that somebody edited and gave back: followed as they are, or refused with what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx

from fsdp_compile import configure
from fsdp_compile.passes import Plan
from fsdp_compile.passes.ir.markers import change_spec
from fsdp_compile.passes.schedule.given import fitted
from fsdp_compile.passes.schedule.planner import plan_joint
from tests.comparing import assert_same_grads, batches, loss_of, mine, reference_backward
from tests.compiling import compiled
from tests.models import Stack, pair, shard
from tests.on_ranks import on_two_ranks
from tests.recording import planned, plans_made
from tests.test_budget import five_products


def _half(half: Plan | None, **changes: object) -> Plan:
    assert half is not None
    return dataclasses.replace(half, **changes)  # type: ignore[arg-type]


def _edited(plan: Plan) -> Plan:
    """Keep the last block's matrices, and have the first one's parameters travel apart."""
    forward = _half(plan.forward)
    kept = tuple(fqn for fqn in plan.again if fqn.startswith("layers.1.") and "weight" in fqn)
    apart = [
        dataclasses.replace(bucket, fqns=(fqn,))
        for bucket in forward.gathers
        for fqn in bucket.fqns
        if fqn.startswith("layers.0.")
    ]
    others = [bucket for bucket in forward.gathers if not bucket.fqns[0].startswith("layers.0.")]
    return dataclasses.replace(
        plan,
        keep=(*plan.keep, *kept),
        forward=_half(forward, gathers=(*others, *apart), order=()),
    )


@on_two_ranks
def test_an_edited_plan_is_followed_and_trains_the_same() -> None:
    """Also where gradients are held back: that backward reduces nothing, so it reads less than the plan gathers."""
    unsharded, sharded = pair(reshard_after_forward=True)
    plan = planned(sharded, backend="passes")
    names = [fqn for fqn in plan.again if fqn.startswith("layers.0.") and fqn.endswith("weight") and "norm" not in fqn]
    edited = dataclasses.replace(_edited(plan), recompute=(names[-1],))
    configure(sharded, plan=Plan.from_json(edited.to_json()))
    run = compiled(sharded, "passes")
    with plans_made() as plans:
        for step in range(4):  # the first two and the last two together
            sharded.set_requires_gradient_sync(step % 2 == 1)
            loss_of(run(mine(step))).backward()
            reference_backward(unsharded, batches(step))
    assert_same_grads(sharded, unsharded)
    followed = plans[-1]
    assert followed.keep and set(followed.keep) == set(edited.keep) and followed.recompute == edited.recompute
    forward, backward = _half(followed.forward), _half(followed.backward)
    assert [bucket.fqns for bucket in forward.gathers] == [bucket.fqns for bucket in _half(edited.forward).gathers]
    # With what is computed again as well, which is gathered in any case.
    assert {fqn for bucket in backward.gathers for fqn in bucket.fqns} == {*plan.again} - {*followed.keep}
    assert sorted(forward.order) == sorted(("gather", index) for index in range(len(forward.gathers)))


def _with_another_model(plan: Plan) -> Plan:
    return dataclasses.replace(plan, keep=(*plan.keep, "other.weight"))


def _without_one(plan: Plan) -> Plan:
    forward = _half(plan.forward)
    return dataclasses.replace(plan, forward=_half(forward, gathers=forward.gathers[1:], order=()))


def _twice(plan: Plan) -> Plan:
    forward = _half(plan.forward)
    return dataclasses.replace(plan, forward=_half(forward, gathers=(*forward.gathers, forward.gathers[0])))


def _mixed(plan: Plan) -> Plan:
    forward = _half(plan.forward)
    fqns = tuple(fqn for bucket in forward.gathers for fqn in bucket.fqns)
    return dataclasses.replace(plan, forward=_half(forward, gathers=(dataclasses.replace(forward.gathers[0], fqns=fqns),)))


def _short_order(plan: Plan) -> Plan:
    backward = _half(plan.backward)
    return dataclasses.replace(plan, backward=_half(backward, order=backward.order[1:]))


def _ahead(plan: Plan, num_units: int, in_halves: int) -> Plan:
    halves = {name: _half(getattr(plan, name), lookahead=in_halves, order=()) for name in ("forward", "backward")}
    return dataclasses.replace(plan, lookahead=num_units, **halves)


@pytest.fixture
def graph() -> fx.Graph:
    """A step of five units, one of which lets nobody share its bucket."""
    graph = five_products()
    change_spec(graph.find_nodes(op="call_function", target=torch.ops.fsdpc.unshard.default)[0], bucketing="none")
    return graph


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_with_another_model, r"keeps other\.weight, which the graph does not gather.*that can have 0\.weight"),
        (_without_one, r"too many are \[\], and there should be \['.*'\]"),
        (_twice, r"gathers in forward each of its parameters once: too many are \['"),
        (_short_order, "does not name each of its buckets once"),
        (_mixed, r"in one bucket\. What shares a bucket travels in one dtype"),
        (lambda plan: plan.forward, "a plan of a forward graph was given"),
        (lambda plan: dataclasses.replace(plan, order=(("gather", 0),)), "those of a step are in its `forward` and `backward`"),
        (lambda plan: _ahead(plan, 0, 0), r"lookahead=0, 0 in forward .* give 1 or more"),
        (lambda plan: _ahead(plan, 1, 0), r"lookahead=1, 0 in forward .* give 1 or more"),
        (lambda plan: _ahead(plan, 2, 1), r"lookahead=2, 1 in forward .* all three the same, and leave `order`"),
        (
            lambda plan: dataclasses.replace(plan, recompute=("7.weight",)),
            r"computed with 7\.weight, .*here that can have nothing",
        ),
        (
            lambda plan: dataclasses.replace(plan, offload=("7.weight",)),
            r"activations of 7\.weight on the host.*Take it out of `offload`; here",
        ),
        (
            lambda plan: dataclasses.replace(plan, slices=("0.weight",)),
            r"keeps slices of 0\.weight, and the ranks .* no groups for that",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(graph: fx.Graph, edit: Callable[[Plan], Plan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(edit(plan_joint(graph)), graph)


def test_no_plan_is_followed_where_the_partitioner_has_a_budget_of_its_own(graph: fx.Graph) -> None:
    plan = plan_joint(graph)
    message = "a plan was given, and torch's activation_memory_budget is set"
    with torch._functorch.config.patch(activation_memory_budget=0.5), pytest.raises(ValueError, match=message):
        fitted(plan, graph)


def test_a_plan_may_have_gathers_launched_further_ahead(graph: fx.Graph) -> None:
    plan = plan_joint(graph)
    followed = fitted(_ahead(plan, 2, 2), graph)
    for ours, theirs in ((plan.forward, followed.forward), (plan.backward, followed.backward)):
        ours, theirs = _half(ours), _half(theirs)
        assert (theirs.lookahead, theirs.gathers, theirs.reduces) == (2, ours.gathers, ours.reduces)
    # In forward there are nothing but gathers, and they have one order.
    assert _half(followed.backward).order != _half(plan.backward).order


def test_a_plan_is_a_plan(fake_group_of_four: None) -> None:
    with pytest.raises(TypeError, match=r"plan is a Plan .* not str"):
        configure(shard(Stack(1)), plan="plan.json")  # type: ignore[arg-type]
