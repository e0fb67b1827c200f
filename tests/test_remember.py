"""What was chosen within a budget is found by the next process, and only where a search would choose the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from fsdp_compile import configure
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import Budget, Plan
from fsdp_compile.passes import _torch_compat as compat
from fsdp_compile.passes.budget import budget, remember
from fsdp_compile.passes.budget.remember import remembered
from fsdp_compile.passes.budget.residency import choose
from fsdp_compile.passes.budget.trial import Decision
from fsdp_compile.passes.ir.plan import Candidate, Choice
from fsdp_compile.passes.ir.provenance import settle_names
from fsdp_compile.passes.ranks.settle import Settled
from fsdp_compile.passes.schedule.calls import name_markers
from tests.models import Stack, shard
from tests.recording import plans_made
from tests.test_passes import Builder, spec

aten = torch.ops.aten
CHOICE = Choice(100, "toy", 0, Candidate("kept", 1, 90, 0.5, 0.25), (Candidate("again", 0, 60, 1.0, 0.5),))
FOUND = Plan("joint", keep=("up.weight",), lookahead=2, choice=CHOICE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(remember.kernels_compat, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compat, "group_ranks", lambda name: (0, 1))
    return tmp_path / "fsdp_compile"


def product(rows: int = 8, step: str = "budget 0, 7.1", saved: Any = None, op: Any = aten.relu.default) -> fx.Graph:
    """A weight's product and gradient, as a joint graph has them."""
    b = Builder()
    shard, x, tangent = b.input("primals_1", 2, 3), b.input("primals_2", rows, 4), b.input("tangents_1", rows, 3)
    its_spec = spec(step=step)
    weight = b.unshard(shard, its_spec)
    y = b.call(op, b.call(aten.mm.default, x, weight))
    y.meta["recompute"] = saved
    grad = b.call(aten.mm.default, b.call(aten.t.default, x), tangent)
    graph = b.output(y, b.reduce(grad, its_spec, of=weight), None)  # type: ignore[arg-type]
    name_markers(graph)
    settle_names(graph)
    return graph


class Search:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Plan:
        self.times += 1
        return FOUND


def test_the_same_step_is_searched_once(folder: Path) -> None:
    search = Search()
    found = [remembered(product(step=f"budget 0, {process}.1"), "1GiB", search) for process in (7, 8)]
    assert found == [FOUND, FOUND] and search.times == 1
    assert found[1].choice == CHOICE  # which equality leaves out
    assert len(list(folder.iterdir())) == 1


def test_groups_come_in_any_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of a set of strings, which each process has in an order of its own."""
    search = Search()
    monkeypatch.setattr(compat, "group_ranks", {"shards": (0, 1), "replicas": (0, 2)}.__getitem__)
    for order in (["shards", "replicas"], ["replicas", "shards"]):
        monkeypatch.setattr(remember, "groups_of", lambda graph, order=order: order)
        remembered(product(), "1GiB", search)
    assert search.times == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: (product(rows=16), "1GiB"),
        lambda: (product(op=aten.gelu.default), "1GiB"),
        lambda: (product(saved=1), "1GiB"),
        lambda: (product(), "2GiB"),
    ],
    ids=["sizes", "operator", "checkpointing", "budget"],
)
def test_another_step_is_searched_anew(folder: Path, other: Callable[[], tuple[fx.Graph, str]]) -> None:
    search = Search()
    remembered(product(), "1GiB", search)
    remembered(*other(), search)
    assert search.times == 2 and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "patched",
    [
        lambda: mock.patch.object(remember, "source_hash", lambda: "of other passes"),
        lambda: mock.patch.object(torch, "__version__", "2.99"),
        lambda: mock.patch.object(compat, "group_ranks", lambda name: (0, 8)),
        lambda: torch._functorch.config.patch(aggressive_recomputation=True),
        lambda: mock.patch.object(remember.compat, "allows_tf32", lambda: True),
    ],
    ids=["passes", "torch", "ranks", "partitioner", "tf32"],
)
def test_so_is_one_of_other_circumstances(folder: Path, patched: Callable[[], Any]) -> None:
    search = Search()
    remembered(product(), "1GiB", search)
    with patched():
        remembered(product(), "1GiB", search)
    assert search.times == 2


def test_half_a_file_is_as_good_as_none(folder: Path) -> None:
    search = Search()
    for text in ("", "{}", '{"error": "rank 3"}', FOUND.to_json()[:40]):
        remembered(product(), "1GiB", search)
        (file,) = folder.iterdir()
        file.write_text(text)
    assert remembered(product(), "1GiB", search) == FOUND and search.times == 5
    assert remembered(product(), "1GiB", search) == FOUND and search.times == 5


@pytest.mark.parametrize("setting", ["force_disable_caches", "fx_graph_cache"])
def test_where_inductor_keeps_nothing_nothing_is_remembered(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "group_ranks", lambda name: (0, 1))
    search = Search()
    with torch._inductor.config.patch(**{setting: setting == "force_disable_caches"}):
        for _ in range(2):
            remembered(product(), "1GiB", search)
    assert search.times == 2


def test_a_disk_that_takes_nothing_is_no_error(folder: Path) -> None:
    folder.write_text("a file in the folder's place")
    search = Search()
    assert [remembered(product(), "1GiB", search) for _ in range(2)] == [FOUND, FOUND] and search.times == 2


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_model_is_planned_as_it_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember.kernels_compat, "cache_folder", lambda: tmp_path)

    def plan(profile: str) -> Plan:
        """As another process would: nothing is left of what this one settled."""
        manager.settled = Settled()
        model = shard(Stack(0))
        configure(model, memory_budget="fsdp2", profile=profile)
        torch._dynamo.reset()
        with plans_made() as plans:
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
            run(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
        return plans[0]

    with mock.patch.object(budget, "choose", side_effect=choose) as searching:
        first, second = plan("h100"), plan("h100")
        assert searching.call_count == 1
        assert second == first and second.id == first.id and second.choice == first.choice
        plan("a100")
        assert searching.call_count == 2


_PRINTS_ITS_KEY = """
import os, warnings
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import configure
from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.passes.budget import remember
from tests.models import Stack, shard

warnings.simplefilter("ignore")


def stop(graph, said):
    print(key(graph, said), flush=True)
    os._exit(0)  # nothing is to run


key = remember._key
with pretended_world(4), mock.patch.object(remember, "_key", stop):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(Stack(1), mesh=mesh)
    configure(model, memory_budget="1GiB", profile="h100")
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.zeros(2, 5, dtype=torch.long))
"""


@pytest.mark.more
def test_the_key_is_the_same_under_every_hash_seed() -> None:
    """Sets of strings are in another order in each process, as are the groups of replicas here."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PRINTS_ITS_KEY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in "012"
    ]
    keys = [one.communicate()[0].strip() for one in started]
    assert len(keys[0]) == 64 and len({*keys}) == 1


@pytest.mark.parametrize(("said", "searches"), [(Budget(share=0.5), 2), (Budget(1 << 30), 1)])
def test_a_share_of_what_is_free_is_other_bytes_each_time(said: Budget, searches: int, folder: Path) -> None:
    with mock.patch.object(budget, "searched", return_value=(Decision(), CHOICE)) as searching:
        decided = [budget._decide(said, product(), rank) for rank in (0, 4)]
    assert searching.call_count == searches
    assert [one.choice and one.choice.rank for one in decided] == [0, 4]  # whoever decides, from wherever it has that
