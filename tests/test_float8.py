"""Float8 weights of torchao have an all-gather extension; they train as on torch's FSDP2, eager and compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp_compile
from tests.comparing import mean_over_ranks
from tests.compiling import compiled
from tests.models import EvenBlock
from tests.on_ranks import on_two_ranks
from tests.recording import recorded

pytestmark = pytest.mark.slow

torchao = pytest.importorskip("torchao.float8")


class Adapted(nn.Module):
    """A layer beside a low-rank adapter: frozen in four bits, or trained with eight-bit products."""

    def __init__(self, frozen: bool, dim: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.base = nn.Linear(dim, dim)
        self.a = nn.Linear(dim, 8, bias=False)
        self.b = nn.Linear(8, dim)
        if frozen:
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

            quantized = to_nf4(self.base.weight.detach(), block_size=64, scaler_block_size=64)
            self.base.weight = nn.Parameter(quantized, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.base(x) + self.b(self.a(x))


def model_in_float8(emulate: bool = True) -> nn.Sequential:
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    model = nn.Sequential(EvenBlock(32), EvenBlock(32), nn.Linear(32, 16))
    return torchao.convert_to_float8_training(model, config=config)


def model_in_nf4() -> nn.Sequential:
    return nn.Sequential(Adapted(frozen=True), Adapted(frozen=True), nn.Linear(256, 4))


def model_in_int8() -> nn.Sequential:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    model = nn.Sequential(Adapted(frozen=False), Adapted(frozen=False), nn.Linear(256, 4))
    quantize_(model, int8_mixed_precision_training(), lambda module, name: name.endswith("base"))
    return model


def sharded(model: nn.Sequential, fully_shard: Callable[..., Any], **settings: Any) -> Any:
    for layer in (model[0], model[1]):
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def losses_on(
    fully_shard: Callable[..., Any],
    make: Callable[..., nn.Sequential],
    backend: str | None,
    precompute: bool = False,
    emulate: bool = True,
    **settings: Any,
) -> list[float]:
    """The mean losses of training steps; ``precompute``: one reduction finds the scales of all weights."""
    torch.manual_seed(0)
    in_float8 = make is model_in_float8
    model = sharded(make(emulate) if in_float8 else make(), fully_shard, **settings)
    run = compiled(model, backend, fullgraph=in_float8)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2 if in_float8 else 1e-3)
    inputs = torch.Generator().manual_seed(5 + dist.get_rank())
    losses = []
    for _ in range(4):
        loss = run(torch.randn(16, 32 if in_float8 else 256, generator=inputs)).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if precompute:
            torchao.precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(mean_over_ranks(loss).item())
    return losses


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        *((backend, {"precompute": False}) for backend in (None, "aot_eager", "inductor")),
        *((backend, {"precompute": True}) for backend in (None, "aot_eager", "inductor")),
        *((backend, {"precompute": True, "reshard_after_forward": False}) for backend in (None, "aot_eager")),
        *((backend, {"precompute": True, "emulate": False}) for backend in (None, "inductor")),
    ],
)
@on_two_ranks
def test_float8_trains_as_on_fsdp2(backend: str | None, settings: dict[str, bool]) -> None:
    """Scales of each weight, or of all at once; weights that stay gathered; eight-bit products of the machine."""
    expected = losses_on(torch_fsdp.fully_shard, model_in_float8, None, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs eagerly inside compiled code")
        losses = losses_on(fsdp_compile.fully_shard, model_in_float8, backend, **settings)
    assert losses[-1] < 0.7 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-4 if backend == "inductor" else 1e-5)


@pytest.mark.parametrize("make", [model_in_nf4, model_in_int8])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_other_weights_train_as_on_fsdp2(backend: str | None, make: Callable[..., nn.Sequential]) -> None:
    expected = losses_on(torch_fsdp.fully_shard, make, None)
    assert expected[-1] != expected[0]
    assert losses_on(fsdp_compile.fully_shard, make, backend) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.usefixtures("fake_group_of_four")
def test_weights_travel_as_eight_bits_and_scales_that_are_there_are_used(precompute: bool) -> None:
    torch._dynamo.reset()
    model = sharded(model_in_float8(), fsdp_compile.fully_shard)
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
    num_reductions = sum("all_reduce" in str(node.target) for node in found.nodes)
    assert num_reductions == (0 if precompute else 5)
