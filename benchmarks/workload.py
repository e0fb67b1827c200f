"""The workload that every variant trains: a Llama of Hugging Face with random weights, and fixed batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.settings import Settings

_HEAD_DIM = 64

Model = Callable[..., Any]
"""A module, or what torch.compile made of it."""


def torch_dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def build_model(settings: Settings) -> nn.Module:
    """Build the model, with the same weights on every rank and in every variant: the seed is set right here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    num_heads = max(1, settings.dim // _HEAD_DIM)
    sizes: dict[str, Any] = dict(
        hidden_size=settings.dim,
        intermediate_size=3 * settings.dim,  # with the defaults: 28.8M parameters
        num_hidden_layers=settings.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        vocab_size=settings.vocab,
        max_position_embeddings=max(2048, settings.seq),
        use_cache=False,
        attn_implementation="sdpa",
    )
    config = LlamaConfig(**sizes)
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model: nn.Module = LlamaForCausalLM(config)
    model.to(torch_dtype(settings.dtype))
    model.train()
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers, which a user shards and compiles one by one."""
    layers = model.get_submodule("model.layers")
    return list(layers.children())


def batch_of(settings: Settings, rank: int) -> Tensor:
    """Return the token ids of one rank, which are also its labels.

    Each rank has a batch of its own, so that a missing reduction shows in the loss; it is the same batch in
    each step, so that the loss falls quickly and a wrong gradient cannot hide behind random data.
    """
    generator = torch.Generator().manual_seed(settings.seed * 1000 + rank + 1)
    return torch.randint(settings.vocab, (settings.batch, settings.seq), generator=generator).to(settings.device)


def loss_of(model: Model, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def optimizer_for(parameters: Iterable[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"default": {}, "fused": {"fused": True}, "foreach": {"foreach": True}}[
        settings.adamw
    ]
    return torch.optim.AdamW(parameters, lr=settings.lr, **how)


def autocast(settings: Settings) -> contextlib.AbstractContextManager[object]:
    """Return the autocast by which variants without sharding use `--param-dtype`: no policy casts their parameters."""
    if settings.param_dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(settings.device, dtype=torch_dtype(settings.param_dtype))
