"""Checkpoints go from any number of ranks to any other, from any way of sharding to any other, and on from there.

    saved by 1, 2, 3 or 4 ranks, replicas, columns, one unit  -->  loaded by any of these: bit by bit, and trained on
    saved by ours                                             -->  loaded by FSDP2, FSDP1, DDP, a plain model
    saved by FSDP2, FSDP1, DDP, a plain model                 -->  loaded by ours
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import fully_shard
from tests.comparing import batches, full, loss_of
from tests.compiling import num_graphs
from tests.fsdp1_scripts import silenced, under_theirs
from tests.models import Block, Stack, mesh_of, shard
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks

STEPS = 2  # before saving, and after loading


class Saved(Stack):
    """Tied weights, biases, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(2, tied=True)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, tokens: Tensor) -> Tensor:
        self.scale.mul_(1.25)
        return super().forward(tokens) * 0.5


@dataclass
class Run:
    """A model and its optimizer, both with two groups of parameters."""

    model: Any
    optim: torch.optim.Optimizer

    def step(self, index: int) -> float:
        """All ranks have one batch, so that their number does not change what is learnt."""
        loss = loss_of(self.model(batches(index)[0]))
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        return loss.item()


def made(kind: Callable[[Saved], Any], seed: int, steps: int = 0) -> Run:
    torch.manual_seed(seed)
    model = kind(Saved())
    params = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in params if name.endswith("bias") is bias], "weight_decay": decay}
        for bias, decay in ((False, 0.1), (True, 0.0))
    ]
    run = Run(model, torch.optim.AdamW(groups, lr=1e-2))
    for index in range(steps):
        run.step(index)
    return run


def by_name(model: dict[str, Any], optim: dict[str, Any]) -> dict[str, Tensor]:
    named = {f"model.{name}": value for name, value in model.items()}
    for fqn, state in optim["state"].items():
        named |= {f"optim.{fqn}.{key}": value for key, value in state.items()}
    return named


def values_of(run: Run) -> dict[str, Tensor]:
    """Everything that is saved, whole, by name."""
    return {name: full(value).clone() for name, value in by_name(*get_state_dict(run.model, run.optim)).items()}


def save(run: Run, folder: str, step: int = STEPS) -> None:
    model, optim = get_state_dict(run.model, run.optim)
    dcp.save({"model": model, "optim": optim, "step": step}, checkpoint_id=folder)


def assert_values(run: Run, expected: dict[str, Tensor]) -> None:
    ours = values_of(run)
    assert sorted(ours) == sorted(expected)
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name


def go_on(run: Run) -> None:
    """As a model that was never saved, nor sharded, would."""
    reference = made(lambda model: model, 0)
    for index in range(2 * STEPS):
        expected = reference.step(index)
        if index >= STEPS:
            assert abs(run.step(index) - expected) < 1e-5
    torch.testing.assert_close(values_of(run), values_of(reference), atol=1e-5, rtol=1e-3)


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None


def _compiled(model: Saved) -> Any:
    return torch.compile(shard(model), backend="aot_eager")


WAYS: dict[str, tuple[int, Callable[[Saved], Any]]] = {
    "1 rank": (1, shard),
    "2 ranks": (2, shard),
    "3 ranks": (3, shard),
    "4 ranks": (4, shard),
    "2 ranks, columns": (2, functools.partial(shard, shard_placement_fn=_columns)),
    "3 ranks, one unit": (3, fully_shard),
    "2 replicas of 2 shards": (4, lambda model: shard(model, mesh=mesh_of("replicate", "shard"))),
}
OFTEN = "2 replicas of 2 shards"


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, Ranks]]:
    """Of each size; processes are started where they are used."""
    made = {size: Ranks(size) for size in (1, 2, 3, 4)}
    yield made
    for ranks in made.values():
        ranks.stop()


def _save(way: str, folder: str) -> dict[str, Tensor] | None:
    run = made(WAYS[way][1], 0, STEPS)
    save(run, folder)
    values = values_of(run)
    return values if dist.get_rank() == 0 else None


