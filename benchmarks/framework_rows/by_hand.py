"""Rows: frameworks that leave the loop to the user, and that loop; saved with torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.framework_rows.common import (
    DIM,
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
    tokens_of,
)


def _loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return loss_between(model(tokens), tokens)


def _train_and_resume(
    make: Callable[[], nn.Module],
    folder: Path,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = _loss_of,
    while_training: bool = False,
    adapters_only: bool = False,
) -> Losses:
    """``while_training``: the checkpoint is written beside the steps that follow."""
    options = helpers.StateDictOptions(ignore_frozen_params=adapters_only, strict=not adapters_only)

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=LR)

    def steps(model: nn.Module, optim: torch.optim.Optimizer, numbers: range) -> Losses:
        losses = []
        for step in numbers:
            loss = loss_of(model, tokens_of(step))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(mean_over_ranks(loss))
        return losses

    model, optim = start()
    losses = steps(model, optim, range(SAVED_AFTER))
    state, optim_state = helpers.get_state_dict(model, optim, options=options)
    saved = {"model": state, "optim": optim_state}
    where = str(folder / "dcp")
    if while_training:  # a group of its own: its collectives run beside those of the steps
        written = dcp.async_save(saved, checkpoint_id=where, process_group=dist.new_group(backend="gloo"))
        losses += steps(model, optim, range(SAVED_AFTER, STEPS))
        written.result()
        dist.barrier()
    else:
        dcp.save(saved, checkpoint_id=where)
        losses += steps(model, optim, range(SAVED_AFTER, STEPS))
    model, optim = start()
    state, optim_state = helpers.get_state_dict(model, optim, options=options)
    loaded = {"model": state, "optim": optim_state}
    dcp.load(loaded, checkpoint_id=where)
    helpers.set_state_dict(
        model, optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"], options=options
    )
    return losses + steps(model, optim, range(SAVED_AFTER, STEPS))


def wrapped(model: nn.Module, compiled: bool, **settings: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    device = torch.device("cpu")
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=device, use_orig_params=True, **settings
    )
    return torch.compile(model) if compiled else model


def _by_hand(compiled: bool, folder: Path, shard: Any, while_training: bool = False) -> Losses:
    return _train_and_resume(lambda: shard(decoder(), compiled), folder, while_training=while_training)


def _sharded(model: nn.Module, layers: Any, compiled: bool, ignored: set[nn.Parameter] | None = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    return torch.compile(model) if compiled else model


def _peft(compiled: bool, folder: Path) -> Losses:
    from peft import LoraConfig, get_peft_model

    def make() -> nn.Module:
        model = get_peft_model(decoder(), LoraConfig(r=4, lora_dropout=0.0, target_modules=["up", "down"]))
        return _sharded(model, model.base_model.model.layers, compiled)

    return _train_and_resume(make, folder)


def _torchao(compiled: bool, folder: Path) -> Losses:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(2 * DIM) for _ in range(2))  # eight-bit products take multiples of 16
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = convert_to_float8_training(Decoder(blocks), config=config)
        return _sharded(model, model.layers, compiled)

    return _train_and_resume(make, folder)


def _int8(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model, int8_weight_only_quantized_training())


def _nf4(model: nn.Module) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for linear in _linears_in(model):
        quantized = to_nf4(linear.weight.detach(), block_size=32, scaler_block_size=32)
        linear.weight = nn.Parameter(quantized, requires_grad=False)


def for_inference(config: str, **settings: Any) -> Callable[[nn.Module], None]:
    """One of torchao's configurations of weights that are read only."""

    def quantize(model: nn.Module) -> None:
        import torchao.quantization as quantization

        quantization.quantize_(model, getattr(quantization, config)(**settings))

    return quantize


def _linears_in(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _quantized_base(quantize: Callable[[nn.Module], None], ignores: bool = False) -> Any:
    """PEFT's adapters over blocks whose frozen weights are quantized; with ``ignores``, every rank has these whole."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = Decoder(nn.ModuleList(Block(4 * DIM) for _ in range(2)))
    model.requires_grad_(False)
    quantize(model.layers)
    ignored = {linear.weight for linear in _linears_in(model.layers)} if ignores else None
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, target_modules=["up", "down"]))
    return model, ignored


def _adapted(compiled: bool, folder: Path, quantize: Callable[[nn.Module], None], ignores: bool = False) -> Losses:
    def make() -> nn.Module:
        model, ignored = _quantized_base(quantize, ignores)
        return _sharded(model, model.base_model.model.layers, compiled, ignored)

    return _train_and_resume(make, folder, adapters_only=True)


def shard_quantized(quantize: Callable[[nn.Module], None]) -> None:
    model, _ = _quantized_base(quantize)
    _sharded(model, model.base_model.model.layers, compiled=False)


def _torchtitan(compiled: bool, folder: Path) -> Losses:
    from torch.distributed.fsdp import FSDPModule

    titan = import_module("torchtitan.distributed.fsdp")

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Decoder(nn.ModuleDict({str(number): Block() for number in range(2)}))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        titan.apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # with a factor of its own, FSDP2 asks for a reduction that gloo lacks
                module.set_force_sum_reduction_for_comms(True)
        if compiled:
            model.compile()
        return model

    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        return loss_between(model(tokens), tokens) / dist.get_world_size()  # gradients are summed, not averaged

    return _train_and_resume(make, folder, loss_of)


def _by_policy(model: Any, compiled: bool) -> nn.Module:
    return _sharded(model, model.layers, compiled)


ROWS = (
    Row("loop by hand, async_save", "torch", partial(_by_hand, shard=_by_policy, while_training=True)),
    Row("loop by hand, FSDP1", "torch", partial(_by_hand, shard=wrapped), FSDP1),
    Row("PEFT LoRA", "peft", _peft),
    Row("PEFT LoRA over int8 weights", "torchao", partial(_adapted, quantize=_int8)),
    Row("PEFT LoRA over NF4 weights (QLoRA)", "torchao", partial(_adapted, quantize=_nf4)),
    Row("torchao float8, float8 all-gather", "torchao", _torchao),
    Row("torchtitan, apply_fsdp_to_decoder", "torchtitan", _torchtitan),
)
