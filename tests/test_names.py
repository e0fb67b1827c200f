"""Parameters and modules may be called whatever nn.ParameterDict and nn.ModuleDict take: no code depends on a name."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import explain, fully_shard, inspect
from fsdp_compile.core.unit import unit_of
from fsdp_compile.lookout.names import Namer
from fsdp_compile.passes.ir.module_paths import path_of
from fsdp_compile.tools.inspect import Report
from tests.comparing import assert_same_grads
from tests.compiling import passes
from tests.ranks import Ranks

# What Python takes for one identifier, and what looks like two things that belong to one parameter.
LOOK_ALIKE = ("\N{LATIN SMALL LIGATURE FI}", "fi", "edge_x", "x")
NAMES = (
    "a b",
    "a'b",
    'a"b',
    "my-adapter",
    "line\nbreak = 1",
    "{x}",
    "\N{GRINNING FACE}",
    "class",
    "back\\slash",
    '"""',
    "%s",
    "#",
    "a[0]",
    "9",
    *LOOK_ALIKE,
)
SOME = ("a b", 'a"b', "my-adapter", "line\nbreak = 1", "{x}", *LOOK_ALIKE)


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


def _trains(names: tuple[str, ...], backend: str | None) -> None:
    unsharded, model = _pair(names)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    for step in range(2):
        batch = torch.randn(dist.get_world_size(), 3, 4, generator=torch.Generator().manual_seed(step))
        run(batch[dist.get_rank()]).pow(2).sum().backward()
        torch.stack([unsharded(one).pow(2).sum() for one in batch]).mean().backward()
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-3)
        for optim in optims:
            optim.step()
            optim.zero_grad()


@pytest.mark.compat
def test_any_name_trains_eagerly(two_ranks: Ranks) -> None:
    two_ranks.run(_trains, NAMES, None)


@pytest.mark.compat
def test_any_name_trains_in_one_graph(two_ranks: Ranks) -> None:
    two_ranks.run(_trains, SOME, "aot_eager")


@pytest.mark.more
def test_any_name_trains_on_inductor(two_ranks: Ranks) -> None:
    two_ranks.run(_trains, SOME, "inductor")


def _save(names: tuple[str, ...], backend: str, folder: str) -> list[str]:
    _, model = _pair(names)
    with inspect(model) as report:
        torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        report.save(folder)
    return [name for graph in report.graphs for name in (*graph.plan.regather, *graph.plan.keep)]


def _run_all(folder: Path) -> None:
    """Of each graph the last step as a script, and the others one after another in a process that imported torch."""
    run_paths = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"
    graphs = [sorted(graph.glob("*.py")) for graph in sorted(folder.iterdir()) if graph.is_dir()]
    assert all(graphs)
    alone = [[sys.executable, str(files[-1])] for files in graphs]
    for command in (*alone, [sys.executable, "-c", run_paths, *(str(file) for files in graphs for file in files[:-1])]):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.more
def test_saved_graphs_run_whatever_parameters_are_called(two_ranks: Ranks, tmp_path: Path) -> None:
    names = ("a b", 'a"b', "line\nbreak = 1", '"""', "\N{GRINNING FACE}", "a[0]", "\ud800")
    planned = two_ranks.run(_save, names, "aot_eager", str(tmp_path))[0]
    said = [name.encode(errors="backslashreplace").decode() for name in names]
    # Those of a unit of their own as well: its path is found whatever it is called.
    assert {f"scales.{name}" for name in said} | {f"layers.{name}.weight" for name in names[:-1]} <= set(planned)
    _run_all(tmp_path)
    assert "line\\nbreak = 1" in next(tmp_path.glob("*/0_captured.py")).read_text(encoding="utf-8")


@pytest.mark.more
def test_graphs_saved_on_inductor_run_whatever_parameters_are_called(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_save, ("a'b", "line\nbreak = 1", "{x}"), "inductor", str(tmp_path))
    _run_all(tmp_path)


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
@pytest.mark.parametrize("of_their_own", (False, True))
def test_a_module_that_getattr_asks_for_keeps_its_name(tmp_path: Path, of_their_own: bool) -> None:
    torch._dynamo.reset()
    model = AskedFor(ASKED_FOR)
    for name in ASKED_FOR if of_their_own else ():
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
    names = Namer()._names_in(unit).values()
    assert {"my_modules.weight", "0.weight"} < {*names}
