"""Parameters and modules may be called whatever nn.ParameterDict and nn.ModuleDict take: no code depends on a name.

And one unit has one name: in each graph that is cut from a model, and in every table that tells of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_compile import explain, fully_shard, inspect
from fsdp_compile.core.unit import unit_of
from fsdp_compile.lookout.names import Namer
from fsdp_compile.passes.ir.module_paths import path_of
from fsdp_compile.passes.ir.provenance import find_unshards
from fsdp_compile.tools.inspect import Report
from fsdp_compile.tools.tables import format_unit
from tests.comparing import assert_same_grads
from tests.compiling import compiled, passes
from tests.models import Stack, shard
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks
from tests.recording import recorded
from tests.test_inspect import printed_by

# What Python takes for one identifier, and what looks like two things that belong to one parameter.
LOOK_ALIKE = ("\N{LATIN SMALL LIGATURE FI}", "fi", "edge_x", "x")
NAMES = (
    "a b", "a'b", 'a"b', "my-adapter", "line\nbreak = 1", "{x}", "\N{GRINNING FACE}", "class", "back\\slash", '"""',
    "%s", "#", "a[0]", "9", *LOOK_ALIKE,
)  # fmt: skip
SOME = ('a"b', "line\nbreak = 1", *LOOK_ALIKE)


class Adapters(nn.Module):
    """Parameters and modules by name, each of which takes part."""

    def __init__(self, names: tuple[str, ...], dim: int = 4) -> None:
        super().__init__()
        self.names = names
        self.scales = nn.ParameterDict({name: torch.randn(dim) for name in names})
        self.layers = nn.ModuleDict({name: nn.Linear(dim, dim) for name in names})
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.tanh(self.layers[name](x) * self.scales[name])
        return self.norm(x)


def _pair(names: tuple[str, ...]) -> tuple[Adapters, Adapters]:
    torch.manual_seed(0)
    unsharded = Adapters(names)
    model = copy.deepcopy(unsharded)
    for name in names[::2]:
        fully_shard(model.layers[name])
    return unsharded, fully_shard(model)


@pytest.mark.parametrize(
    ("names", "path"),
    [
        pytest.param(NAMES, "eager", marks=pytest.mark.compat),
        pytest.param(SOME, "aot_eager", marks=pytest.mark.compat),
    ],
    ids=lambda one: one if isinstance(one, str) else "names",
)
@on_two_ranks
def test_any_name_trains(names: tuple[str, ...], path: str) -> None:
    unsharded, model = _pair(names)
    run = compiled(model, path)
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    for step in range(2):
        batch = torch.randn(dist.get_world_size(), 3, 4, generator=torch.Generator().manual_seed(step))
        run(batch[dist.get_rank()]).pow(2).sum().backward()
        torch.stack([unsharded(one).pow(2).sum() for one in batch]).mean().backward()
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-3)
        for optim in optims:
            optim.step()
            optim.zero_grad()


def _save(names: tuple[str, ...], backend: str, folder: str) -> list[str]:
    _, model = _pair(names)
    with inspect(model) as report:
        torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        report.save(folder)
    return [name for graph in report.graphs for name in graph.plan.params]


@pytest.mark.slow
def test_saved_graphs_run_whatever_parameters_are_called(two_ranks: Ranks, tmp_path: Path) -> None:
    names = ("a b", 'a"b', "line\nbreak = 1", '"""', "\N{GRINNING FACE}", "a[0]", "\ud800")
    planned = two_ranks.run(_save, names, "aot_eager", str(tmp_path / "joint"))[0]
    said = [name.encode(errors="backslashreplace").decode() for name in names]
    # Those of a unit of their own as well: its path is found whatever it is called.
    assert {f"scales.{name}" for name in said} | {f"layers.{name}.weight" for name in names[:-1]} <= set(planned)
    two_ranks.run(_save, ("a'b", "line\nbreak = 1", "{x}"), "passes", str(tmp_path / "of_passes"))
    for folder in (tmp_path / "joint", tmp_path / "of_passes"):
        assert printed_by([str(path.relative_to(folder)) for path in folder.glob("*/*.py")], folder)
        assert "line\\nbreak = 1" in (folder / "00_joint" / "0_captured.py").read_text(encoding="utf-8")


# Of modules that a forward asks for with getattr, as no attribute could be called so.
ASKED_FOR = ("out-proj", "a b", "x[0]", "блок[0]日本", "L['self']", 'a, "b")', "{x}")


