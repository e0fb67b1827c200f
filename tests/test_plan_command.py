"""fsdp-compile plan: few layers tell of all, figures that are known by hand, what is refused and with which words."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, cli, fully_shard
from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.forecast import command, forecast
from fsdp_compile.forecast.command import add_options
from fsdp_compile.forecast.forecast import OPTIMIZER, Configuration, Forecast, Hardware, Planner
from fsdp_compile.forecast.joint import FULL, NONE, SELECTIVE
from fsdp_compile.forecast.layers import LayerRun, find_run, with_fewer
from fsdp_compile.forecast.show import advice, short_number, show_one, show_sweep, size, unit_for
from fsdp_compile.forecast.sweep import Sweep, Weights, around, best_of, weights_of
from fsdp_compile.forecast.target import Target, find_target
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import GraphRecord, load_profile
from fsdp_compile.passes.budget.periods import periods_of
from fsdp_compile.passes.budget.residency import MAY
from fsdp_compile.passes.budget.trial import Decision, trial_of
from fsdp_compile.passes.cost.roofline import copy_seconds
from fsdp_compile.passes.cost.steps import Half, Step, Unsettled, lengthened, peak, replay, settled
from fsdp_compile.passes.ir.plan import Candidate, Choice
from fsdp_compile.passes.ir.provenance import find_reduces, find_unshards
from fsdp_compile.passes.wire.layout import reduction_of
from fsdp_compile.passes.wire.streams import TO_HOST
from fsdp_compile.tools.report import GraphReport
from fsdp_compile.tools.tables import console_for_output
from tests.compiling import decomposed

DIM, VOCAB, LAYERS, RANKS = 64, 256, 12, 16
MORE_LAYERS = 24  # than a search looks at
FEW_LAYERS = 6  # where all are traced
LLAMAS_LAYERS = 8  # which take a second each to trace


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.up, self.down = index, nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self, num_layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(index) for index in range(num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def tiny() -> nn.Module:
    return Tiny()


def deep() -> nn.Module:
    return Tiny(MORE_LAYERS)


def short() -> nn.Module:
    return Tiny(FEW_LAYERS)


def with_batch() -> tuple[nn.Module, Tensor]:
    return Tiny(), torch.zeros(3, 32, dtype=torch.long)


class OneLayer(nn.Linear):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.float()).sum()


def one_layer(batch_size: int, sequence: int) -> tuple[nn.Module, Tensor]:
    return OneLayer(8, 8), torch.zeros(2, 8)


class Breaks(OneLayer):
    def forward(self, tokens: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(tokens)


def one_that_breaks() -> nn.Module:
    return Breaks(8, 8)


def broken() -> nn.Module:
    raise KeyError("width")


def a_number() -> int:
    return 7


def hardware(ranks: int = RANKS, **said: Any) -> Hardware:
    return dataclasses.replace(Hardware(load_profile("h100"), 70 << 30, ranks, "bf16", "adamw"), **said)


@pytest.fixture
def world() -> Iterator[None]:
    with pretended_world(RANKS):
        yield


# --- few layers tell of all ------------------------------------------------------------------------------------------


def _step(what: str, num_bytes: int = 0, back: int = 0) -> Step:
    return Step(what, 1.0, (0, 0, 0, num_bytes, 0, 0), back=back)


NOTHING = (0, 0, 0, 0, 0, 0)


def _half(layer: tuple[Step, ...], num_layers: int) -> Half:
    """Layers, and behind them something of each; what is launched in front of them is awaited at the end."""
    begins = [(2 + turn * len(layer) + 1, (False, turn)) for turn in range(num_layers)]  # behind the first launches
    back = 1 + num_layers * sum(step.what == "launch" for step in layer)
    steps = _step("launch"), _step("embed"), *num_layers * layer, _step("head"), _step("wait", back=back)
    begins += [(len(steps) + turn, (True, turn)) for turn in range(num_layers)]
    return Half((9, 0, 0, 0, 0, 0), (*steps, *num_layers * (_step("gt", 4),)), tuple(begins))


def test_a_layer_is_repeated_as_often_with_what_it_holds() -> None:
    layer = (_step("launch"), _step("mm", 8), _step("wait", back=1))
    four, all_of_them = _half(layer, 4), range(4)
    more = settled(four, {all_of_them: 6})
    assert [*more.values()] == [6, 6]
    ten, _ = lengthened((four, four), (more, more), (2, 0, 0, 0, 0, 0))
    assert ten.steps == _half(layer, 10).steps
    assert peak(ten) == (11, 0, 0, 120, 0, 0)
    assert replay(ten).total_s == 2 * 10 + 2  # all that is computed: no collective takes longer
    both = _step("launch"), _step("mm", 8), _step("wait", back=1), Step("launch", 3.0, NOTHING, TO_HOST)
    with pytest.raises(Unsettled):  # nothing waits for the copies
        settled(_half(both, 4), {all_of_them: 6})
    ends = [
        dataclasses.replace(half, steps=(*half.steps, Step("wait", 0.0, NOTHING, TO_HOST)))
        for half in (_half(both, 4), _half(both, 10))
    ]
    more = settled(ends[0], {all_of_them: 6})
    ten, _ = lengthened((ends[0], ends[0]), (more, more), NOTHING)
    assert ten.steps == ends[1].steps
    assert replay(ten).total_s == replay(ends[1]).total_s == 2 + 10 * 3  # one copy after another
    with pytest.raises(Unsettled):  # what is launched in a layer and not awaited cannot go on so
        settled(_half((_step("launch"), _step("mm", 8)), 4), {all_of_them: 6})


def test_layers_repeat_that_differ_in_their_number_alone() -> None:
    model = Tiny()
    assert find_run(model) == LayerRun("layers", 0, 1, LAYERS)
    model.layers[0].up = nn.Linear(DIM, 4 * DIM)  # a bias
    assert find_run(model) == LayerRun("layers", 1, 1, LAYERS - 1)
    for place, layer in enumerate(model.layers):
        layer.window = 8 if place % 3 else None
    assert find_run(model) == LayerRun("layers", 1, 3, (LAYERS - 1) // 3)
    run = LayerRun("layers", 1, 3, 3)
    fewer = with_fewer(model, run, 2)
    assert [layer.index for layer in fewer.layers] == [0, 1, 2, 3, 7, 8, 9, 10, 11]
    assert [name for name, _ in fewer.layers.named_children()] == [str(place) for place in range(9)]
    assert len(model.layers) == LAYERS
    assert find_run(nn.Linear(2, 2)) is None


def _compiled(num_layers: int = LAYERS, **budget: Any) -> GraphReport:
    """The report of the model that is compiled and runs: all layers, and no helper of the command's."""
    torch._dynamo.reset()
    model = Tiny(num_layers)
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if budget:
        fsdp_compile.configure(model, profile="h100", **budget)
    tokens = torch.zeros(2, 128, dtype=torch.long)
    with fsdp_compile.inspect(model) as report:
        torch.compile(model, backend=decomposed, fullgraph=True)(tokens).backward()
    return report.joint


