"""Every model of the zoo: sharded, compiled into one graph, and trained as if it were not sharded.

A case (model, ranks, backend) is trained once, five steps of AdamW; each test reads a part of what came out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard, passes
from tests.compiling import num_graphs
from tests.models import PLAIN, ZOO, Batch, Entry
from tests.ranks import Ranks
from tests.recording import recorded

NUM_STEPS = 5
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Case:
    """What is trained, where, and by which backend."""

    model: str
    num_ranks: int
    backend: str = "aot_eager"

    def __str__(self) -> str:
        return f"{self.model}-{self.num_ranks}-{self.backend}"


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


def train(model_name: str, backend: str) -> SimpleNamespace:
    """Train sharded and compiled beside unsharded and eager; this rank's account of it."""
    entry = ZOO[model_name]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = entry.build()
    exact, unsharded = Unsharded(entry, model, torch.float64), Unsharded(entry, model, torch.float32)
    for block in entry.blocks(model):
        fully_shard(block)
    fully_shard(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
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
                with _float32_means_float64():
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
        graphs=Counter(record.stage for record in records),  # joint, forward, backward
        dynamo_graphs=num_graphs(),
        num_params=len(list(model.parameters())),
        # FQNs in the joint graph's markers, relative to their units
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


@contextlib.contextmanager
def _float32_means_float64() -> Iterator[None]:
    """transformers computes norms and rotations in float32, whatever the dtype of the model."""
    with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(Tensor, "float", Tensor.double):
        yield


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
    return [str(node.kwargs["fqn"]) for node in markers]


def _floating_to(dtype: torch.dtype, batch: Batch) -> Batch:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


# --- the promises -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(two_ranks: Ranks, three_ranks: Ranks) -> Callable[[Case], list[Any]]:
    """Every rank's report of a case, trained when it is first asked for."""

    @functools.cache
    def trained_or_failed(case: Case) -> list[Any] | AssertionError:
        ranks = {2: two_ranks, 3: three_ranks}[case.num_ranks]
        try:
            return ranks.run(train, case.model, case.backend)
        except AssertionError as failure:
            return failure

    def report(case: Case) -> list[Any]:
        outcome = trained_or_failed(case)
        if isinstance(outcome, AssertionError):
            raise outcome
        return outcome

    return report


# Every model of plain torch is on three ranks, where shards are uneven; the first one also on two, where they are even.
SLOW = [Case("llama", 2, "inductor"), Case("conv", 3, "inductor"), Case("mixtral", 3), Case("t5", 3)]
CASES = [Case("sequential", 2), *(Case(model, 3) for model in PLAIN), Case("llama", 3), *SLOW]
COMPAT = [Case("sequential", 2), Case("loop", 3)]


def every(*models: str) -> pytest.MarkDecorator:
    """Every case of these models, or of all."""

    def marks(case: Case) -> list[pytest.MarkDecorator]:
        return [mark for mark, cases in ((pytest.mark.compat, COMPAT), (pytest.mark.slow, SLOW)) if case in cases]

    chosen = [case for case in CASES if not models or case.model in models]
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in chosen])


@every()
def test_a_step_is_one_forward_and_one_backward_graph(reports: Any, case: Case) -> None:
    """A branch that some steps take is one more graph."""
    expected = {"joint": 1} | ({"forward": 1, "backward": 1} if case.backend == "inductor" else {})
    for report in reports(case):
        if case.model == "sometimes":
            assert report.dynamo_graphs == 2
            has_gradient = [any("sometimes" in fqn for fqn in step) for step in report.trained]
            assert has_gradient == [True, False, True, False, True]
        else:
            assert report.dynamo_graphs == 1
            assert dict(report.graphs) == expected


@every()
def test_gradients_are_the_unsharded_mean_over_ranks_to_rounding(reports: Any, case: Case) -> None:
    for report in reports(case):
        assert report.compared == report.unsharded_trained[0]
        assert report.off == report.misplaced == []


@every()
def test_five_adamw_steps_have_the_unsharded_losses(reports: Any, case: Case) -> None:
    """In every step the same parameters have a gradient."""
    for report in reports(case):
        assert report.losses == pytest.approx(report.unsharded_losses, rel=1e-5)
        assert report.trained == report.unsharded_trained


@every("used_twice", "tied_in_group", "tied_across_groups", "t5")
def test_a_parameter_is_gathered_and_reduced_once_however_often_it_is_read(reports: Any, case: Case) -> None:
    for report in reports(case):
        assert len(report.gathered) == report.num_params
        assert len(report.reduced) == report.num_params


@every("frozen")
def test_frozen_parameters_are_gathered_but_not_reduced(reports: Any, case: Case) -> None:
    for report in reports(case):
        assert report.gathered.count("up.weight") == 2
        assert report.reduced.count("down.weight") == 2
        assert report.reduced.count("up.weight") == report.reduced.count("up.bias") == 0
        assert not any(".up." in fqn for step in report.trained for fqn in step)


@every("unused")
def test_unused_parameters_are_not_gathered_and_have_no_gradient(reports: Any, case: Case) -> None:
    for report in reports(case):
        assert not any("unused" in fqn for fqn in report.gathered)
        assert not any("unused" in fqn for step in report.trained for fqn in step)


@every("conv")
def test_batch_norm_statistics_stay_plain_tensors_of_each_rank(reports: Any, case: Case) -> None:
    for report in reports(case):
        assert report.buffer_types == {Tensor}
        assert len(report.buffers) == 6
        for name, values in report.buffers.items():
            assert values == pytest.approx(report.unsharded_buffers[name], rel=1e-4, abs=1e-6), name
    first, second = reports(case)[:2]
    assert first.buffers["1.norm.running_mean"] != second.buffers["1.norm.running_mean"]


def train_two_models_with_equal_names() -> list[float]:
    """Linears only: Inductor has next to nothing to generate for them."""
    errors = []
    for width in (7, 10):
        model: Any = nn.Sequential(nn.Linear(5, width, bias=False), nn.Linear(width, 5, bias=False))
        batches = [torch.randn(3, 5) for _ in range(dist.get_world_size())]
        expected = sum(torch.autograd.grad(model(batch).sum(), model[0].weight)[0] for batch in batches) / len(batches)
        fully_shard(model)
        torch.compile(model, fullgraph=True)(batches[dist.get_rank()]).sum().backward()
        errors.append((model[0].weight.grad.full_tensor() - expected).abs().max().item())
    return errors


@pytest.mark.slow
def test_a_second_model_with_the_same_names_and_other_sizes_trains_in_the_same_process(two_ranks: Ranks) -> None:
    for errors in two_ranks.run(train_two_models_with_equal_names):
        assert max(errors) < 1e-5
