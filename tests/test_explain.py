"""Why a collective is exposed: of event lists worked out by hand, and of models that are made so."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compile
from fsdp_compile import Explanation, MixedPrecisionPolicy, explain, fully_shard
from fsdp_compile.core.unit import units_in
from fsdp_compile.passes import Bucket, ParamSpec
from fsdp_compile.passes.cost.owners import _StorageNames
from fsdp_compile.passes.cost.replay import QUEUED, Compute, Event, Launch, Wait, simulate
from fsdp_compile.passes.cost.verdicts import COMPUTE, DEPENDENCY, HIDDEN, MEMORY, ORDER, Verdict, Verdicts
from fsdp_compile.passes.ir.aliases import storages_of
from fsdp_compile.passes.ir.meta import ROLE
from fsdp_compile.passes.wire import layout
from fsdp_compile.tools.explain import why_apart
from tests.compiling import passes
from tests.models import Apart
from tests.test_budget import Steps
from tests.test_cost import TOY
from tests.test_passes import spec

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


def verdict(*events: Event, room: int | None = None) -> Verdict:
    """Of the last collective that is waited for."""
    timeline = simulate(events)
    return Verdicts(events, timeline, room).of(timeline.exposed[-1])


def gather(name: str, seconds: float, num_bytes: int = 0) -> Launch:
    return Launch(name, seconds, "g", allocs=((name, num_bytes),) if num_bytes else ())


def test_what_hides_when_launched_earlier_is_the_orders_fault() -> None:
    found = verdict(Compute("a", 5.0), gather("w", 3.0), Compute("b", 1.0), Wait("w"), Compute("c", 1.0))
    assert (found.cause, found.earlier, found.saves_s) == (ORDER, "a", 2.0)


def test_it_is_memorys_where_that_is_over_the_budget() -> None:
    events = (
        Compute("a", 5.0, allocs=(("x", 100),), frees=("x",)),
        gather("w", 3.0, 50), Compute("b", 1.0), Wait("w"), Compute("c", 1.0),
    )  # fmt: skip
    assert verdict(*events, room=150).cause == ORDER
    found = verdict(*events, room=149)
    assert (found.cause, found.saves_s, found.holds_bytes) == (MEMORY, 2.0, 150)
    assert "149 bytes" in found.words


def test_links_that_are_always_busy_lack_compute() -> None:
    events: list[Event] = [gather("w0", 3.0), gather("w1", 3.0), Wait("w0"), Compute("a", 1.0)]
    events += [gather("w2", 3.0), Wait("w1"), Compute("b", 1.0), Wait("w2"), Compute("c", 1.0)]
    assert verdict(*events).cause == COMPUTE


def test_what_could_not_be_launched_earlier_is_a_dependency() -> None:
    reduction = Launch("r", 3.0, "g", needs=("grad",))
    assert verdict(Compute("a", 5.0), Compute("grad", 1.0), reduction, Compute("b", 1.0), Wait("r")).cause == DEPENDENCY
    # What it does not need stands between: then it is the order.
    found = verdict(Compute("grad", 1.0), Compute("a", 5.0), reduction, Compute("b", 1.0), Wait("r"))
    assert (found.cause, found.earlier, found.saves_s) == (ORDER, "a", 2.0)
    assert verdict(gather("w", 1.0), Wait("w"), Compute("a", 1.0)).cause == DEPENDENCY
    # What packs others is no place to stand in front of.
    packing = [Compute("cat0", 1.0, is_copy=True), gather("w0", 3.0), Compute("cat1", 1.0, is_copy=True), gather("w1", 3.0)]
    found = verdict(*packing, Wait("w0"), Compute("a", 1.0), Wait("w1"), Compute("b", 1.0))
    assert found.cause == DEPENDENCY and "when the graph begins; only 1000.000 ms" in found.words


def test_a_queue_is_the_orders_fault_where_going_first_helps() -> None:
    events = [Compute("a", 1.0), Launch("r", 9.0, "g", needs=("a",)), gather("w", 1.0), Compute("b", 2.0), Wait("w")]
    found = verdict(*events, Compute("c", 9.0), Wait("r"))
    assert found.cause == ORDER and found.earlier in ("a", "r")


def explained(model: nn.Module, batch: Tensor, profile: Any = TOY, **options: Any) -> Explanation:
    torch._dynamo.reset()
    for part in model.children():
        fully_shard(part, **options.pop("shard", {}))
    fully_shard(model)
    if options:
        fsdp_compile.configure(model, **options)
    return explain(torch.compile(model, backend=passes, fullgraph=True), batch, profile=profile)


def of(found: Explanation, stage: str, fqn: str) -> Any:
    [one] = [one.launch for one in found.buckets if one.stage == stage and fqn in one.launch.fqns]
    return one


def test_a_model_that_is_limited_by_the_order_and_its_memory() -> None:
    found = explained(Steps(), torch.randn(8192, 256, requires_grad=True))
    large = of(found, "forward", "large.weight")
    assert large.cause == ORDER and 0 < large.exposed_s < large.seconds and 0 < large.hidden_share < 1
    assert "launched earlier (between" in large.verdict and "because of the order" in str(found)
    first = of(found, "forward", "long.weight")
    assert first.cause == DEPENDENCY and first.launched_behind == "begin"
    assert of(found, "forward", "tiny.weight").launched_behind == "begin"
    # What the owners hold at the peak of each graph adds up to the predicted peak.
    [step] = found.steps
    assert max(max(one.owners.alive) for one in step.memory) == step.predicted.peak_bytes
    for one in step.memory:
        top = max(one.owners.alive)
        assert len(one.at_s) == len(one.owners.events) == len(one.owners.alive)
        assert sum(owner.num_bytes for owner in one.owners.peak) == top
    forward = step.memory[0].owners
    assert {"parameter shard", "gathered"} <= {kind for kind, levels in forward.of_kind.items() if any(levels)}
    assert "large.weight" in {owner.of for owner in forward.peak}
    assert f"memory, up to {step.predicted.peak_bytes / 1024**2:.1f} MiB" in str(found)


def test_a_model_that_is_limited_by_compute_and_by_a_dependency() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(5)])
    found = explained(model, torch.randn(8, 64))
    forward = [of(found, "forward", f"{layer}.weight") for layer in range(5)]
    assert [one.cause for one in forward] == [DEPENDENCY, DEPENDENCY, COMPUTE, COMPUTE, COMPUTE]
    assert "because of compute" in str(found) and "because of a dependency" in str(found)
    # Nothing is sent before the first gradient is there.
    first = next(one.launch for one in found.buckets if one.launch.kind == "reduce_scatter")
    assert first.fqns == ("4.weight",) and first.cause == DEPENDENCY and "left to compute beside it" in first.verdict
    # The last reduction is launched behind the wait for the one before it.
    last = found.buckets[-1].launch
    assert last.fqns == ("0.weight",) and last.cause == ORDER and "(between grad 0.weight and end)" in last.verdict


def test_verdicts_say_what_the_tables_say() -> None:
    """Of a model on whose links collectives queue, and slow computation down."""
    slowed = dataclasses.replace(TOY, inside=dataclasses.replace(TOY.inside, slows_compute=0.5))
    model = nn.Sequential(*[nn.Linear(width, width + 1, bias=False) for width in range(64, 69)])
    found = explained(model, torch.randn(64, 64), profile=slowed)
    exposed = [one.launch for one in found.buckets if not one.launch.is_hidden]
    queued = [one for one in exposed if one.why.startswith(QUEUED)]
    assert queued and len(queued) < len(exposed)
    for one in exposed:
        beside = f"{one.beside_s * 1e3:.3f} ms"
        assert beside in one.why
        if one.cause in (COMPUTE, DEPENDENCY):
            assert beside in one.verdict or ("nothing is left to compute" in one.verdict and not one.beside_s)
        is_first = one.launched_behind == "begin"
        assert not (is_first and one.cause == COMPUTE and "launched earlier" in one.verdict)
        if one.kind == "all_gather" and one.cause == DEPENDENCY:
            assert ("when the graph begins" in one.verdict) == is_first
            assert is_first or f"launched behind {one.launched_behind}," in one.verdict
        in_queue = re.search(r"[\d.]+ ms behind \w+ of [^;]+", one.why)
        assert (in_queue is not None) == ("queued" in one.verdict)
        assert in_queue is None or one.verdict.endswith(f"; queued {in_queue[0]}")


def test_a_model_that_is_limited_by_memory() -> None:
    def products() -> nn.Module:
        return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(5)])

    batch = torch.randn(8, 64, requires_grad=True)
    free = explained(products(), batch)
    [step] = free.steps
    assert {one.becomes for one in free.parameters} == {"gathered again"}
    tight = explained(products(), batch, memory_budget=step.predicted.peak_bytes, profile=TOY)
    again = [one for one in tight.parameters if one.becomes == "gathered again"]
    assert again and all(one.why.startswith("memory budget") for one in again)
    exposed = [
        one.launch for one in tight.buckets
        if one.stage == "backward" and one.launch.kind == "all_gather" and one.launch.exposed_s
    ]  # fmt: skip
    assert exposed and {one.cause for one in exposed} == {MEMORY}
    assert all("budget has" in one.verdict for one in exposed) and "because of memory" in str(tight)


@pytest.mark.filterwarnings("ignore:memory_budget is 1 bytes")
def test_it_names_what_a_budget_has_computed_again() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    batch = torch.randn(2048, 64, requires_grad=True)
    tight = explained(nn.Sequential(*blocks), batch, memory_budget=1, profile=TOY)
    [step] = tight.steps
    # What the last product reads is needed as soon as backward begins: to save it raises no peak.
    assert {"0.0.weight", "0.2.weight", "1.0.weight"} == {*step.computed_again}
    assert "what is computed with it is computed again (0.0.weight" in str(tight)


def test_a_link_that_is_quick_hides_all_but_both_ends() -> None:
    quick = dataclasses.replace(TOY, inside=dataclasses.replace(TOY.inside, latency_s=0, step_s=0, bytes_per_s=1e15))
    found = explained(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.randn(64, 64), profile=quick)
    causes = [one.launch.cause for one in found.buckets]
    assert set(causes[1:-2]) == {HIDDEN}
    assert all(one.launch.hidden_share == 1.0 for one in found.buckets[1:-2])


class Mixed(nn.Module):
    """A unit with a weight that travels alone, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(512, 600), nn.LayerNorm(600)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).sum()


