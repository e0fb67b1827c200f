"""Rows: the Hugging Face Trainer with either version of FSDP, and TRL's trainer for supervised fine-tuning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.framework_rows.accelerated import accelerate_on_cpu, forget_state
from benchmarks.framework_rows.common import (
    BATCH,
    FORGETS,
    FSDP1,
    LR,
    SAVED_AFTER,
    STEPS,
    VOCAB,
    Losses,
    Row,
    llama,
    tokens_of,
)

_WORDS = [*(f"w{number}" for number in range(VOCAB - 2)), "<pad>", "<eos>"]


def _samples() -> list[Any]:
    """Rows of all steps: the sampler gives each rank every second batch."""
    return [row for step in range(STEPS) for rank in range(dist.get_world_size()) for row in tokens_of(step, rank)]


def _arguments(folder: Path, compiled: bool, version: int) -> dict[str, Any]:
    config = {
        "version": version,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
        "sync_module_states": False,  # of version 1, which asks for a GPU
    }
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_steps": SAVED_AFTER,
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "torch_compile": compiled,
        "fsdp": True if version == 2 else "full_shard auto_wrap",
        "fsdp_config": config,
    }


def _train_with(make: Any, folder: Path) -> Losses:
    """Train to the end, then once more from the checkpoint, with trainers that ``make(callbacks)`` makes."""
    from transformers import TrainerCallback

    losses: Losses = []

    class Listen(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    with accelerate_on_cpu():
        for resumed in (None, str(folder / f"checkpoint-{SAVED_AFTER}")):
            forget_state()
            make([Listen()]).train(resume_from_checkpoint=resumed)
    return losses


def _trainer(compiled: bool, folder: Path, version: int = 2) -> Losses:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in _samples()]

    def make(callbacks: list[Any]) -> Any:
        arguments = TrainingArguments(**_arguments(folder, compiled, version))
        return Trainer(model=llama(), args=arguments, train_dataset=data, callbacks=callbacks)

    return _train_with(make, folder)


def _tokenizer() -> Any:
    """A word for each token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _sft(compiled: bool, folder: Path, version: int = 2, lora: bool = False) -> Losses:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(_WORDS[token] for token in row) for row in _samples()]

    def make(callbacks: list[Any]) -> Any:
        return SFTTrainer(
            model=llama(),
            args=SFTConfig(**_arguments(folder, compiled, version), gradient_checkpointing=False),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "up_proj"]) if lora else None,
            callbacks=callbacks,
        )

    return _train_with(make, folder)


_TRAINER, _SFT = partial(_trainer, version=1), partial(_sft, version=1)

ROWS = (
    Row("transformers.Trainer", "transformers", _trainer),
    Row("transformers.Trainer, full_shard auto_wrap", "transformers", _TRAINER, FSDP1, resumed_within=FORGETS),
    Row("trl.SFTTrainer", "trl", _sft),
    Row("trl.SFTTrainer, LoRA", "trl", partial(_sft, lora=True)),
    Row("trl.SFTTrainer, full_shard auto_wrap", "trl", _SFT, FSDP1, resumed_within=FORGETS),
)
