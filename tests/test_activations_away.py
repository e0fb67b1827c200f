"""Activations in the host's memory from forward to backward: where they are copied, in which order, what that changes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fsdp_compile import configure, inspect
from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.passes import Plan
from fsdp_compile.passes.budget.residency import MAY, choose, told_to_keep
from fsdp_compile.passes.budget.trial import Trial, trial_of
from fsdp_compile.passes.cost.fusion import is_pointwise
from fsdp_compile.passes.cost.memory import saved_by, taken_as
from fsdp_compile.passes.cost.roofline import is_product
from fsdp_compile.passes.ir.meta import OFFLOADED, ROLE
from fsdp_compile.passes.ir.provenance import settle_names
from fsdp_compile.passes.schedule.activations import matrices_of
from fsdp_compile.passes.wire import streams
from fsdp_compile.passes.wire.collectives import is_launch, is_wait
from fsdp_compile.passes.wire.copies import is_copy
from fsdp_compile.passes.wire.ledger import begin
from tests.comparing import full, loss_of
from tests.models import EvenBlock, Stack, shard
from tests.ordering import History, watched
from tests.ranks import Ranks
from tests.recording import planned, recorded
from tests.test_budget import GROUPS, _peak_above
from tests.test_cost import TOY
from tests.test_recompute import Noisy, two_blocks

# Each activation of a model 32 wide has 128 KiB.
TOKENS = torch.arange(1024).view(8, 128) % 31


def _stack() -> Stack:
    return shard(Stack(3, dim=32, block=EvenBlock))


def matrices_in(plan: Plan, where: str = "layers.") -> tuple[str, ...]:
    """The matrices of blocks, or of other modules."""
    return tuple(fqn for fqn in plan.params if where in fqn and fqn.endswith(("up.weight", "down.weight")))


def offload(model: nn.Module, batch: Tensor = TOKENS, where: str = "layers.", **changes: Any) -> None:
    """Give a model its own plan, with the activations of its blocks on the host."""
    plan = planned(model, batch)
    configure(model, plan=dataclasses.replace(plan, offload=matrices_in(plan, where), **changes))
    torch._dynamo.reset()


def _graphs(model: nn.Module, batch: Tensor = TOKENS, backend: str = "passes") -> dict[str, fx.Graph]:
    with recorded() as records:
        torch.compile(model, backend=backend, fullgraph=True)(batch).sum().backward()
    return {one.stage: one.graph for one in records}


def said(graph: fx.Graph) -> str:
    """Copies and the waits for them, gathers and products."""
    lines: list[str] = []
    for node in graph.nodes:
        if is_copy(node):
            lines.append(f"{node.target.name().rpartition('launch_')[2]} {node.meta[OFFLOADED][0]}")
        elif is_wait(node) and is_copy(node.args[0]):
            lines.append(f"    wait {node.args[0].meta[OFFLOADED][0]}")
        elif is_launch(node) and node.meta[ROLE].kind == "gather":
            lines.append(f"gather {node.meta[ROLE].unit}")
        elif is_product(node) and ROLE not in node.meta:
            lines.append("product")
    return "\n".join(lines) + "\n"


@pytest.mark.usefixtures("fake_group_of_four")
def test_copies_go_behind_their_last_use_and_come_back_a_unit_ahead() -> None:
    model = _stack()
    offload(model)
    graphs = _graphs(model)
    assert_expected_inline(said(graphs["forward"]), """\
gather Stack:
gather EvenBlock:layers.0
gather EvenBlock:layers.1
product
to_host layers.0.up.weight
product
gather EvenBlock:layers.2
to_host layers.0.down.weight
product
to_host layers.1.up.weight
    wait layers.0.up.weight
product
gather Stack:
to_host layers.1.down.weight
    wait layers.0.down.weight
to_host layers.1.up.weight
product
to_host layers.2.up.weight
    wait layers.1.up.weight
product
to_host layers.2.down.weight
    wait layers.1.down.weight
to_host layers.2.up.weight
    wait layers.1.up.weight
product
    wait layers.2.up.weight
    wait layers.2.up.weight
    wait layers.2.down.weight
""")
    assert_expected_inline(said(graphs["backward"]), """\
to_device layers.2.down.weight
to_device layers.2.up.weight
to_device layers.2.up.weight
gather EvenBlock:layers.2
product
product
gather EvenBlock:layers.1
to_device layers.1.down.weight
to_device layers.1.up.weight
to_device layers.1.up.weight
product
    wait layers.2.down.weight
product
product
    wait layers.2.up.weight
product
    wait layers.2.up.weight
gather EvenBlock:layers.0
to_device layers.0.down.weight
to_device layers.0.up.weight
product
    wait layers.1.down.weight
product
product
    wait layers.1.up.weight
product
    wait layers.1.up.weight
product
    wait layers.0.down.weight
product
product
    wait layers.0.up.weight
