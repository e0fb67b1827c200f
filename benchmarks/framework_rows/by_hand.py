"""The rows of `benchmarks.frameworks`: how a user of each framework trains, saves and resumes with FSDP2.

A row trains five steps, saves behind the third, and resumes from there in a model that was made anew:

    losses   1  2  3  4  5      of the first model
                      4  5      of the second one

No row knows this package: each calls its framework, which calls torch's FSDP2 by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.device_mesh import init_device_mesh

STEPS, SAVED_AFTER = 5, 3
_VOCAB, _DIM, _SEQ, _BATCH = 64, 32, 16, 2
_LR = 1e-2
Losses = list[float]


@dataclass(frozen=True)
class Row:
    """``run(compiled, folder)`` returns the losses, each the mean over the ranks."""

    name: str
    package: str
    run: Callable[[bool, Path], Losses]


# --- what the rows train


class Block(nn.Module):
    def __init__(self, hidden: int = 2 * _DIM + 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_DIM)
        self.up = nn.Linear(_DIM, hidden)
        self.down = nn.Linear(hidden, _DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Under torchtitan's names, with as many layers as show what is shared."""

    enable_weight_tying = False

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(_VOCAB, _DIM)
        self.layers = layers
        self.norm = nn.LayerNorm(_DIM)
        self.lm_head = nn.Linear(_DIM, _VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        layers = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for layer in layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def _decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(nn.ModuleList(Block() for _ in range(2)))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": _DIM, "intermediate_size": 2 * _DIM, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=_VOCAB, max_position_embeddings=_SEQ, use_cache=False, **sizes))


def _tokens(step: int, rank: int | None = None) -> Tensor:
    """A batch for each step and rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, _VOCAB, (_BATCH, _SEQ), generator=generator)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# --- accelerate


@contextmanager
def _accelerate_on_cpu() -> Iterator[None]:
    """Let accelerate do FSDP on the CPU: its state says so on accelerators only."""
    from accelerate import state
    from accelerate.utils import DistributedType

    init = state.AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    before = dict(os.environ)
    rank = str(dist.get_rank())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    os.environ.update(place, LOCAL_WORLD_SIZE=place["WORLD_SIZE"], MASTER_ADDR="localhost", MASTER_PORT="29500")
    state.AcceleratorState.__init__ = with_fsdp
    try:
        yield
    finally:
        state.AcceleratorState.__init__ = init
        _forget_state()
        os.environ.clear()
        os.environ.update(before)


def _forget_state() -> None:
    from accelerate import state

    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


def _accelerate(compiled: bool, folder: Path, regions: bool) -> Losses:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import TorchDynamoPlugin

    def prepare() -> tuple[Any, Any, Any]:
        _forget_state()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=True,
            state_dict_type="SHARDED_STATE_DICT",
        )
        dynamo = TorchDynamoPlugin(backend="inductor" if compiled else "no", use_regional_compilation=regions)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_plugin=dynamo)
        model = _decoder()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=_LR))

    def steps(accelerator: Any, model: nn.Module, optim: Any, numbers: range) -> Losses:
        losses = []
        for step in numbers:
            loss = _loss(model(_tokens(step)), _tokens(step))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
            losses.append(_mean(loss))
        return losses

    with _accelerate_on_cpu():
        accelerator, model, optim = prepare()
        losses = steps(accelerator, model, optim, range(SAVED_AFTER))
        accelerator.save_state(str(folder))
        losses += steps(accelerator, model, optim, range(SAVED_AFTER, STEPS))
        accelerator, model, optim = prepare()
        accelerator.load_state(str(folder))
        return losses + steps(accelerator, model, optim, range(SAVED_AFTER, STEPS))


def _accelerate_model(compiled: bool, folder: Path) -> Losses:
    return _accelerate(compiled, folder, regions=False)


def _accelerate_regions(compiled: bool, folder: Path) -> Losses:
    return _accelerate(compiled, folder, regions=True)


# --- transformers


def _trainer(compiled: bool, folder: Path) -> Losses:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: Losses = []

    class Listen(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    # The sampler gives each rank every second batch.
    samples = [row for step in range(STEPS) for rank in range(dist.get_world_size()) for row in _tokens(step, rank)]
    data = [{"input_ids": row, "labels": row} for row in samples]

    def train(resume: str | None) -> None:
        _forget_state()
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=_BATCH,
            learning_rate=_LR,
            lr_scheduler_type="constant",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_steps=SAVED_AFTER,
            report_to=[],
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            torch_compile=compiled,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        )
        Trainer(model=_llama(), args=arguments, train_dataset=data, callbacks=[Listen()]).train(
            resume_from_checkpoint=resume
        )

    with _accelerate_on_cpu():
        train(None)
        train(str(folder / f"checkpoint-{SAVED_AFTER}"))
    return losses


# --- Lightning


def _fabric(compiled: bool, folder: Path) -> Losses:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def parallelize(model: Decoder, mesh: Any) -> Decoder:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    def setup() -> tuple[Any, Any, Any]:
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
        fabric = Fabric(
            accelerator="cpu",
            strategy=strategy,
            devices=dist.get_world_size(),
            plugins=[TorchElasticEnvironment()],
        )
        fabric.launch()
        model: Any = _decoder()
        model = fabric.setup_module(torch.compile(model) if compiled else model)
        return fabric, model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=_LR))

    def steps(fabric: Any, model: Any, optim: Any, numbers: range) -> Losses:
        losses = []
        for step in numbers:
            for micro_batch in range(2):
                tokens = _tokens(step + STEPS * micro_batch)
                with fabric.no_backward_sync(model, enabled=micro_batch == 0):
                    loss = _loss(model(tokens), tokens)
                    fabric.backward(loss / 2)
            optim.step()
            optim.zero_grad()
            losses.append(_mean(loss))
        return losses

    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, GROUP_RANK="0", LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    try:
        fabric, model, optim = setup()
        losses = steps(fabric, model, optim, range(SAVED_AFTER))
        fabric.save(folder / "fabric", {"model": model, "optim": optim})
        losses += steps(fabric, model, optim, range(SAVED_AFTER, STEPS))
        fabric, model, optim = setup()
        fabric.load(folder / "fabric", {"model": model, "optim": optim})
        return losses + steps(fabric, model, optim, range(SAVED_AFTER, STEPS))
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- frameworks that leave the loop to the user: saved with torch.distributed.checkpoint


def _train_and_resume(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Tensor], Tensor], folder: Path
) -> Losses:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=_LR)

    def steps(model: nn.Module, optim: torch.optim.Optimizer, numbers: range) -> Losses:
        losses = []
        for step in numbers:
            loss = loss_of(model, _tokens(step))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(_mean(loss))
        return losses

    model, optim = start()
    losses = steps(model, optim, range(SAVED_AFTER))
    state, optim_state = helpers.get_state_dict(model, optim)
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=str(folder / "dcp"))
    losses += steps(model, optim, range(SAVED_AFTER, STEPS))
    model, optim = start()
    state, optim_state = helpers.get_state_dict(model, optim)
    loaded = {"model": state, "optim": optim_state}
    dcp.load(loaded, checkpoint_id=str(folder / "dcp"))
    helpers.set_state_dict(model, optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    return losses + steps(model, optim, range(SAVED_AFTER, STEPS))


def _sharded(model: nn.Module, layers: nn.ModuleList, compiled: bool) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    return torch.compile(model) if compiled else model


def _loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return _loss(model(tokens), tokens)


def _peft(compiled: bool, folder: Path) -> Losses:
    from peft import LoraConfig, get_peft_model

    def make() -> nn.Module:
        model = get_peft_model(_decoder(), LoraConfig(r=4, lora_dropout=0.0, target_modules=["up", "down"]))
        return _sharded(model, model.base_model.model.layers, compiled)

    return _train_and_resume(make, _loss_of, folder)


def _torchao(compiled: bool, folder: Path) -> Losses:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(2 * _DIM) for _ in range(2))  # eight-bit products take multiples of 16
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = convert_to_float8_training(Decoder(blocks), config=config)
        return _sharded(model, model.layers, compiled)

    return _train_and_resume(make, _loss_of, folder)


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
        return _loss(model(tokens), tokens) / dist.get_world_size()  # gradients are summed, not averaged

    return _train_and_resume(make, loss_of, folder)


ROWS = (
    Row("accelerate, whole model compiled", "accelerate", _accelerate_model),
    Row("accelerate, regions compiled", "accelerate", _accelerate_regions),
    Row("transformers.Trainer", "transformers", _trainer),
    Row("Lightning Fabric, ModelParallelStrategy", "lightning_fabric", _fabric),
    Row("PEFT LoRA", "peft", _peft),
    Row("torchao float8, float8 all-gather", "torchao", _torchao),
    Row("torchtitan, apply_fsdp_to_decoder", "torchtitan", _torchtitan),
)
