"""Activations that backward computes again, so that a step fits into a byte budget: which, at what price, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile import configure, fully_shard, inspect
from fsdp_compile.demo.training import DemoSettings, batch_of, build_model, shard_with_ours
from fsdp_compile.passes.budget.residency import AGAIN, KEPT, LEAN, choose
from fsdp_compile.passes.budget.trial import Trial, trial_of
from fsdp_compile.passes.cost.memory import results_of, saved_by
from fsdp_compile.passes.ir.markers import change_spec
from fsdp_compile.passes.ir.provenance import settle_names
from fsdp_compile.passes.schedule.activations import activations_of, compute_again
from fsdp_compile.passes.schedule.calls import name_markers
from tests.comparing import assert_same_grads
from tests.models import twins
from tests.ranks import Ranks
from tests.recording import planned
from tests.test_budget import GROUPS, _peak_above
from tests.test_cost import TOY
from tests.test_passes import Builder, spec

aten = torch.ops.aten
KIB = 1 << 10
UP, DOWN = "up.weight", "down.weight"


def two_blocks() -> fx.Graph:
    """h1 = h0 + relu(h0 @ up0) @ down0, h2 likewise. What is between the products is four times as wide."""
    b = Builder()
    its = {UP: spec(UP, (64, 256)), DOWN: spec(DOWN, (256, 64))}
    names = [(layer, name) for layer in range(2) for name in its]
    sizes = {UP: (32, 256), DOWN: (128, 64)}
    shards = [b.input(f"primals_{place + 1}", *sizes[name]) for place, (_, name) in enumerate(names)]
    h, grad = b.input("primals_5", 256, 64), b.input("tangents_1", 256, 64)
    weights = {
        key: b.unshard(one, its[key[1]], f"{key[0]}.{key[1].split('.')[0]}") for key, one in zip(names, shards)
    }
    layers = []
    for layer in range(2):
        up, down = weights[layer, UP], weights[layer, DOWN]
        wide = b.call(aten.relu.default, b.call(aten.mm.default, h, up))
        layers.append((h, up, wide, down))
        h = b.call(aten.add.Tensor, h, b.call(aten.mm.default, wide, down))
    grads = []
    for read, up, wide, down in reversed(layers):
        of_down = b.call(aten.mm.default, b.call(aten.t.default, wide), grad)
        of_wide = b.call(aten.mm.default, grad, b.call(aten.t.default, down))
        of_wide = b.call(aten.threshold_backward.default, of_wide, wide, 0)
        of_up = b.call(aten.mm.default, b.call(aten.t.default, read), of_wide)
        grad = b.call(aten.add.Tensor, grad, b.call(aten.mm.default, of_wide, b.call(aten.t.default, up)))
        grads[:0] = [b.reduce(of_up, its[UP], of=up), b.reduce(of_down, its[DOWN], of=down)]
    graph = b.output(h, *grads, grad)
    name_markers(graph)
    settle_names(graph)
    return graph


EVERYTHING = ("0.down.weight", "0.up.weight", "1.down.weight", "1.up.weight")


def _names(graph: fx.Graph) -> dict[str, list[str]]:
    return {name: [node.name for node in nodes] for name, nodes in activations_of(graph).items()}


def test_what_stays_inside_of_a_unit_can_be_computed_again_by_the_name_of_its_matrix() -> None:
    # The products with down, and their sums, are what units hand on.
    assert _names(two_blocks()) == {
        "0.up.weight": ["mm_default"],
        "0.down.weight": ["relu_default"],
        "1.up.weight": ["mm_default_2"],
        "1.down.weight": ["relu_default_1"],
    }


def test_whether_a_matrix_is_kept_says_nothing_of_what_is_computed_with_it() -> None:
    graph = two_blocks()
    for node in graph.find_nodes(op="call_function", target=torch.ops.fsdpc.unshard.default):
        change_spec(node, regather=False)
    before = str(graph)
    assert _names(graph) == _names(two_blocks())
    assert str(graph) == before


def test_what_checkpointing_has_is_left_to_it() -> None:
    graph = two_blocks()
    told = next(node for node in graph.nodes if node.name == "relu_default")
    told.meta["recompute"], told.meta["ac_graph_id"] = CheckpointPolicy.MUST_SAVE, 1
    assert "0.down.weight" not in activations_of(graph)
    compute_again(graph, EVERYTHING)
    assert told.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def _saved(trial: Trial) -> set[str]:
    """What forward computes and saves, whether as it is or transposed."""
    saved = results_of(trial.forward.graph)[saved_by(trial.forward.graph, trial.backward.graph) :]
    nodes = [one.args[0] if one.target is aten.t.default else one for one in saved if isinstance(one, fx.Node)]
    return {one.name for one in nodes if isinstance(one, fx.Node) and one.op == "call_function"}


def _products(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.find_nodes(op="call_function", target=aten.mm.default)]


def test_a_trial_saves_what_units_hand_on_and_backward_makes_the_rest() -> None:
    saving, lean = (trial_of(two_blocks(), (), TOY, GROUPS, recompute=which) for which in ((), EVERYTHING))
    assert _saved(saving) == {"relu_default", "relu_default_1", "add_tensor"}
    assert _saved(lean) == {"add_tensor"}
    assert {*_products(lean.backward.graph)} - {*_products(saving.backward.graph)} == {"mm_default", "mm_default_2"}
    assert lean.plan.recompute == EVERYTHING and saving.plan.recompute == ()
    # Of the two wide results one is there when backward is at its most.
    assert saving.peak_bytes - lean.peak_bytes >= 256 * KIB
    assert lean.backward.timeline.compute_s > saving.backward.timeline.compute_s
    assert lean.forward.timeline.total_s == saving.forward.timeline.total_s


def test_half_of_it_is_computed_again_by_half_of_the_names() -> None:
    one = trial_of(two_blocks(), (), TOY, GROUPS, recompute=("0.down.weight", "0.up.weight"))
    assert _saved(one) == {"relu_default_1", "add_tensor"}
    # Without the product that it is made of, there is the product to save.
    light = trial_of(two_blocks(), (), TOY, GROUPS, recompute=("0.down.weight",))
    assert _saved(light) == {"mm_default", "relu_default_1", "add_tensor"}


def test_a_budget_below_what_parameters_alone_can_do_is_met_by_computing_again() -> None:
    least = min(trial_of(two_blocks(), kept, TOY, GROUPS).peak_bytes for kept in ((), EVERYTHING))
    steps = []
    for budget in (least - 1, 1 << 30):
        best, lost = choose(two_blocks(), lambda trial, budget=budget: budget, TOY, GROUPS)
        chosen, names = best.figures, {one.name for one in (best, *lost)}
        assert chosen.peak_bytes <= budget
        assert bool(chosen.recomputed) == (LEAN in names) == (budget < least)  # where there is room nothing is
        assert {AGAIN, KEPT} <= names
        steps.append(chosen)
    seconds = [step.seconds for step in steps]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]


# --- models ----------------------------------------------------------------------------------------------------------


SIZES = DemoSettings(layers=3, dim=128, batch=8, seq=256, head_dim=32, vocab=256)


def _trained_within(shares: tuple[float, ...]) -> list[tuple[int, int, int, tuple[str, ...]]]:
    """Of budgets so far from the least to everything kept: bytes, predicted peak, what the step took, what is again."""
    batch = batch_of(SIZES, dist.get_rank())
    unsharded = build_model(SIZES)
    torch.stack([unsharded(batch_of(SIZES, rank)) for rank in range(2)]).mean().backward()
    model = shard_with_ours(build_model(SIZES), init_device_mesh("cpu", (2,)))
    configure(model, memory_budget=1)
    choice = planned(model, batch, "inductor").choice
    assert choice is not None
    peaks = {one.name: one.peak_bytes for one in (choice.chosen, *choice.lost)}
    found = []
    for share in shares:
        model.zero_grad()
        budget = int(peaks[LEAN] + share * (peaks[KEPT] - peaks[LEAN]))
        configure(model, memory_budget=budget)
        with inspect(model) as report:
            run = torch.compile(model, fullgraph=True)
            run(batch).backward()
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-3)
        held = sum(one.to_local().nbytes for one in model.parameters()) + batch.nbytes  # type: ignore[attr-defined]

        def step(run: Callable[[Tensor], Tensor] = run) -> None:
            model.zero_grad()
            run(batch).backward()

        step()
        plan = report.joint.plan
        assert plan.choice is not None
        model.zero_grad()
        found.append((budget, plan.choice.chosen.peak_bytes, held + _peak_above(step), plan.recompute))
    return found


@pytest.mark.filterwarnings("ignore:memory_budget is 1 byte")
@pytest.mark.slow
def test_steps_within_small_budgets_take_what_was_predicted_and_train_the_same(two_ranks: Ranks) -> None:
    here, there = two_ranks.run(_trained_within, (0.0, 0.4, 1.0))
    assert [one[3] for one in here] == [one[3] for one in there]
    assert len(here[0][3]) > len(here[1][3]) > len(here[2][3]) == 0
    for budget, predicted, measured, _ in (*here, *there):
        assert predicted <= budget
        assert measured <= 1.2 * budget  # 15 % off at the least, where a kernel holds what it concatenates, 11 % at 0.4
    assert here[0][2] < 0.6 * here[2][2]


class Noisy(nn.Module):
    """Random numbers between the products of a block."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.3)
        return x + nn.functional.dropout(self.down(wide), 0.1)


def _noisy() -> tuple[tuple[str, ...], str]:
    """Gradients with everything computed again, beside those of the unsharded model on the same random numbers."""
    unsharded, model = twins(lambda: nn.Sequential(*[Noisy() for _ in range(2)]))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(64, 32)
    configure(model, memory_budget=1)
    with torch._inductor.config.patch(fallback_random=True), inspect(model) as report:
        torch.manual_seed(7)
        torch.compile(model, backend="aot_eager", fullgraph=True)(x).pow(2).sum().backward()
        torch._dynamo.reset()
        torch.manual_seed(7)
        torch.compile(unsharded, backend="aot_eager", fullgraph=True)(x).pow(2).sum().backward()
    assert_same_grads(model, unsharded, atol=1e-4, rtol=1e-3)
    return report.joint.plan.recompute, report.joint.plan.id


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:memory_budget is 1 bytes")
def test_random_numbers_are_not_drawn_again(two_ranks: Ranks) -> None:
    (recomputed, id_here), (_, id_there) = two_ranks.run(_noisy)
    assert {"0.up.weight", "1.up.weight"} <= {*recomputed} and id_here == id_there