product
""")


FAULTS = {
    "to_host reads what current writes": ("wait", "to_host", "current"),
    "current is given what to_host reads": ("wait", "current", "to_host"),
    "to_device reads what to_host writes": ("wait", "current", "to_host"),
    "current reads what to_device writes": ("wait", "current", "to_device"),
}


@pytest.mark.usefixtures("fake_group_of_four")
def test_copies_are_in_order_with_what_computes_and_a_wait_that_is_left_out_is_found() -> None:
    """On a device with streams, where graphs run without Inductor."""
    model = _stack()
    offload(model)
    graphs = _graphs(model)
    for graph in graphs.values():
        for node in graph.find_nodes(op="call_function", target=begin):
            graph.erase_node(node)
    forward, backward = (fx.GraphModule({}, graphs[stage]) for stage in ("forward", "backward"))
    num_results = saved_by(forward.graph, backward.graph)
    names = ["result"] * num_results + taken_as(forward.graph, backward.graph, num_results)
    asked = set()

    def unordered(skipped: tuple[str, ...] = ()) -> set[str]:
        """The accesses of a step that nothing would order."""
        history = History(lambda *what: asked.add(what) or what == skipped)
        with watched(history, model):
            inputs = {node.name: _zeros(node) for node in forward.graph.find_nodes(op="placeholder")}
            inputs |= dict(zip(names, forward(*inputs.values())))
            taken = backward.graph.find_nodes(op="placeholder")
            backward(*[inputs.pop(node.name) if node.name in inputs else _zeros(node) for node in taken])
        return history.unordered

    assert unordered() == set()
    assert {what[1:] for what in FAULTS.values()} <= {what[1:] for what in asked if what[0] == "wait"}
    for found, skipped in FAULTS.items():
        assert found in unordered(skipped)


def _zeros(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype)


# --- models ----------------------------------------------------------------------------------------------------------


def _noisy() -> nn.Module:
    """Random numbers between the products, and one matrix that looks up and multiplies."""
    torch.manual_seed(0)
    return shard(Stack(1, dim=32, tied=True, block=Noisy))


def _trained(backend: str, away: bool, dynamic: bool | None = None, lengths: Collection[int] = (128,)) -> list[Tensor]:
    """The gradients of some steps, and what the model is then."""
    model = _noisy()
    if away:
        offload(model, where="")
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    found = []
    for step, length in enumerate(lengths):
        torch.manual_seed(step)
        tokens = torch.randint(0, 31, (8, length), generator=torch.Generator().manual_seed(dist.get_rank()))
        loss_of(run(tokens)).backward()
        found += [full(one.grad).clone() for one in model.parameters()]
        optim.step()
        optim.zero_grad()
    return [*found, *(full(one).detach().clone() for one in model.parameters())]


def _compared(backend: str, dynamic: bool | None, lengths: Collection[int]) -> int:
    """How many activations were copied; raises if anything is another number than where they stayed."""
    ours, theirs = [], []
    with recorded() as records:
        ours = _trained(backend, True, dynamic, lengths)
    torch._dynamo.reset()
    theirs = _trained(backend, False, dynamic, lengths)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    return sum(is_copy(node) for one in records if one.stage == "forward" for node in one.graph.nodes)


@pytest.mark.parametrize(
    ("backend", "dynamic", "lengths"),
    [
        ("passes", True, (128, 96, 160)),
        pytest.param("inductor", True, (128, 96), marks=pytest.mark.more),
    ],
)
def test_numbers_are_those_of_a_step_that_keeps_them_on_the_device(
    two_ranks: Ranks, backend: str, dynamic: bool | None, lengths: tuple[int, ...]
) -> None:
    here, there = two_ranks.run(_compared, backend, dynamic, lengths)
    assert here == there >= 3


def test_one_process_alone_copies_as_well() -> None:
    with pretended_world(1, "gloo"):
        assert _compared("passes", None, (128, 128)) >= 3
    torch._dynamo.reset()


# --- within a budget -------------------------------------------------------------------------------------------------


def _joint(model: nn.Module | None = None, batch: Tensor = TOKENS, backend: str = "passes") -> fx.Graph:
    """Of a model, else one with four blocks, as a search gets it."""
    with recorded() as records:
        planned(model or shard(Stack(4, dim=32, block=EvenBlock)), batch, backend)
    joint: fx.Graph = records[0].snapshots[3]
    settle_names(joint)
    return joint


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_budget_below_what_computing_again_can_do_is_met_by_the_host() -> None:
    joint = _joint()
    least, lower = (choose(joint, lambda trial: 1, TOY, may=may)[0].figures for may in (MAY[:2], MAY))
    assert lower.peak_bytes < least.peak_bytes
    best, lost = choose(joint, lambda trial: least.peak_bytes - 1, TOY, may=MAY)
    found = best.figures
    assert lower.peak_bytes <= found.peak_bytes < least.peak_bytes and found.offloaded
    assert found.offloaded_bytes > 0 and found.copied_s > 0
    # The least bytes cost no less time than these, and the best is what a cut of its own says.
    assert all(one.figures.seconds >= found.seconds for one in lost if one.figures.peak_bytes < least.peak_bytes)
    trial = trial_of(joint, found.kept, TOY, None, False, found.recomputed, (), found.lookahead, found.offloaded)
    assert trial.halves().figures() == found
    # Activations only: the units' own settings say which parameters are kept.
    best, lost = choose(joint, lambda trial: 1, TOY, may=("offload",))
    assert {one.figures.kept for one in (best, *lost)} == {told_to_keep(joint)}
    assert best.figures.offloaded and not any(one.figures.recomputed for one in (best, *lost))


class _WithLoss(Stack):
    """Cross entropy's gradient reads the logits, and each row's maximum and sum."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens).flatten(0, -2)
        return nn.functional.cross_entropy(logits.float(), tokens.flatten())


