"""torchao's float8 linear layers, whose weights travel as eight bits: as on torch's FSDP2, eager and compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, fx, nn

import fsdp_compile
from tests.comparing import mean_over_ranks
from tests.ranks import Ranks
from tests.recording import recorded

pytestmark = pytest.mark.more

torchao = pytest.importorskip("torchao.float8")

STEPS = 4


class Block(nn.Module):
    """Norm, up, down; sizes that eight-bit products take."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model_in_float8(emulate: bool = True) -> Model:
    torch.manual_seed(0)
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    return torchao.convert_to_float8_training(Model(), config=config)


def losses_on(
    fully_shard: Callable[..., Any],
    backend: str | None = None,
    precompute: bool = False,
    emulate: bool = True,
    steps: int = STEPS,
    **settings: Any,
) -> list[float]:
    """The mean losses of training steps; ``precompute``: one reduction finds the scales of all weights."""
    model = model_in_float8(emulate)
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.Generator().manual_seed(5 + dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = run(torch.randn(16, 32, generator=inputs)).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if precompute:
            torchao.precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(mean_over_ranks(loss).item())
    return losses


def losses_of_the_three(precompute: bool = False, emulate: bool = True) -> dict[str, list[float]]:
    """On torch's FSDP2, on ours, and on ours compiled by Inductor; every rank of two calls it."""
    return {
        "FSDP2": losses_on(torch_fsdp.fully_shard, None, precompute, emulate),
        "eager": losses_on(fsdp_compile.fully_shard, None, precompute, emulate),
        "compiled": losses_on(fsdp_compile.fully_shard, "inductor", precompute, emulate),
    }


def _as_fsdp2(backend: str | None, precompute: bool, emulate: bool, settings: dict[str, Any]) -> None:
    expected = losses_on(torch_fsdp.fully_shard, None, precompute, emulate, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs eagerly inside compiled code")
        losses = losses_on(fsdp_compile.fully_shard, backend, precompute, emulate, **settings)
    assert losses[-1] < 0.7 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-4 if backend == "inductor" else 1e-5)


@pytest.mark.parametrize("precompute", [False, True], ids=["scales by weight", "scales at once"])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_float8_trains_as_on_fsdp2(two_ranks: Ranks, backend: str | None, precompute: bool) -> None:
    two_ranks.run(_as_fsdp2, backend, precompute, True, {})


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_eight_bit_products_of_the_machine(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(_as_fsdp2, backend, True, False, {})


def test_weights_that_stay_gathered(two_ranks: Ranks) -> None:
    for backend in (None, "aot_eager"):
        two_ranks.run(_as_fsdp2, backend, True, True, {"reshard_after_forward": False})


def _is_all_reduce(node: fx.Node) -> bool:
    return "all_reduce" in str(node.target)


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.usefixtures("fake_group_of_four")
def test_weights_travel_as_eight_bits_and_scales_that_are_there_are_used(precompute: bool) -> None:
    torch._dynamo.reset()
    model = model_in_float8()
    for layer in model.layers:
        fsdp_compile.fully_shard(layer)
    fsdp_compile.fully_shard(model)
    if precompute:
        torchao.precompute_float8_dynamic_scale_for_fsdp(model)
    with recorded() as seen:
        torch.compile(model, fullgraph=True)(torch.ones(16, 32)).sum().backward()
    by_stage = {record.stage: record for record in seen}
    for stage in ("forward", "backward"):
        weights = [one for one in by_stage[stage].plan.gathers if any(":" in fqn for fqn in one.fqns)]
        assert {one.dtype for one in weights} == {"float8_e4m3fn"}
    found = by_stage["forward"].graph
    assert found is not None
    # Without scales, each weight has a reduction of its own that finds its scale.
    assert len([node for node in found.nodes if _is_all_reduce(node)]) == (0 if precompute else 5)
