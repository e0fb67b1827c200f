"""Rows of the table of differences in docs/from-fsdp2.md, beside what FSDP2 does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_compile
from tests.comparing import full
from tests.models import Block
from tests.on_ranks import on_two_ranks


@on_two_ranks
def test_between_unshard_and_reshard_reads_are_full_and_what_is_registered_are_shards() -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    outputs = []
    for package in (fsdp_compile, torch_fsdp):
        torch.manual_seed(0)
        model: Any = package.fully_shard(Block())
        model(x).sum().backward()
        model.unshard()
        registered = dict(model.named_parameters())["up.weight"]
        assert isinstance(registered, DTensor) == (package is fsdp_compile)
        assert isinstance(model.up.weight, nn.Parameter)
        with torch.no_grad():
            before = model.up.weight.clone()
            assert type(before) is torch.Tensor and before.shape == (33, 16)
            model.up.weight.mul_(2)
            torch.testing.assert_close(model.up.weight, before * 2)
            outputs.append(model(x))
        model.reshard()
        torch.testing.assert_close(full(model.up.weight), before, atol=0, rtol=0)
        assert model.up.weight.grad is not None  # the shard's
        model.unshard()
        torch.testing.assert_close(model.up.weight, before, atol=0, rtol=0)
        model.reshard()
    torch.testing.assert_close(*outputs)


@on_two_ranks
def test_the_root_is_freed_after_a_forward_without_backward() -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    gathered = []
    for package in (fsdp_compile, torch_fsdp):
        model: Any = package.fully_shard(Block())
        with torch.no_grad():
            model(x)
            gathered.append(not isinstance(model.up.weight, DTensor))
    assert gathered == [False, True]
