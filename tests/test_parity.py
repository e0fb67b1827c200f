"""Eager and compiled are the same training: bit by bit where no code is generated."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import check_parity, configure
from tests.comparing import batches, loss_of, train_and_compare
from tests.compiling import compiled
from tests.models import Block, Stack, pair, shard
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


def experts() -> nn.Module:
    return Stack(block=Experts)


def tied() -> nn.Module:
    return Stack(tied=True)


MODELS = {"mlp": Stack, "tied": tied, "experts": experts}
KINDS = ["mlp", *(pytest.param(kind, marks=pytest.mark.more) for kind in ("tied", "experts"))]


def _train(kind: str, dtype: torch.dtype, bucketing: str | None, backend: str, steps: int = 5) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = MODELS[kind]().to(dtype)
    graph = copy.deepcopy(eager)
    for model in (eager, graph):
        shard(model)  # type: ignore[arg-type]
        if bucketing is not None:
            configure(model, bucketing=bucketing)
    run = compiled(graph, backend)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (eager, graph)]
    for step in range(steps):
        tokens = batches(step)[dist.get_rank()]
        losses = []
        for call, optim in zip((eager, run), optims):
            loss = loss_of(call(tokens))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses), f"step {step}: {losses}"
    for (name, ours), theirs in zip(eager.named_parameters(), graph.parameters()):
        assert torch.equal(ours.to_local(), theirs.to_local()), name


FP32, BF16 = torch.float32, torch.bfloat16
MORE_FP32, MORE_BF16 = (pytest.param(dtype, marks=pytest.mark.more) for dtype in (FP32, BF16))


@pytest.mark.parametrize("dtype", [FP32, MORE_BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_collective_a_parameter_is_bit_equal(three_ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    three_ranks.run(_train, kind, dtype, "none", "aot_eager")


@pytest.mark.parametrize("dtype", [MORE_FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_bucket_a_group_is_bit_equal(three_ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    three_ranks.run(_train, kind, dtype, "group", "passes")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_defaults_are_bit_equal_on_two_ranks(two_ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    two_ranks.run(_train, kind, dtype, None, "aot_eager")


@pytest.mark.parametrize("backend", ["aot_eager", "passes"])
def test_four_ranks_are_bit_equal(four_ranks: Ranks, backend: str) -> None:
    four_ranks.run(_train, "tied", torch.float32, "none" if backend == "aot_eager" else "group", backend)


def _parity() -> tuple[str, str, str]:
    _, model = pair(make=lambda: Stack(3))
    tokens = batches(0)[dist.get_rank()]
    grads = {name: param.grad for name, param in model.named_parameters()}
    good = check_parity(model, tokens, loss=loss_of)
    assert good and good.first is None
    assert {name: param.grad for name, param in model.named_parameters()} == grads
    with pytest.raises(ValueError, match="Pass check_parity a"):
        check_parity(model, (tokens,))
    with pytest.raises(ValueError, match="holds no module"):
        check_parity(nn.Linear(2, 2), {"input": torch.ones(2)})

    class Lying(Block):
        def forward(self, x: Tensor) -> Tensor:
            factor = 2 if torch.compiler.is_compiling() else 1
            return x + factor * self.down(torch.relu(self.up(self.norm(x))))

    torch.manual_seed(0)
    lying = Stack(3)
    lying.layers[2] = Lying()
    shard(lying)
    bad = check_parity(lying, tokens, loss=loss_of)
    assert not bad and bad.first is not None
    close = check_parity(lying, tokens, loss=loss_of, atol=1e3)
    return str(good), str(bad), str(close)


def test_check_parity_names_what_differs_first(two_ranks: Ranks) -> None:
    good, bad, close = two_ranks.run(_parity)[0]
    assert good == "eager and aot_eager agree: the loss and the gradients of 22 parameters"
    assert bad.startswith("eager and aot_eager differ, first at loss: differs by up to")
    assert close == good


class Ungated(Block):
    """Its weights' gradients differ when compiled, its output does not."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if torch.compiler.is_compiling():
            return out.detach() + 0 * out
        return out


def _first_parameter() -> str:
    torch.manual_seed(0)
    model = Stack()
    model.layers[1] = Ungated()
    shard(model)
    parity = check_parity(model, batches(0)[dist.get_rank()], loss=loss_of)
    assert parity.first is not None
    return parity.first.name


def test_check_parity_names_the_first_parameter(two_ranks: Ranks) -> None:
    assert two_ranks.run(_first_parameter) == ["embed.weight"] * 2


def _mixed_step() -> None:
    """Compiled blocks in an eager model, an eager block in a compiled one, a break inside a unit, compile toggled."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    class Breaking(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.up(self.norm(x)))
            torch._dynamo.graph_break()
            return x + self.down(hidden)

    base = Stack(num_blocks=4)
    base.layers[3] = Breaking()
    eager, mixed = shard(copy.deepcopy(base)), copy.deepcopy(base)
    mixed.layers[0].compile(backend="aot_eager")
    shard(mixed)
    mixed.layers[2].forward = torch._dynamo.disable(mixed.layers[2].forward)  # type: ignore[method-assign]
    compiled = torch.compile(mixed, backend="aot_eager")
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (eager, mixed)]
    for step in range(6):
        tokens = batches(step)[dist.get_rank()]
        run = compiled if step % 3 else mixed
        losses = [loss_of(eager(tokens)), loss_of(run(tokens))]
        for loss, optim in zip(losses, optims):
            loss.backward()
            optim.step()
            optim.zero_grad()
        torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=0)
    for (name, ours), theirs in zip(eager.named_parameters(), mixed.parameters()):
        assert torch.equal(ours.to_local(), theirs.to_local()), name


def test_a_step_that_mixes_everything(two_ranks: Ranks) -> None:
    two_ranks.run(_mixed_step)


def _unit_compiled_at_its_forward() -> None:
    unsharded, model = pair()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")  # upstream's recipe for FSDP2
    train_and_compare(model, model, unsharded)


def test_forwards_that_are_compiled_themselves(two_ranks: Ranks) -> None:
    two_ranks.run(_unit_compiled_at_its_forward)