@pytest.mark.usefixtures("fake_group_of_four")
def test_backward_still_computes_what_it_does_without_copies() -> None:
    joint = _joint(shard(_WithLoss(2, dim=32, block=EvenBlock).bfloat16()), TOKENS.repeat(8, 1), "decomposed")
    kept, away = (trial_of(joint, (), TOY, offload=names) for names in ((), {one.fqn for one in matrices_of(joint).values()}))

    def computed(trial: Trial) -> set[str]:
        return {node.name for node in trial.backward.graph.nodes if is_pointwise(node)}

    assert len(away.offloaded) > 4 and computed(kept) <= computed(away)
    assert away.peak_bytes < kept.peak_bytes


def test_without_the_word_and_with_room_nothing_leaves() -> None:
    best, lost = choose(two_blocks(), lambda trial: 1, TOY, GROUPS)
    assert not any(one.figures.offloaded for one in (best, *lost))
    best, _ = choose(two_blocks(), lambda trial: 1 << 30, TOY, GROUPS, MAY)
    assert not best.figures.offloaded


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_choice_is_printed_and_travels() -> None:
    model = _stack()
    with pytest.warns(UserWarning, match="memory_budget is 1 bytes"):
        configure(model, memory_budget=1, may=MAY)
        with inspect(model) as report:
            torch.compile(model, backend="passes", fullgraph=True)(TOKENS).sum().backward()
    plan = report.joint.plan
    assert plan.choice is not None and plan.offload
    assert plan.choice.chosen.num_offloaded == len(plan.offload) > 0
    assert Plan.from_json(plan.to_json()).offload == plan.offload
    printed = str(report)
    assert f"activations of {len(plan.offload)} on the host" in printed and " ms of copies)" in printed
    assert re.search(r"\d+ activations, [\d.]+ KiB, copied to the host in [\d.]+ ms, [\d.]+ of them waited for", printed)
    assert re.search(r"\d+ activations, [\d.]+ KiB, copied from the host in", printed)


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize("may", ["offload", ("offload", "gathers"), ()])
def test_words_that_nobody_knows_are_refused(may: Any) -> None:
    model = _stack()
    with pytest.raises(ValueError, match=r"may=.* is not a tuple of some of 'gather', 'recompute', 'offload'"):
        configure(model, memory_budget="1GiB", may=may)
    with pytest.raises(ValueError, match=r"may is what a memory_budget may choose"):
        configure(model, may=("gather",))
    with pytest.raises(ValueError, match=r"a budget cannot move its shards\. `fsdp-compile plan` with .* shards`"):
        configure(model, memory_budget="1GiB", may=("gather", "shards"))


# --- what is measured ------------------------------------------------------------------------------------------------


class _HostApart(streams.Accelerator):
    """The host's memory is none that torch's allocator gives out, so a profile shows the device's alone."""

    def on_host(self, like: Tensor, pinned: bool) -> Tensor:
        memory = torch.frombuffer(bytearray(like.untyped_storage().nbytes()), dtype=like.dtype)
        return memory.as_strided(like.size(), like.stride())


def _measured(may: tuple[str, ...]) -> tuple[int, int, int, int]:
    """Of the least budget: the bytes predicted and measured, those on the host, and how many matrices' those are."""
    batch = torch.arange(2048).view(8, 256) % 31
    model = shard(Stack(4, dim=128, block=EvenBlock))
    configure(model, memory_budget=1, may=may)
    # Else Inductor keeps memory that it may use later, of which no prediction knows.
    no_reuse = torch._inductor.config.patch(allow_buffer_reuse=False)
    with patch.object(streams, "accelerator", _HostApart()), no_reuse:
        with inspect(model) as report:
            run = torch.compile(model, fullgraph=True)
            run(batch).sum().backward()
        held = sum(one.to_local().nbytes for one in model.parameters()) + batch.nbytes  # type: ignore[attr-defined]

        def step() -> None:
            model.zero_grad()
            run(batch).sum().backward()

        step()
        model.zero_grad()
        measured = held + _peak_above(step)
    choice = report.joint.plan.choice
    assert choice is not None
    its = choice.chosen
    return its.peak_bytes, measured, its.offloaded_bytes, its.num_offloaded


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:memory_budget is 1 byte")
def test_the_device_holds_what_was_predicted(two_ranks: Ranks) -> None:
    for predicted, measured, away, count in two_ranks.run(_measured, ("gather", "offload")):
        assert count > 0 and away > 0
        assert measured == pytest.approx(predicted, rel=0.05)