class AskedFor(nn.Module):
    """Modules whose names are no identifiers, in one another and in a dictionary."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.kept = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4)) for name in names})
        for name in names:
            outer = nn.Module()
            outer.add_module(name, nn.Linear(4, 4))
            self.add_module(name, outer)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.tanh(self.kept[name](getattr(getattr(self, name), name)(x)))
        return x


def _bucketed(report: Report) -> set[str]:
    plans = [graph.plan for graph in report.graphs if graph.stage in ("forward", "backward")]
    return {fqn for plan in plans for bucket in (*plan.gathers, *plan.reduces) for fqn in bucket.fqns}


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_module_that_getattr_asks_for_keeps_its_name() -> None:
    """Every other one is a unit of its own."""
    model = AskedFor(ASKED_FOR)
    for name in ASKED_FOR[::2]:
        fully_shard(getattr(getattr(model, name), name))
        fully_shard(model.kept[name])
    fully_shard(model)
    expected = {name for name, _ in model.named_parameters()}
    found = explain(torch.compile(model, backend=passes, fullgraph=True), torch.ones(2, 4))
    assert _bucketed(found.report) == expected
    assert {one.fqn for one in found.parameters} == expected
    assert {fqn for one in found.buckets for fqn in one.launch.fqns} == expected
    units = {name for name, _ in model.named_modules()}
    assert {one.launch.unit.partition(":")[2] for one in found.buckets} <= units
    picture = found.report.picture()
    assert {fqn for step in picture.steps for graph in step.graphs for one in graph.collectives for fqn in one.fqns} == expected
    assert {one.module for step in picture.steps for graph in step.graphs for one in graph.compute} <= units


def test_a_path_is_read_from_any_text_of_dynamo() -> None:
    for source, path in (
        ("L['self'].layers[3].attn", ["layers", "3", "attn"]),
        ("getattr(getattr(L['self'], 'a b').up, \"c'd\").w", ["a b", "up", "c'd", "w"]),
        ("getattr(L['self'].a, b), 'x[0]')[1]", ["a, b)", "x[0]", "1"]),  # a name that looks like the end of another
        ("L['self'].kept.x[0.up", ["kept", "x[0", "up"]),
        ("L['self'].kept._modules['line\\nbreak']._orig_mod.0", ["kept", "line\nbreak", "0"]),
    ):
        assert path_of(source) == ("self", path), source
    assert path_of("getattr(L['teacher'], 'out-proj')") == ("teacher", ["out-proj"])


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_name_that_ends_as_a_wrapper_is_called_stays_whole() -> None:
    model = nn.Module()
    model.my_modules, model._orig_mod = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    unit = unit_of(fully_shard(model))
    assert unit is not None
    names = [name for name, _ in Namer()._in(unit).values()]
    assert {"my_modules.weight", "0.weight"} < {*names}


# --- names of units ---------------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """Units of two modules that stand apart, and an embedding that the root reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.ups = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, norm in zip(self.ups, self.norms):
            x = norm(torch.relu(up(x)))
        return F.linear(x, self.embed.weight)


def sharded_pairs() -> Pairs:
    model = Pairs()
    fully_shard(model.embed)
    for up, norm in zip(model.ups, model.norms):
        fully_shard([up, norm])
    return fully_shard(model)


def sharded_checkpoints() -> Stack:
    model = Stack(2)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return shard(model)


def test_one_walk_of_the_model_names_all_its_units(fake_group_of_four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_pairs()
    walks = []
    walk = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda self, *rest: (walks.append(self), walk(self, *rest))[1])
    units = [unit_of(one) for one in (model, model.embed, model.ups[0], model.norms[1])]
    for _ in range(2):
        assert [unit.name for unit in units] == [
            "(root) (Pairs)", "embed (Embedding)", "ups.0 (Linear), norms.0 (LayerNorm)", "ups.1 (Linear), norms.1 (LayerNorm)"
        ]  # fmt: skip
    assert walks.count(model) == 1
    model.norms[0], model.norms[1] = model.norms[1], model.norms[0]
    assert units[3].name == "ups.1 (Linear), norms.0 (LayerNorm)"


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (
            sharded_pairs,
            {"embed (Embedding)": 1, "ups.0, norms.0 (Linear+LayerNorm)": 4, "ups.1, norms.1 (Linear+LayerNorm)": 4},
        ),
        (sharded_checkpoints, {"(Stack)": 4, "layers.0 (CheckpointWrapper)": 6, "layers.1 (CheckpointWrapper)": 6}),
    ],
)
def test_a_unit_is_called_by_its_path_in_each_graph(
    fake_group_of_four: None, make: Callable[[], nn.Module], units: dict[str, int]
) -> None:
    model = make()
    with inspect(model) as report:
        torch.compile(model, backend="passes")(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    markers = find_unshards(report.joint.record.snapshots[-1])
    found = [format_unit(marker.unit) for marker in markers]
    assert {unit: found.count(unit) for unit in found} == units
    assert {marker.fqn.replace("_checkpoint_wrapped_module.", "") for marker in markers} == {
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()
    }
    for unit in units:
        assert f"\n  {unit} " in str(report.joint)
    last, first = list(units)[-1], list(units)[-2]
    assert {launch.unit for launch in report.forward.launches} == set(units)
    reductions = [launch.unit for launch in report.backward.launches if launch.kind == "reduce_scatter"]
    assert set(reductions) == set(units)
    assert reductions.index(last) < reductions.index(first), "backward begins with the last unit"
    assert {launch.unit for launch in report.backward.launches} - {"ahead (vectors)"} == set(units)


def test_units_of_two_models_in_one_graph_have_names_of_their_own(fake_group_of_four: None) -> None:
    one, other = shard(Stack(1)), shard(Stack(1))

    def both(one: nn.Module, other: nn.Module, tokens: Tensor) -> Tensor:
        return one(tokens) + other(tokens)

    with recorded() as records:
        torch.compile(both, backend="passes")(one, other, torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    stages = {record.stage: record.plan for record in records}
    expected = [f"{model}.{fqn}" for model in ("one", "other") for fqn, _ in one.named_parameters()]
    assert sorted(fqn for bucket in stages["forward"].gathers for fqn in bucket.fqns) == sorted(expected)
    assert sorted(fqn for bucket in stages["backward"].reduces for fqn in bucket.fqns) == sorted(expected)
    # A bucket is of one model, however alike the units are.
    for bucket in (*stages["forward"].gathers, *stages["backward"].gathers, *stages["backward"].reduces):
        assert len({fqn.partition(".")[0] for fqn in bucket.fqns}) == 1
    assert {bucket.unit for bucket in stages["forward"].gathers} == {
        "Stack:one", "Block:one.layers.0", "Stack:other", "Block:other.layers.0"
    }  # fmt: skip