def test_it_says_why_buckets_stay_apart_and_what_each_parameter_is_sent_in() -> None:
    model = nn.Sequential(Mixed())
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fully_shard(model)
    fsdp_compile.configure(model, bucketing="none")
    held = {param: torch.zeros_like(param) for param in model.parameters()}
    for param, grad in held.items():
        param.grad = grad
    found = explain(torch.compile(model, backend=passes, fullgraph=True), torch.randn(4, 512))
    assert all(param.grad is grad for param, grad in held.items()), "gradients are not put back"
    parameters = {one.fqn: one for one in found.parameters}
    up = parameters["0.up.weight"]
    assert (up.unit, up.dtype, up.reduce_dtype) == ("0 (Mixed)", "bf16", "fp32")
    assert up.num_bytes == 600 * 512 * 2 // 4  # of four ranks
    kinds = [one.launch.kind == "all_gather" for one in up.buckets]
    assert kinds.count(False) == 1 and kinds[0]
    assert {one.apart for one in found.buckets if one.apart} == {"bucketing='none': each parameter has a collective of its own"}
    assert "nothing ran eagerly" in str(found)


def test_rows_tell_layers_apart_and_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    model.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])
    for layer in model.layers:
        fully_shard(layer)
    model.forward = lambda x: model.layers(x)
    found = explained(model, torch.randn(4, 8))
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = [line for line in str(found).splitlines() if "all_gather" in line and "forward " in line]
    for layer, row in zip(range(3), rows, strict=True):
        assert f"layers.{layer}: 0.weight 0.bias 1.weight +1" in row
    numbers = re.compile(r"[\d.]+ (?:B|KiB|ms)|\d+%")
    wide = sorted(numbers.findall(" ".join(str(found).split())))
    for columns in (120, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(found).splitlines()
        assert max(map(len, lines)) <= columns
        assert sorted(numbers.findall(" ".join(" ".join(lines).split()))) == wide, "a number is cut"


def test_owners_at_the_peak_are_called_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_PACK", {"fake"})
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(3)])
    found = explained(model, torch.randn(4, 64), reduction="all_to_all")
    said: set[str] = set()
    for record in (graph.record for graph in found.report.graphs if graph.stage != "joint"):
        names = _StorageNames(record.graph, record.plan)
        for node in record.graph.nodes:
            if node.op == "call_function" and ROLE in node.meta:
                said |= {names.of(storage) for storage in storages_of(record.graph)[node] if storage.node is node}
    for what in ("packed shards of ", "", "packed gradients of ", "received gradients of ", "reduced gradients of "):
        assert f"{what}2.0.weight +3" in said
    highest = max((one.owners for step in found.steps for one in step.memory), key=lambda one: max(one.alive))
    assert highest.peak_at.startswith(f"{highest.events[highest.alive.index(max(highest.alive))]} (")


