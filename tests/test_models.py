"""Models with layers of every kind: sharded, compiled into one graph, and trained as if they were not sharded.

A model is trained once, five steps of AdamW; each test reads a part of what came out. What each layer launches by
itself, and on every path, is in test_sequence.py, and transformers' models are trained in test_hugging_face.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard, passes
from fsdp_compile.passes.ir.markers import spec_in
from tests.compiling import num_graphs
from tests.models import (
    PLAIN,
    AttentionBlock,
    Batch,
    Block,
    DictBlock,
    Entry,
    FrozenBlock,
    ListBlock,
    Loop,
    PartlyUsedBlock,
    TiedInBlock,
    TwiceBlock,
    layers,
    rows,
    squared_error,
)
from tests.ranks import Ranks
from tests.recording import recorded

BLOCKS = (Block, AttentionBlock, ListBlock, DictBlock, TwiceBlock, FrozenBlock, PartlyUsedBlock, TiedInBlock, Block)


def blocks_of_every_kind() -> nn.Module:
    """Five features, which two ranks do not share evenly; the last block's weight is the first one's."""
    model = Loop([block(5) for block in BLOCKS], 5)
    model.layers[-1].down.weight = model.layers[0].down.weight
    return model


MODELS = {
    "every kind": Entry(blocks_of_every_kind, layers, rows(5, 5), squared_error),
    "conv": PLAIN["conv"],
    "sometimes": PLAIN["sometimes"],
}
NUM_STEPS = 5
EPS = torch.finfo(torch.float32).eps


# --- on the ranks -----------------------------------------------------------------------------------------------


class Unsharded:
    """The same model, run on every rank's batch in turn; each rank keeps its own buffers."""

    def __init__(self, entry: Entry, model: nn.Module, dtype: torch.dtype) -> None:
        self.entry = entry
        self.dtype = dtype
        self.model = copy.deepcopy(model).to(dtype)
        self.buffers = [_buffers(self.model) for _ in range(dist.get_world_size())]

    def backward(self, batches: list[Batch]) -> list[float]:
        """Leave the mean gradient in the parameters; return each rank's loss."""
        losses = []
        for rank, batch in enumerate(batches):
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[rank][name])
            loss = self.entry.loss(self.model, **_floating_to(self.dtype, batch))
            assert loss.dtype is self.dtype
            (loss / len(batches)).backward()
            self.buffers[rank] = _buffers(self.model)
            losses.append(loss.item())
        return losses


def train(model_name: str) -> SimpleNamespace:
    """Train sharded and compiled beside unsharded and eager; this rank's account of it."""
    entry = MODELS[model_name]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = entry.build()
    exact, unsharded = Unsharded(entry, model, torch.float64), Unsharded(entry, model, torch.float32)
    for block in entry.blocks(model):
        fully_shard(block)
    fully_shard(model)
    owned = _names_by_unit([*entry.blocks(model), model])
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    unsharded_optimizer = torch.optim.AdamW(unsharded.model.parameters(), lr=1e-2)

    losses, unsharded_losses, trained, unsharded_trained = [], [], [], []
    torch._dynamo.utils.counters.clear()
    with recorded() as records:
        for step in range(NUM_STEPS):
            batches = [entry.batch(100 * step + rank) for rank in range(num_ranks)]
            loss = entry.loss(compiled, **batches[rank])
            loss.backward()
            losses.append(loss.item())
            unsharded_losses.append(unsharded.backward(batches)[rank])
            if step == 0:
                exact.backward(batches)
                compared, off = _compare(model, unsharded.model, exact.model)
                misplaced = [fqn for fqn, param in model.named_parameters() if not _grad_is_placed_like(param)]
            trained.append(_trained(model))
            unsharded_trained.append(_trained(unsharded.model))
            for one in (optimizer, unsharded_optimizer):
                one.step()
                one.zero_grad()

    joint_graphs = [record.graph for record in records if record.stage == "joint" and record.graph]
    return SimpleNamespace(
        joint_graphs=len(joint_graphs),
        dynamo_graphs=num_graphs(),
        owned=[fqn for fqn, _ in owned],
        trainable=[fqn for fqn, param in owned if param.requires_grad],
        # FQNs in the joint graph's markers, as in ``owned``
        gathered=[fqn for graph in joint_graphs for fqn in _fqns(passes.ir.provenance.unshard_nodes(graph))],
        reduced=[fqn for graph in joint_graphs for fqn in _fqns(passes.ir.provenance.reduce_nodes(graph))],
        compared=compared,  # parameters whose first gradient was compared
        off=off,  # and those whose worst element is further from the exact one than rounding takes it
        misplaced=misplaced,  # parameters whose gradient is not sharded as they are
        trained=trained,  # by step: parameters with a gradient
        unsharded_trained=unsharded_trained,
        losses=losses,  # by step, on this rank's batches
        unsharded_losses=unsharded_losses,
        buffers=_values(_buffers(model)),  # after the last step
        unsharded_buffers=_values(unsharded.buffers[rank]),
        buffer_types={type(buffer) for buffer in model.buffers()},
    )


