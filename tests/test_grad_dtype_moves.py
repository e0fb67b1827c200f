"""Modules whose gradients have another dtype than their parameters can be moved and converted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compile import fully_shard

pytestmark = pytest.mark.compat


def _with_gradient(grad_dtype: torch.dtype | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4, dtype=torch.bfloat16))
    for param in model.parameters():
        param.grad_dtype = grad_dtype  # type: ignore[attr-defined]
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
    return model


@pytest.mark.parametrize("move", ["cpu", "double", "to"])
def test_gradients_of_their_own_dtype_survive_a_move(fake_group_of_four: None, move: str) -> None:
    model = _with_gradient(torch.float32)
    before = [param.grad.to_local().clone() for param in model.parameters()]
    moved = {"cpu": model.cpu, "double": model.double, "to": lambda: model.to("cpu", torch.float16)}[move]()
    assert moved is model
    for param, grad in zip(model.parameters(), before):
        assert param.dtype == {"cpu": torch.bfloat16, "double": torch.float64, "to": torch.float16}[move]
        assert param.grad_dtype == param.grad.dtype == torch.float32  # type: ignore[attr-defined]
        if move == "cpu":
            # What a group gathers that moves no data may be anything.
            torch.testing.assert_close(param.grad.to_local(), grad, rtol=0, atol=0, equal_nan=True)
    inputs = torch.ones(2, 4, dtype=next(model.parameters()).dtype)
    model(inputs).square().sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())
