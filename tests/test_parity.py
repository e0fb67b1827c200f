"""Eager and compiled are the same training, bit by bit where no code is generated; check_parity compares the two.

check_parity is a trial: training goes on as if it had not been called, and it says what it did not compare.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import check_parity, configure, fully_shard
from tests.comparing import (
    assert_same_grads,
    backward_on_both,
    batches,
    local_loss,
    loss_of,
    mine,
    reference_backward,
)
from tests.compiling import PATHS, compiled
from tests.models import Block, Stack, pair, shard
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks


class Experts(nn.Module):
    """Two experts, each token to the one that its gate prefers; every expert sees every token, weighted."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 2)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = (weights == weights.max(-1, keepdim=True).values) * weights
        return x + sum(chosen[..., index, None] * torch.tanh(expert(x)) for index, expert in enumerate(self.experts))


MODELS = {"tied": lambda: Stack(1, tied=True), "experts": lambda: Stack(1, block=Experts)}


def _train(kind: str, dtype: torch.dtype, bucketing: str, backend: str) -> None:
    torch.manual_seed(0)
    eager = MODELS[kind]().to(dtype)
    graph = copy.deepcopy(eager)
    for model in (eager, graph):
        configure(shard(model), bucketing=bucketing)
    run = compiled(graph, backend)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (eager, graph)]
    for step in range(6):
        losses = [local_loss(eager, step), local_loss(run, step)]
        for loss, optim in zip(losses, optims):
            loss.backward()
            optim.step()
            optim.zero_grad()
        assert torch.equal(*losses), f"step {step}: {losses}"
    for (name, ours), theirs in zip(eager.named_parameters(), graph.parameters()):
        assert torch.equal(ours.to_local(), theirs.to_local()), name


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "dtype", "bucketing", "backend"),
    [
        ("tied", BF16, "group", "passes"),  # one bucket a group
        ("experts", FP32, "none", "aot_eager"),  # one collective a parameter
    ],
)
def test_three_ranks_are_bit_equal(
    three_ranks: Ranks, kind: str, dtype: torch.dtype, bucketing: str, backend: str
) -> None:
    """A sum of two is the same in either order; one of three is not."""
    three_ranks.run(_train, kind, dtype, bucketing, backend)


# --- check_parity -----------------------------------------------------------------------------------------------------


class Lying(Block):
    """Its output differs when compiled."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if torch.compiler.is_compiling() else 1
        return x + factor * self.down(torch.relu(self.up(self.norm(x))))


class Ungated(Block):
    """Its weights' gradients differ when compiled, its output does not."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if torch.compiler.is_compiling():
            return out.detach() + 0 * out
        return out


def _with_last(block: Block) -> Any:
    torch.manual_seed(0)
    model = Stack(1)
    model.layers[0] = block
    return shard(model)


@on_two_ranks
def test_check_parity_names_what_differs_first() -> None:
    lying = _with_last(Lying())
    with pytest.raises(ValueError, match="Pass check_parity a"):
        check_parity(lying, (mine(),))
    with pytest.raises(ValueError, match="holds no module"):
        check_parity(nn.Linear(2, 2), {"input": torch.ones(2)})
    bad = check_parity(lying, mine(), loss=loss_of)
    assert not bad and bad.first is not None
    close = check_parity(lying, mine(), loss=loss_of, atol=1e3)
    assert close and close.first is None
    assert all(param.grad is None for param in lying.parameters())
    assert str(close) == "eager and aot_eager agree: the loss and the gradients of 10 parameters"
    assert str(bad).startswith("eager and aot_eager differ, first at loss: differs by up to")
    lying.set_requires_gradient_sync(False)
    unsynced = check_parity(lying, mine(), loss=loss_of)
    assert not unsynced and "layers.0.up.weight" in {one.name for one in unsynced.differences}
    ungated = check_parity(_with_last(Ungated()), mine(), loss=loss_of)
    assert ungated.first is not None and ungated.first.name == "embed.weight"


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_an_accumulation_goes_on(path: str) -> None:
    """Behind a backward that was not synchronized, between a forward and its backward, and behind one that was."""
    unsharded, model = pair(make=functools.partial(Stack, 1))
    run = compiled(model, path, fullgraph=False)

    def compares() -> None:
        parity = check_parity(model, mine(2), loss=loss_of)
        assert parity and parity.num_params == len(list(model.parameters()))

    model.set_requires_gradient_sync(False)
    backward_on_both(run, unsharded, 0)
    compares()
    model.set_requires_gradient_sync(True)
    loss = local_loss(run, 1)
    compares()
    loss.backward()
    compares()
    reference_backward(unsharded, batches(1))
    assert_same_grads(model, unsharded)