def test_what_ran_eagerly_is_said_with_its_reason() -> None:
    model = Apart()
    fully_shard(model)
    found = explain(torch.compile(model, backend=passes), torch.randn(4, 8))
    assert any("Apart" in one and "graph_break" in one for one in found.eagerly), found.eagerly
    assert any("1 unit ((Apart)): compiled by themselves, or in parts, " in one for one in found.eagerly), found.eagerly


class Tagged(nn.Linear):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * scale


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_dict_is_one_argument_and_the_error_says_how_it_becomes_keywords() -> None:
    model, batch = fully_shard(Tagged(8, 8)), {"x": torch.randn(4, 8), "scale": 2.0}
    with pytest.raises(TypeError, match="explain takes the model and its inputs, but got int"):
        explain(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError) as raised:
        explain(torch.compile(model, backend=passes), batch)
    assert "call explain(model, **batch)" in "".join(raised.value.__notes__)
    assert explain(torch.compile(model, backend=passes), **batch).steps
    with pytest.raises(TypeError) as raised:
        explain(torch.compile(model, backend=passes), batch["x"])
    assert not hasattr(raised.value, "__notes__")


def said_of(kind: str, *specs: ParamSpec, **of_the_second: Any) -> str:
    """Why two parameters of one unit are in two buckets, of which the second one is otherwise in these."""
    buckets = [Bucket("Block:0", (one.fqn,), "float32", one.gather_bytes, num_ranks=one.num_shards) for one in specs]
    buckets[1] = dataclasses.replace(buckets[1], **of_the_second)
    return why_apart(kind, buckets, 0, {one.fqn: one for one in specs})