def _compare(model: nn.Module, unsharded: nn.Module, exact: nn.Module) -> tuple[set[str], list[str]]:
    """Errors of all gradients, relative to the largest element of each, or of all where one should be zero.

    (A bias before a batch norm, the bias of attention's keys: what they get is rounding.)
    """
    exact_grads = {fqn: param.grad for fqn, param in exact.named_parameters() if param.grad is not None}
    largest = max(grad.abs().max().item() for grad in exact_grads.values())
    compared, off = set(), []
    for fqn, param in model.named_parameters():
        if not isinstance(param.grad, DTensor) or fqn not in exact_grads:
            continue  # which parameters have a gradient is a test of its own
        compared.add(fqn)
        truth = exact_grads[fqn]
        size = truth.abs().max().item()
        scale = size if size > 1e-9 * largest else largest
        error, unsharded_error = (
            (grad.double() - truth).abs().max().item() / scale
            for grad in (param.grad.full_tensor(), unsharded.get_parameter(fqn).grad)
        )
        if not error <= 2 * unsharded_error + 4 * EPS:
            off.append(f"{fqn}: {error}, and unsharded {unsharded_error}")
    return compared, off


def _names_by_unit(units: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once, under its name in the innermost unit that has it, or in the first such one."""
    named: dict[nn.Parameter, str] = {}
    for unit in units:
        for fqn, param in unit.named_parameters():
            named.setdefault(param, fqn)
    return [(fqn, param) for param, fqn in named.items()]


def _trained(model: nn.Module) -> set[str]:
    return {fqn for fqn, param in model.named_parameters() if param.grad is not None}


def _grad_is_placed_like(param: Tensor) -> bool:
    grad = param.grad
    if grad is None:
        return True
    assert isinstance(param, DTensor)
    return isinstance(grad, DTensor) and grad.placements == param.placements and grad.device_mesh == param.device_mesh


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _values(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in tensors.items()}


def _fqns(markers: Any) -> list[str]:
    return [spec_in(node).fqn for node in markers]


def _floating_to(dtype: torch.dtype, batch: Batch) -> Batch:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


# --- the promises -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(two_ranks: Ranks) -> Callable[[str], list[Any]]:
    """Every rank's report of a model, trained when it is first asked for."""
    return functools.cache(lambda model: two_ranks.run(train, model))


each_model = pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[pytest.mark.compat] * (model == "every kind")) for model in MODELS]
)


@each_model
def test_a_step_is_one_forward_and_one_backward_graph(reports: Any, model: str) -> None:
    """A branch that some steps take is one more graph."""
    for report in reports(model):
        if model == "sometimes":
            assert report.dynamo_graphs == 2
            has_gradient = [any("sometimes" in fqn for fqn in step) for step in report.trained]
            assert has_gradient == [True, False, True, False, True]
        else:
            assert report.dynamo_graphs == report.joint_graphs == 1


@each_model
def test_gradients_are_the_unsharded_mean_over_ranks_to_rounding(reports: Any, model: str) -> None:
    for report in reports(model):
        assert report.compared == report.unsharded_trained[0]
        assert report.off == report.misplaced == []


@each_model
def test_five_adamw_steps_have_the_unsharded_losses(reports: Any, model: str) -> None:
    """In every step the same parameters have a gradient."""
    for report in reports(model):
        assert report.losses == pytest.approx(report.unsharded_losses, rel=1e-5)
        assert report.trained == report.unsharded_trained


@pytest.mark.compat
def test_a_parameter_is_gathered_and_reduced_once_however_often_it_is_read(reports: Any) -> None:
    for report in reports("every kind"):
        assert sorted(report.gathered) == sorted(fqn for fqn in report.owned if "unused" not in fqn)
        assert sorted(report.reduced) == sorted(fqn for fqn in report.trainable if "unused" not in fqn)


def test_frozen_parameters_are_gathered_but_not_reduced(reports: Any) -> None:
    frozen = f"layers.{BLOCKS.index(FrozenBlock)}.up."
    for report in reports("every kind"):
        assert report.gathered.count("up.weight") == report.reduced.count("up.weight") + 1
        assert not any(fqn.startswith(frozen) for step in report.trained for fqn in step)


def test_unused_parameters_are_not_gathered_and_have_no_gradient(reports: Any) -> None:
    for report in reports("every kind"):
        assert not any("unused" in fqn for fqn in report.gathered)
        assert not any("unused" in fqn for step in report.trained for fqn in step)


def test_batch_norm_statistics_stay_plain_tensors_of_each_rank(reports: Any) -> None:
    first, second = reports("conv")
    for report in (first, second):
        assert report.buffer_types == {Tensor}
        assert len(report.buffers) == 6
        for name, values in report.buffers.items():
            assert values == pytest.approx(report.unsharded_buffers[name], rel=1e-4, abs=1e-6), name
    assert first.buffers["1.norm.running_mean"] != second.buffers["1.norm.running_mean"]