def load(run: Run, folder: str) -> int:
    model, optim = get_state_dict(run.model, run.optim)
    state: dict[str, Any] = {"model": model, "optim": optim, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(run.model, run.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


def _load(way: str, folders: dict[str, str], saved: dict[str, dict[str, Tensor]]) -> None:
    for index, (writer, folder) in enumerate(folders.items()):
        run = made(WAYS[way][1], 100 + index)
        assert load(run, folder) == STEPS, writer
        assert_values(run, saved[writer])
        go_on(run)


def saved_by(writers: Iterable[str], worlds: dict[int, Ranks], folder: Path) -> Any:
    """A checkpoint of each way: folders, and what is in them."""
    folders = {writer: str(folder / writer.replace(" ", "_")) for writer in writers}
    return folders, {writer: worlds[WAYS[writer][0]].run(_save, writer, path)[0] for writer, path in folders.items()}


@pytest.fixture(scope="module")
def everything_saved(worlds: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return saved_by(WAYS, worlds, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.more if way == OFTEN else pytest.mark.slow) for way in WAYS])
def test_what_any_way_saved_is_loaded_and_trained_on(worlds: dict[int, Ranks], everything_saved: Any, way: str) -> None:
    worlds[WAYS[way][0]].run(_load, way, *everything_saved)


def test_what_two_ranks_saved_three_load_and_the_reverse(worlds: dict[int, Ranks], tmp_path: Path) -> None:
    for writer, way in (("2 ranks", "3 ranks"), ("3 ranks", "2 ranks, columns")):
        worlds[WAYS[way][0]].run(_load, way, *saved_by([writer], worlds, tmp_path))


def _fsdp2(model: Saved) -> Any:
    for layer in model.layers:
        torch_fsdp.fully_shard(layer)
    return torch_fsdp.fully_shard(model)


OTHERS: dict[str, Callable[[Saved], Any]] = {
    "ours": shard,
    "ours, compiled": _compiled,
    "FSDP2": _fsdp2,
    "FSDP1": functools.partial(under_theirs, auto_wrap_policy=ModuleWrapPolicy({Block})),
    "DDP": DistributedDataParallel,
    "plain": lambda model: model,
}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _all_save(folder: str) -> None:
    for name, kind in OTHERS.items():
        run = made(kind, 0, STEPS)
        num = num_graphs()
        with silenced():
            save(run, f"{folder}/{name}")
            model, optim = get_state_dict(run.model, run.optim, options=WHOLE)
        if dist.get_rank() == 0:
            torch.save({"model": model, "optim": optim}, f"{folder}/{name}.pt")
        run.step(STEPS)
        assert num_graphs() == num, "saving compiles nothing anew"
    dist.barrier()


def load_file(run: Run, path: str) -> None:
    """Whole tensors, which every rank reads; nothing in the file can run code."""
    whole = torch.load(path, weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(run.model, run.optim, model_state_dict=whole["model"], optim_state_dict=whole["optim"], options=options)


@pytest.fixture(scope="module")
def saved_by_all(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("others"))
    two_ranks.run(_all_save, folder)
    return folder


@pytest.mark.parametrize("reader", ["ours", *(pytest.param(name, marks=pytest.mark.more) for name in list(OTHERS)[1:])])
@on_two_ranks
def test_what_any_of_them_saved_ours_loads_and_the_reverse(reader: str, saved_by_all: str) -> None:
    plain = made(OTHERS["plain"], 0, STEPS)
    expected, expected_loss = values_of(plain), plain.step(STEPS)
    writers = OTHERS if reader == "ours" else ("ours", "ours, compiled")
    sources = [(load, f"{saved_by_all}/{writer}") for writer in writers]
    # On the CPU torch's FSDP1 writes one gather over the last (2.15): whole first moments have second ones in them.
    sources += [(load_file, f"{saved_by_all}/{writer}.pt") for writer in writers if writer != "FSDP1"]
    for index, (read, path) in enumerate(sources):
        run = made(OTHERS[reader], 100 + index)
        with silenced():
            read(run, path)
            if reader == "FSDP1":  # of which whole states are wrong: see above
                model, optim = run.model.state_dict(), {"state": {}}
            else:
                model, optim = get_state_dict(run.model, run.optim, options=WHOLE)
        if dist.get_rank() == 0:
            values = by_name(model, optim)
            names = set(expected) if reader != "FSDP1" else {name for name in expected if name.startswith("model.")}
            assert set(values) == names, path
            for name, value in values.items():
                assert torch.equal(value, expected[name]), (path, name)
        assert abs(run.step(STEPS) - expected_loss) < 1e-5, path


@on_two_ranks
def test_an_async_save_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    folder = str(tmp_path / "async")
    run = made(shard, 0, 1)
    model, optim = get_state_dict(run.model, run.optim)
    # A group of its own: another thread talks while this one trains.
    group = dist.new_group(backend="gloo")
    future = dcp.async_save({"model": model, "optim": optim, "step": 1}, checkpoint_id=folder, process_group=group)
    expected = values_of(run)
    run.step(1)  # writes to what is being saved
    future.result()
    again = made(shard, 1)
    assert load(again, folder) == 1
    assert_values(again, expected)