def test_what_is_gathered_from_slices_says_so_beside_what_is_not() -> None:
    a, b = (spec(fqn, (64, 64), num_shards=4, local_length=16) for fqn in "ab")
    assert said_of("gather", a, b, num_ranks=2) == "the next has another process group: 2 ranks, not 4"


def test_an_embedding_beside_other_weights_of_its_unit_is_gathered_apart() -> None:
    a, b = (spec(fqn, (64, 64), is_table=fqn == "a") for fqn in "ab")
    assert said_of("gather", a, b) == "the weight of an embedding is gathered apart: forward reads it first"
    assert "embedding" not in said_of("reduce", a, b)


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_units_that_could_be_neighbours_send_alike(kind: str) -> None:
    a, b = (spec(fqn, (64, 64), bucketing="size") for fqn in "ab")
    small = layout.bucket_limits(a.backend, a.num_shards).small_bytes // a.num_shards
    allowed = "which bucketing='neighbours' allows"
    assert said_of(kind, a, b, unit="Block:1").endswith(allowed)
    for other in ({"group": "h"}, {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}, {"num_shards": 1}):
        assert "neighbours" not in said_of(kind, a, dataclasses.replace(b, **other), unit="Block:1")
    assert "neighbours" not in said_of(kind, a, b, unit="Block:1", num_ranks=4)
    assert "neighbours" not in said_of(kind, a, b, unit="Block:1", num_bytes=small + 1)
    assert said_of(kind, a, b, unit="Block:1", num_bytes=small).endswith(allowed)


def test_it_leaves_what_micro_batches_have_held_back_and_takes_no_step_where_the_optimizer_is_in_backward() -> None:
    model = fully_shard(nn.Linear(8, 8))
    stepped: list[Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(stepped.append)
    run = torch.compile(model, backend=passes)
    with fsdp_compile.no_sync(model):
        run(torch.ones(4, 8)).sum().backward()
        explain(run, torch.ones(4, 8))
    assert explain(run, torch.ones(4, 8)).steps and not stepped
    [unit] = units_in(model)
    assert all(param.grad is None for param in model.parameters())
    assert set(unit.accumulation.held.pending) == {"weight", "bias"}
    torch.testing.assert_close(unit.accumulation.held.pending["bias"], torch.full((8,), 4.0))
    run(torch.ones(4, 8)).sum().backward()
    assert len(stepped) == 2, "hooks stay"


def test_blocks_that_are_compiled_by_themselves_are_explained_as_they_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer).compile(backend=passes)
    fully_shard(model)
    found = explain(model, torch.ones(4, 8, requires_grad=True))
    assert len(found.report.around) == 2
    assert any("compiled by themselves, or in parts, the eager path gathers around them" in one for one in found.eagerly)
