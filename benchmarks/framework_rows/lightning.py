"""Rows: Lightning Fabric, its strategies for FSDP2 and for FSDP1."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.framework_rows.common import (
    FSDP1,
    LR,
    SAVED_AFTER,
    STEPS,
    Block,
    Decoder,
    Losses,
    Row,
    decoder,
    loss_between,
    mean_over_ranks,
    started_by_torchrun,
    tokens_of,
)


def _model_parallel() -> Any:
    """FSDP2, by a function of the user's."""
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def parallelize(model: Decoder, mesh: Any) -> Decoder:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    return ModelParallelStrategy(parallelize, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def _fully_sharded() -> Any:
    """FSDP1. Fabric refuses the class itself without a GPU, and asks for no more than the class."""
    from lightning_fabric.strategies import FSDPStrategy

    class OnCPU(FSDPStrategy):
        pass

    return OnCPU()


def _wrapped_decoder() -> Any:
    """By hand: the strategy has no device to name, and torch's FSDP1 wants one."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        decoder(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )


def _fabric(compiled: bool, folder: Path, strategy: Any = _model_parallel, wraps: bool = False) -> Losses:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    def setup() -> tuple[Any, Any, Any]:
        fabric = Fabric(
            accelerator="cpu",
            strategy=strategy(),
            devices=dist.get_world_size(),
            plugins=[TorchElasticEnvironment()],
        )
        fabric.launch()
        model: Any = _wrapped_decoder() if wraps else decoder()
        model = fabric.setup_module(torch.compile(model) if compiled else model)
        return fabric, model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LR))

    def steps(fabric: Any, model: Any, optim: Any, numbers: range) -> Losses:
        losses = []
        for step in numbers:
            for micro_batch in range(2):
                tokens = tokens_of(step + STEPS * micro_batch)
                with fabric.no_backward_sync(model, enabled=micro_batch == 0):
                    loss = loss_between(model(tokens), tokens)
                    fabric.backward(loss / 2)
            if wraps:
                fabric.clip_gradients(model, optim, max_norm=1.0)
            optim.step()
            optim.zero_grad()
            losses.append(mean_over_ranks(loss))
        return losses

    with started_by_torchrun():
        fabric, model, optim = setup()
        losses = steps(fabric, model, optim, range(SAVED_AFTER))
        fabric.save(folder / "fabric", {"model": model, "optim": optim})
        losses += steps(fabric, model, optim, range(SAVED_AFTER, STEPS))
        fabric, model, optim = setup()
        fabric.load(folder / "fabric", {"model": model, "optim": optim})
        return losses + steps(fabric, model, optim, range(SAVED_AFTER, STEPS))


_SHARDED = partial(_fabric, strategy=_fully_sharded, wraps=True)

ROWS = (
    Row("Lightning Fabric, ModelParallelStrategy", "lightning_fabric", _fabric),
    Row("Lightning Fabric, FSDPStrategy", "lightning_fabric", _SHARDED, FSDP1),
)
