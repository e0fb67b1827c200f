"""Hugging Face architectures beyond those of every run: five steps in one graph, as if not sharded. ``pytest -m slow``.

A model that does not compile unsharded (``fullgraph=True``) trains through graph breaks; which those are is asserted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import fully_shard
from tests.comparing import full
from tests.compiling import num_graphs
from tests.models import VOCABULARY, Batch, decoder_config, encoder_config, labelled_images, token_pairs, tokens
from tests.ranks import Ranks

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers, its config, and what to feed it."""

    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[int], Batch]
    experts: str | None = None  # how experts run without depending on data
    breaks_unsharded: bool = False


def _frames(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    return {"input_features": torch.randn(2, 8, 12, generator=generator), "decoder_input_ids": ids[:, :-1]}


def _images(seed: int) -> Batch:
    return {"pixel_values": labelled_images(seed)["pixel_values"]}


def _ids(seed: int) -> Batch:
    return {"input_ids": tokens(seed)["input_ids"]}


def _pairs(seed: int) -> Batch:
    batch = token_pairs(seed)
    return {"input_ids": batch["input_ids"], "decoder_input_ids": batch["decoder_input_ids"]}


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART = dict(
    vocab_size=VOCABULARY, d_model=20, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=34, decoder_ffn_dim=34, dropout=0.0, max_position_embeddings=16,
    use_cache=False, decoder_start_token_id=1, forced_eos_token_id=None, **_SPECIAL,
)  # fmt: skip

ARCHITECTURES = {
    # dense decoders
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", decoder_config(head_dim=10), _ids),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "Gemma2Config", decoder_config(head_dim=10, query_pre_attn_scalar=10, **_SPECIAL), _ids
    ),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", decoder_config(**_SPECIAL), _ids),
    "olmo2": Architecture("Olmo2ForCausalLM", "Olmo2Config", decoder_config(**_SPECIAL), _ids),
    # mixtures of experts
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        decoder_config(head_dim=10, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=14), _ids, "batched_mm",
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", "OlmoeConfig", decoder_config(num_experts=4, num_experts_per_tok=2, **_SPECIAL), _ids,
        "batched_mm",
    ),
    # encoders
    "roberta": Architecture(
        "RobertaForMaskedLM", "RobertaConfig",
        encoder_config(vocab_size=VOCABULARY, max_position_embeddings=20, **_SPECIAL), _ids,
    ),
    "distilbert": Architecture(
        "DistilBertForMaskedLM", "DistilBertConfig",
        dict(vocab_size=VOCABULARY, dim=20, n_layers=2, n_heads=2, hidden_dim=34, dropout=0.0, attention_dropout=0.0,
             max_position_embeddings=16), _ids,
    ),
    # encoder and decoder
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", _BART, _pairs),
    # vision
    "dinov2": Architecture(
        "Dinov2Model", "Dinov2Config",
        encoder_config(image_size=8, patch_size=4, mlp_ratio=2), _images,
    ),
    "convnext": Architecture(
        "ConvNextModel", "ConvNextConfig",
        dict(patch_size=2, num_stages=2, hidden_sizes=[10, 20], depths=[1, 1], image_size=8), _images,
    ),
    # audio
    "whisper": Architecture(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {key: value for key, value in _BART.items() if key not in ("max_position_embeddings", "forced_eos_token_id")}
        | dict(num_mel_bins=8, max_source_positions=6, max_target_positions=16, begin_suppress_tokens=None,
               suppress_tokens=None), _frames,
    ),
    # state space
    "mamba": Architecture(
        "MambaForCausalLM", "MambaConfig",
        dict(vocab_size=VOCABULARY, hidden_size=20, state_size=4, num_hidden_layers=2, use_cache=False, **_SPECIAL), _ids,
    ),
}  # fmt: skip


def build(one: Architecture) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, one.model)(getattr(transformers, one.config)(**one.options))
    if one.experts is not None:
        model.set_experts_implementation(one.experts)
    return model


def loss_of(output: Any) -> Tensor:
    """Of every output; a layer norm's squares alone would have hardly any gradient, a weighted sum alone may be zero."""
    first = output.logits if hasattr(output, "logits") else output.last_hidden_state
    pooled = getattr(output, "pooler_output", None)
    flat = torch.cat([one.float().flatten() for one in (first, pooled) if one is not None])
    return (flat * torch.arange(len(flat)).cos() + flat.square()).mean()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the module lists that are not inside another one."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) and any(True for _ in child.parameters()):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    return found


def _train(name: str, backend: str) -> tuple[int, float]:
    one = ARCHITECTURES[name]
    unsharded = build(one).train()
    model = copy.deepcopy(unsharded)
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    run = torch.compile(model, fullgraph=not one.breaks_unsharded, backend=backend)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(unsharded.parameters(), lr=1e-3)
    worst = 0.0
    for step in range(5):
        batches = [one.batch(10 * step + rank) for rank in range(dist.get_world_size())]
        loss = loss_of(run(**batches[dist.get_rank()]))
        loss.backward()
        losses = [loss_of(unsharded(**batch)) for batch in batches]
        (sum(losses) / len(losses)).backward()
        largest = max(abs(each.item()) for each in losses)  # one rank's may be next to zero
        worst = max(worst, abs(loss.item() - losses[dist.get_rank()].item()) / largest)
        for (fqn, ours), theirs in zip(model.named_parameters(), unsharded.parameters()):
            assert (ours.grad is None) == (theirs.grad is None), fqn
            if step == 0 and theirs.grad is not None:
                scale = theirs.grad.abs().max().clamp_min(1e-6)
                torch.testing.assert_close(full(ours.grad) / scale, theirs.grad / scale, atol=2e-4, rtol=0, msg=fqn)
        for each in (optim, reference):
            each.step()
            each.zero_grad()
    return num_graphs(), worst


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_five_steps_as_if_not_sharded(three_ranks: Ranks, name: str) -> None:
    for graphs, worst in three_ranks.run(_train, name, "aot_eager"):
        assert (graphs == 1) != ARCHITECTURES[name].breaks_unsharded
        assert worst < 1e-5