@on_two_ranks
def test_what_was_gathered_by_hand_stays_and_an_optimizer_in_backward_does_not_step() -> None:
    _, model = pair(make=functools.partial(Stack, 1))
    model.unshard()
    whole = model.head.weight
    assert check_parity(model, mine(1), loss=loss_of)
    assert model.head.weight is whole
    assert torch.isfinite(whole).all() and whole.untyped_storage().nbytes() > 0
    model.reshard()

    steps: list[str] = []
    for fqn, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, fqn=fqn: steps.append(fqn))
    before = [param.to_local().clone() for param in model.parameters()]
    assert check_parity(model, mine(), loss=loss_of)
    assert not steps
    assert all(torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters()))
    local_loss(model, 0).backward()
    assert sorted(steps) == sorted(fqn for fqn, _ in model.named_parameters())


class Restless(nn.Module):
    """Draws from every generator, counts its calls, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.seen: list[int] = []

    @torch.compiler.disable
    def draw(self) -> float:
        self.calls += 1
        self.seen.append(self.calls)
        return random.random() + float(numpy.random.rand())

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(self.norm(x * x))) * self.draw()


def _draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def _seed() -> None:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


@on_two_ranks
def test_generators_buffers_attributes_and_inputs_are_as_before() -> None:
    model = fully_shard(Restless())
    _seed()
    expected = _draws()
    _seed()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    y = 2 * x  # whose graph is the caller's
    assert check_parity(model, y, loss=loss_of)
    assert _draws() == expected
    assert (model.calls, model.seen, model.training) == (0, [], True)
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
    assert x.grad is None
    y.sum().backward()


class Pass(nn.Module):
    """Has parameters that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@on_two_ranks
def test_it_says_what_was_not_compared() -> None:
    model = fully_shard(Pass())
    nothing = check_parity(model, torch.ones(2, 2, requires_grad=True), loss=loss_of)
    assert not nothing
    assert str(nothing) == (
        "nothing to compare: none of 2 parameters gets a gradient, eagerly or by aot_eager; the loss is the same"
    )
    with pytest.raises(ValueError, match="Pass: the loss has no gradient"):
        check_parity(model, torch.ones(2, 2), loss=loss_of)
    partly = shard(Stack(1))
    partly.head.weight.requires_grad_(False)
    partly_said = str(check_parity(partly, mine(), loss=loss_of))
    assert partly_said == "eager and aot_eager agree: the loss and the gradients of 9 parameters; 1 more get none"


class Keywords(nn.Module):
    """Has keyword arguments that check_parity has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, *, loss: Any = None, model: Any = None) -> Tensor:
        out = self.linear(input_ids)
        return out.sum() if loss is None else (out * loss).sum()


@on_two_ranks
def test_inputs_are_given_as_to_the_model() -> None:
    model = fully_shard(Keywords())
    x = torch.ones(2, 4)
    assert check_parity(model, input_ids=x)
    assert check_parity(model, input_ids=x, model=3)
    assert check_parity(model, x, model=3)
    assert check_parity(model, {"input_ids": x, "loss": x})
    with pytest.raises(TypeError, match=r"function of the model.s output.*\{.loss.: \.\.\.\}"):
        check_parity(model, input_ids=x, loss=x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the model and its inputs, but got Tensor"):
        check_parity(x, model)  # type: ignore[arg-type]


@on_two_ranks
def test_it_is_refused_in_the_middle_of_a_step() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_manual_backward_finalization(True)
    model(torch.ones(2, 4)).sum().backward()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match=r"finalize_backward.*Call wait"):
        check_parity(model, torch.ones(2, 4), loss=loss_of)
    handle.wait()
    model(torch.ones(2, 4)).sum().backward()
    assert check_parity(model, torch.ones(2, 4), loss=loss_of)
    model.finalize_backward()
    expected = dist.get_world_size() * 2.0 * 2 / dist.get_world_size()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), expected))

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            check_parity(self, x, loss=loss_of)
            return x

    with pytest.raises(RuntimeError, match="inside a forward"):
        fully_shard(Asks(4, 4))(torch.ones(2, 4))
