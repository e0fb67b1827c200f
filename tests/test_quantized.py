"""Other weights of torchao that say themselves what travels: as on torch's FSDP2, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp_compile
from tests.compiling import compiled
from tests.ranks import Ranks

pytestmark = pytest.mark.more

pytest.importorskip("torchao")

_DIM = 256


class Adapted(nn.Module):
    """A layer beside a low-rank adapter: frozen in four bits, or trained with eight-bit products."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_DIM)
        self.base = nn.Linear(_DIM, _DIM)
        self.a = nn.Linear(_DIM, 8, bias=False)
        self.b = nn.Linear(8, _DIM)
        if frozen:
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

            quantized = to_nf4(self.base.weight.detach(), block_size=64, scaler_block_size=64)
            self.base.weight = nn.Parameter(quantized, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.base(x) + self.b(self.a(x))


def _losses(fully_shard: Callable[..., Any], backend: str | None, frozen: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(frozen), Adapted(frozen), nn.Linear(_DIM, 4))
    if not frozen:
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_

        quantize_(model, int8_mixed_precision_training(), lambda module, name: name.endswith("base"))
    for layer in (model[0], model[1]):
        fully_shard(layer)
    fully_shard(model)
    run = compiled(model, backend, fullgraph=False)
    optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    inputs = torch.Generator().manual_seed(5 + dist.get_rank())
    losses = []
    for _ in range(4):
        loss = run(torch.randn(8, _DIM, generator=inputs)).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def _as_fsdp2(backend: str | None, frozen: bool) -> None:
    expected = _losses(torch_fsdp.fully_shard, None, frozen)
    assert expected[-1] != expected[0]
    assert _losses(fsdp_compile.fully_shard, backend, frozen) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("frozen", [True, False], ids=["nf4", "int8"])
@pytest.mark.parametrize("backend", [None, "aot_eager", "passes"])
def test_trains_as_on_fsdp2(two_ranks: Ranks, backend: str | None, frozen: bool) -> None:
    two_ranks.run(_as_fsdp2, backend, frozen)
