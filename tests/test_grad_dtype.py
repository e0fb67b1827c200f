"""Gradients in another dtype than the parameter's, made by autograd functions or by casting: nothing rounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_compile import fully_shard
from fsdp_compile._torch_compat import autograd
from tests.comparing import full
from tests.models import mesh_of
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks

# The autograd engine of torch 2.11 casts what a function of ours gets.
needs_output_grad_dtype = pytest.mark.skipif(
    not autograd.GRADIENTS_COME_AS_PRODUCED, reason="torch casts gradients on the way"
)
# Before torch 2.15 FSDP2 reduces by param_dtype, and rounds what is finer.
FSDP2_KEEPS_GRAD_DTYPE = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)


class _Times(torch.autograd.Function):
    """A weight's sum times a factor; its gradient is made in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.size = factor, weight.shape
        return weight.float().sum() * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.full(ctx.size, ctx.factor) * grad, None


class Fine(nn.Module):
    """bf16 parameters, one of whose gradients is fp32 and the other bf16."""

    def __init__(self, grad_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        for param in self.parameters():
            param.grad_dtype = grad_dtype  # type: ignore[attr-defined]

    def forward(self, factor: float) -> Tensor:
        return _Times.apply(self.weight, factor) + self.bias.sum()


def _gradients(api: Callable[..., Any], grad_dtype: torch.dtype | None, sync: str, **kwargs: Any) -> list[Tensor]:
    """Of three micro-batches, whose gradients leave 1 of 256 and more."""
    model = Fine(grad_dtype)
    api(model, **kwargs)
    for step, factor in enumerate((256.0, 1.0, -256.0)):
        last = step == 2
        if sync == "held back":
            model.set_requires_gradient_sync(last)
        elif sync == "over shards":
            model.set_requires_all_reduce(last)
        model(factor).backward()
    return [full(param.grad) for param in model.parameters()]


def _as_fsdp2(sync: str, replicas: bool, reduce_dtype: torch.dtype | None) -> None:
    kwargs: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    if replicas:
        kwargs["mesh"] = mesh_of("replicate", "shard")
    for grad_dtype in (None, torch.float32):
        ours = _gradients(fully_shard, grad_dtype, sync, **kwargs)
        theirs = _gradients(fsdp2, grad_dtype, sync, **kwargs)
        assert ours[0].dtype is torch.float32
        assert torch.equal(ours[0], torch.ones(5, 3)), ours[0]
        if FSDP2_KEEPS_GRAD_DTYPE:
            assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1].float(), theirs[1].float())


@needs_output_grad_dtype
@pytest.mark.parametrize("sync", ["each", "held back"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_two_ranks
def test_fp32_gradients_of_bf16_parameters(sync: str, reduce_dtype: torch.dtype | None) -> None:
    _as_fsdp2(sync, False, reduce_dtype)


@needs_output_grad_dtype
@pytest.mark.parametrize("sync", ["each", "held back", "over shards"])
def test_fp32_gradients_with_replicas(four_ranks: Ranks, sync: str) -> None:
    four_ranks.run(_as_fsdp2, sync, True, None)


@needs_output_grad_dtype
@pytest.mark.parametrize("sync", ["each", "held back"])
@on_two_ranks
def test_fp32_gradients_in_compiled_code(sync: str) -> None:
    """One warning, and the numbers of the same script without compiling."""
    torch.manual_seed(0)

    def compiled(model: nn.Module, **kwargs: Any) -> Any:
        fully_shard(model)
        model.compile(backend="aot_eager")
        return model

    with pytest.warns(UserWarning, match=r"Fine\) runs eagerly inside compiled code: grad_dtype=None of weight") as said:
        ours = _gradients(compiled, None, sync)
    assert len([one for one in said if "runs eagerly" in str(one.message)]) == 1
    assert torch.equal(ours[0], torch.ones(5, 3)), ours[0]


@needs_output_grad_dtype
@pytest.mark.filterwarnings("ignore:.*runs eagerly inside compiled code")
@on_two_ranks
def test_fp32_gradients_summed_over_ranks() -> None:
    model, plain = fully_shard(Fine(None)), Fine(None)
    factors = (256.0, 1.0)
    model(factors[dist.get_rank()]).backward()
    sum(plain(factor) for factor in factors).backward()
    assert torch.equal(plain.weight.grad, torch.full((5, 3), 257.0))  # in fp32
    assert torch.equal(full(model.weight.grad), plain.weight.grad / 2)


@pytest.mark.compat
@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize(
    ("move", "dtype"), [("cpu", torch.bfloat16), ("double", torch.float64), ("to", torch.float16)]
)
def test_gradients_of_their_own_dtype_survive_a_move(move: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4, dtype=torch.bfloat16))
    for param in model.parameters():
        param.grad_dtype = torch.float32  # type: ignore[attr-defined]
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
    before = [param.grad.to_local().clone() for param in model.parameters()]
    assert (model.to("cpu", dtype) if move == "to" else getattr(model, move)()) is model
    for param, grad in zip(model.parameters(), before):
        assert param.dtype == dtype
        assert param.grad_dtype == param.grad.dtype == torch.float32  # type: ignore[attr-defined]
        if move == "cpu":
            # What a group gathers that moves no data may be anything.
            torch.testing.assert_close(param.grad.to_local(), grad, rtol=0, atol=0, equal_nan=True)
    model(torch.ones(2, 4, dtype=dtype)).square().sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())