def planner_of(target: Target, how: str = NONE, batch: tuple[int, int] = (2, 128), **said: Any) -> Planner:
    return Planner(target.make(*batch), Configuration((RANKS,), *batch, how, **said), hardware())


@pytest.mark.slow
@pytest.mark.usefixtures("world")
def test_few_layers_tell_what_the_report_of_all_of_them_says(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planner_of(find_target("tests.test_plan_command:tiny")).forecast()
    assert one.num_traced < one.num_periods == LAYERS
    monkeypatch.setattr(forecast, "_FEW", 2)  # which tell nothing
    again = planner_of(find_target("tests.test_plan_command:tiny")).forecast()
    assert again.num_traced == 4 and again.step_s == pytest.approx(one.step_s) and again.peak == one.peak
    whole = _compiled().predict("h100")
    states = one.peak["optimizer state"]
    assert one.peak_bytes - states == pytest.approx(whole.peak_bytes, rel=0.01)
    assert one.forward_s == pytest.approx(whole.of("forward").seconds, rel=0.01)
    assert one.backward_s == pytest.approx(whole.of("backward").seconds, rel=0.01)
    assert one.exposed_s == pytest.approx(whole.exposed_s, rel=0.01)
    # By hand: every parameter is a matrix whose rows divide. And a product forward is two backward; looking up is none.
    params = sum(param.numel() for param in Tiny().parameters())
    assert one.peak["shards"] == 4 * params / RANKS and states == 2 * one.peak["shards"]
    products = params - VOCAB * DIM
    assert one.flops == 6 * products * 2 * 128
    assert one.num_tokens == RANKS * 2 * 128
    assert one.mfu == pytest.approx(one.flops / one.step_s / 989.5e12)
    # Of the optimizer: parameters, gradients and two states read, all but the gradients written.
    assert one.optimizer_s == pytest.approx(7 * one.peak["shards"] / (3.35e12 * 0.92))


@pytest.mark.usefixtures("world")
def test_an_eager_step_saves_more_and_runs_each_operator_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 64, 2048  # so many that bytes take longer than launches
    target = find_target("tests.test_plan_command:short")
    compiled, eager = (planner_of(target, NONE, tokens, is_eager=how).forecast() for how in (False, True))
    assert eager.num_traced < eager.num_periods == FEW_LAYERS
    assert eager.step_s > compiled.step_s and eager.flops == compiled.flops
    assert eager.peak["activations"] > compiled.peak["activations"] and eager.peak["shards"] == compiled.peak["shards"]
    monkeypatch.setattr(forecast, "_FEW", FEW_LAYERS)
    whole = planner_of(target, NONE, tokens, is_eager=True).forecast()
    assert whole.num_traced == FEW_LAYERS and whole.peak == eager.peak
    assert whole.step_s == pytest.approx(eager.step_s, rel=0.01)


def _config(folder: Path, layers: int) -> Path:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("world")
def test_checkpointing_trades_time_for_activations(tmp_path: Path) -> None:
    target = find_target(str(_config(tmp_path, LLAMAS_LAYERS)))
    none, selective, full = (planner_of(target, how).forecast() for how in (NONE, SELECTIVE, FULL))
    assert none.peak["activations"] > selective.peak["activations"] > full.peak["activations"]
    assert none.backward_s < selective.backward_s < full.backward_s
    assert none.flops == selective.flops == full.flops  # what a model takes, however often it is computed
    assert none.forward_s == pytest.approx(full.forward_s, rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("may", "budget"), [(MAY[:2], 2_000_000), (MAY, 1_300_000)])  # bytes that recomputing meets, and not
def test_a_budget_is_spent_as_by_a_model_that_compiles_within_it(may: tuple[str, ...], budget: int) -> None:
    planner = planner_of(find_target("tests.test_plan_command:deep"))
    planner.configuration = dataclasses.replace(planner.configuration, budget=budget, may=may)
    one, report = planner.forecast(), _compiled(MORE_LAYERS, memory_budget=budget, may=may)
    assert one.num_traced < one.num_periods == MORE_LAYERS
    assert one.choice is not None and report.plan.choice is not None
    its = report.plan.choice.chosen
    assert one.choice.chosen == its
    assert its.num_recomputed and bool(its.num_offloaded) == ("offload" in may)
    assert one.held_bytes == its.peak_bytes and one.is_met
    assert one.forward_s + one.backward_s == pytest.approx(its.seconds)
    whole = report.predict("h100")  # of the graphs that were cut with all layers
    assert whole.peak_bytes == its.peak_bytes
    assert whole.of("forward").seconds + whole.of("backward").seconds == pytest.approx(its.seconds, rel=0.01)


@pytest.mark.parametrize(("name", "reduction", "op"), [("cpu", "all_to_all", "sum"), ("h100", "reduce_scatter", "avg")])
def test_it_plans_what_the_backend_of_the_hardware_does(capsys: Any, name: str, reduction: str, op: str) -> None:
    found: list[GraphRecord] = []
    manager.observers.append(found.append)
    try:
        assert cli.main(["plan", "tests.test_plan_command:one_layer", "--world-size", "4", "--hardware", name, "--json"]) == 0
    finally:
        manager.observers.remove(found.append)
    [joint] = [record for record in found if record.stage == "joint"]
    backend = load_profile(name).backend
    specs = [one.spec for one in find_reduces(joint.snapshots[-2])]
    assert {(one.backend, one.reduction, one.reduce_op) for one in specs} == {(backend, reduction, op)}
    assert (backend, reduction) == (backend, reduction_of(backend))


# --- what the command says -------------------------------------------------------------------------------------------

MODEL = "tests.test_plan_command:tiny"
WORLD = ("--world-size", "16")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((MODEL,), r"say how many ranks there are: --world-size 512, or --mesh 8x64"),
        ((MODEL, *WORLD, "--mesh", "3x5"), r"--mesh 3x5 is 15 ranks and --world-size says 16: give .* such as 4x4"),
        ((MODEL, *WORLD, "--mesh", "2x2x4"), r"--mesh 2x2x4 is no mesh: give"),
        ((MODEL, *WORLD, "--hardware", "h1000"), r"no hardware profile 'h1000': give one of cpu, a100, h100"),
        ((MODEL, *WORLD, "--memory", "plenty"), r"--memory plenty is no number of bytes: give one such as 70GiB"),
        ((MODEL, *WORLD, "--memory", "90GiB"), r"--memory 90GiB is more than the 77\.8 GiB that torch may allocate on h100: give less"),
        ((MODEL, *WORLD, "--memory", "80"), r"--memory 80 has no unit, so it is 80 bytes: write 80GiB, or 80B"),
        ((MODEL, *WORLD, "--budget", "60"), r"--budget 60 has no unit, so it is 60 bytes: write 60GiB"),
        ((MODEL, *WORLD, "--may", "offload"), r"--may says what is chosen within a budget, and there is none: add --budget"),
        ((MODEL, *WORLD, "--budget", "rest", "--may", "shards"), r"--may shards needs an optimizer that .*: add --optimizer adamw-on-host"),
        (("tests.test_plan_command:one_layer", *WORLD, "--budget", "rest", "--optimizer", "adamw-on-host", "--may", "shards"),
         r"no layers repeat in this model, and --may shards moves the shards of layers: take it out"),
        ((MODEL, *WORLD, "--sweep", "--optimizer", "adamw-on-host", "--may", "shards"), r"--sweep tries .*: take one of the two out"),
        ((MODEL, *WORLD, "--eager", "--budget", "rest"), r"--eager plans FSDP2 without torch\.compile, .*: take it out, or --budget"),
        ((MODEL, *WORLD, "--batch", "8192"), r"--batch 8192 is no batch: give .* such as 2x8192"),
        ((MODEL, "--world-size", "none"), r"--world-size none is no number of ranks: give"),
        (("tests.test_plan_command:tinny", *WORLD), r"no function called tinny: give a function of it, such as tiny"),
        (("tests.test_plan_command:MODEL", *WORLD), r"a str, not a function, called MODEL: give"),
        (("no_such_module:tiny", *WORLD), r"no module no_such_module to import from .*: run the command in"),
        (("tiny", *WORLD), r"'tiny' is neither a file nor module:function: give"),
        (("tests.test_plan_command:broken", *WORLD), r"raised KeyError: 'width'; have it make a model"),
        (("tests.test_plan_command:a_number", *WORLD), r"returned a int: have it return a model"),
        (("tests.test_plan_command:with_batch", *WORLD, "--batch", "2x8"), r"a batch of its own.*leave it out"),
        (("missing.json", *WORLD), r"missing\.json cannot be read \(No such file.*\): give the path"),
        (("text.json", *WORLD), r"text\.json is not JSON .*: give the config\.json"),
        (("other.json", *WORLD), r"other\.json has no model_type.*: give the config\.json"),
        (("unknown.json", *WORLD), r"transformers makes no model of .*unknown\.json .*'llamma' is none .*llama.*: mend the"),
    ],
)  # fmt: skip
def test_a_mistake_says_what_to_change(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, text in {"text": "{", "other": "{}", "unknown": '{"model_type": "llamma"}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert re.search(said, shown.err) and shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1 and shown.err.startswith("fsdp-compile plan: ")
    assert len(shown.err) < 500


def test_what_dynamo_says_is_shown(capsys: Any) -> None:
    arguments = ("tests.test_plan_command:one_that_breaks", *WORLD)
    assert cli.main(["plan", *arguments]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("fsdp-compile plan: Breaks could not be traced into one graph: make it run under")
    assert lines[0] == "  Call to `torch._dynamo.graph_break()`" and lines[1].startswith("  Explanation: User-inserted graph")
    assert any(line.startswith("  Hint: ") for line in lines) and "FSDPBreaks" not in "".join(lines)
    assert re.search(r'File ".*test_plan_command\.py", line \d+, in forward$', lines[-1])


def test_a_budget_that_nothing_meets_is_said(capsys: Any) -> None:
    arguments = ("tests.test_plan_command:one_layer", "--world-size", "2", "--budget", "0.1KiB")
    code, data, error = _plans(capsys, *arguments)
    [plan] = data["plans"]
    least = plan["forward_backward_bytes"]
    assert code == 2 and data["best"] is None and plan["fits"] and plan["budget_met"] is False
    assert least == plan["peak_bytes"] - plan["peak_bytes_by_kind"]["optimizer state"] > 102
    assert "does not meet its budget: forward and backward may hold 102 bytes on each rank, and the least" in error
    assert f"({least:,} bytes): give a larger --budget, or --may gather recompute offload, or --checkpointing full, or" in error
    assert cli.main(["plan", *arguments]) == 2
    assert re.search(r"of a budget of 102 bytes +not met", capsys.readouterr().out)
    code, data, error = _plans(capsys, *arguments[:-1], f"{least}B")
    assert code == 0 and data["plans"][0]["budget_met"] and not error


def _plans(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = cli.main(["plan", *arguments, "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out), shown.err


def test_a_model_that_does_not_fit_says_what_would_help(capsys: Any) -> None:
    arguments = (MODEL, *WORLD, "--batch", "4x128")
    code, data, error = _plans(capsys, *arguments, "--memory", "6500000")
    [plan] = data["plans"]
    assert code == 2 and not plan["fits"] and data["best"] is None
    assert plan["peak_bytes"] == sum(plan["peak_bytes_by_kind"].values()) > 6_500_000
    assert "does not fit: it needs" in error and "so add --checkpointing full" in error
    # AdamW needs four times the bytes of the shards: for the shards, their gradients and two states. `adamw-on-host`
    # moves the states away.
    away = "--budget rest --may gather recompute offload shards"
    for times, optimizer, said in ((3, "adamw", "or try --optimizer adamw-on-host."), (1, "adamw-on-host", away)):
        one = dataclasses.replace(planned(), hardware=hardware(512, optimizer=optimizer))
        params = one.configuration.mesh[-1] * one.hardware.memory_bytes // (4 * times)
        assert said in advice(one, Weights(params, 4 * params, 4 * params))


def with_adapters() -> nn.Module:
    """Stored in bfloat16, and next to nothing of it is trained."""
    model = short().bfloat16().requires_grad_(False)
    model.layers[0].up.weight.requires_grad_(True)
    return model


ADAPTED = ("tests.test_plan_command:with_adapters", "--world-size", "4", "--batch", "1x16")


def test_what_is_frozen_or_stored_narrowly_takes_no_more_than_it_does(capsys: Any) -> None:
    params, trained = sum(param.numel() for param in short().parameters()), 4 * DIM * DIM
    weights = weights_of(with_adapters(), "bf16")
    assert weights == Weights(params, 2 * params, 2 * trained)
    assert weights_of(with_adapters(), "fp32") == Weights(params, 4 * params, 4 * trained)
    assert weights.standing_bytes((4,), hardware(4)) == (2 * params + 3 * 2 * trained) // 4
    code, data, _ = _plans(capsys, *ADAPTED, "--memory", "100MiB", "--budget", "rest")
    [plan] = data["plans"]
    held = plan["peak_bytes_by_kind"]
    assert code == 0 and held["shards"] == 2 * params // 4 and held[OPTIMIZER] == 2 * 2 * trained // 4
    assert plan["budget"] == (100 << 20) - held[OPTIMIZER]
    assert plan["peak_bytes"] < 16 * params // 4  # what one that is trained in float32 takes before it computes


def test_states_are_on_the_host_as_far_as_the_budget_has_no_room(capsys: Any) -> None:
    arguments = ("tests.test_plan_command:short", *WORLD, "--batch", "4x128", "--optimizer", "adamw-on-host")
    states = 2 * 4 * sum(param.numel() for param in short().parameters()) // RANKS
    [away] = _plans(capsys, *arguments)[1]["plans"]
    least = away["forward_backward_bytes"]
    assert away["peak_bytes_by_kind"][OPTIMIZER] == 0 and away["peak_bytes"] == least
    assert away["optimizer_bytes_on_host"] == states
    assert away["optimizer_s"] == copy_seconds(states, load_profile("h100"))
    within = ("--budget", "rest", "--may", *MAY)
    memory = least + states // 3
    code, data, _ = _plans(capsys, *arguments, "--memory", f"{memory}B", *within)
    [plan] = data["plans"]
    held = plan["peak_bytes_by_kind"][OPTIMIZER]
    assert code == 0 and plan["fits"] and plan["budget"] == memory
    assert held + plan["optimizer_bytes_on_host"] == states
    assert held >= states // 3 and plan["peak_bytes"] <= memory  # what is kept, leaves less than nothing kept


@pytest.mark.more
@pytest.mark.usefixtures("world")
def test_shards_of_as_many_layers_are_on_the_host_as_must_be() -> None:
    planner = planner_of(find_target("tests.test_plan_command:deep"))
    planner.hardware = hardware(optimizer="adamw-on-host")
    joint, _ = planner.joint(MORE_LAYERS)
    names = frozenset(one.fqn for one in find_unshards(joint) if "layers" in one.fqn)
    here, away = (trial_of(joint, (), load_profile("h100"), hosted=which).peak_bytes for which in ((), names))
    planner.configuration = dataclasses.replace(planner.configuration, budget=(here + away) // 2, may=("gather", "shards"))
    one = planner.forecast()
    assert one.is_met and 0 < one.num_hosted < MORE_LAYERS
    # By hand: what is not here is there; the optimizer's step copies states, and these shards and their gradients.
    params = sum(param.numel() for param in Tiny(MORE_LAYERS).parameters())
    of_layers = one.num_hosted * 4 * 2 * 4 * DIM * DIM // RANKS
    assert one.shards_away == of_layers and one.peak["shards"] == 4 * params // RANKS - of_layers
    assert one.states_away == 2 * 4 * params // RANKS and min(one.peak.values()) >= 0
    assert one.optimizer_s == copy_seconds(one.states_away + 2 * of_layers, load_profile("h100"))
    assert one.choice is not None and f"shards of {one.num_hosted} layers on the host" in str(one.choice)
    show_one(one, "", console := Console(record=True))
    assert f"shards of {one.num_hosted} layers on the host" in console.export_text()


@pytest.mark.slow
@pytest.mark.usefixtures("world")
def test_what_is_on_the_host_is_that_of_a_trial_of_all_layers() -> None:
    planner = planner_of(find_target("tests.test_plan_command:deep"))
    found = []
    for few in (16, MORE_LAYERS):
        joint, _ = planner.joint(few)
        periods = periods_of(joint, MORE_LAYERS - few, few)
        both = periods.names[:10], periods.names[-6:]
        hosted, kept = (frozenset(name for names in its for name in names) for its in both)
        sets, blocks = periods.compressed(*Decision(kept, hosted=hosted).names)
        found.append(forecast.both_halves(Decision(*sets), load_profile("h100"), periods, blocks))
    few, whole = found
    assert few.peak() == whole.peak()
    for one, other in ((few.forward, whole.forward), (few.backward, whole.backward)):
        assert replay(one).total_s == pytest.approx(replay(other).total_s)


def test_a_model_without_layers_is_swept_without_checkpointing(capsys: Any) -> None:
    code, data, _ = _plans(capsys, "tests.test_plan_command:one_layer", "--world-size", "2", "--sweep")
    assert code == 0 and {one["checkpointing"] for one in data["plans"]} == {NONE}


class Alternating(Tiny):
    """Every second layer differs, so that two of them repeat."""

    def __init__(self) -> None:
        super().__init__(FEW_LAYERS)
        for layer in self.layers[::2]:
            layer.window = 8


def alternating() -> nn.Module:
    return Alternating()


def test_what_is_chosen_within_a_budget_is_shown(capsys: Any) -> None:
    arguments = ("tests.test_plan_command:alternating", *WORLD, "--batch", "4x128", "--budget", "1GiB", "--may", *MAY)
    code, data, _ = _plans(capsys, *arguments)
    [plan] = data["plans"]
    assert code == 0 and plan["layers_traced"] == plan["layers"] == FEW_LAYERS
    assert plan["choice"]["chosen"]["num_kept"] == 2 * FEW_LAYERS + 1 and plan["may"] == [*MAY]
    assert cli.main(["plan", *arguments]) == 0
    assert re.search(r"-> everything kept.* 13 kept .*peak", capsys.readouterr().out)


@pytest.mark.slow
def test_what_is_too_large_for_its_ranks_asks_for_more_of_them(capsys: Any) -> None:
    params = sum(param.numel() for param in Tiny().parameters())
    # Eight ranks hold 16 bytes a parameter in these: parameter, gradient, two states.
    code, _, error = _plans(capsys, MODEL, "--mesh", "2x4", "--memory", f"{16 * params // 8}B")
    assert code == 2 and "share the parameters out over at least 8 ranks" in error


@pytest.mark.slow
def test_a_sweep_marks_the_fastest_that_fits(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, ...]] = []
    real = show_sweep
    monkeypatch.setattr(command, "show_sweep", lambda *args: shown.append(args) or real(*args))
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ("tests.test_plan_command:with_batch", *WORLD, "--memory", "1900000", "--sweep")
    assert cli.main(["plan", *arguments]) == 0
    [(found, best, *_)] = shown
    assert best.fits and best.tokens_per_s == max(one.tokens_per_s for one in found if one.fits)
    assert not all(one.fits for one in found)
    said = [one.configuration for one in found]
    assert {(one.mesh, one.batch, one.checkpointing) for one in said} == {
        (mesh, 3, how) for mesh in ((16,), (2, 8)) for how in (NONE, FULL)
    }
    assert [one.budget is not None for one in said] == [False] * 4 + [True]
    [marked] = [line for line in capsys.readouterr().out.splitlines() if "-> " in line]
    assert f"{best.tokens_per_s_per_rank:,.0f}" in marked and "x".join(map(str, best.configuration.mesh)) in marked


CHOICE = Choice(62 << 30, "h100", 0, Candidate("kept", 29, 61 << 30, 3.0, 0.0, 7, num_offloaded=5), ())


def planned(how: str = NONE, budget: int | None = None, held: int = 9 << 30, seconds: float = 1.0) -> Forecast:
    return Forecast(
        Configuration((8, 64), 2, 8192, how, budget), hardware(512), {"activations": held, OPTIMIZER: 1 << 30},
        seconds, 2.3456, 0.0123, 0.0456789, 512 * 2 * 8192, 1e15, 4, 80, CHOICE if budget else None,
    )  # fmt: skip


@pytest.mark.parametrize("width", [200, 100, 80, 60, 30])
def test_no_window_is_too_narrow_for_digits(width: int, capsys: Any) -> None:
    found = [planned(), planned(NONE, 62 << 30, 61 << 30), planned(SELECTIVE, held=195 << 30)]
    console = Console(width=width, force_terminal=True, no_color=True)
    show_sweep(found, found[1], "Llama", console)
    show_one(found[1], "Llama", console)
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    for figure in ("8x64", "2x8192", "selective", "10.0", "62.0", "196.0 (over)", "3.358 s", "4,879", "45.679 ms", "30.1%"):
        assert figure in shown, figure
    for figure in ("62.0 GiB", "61.0 GiB", "3.358 s", f"{found[1].tokens_per_s:,.0f}", "12.300 ms"):
        assert figure in shown[shown.rindex("Llama") :], figure
    if width == 200:
        assert re.search(r"of 70\.0 GiB of memory.*fits", shown) and "4 of 80 repeated layers traced" in shown


def test_where_no_window_is_nothing_is_left_out(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    found = [planned(), planned(NONE, 62 << 30, 61 << 30)]
    show_sweep(found, found[1], "Llama", console_for_output())
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    [line] = [line for line in shown.splitlines() if "-> " in line]
    assert " ".join(line.split()) == "-> 8x64 2x8192 none 62.0 29, 7, 5 62.0 3.358 s 45.679 ms 4,879 30.1%"


def test_three_digits_of_a_figure_are_seen() -> None:
    assert [short_number(one) for one in (12, 918_700, 999_999, 8_030_261_248, 70_600_000_000)] == ["12", "919K", "1M", "8.03B", "70.6B"]
    sizes = (12, 1 << 10, 1_234_567, 9 << 29, 75 << 30)
    assert [size(one) for one in sizes] == ["12 bytes", "1.00 KiB", "1.18 MiB", "4.50 GiB", "75.0 GiB"]
    assert [unit_for(one) for one in ((1 << 30, 1 << 40), (1 << 27, 1 << 30), (1 << 26, 1 << 35), (1,))] == ["GiB", "GiB", "MiB", "KiB"]


class Canned(Sweep):
    """Whose plans take as long whatever they are, and hold less within a budget, but not less than a GiB."""

    def __init__(self, saves: bool) -> None:
        super().__init__(Target("", lambda *size: find_target("tests.test_plan_command:with_batch").make(*size)), hardware(512), Weights(9, 36, 36), print)
        self.saves = saves

    def plan(self, one: Configuration) -> Forecast:
        within = one.budget is not None and self.saves
        full = one.checkpointing == FULL
        return planned(one.checkpointing, one.budget, (1 if within else 5 if full else 9) << 30, 3.0 if full else 1.0)


def test_a_row_that_says_the_same_is_left_out() -> None:
    given = Configuration((512,), 3, 32, NONE)
    for saves in (False, True):
        rows = Canned(saves).sweep(given)
        assert [one.configuration.budget is None for one in rows if isinstance(one, Forecast)].count(False) == saves


def test_the_best_is_within_the_budget_that_was_given() -> None:
    given = Configuration((512,), 3, 32, NONE, budget=6 << 30)
    rows = Canned(saves=False).sweep(given)
    best = best_of(rows, given.budget)
    assert best is not None and best.configuration.checkpointing == FULL and best.configuration.budget is None
    assert [one.is_met for one in rows if isinstance(one, Forecast) and one.configuration.budget] == [False]
    assert best_of(rows, 1 << 20) is None and best_of([planned(held=90 << 30)]) is None
    assert best_of(Canned(saves=True).sweep(given), given.budget).configuration.budget == given.budget


def test_a_sweep_is_around_what_was_given() -> None:
    given = Configuration((8, 64), 2, 4096, SELECTIVE)
    made = find_target(MODEL).make(2, 4096)
    tried = around(given, hardware(512), made)
    assert given in tried and len(set(tried)) == len(tried)
    assert {one.batch for one in tried} == {1, 2, 4} and {one.checkpointing for one in tried} == {NONE, SELECTIVE, FULL}
    assert {one.mesh for one in tried} == {(8, 64), (512,), (2, 256), (4, 128)}
    assert {one.batch for one in around(given, hardware(512), dataclasses.replace(made, has_own_batch=True))} == {2}
    alone = find_target("tests.test_plan_command:one_layer").make(2, 4096)
    assert {one.checkpointing for one in around(given, hardware(512), alone)} == {SELECTIVE}
    assert {one.checkpointing for one in around(dataclasses.replace(given, checkpointing=NONE), hardware(512), alone)} == {NONE}


def test_every_option_has_its_help() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert all(action.help for action in parser._actions)
