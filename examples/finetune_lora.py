"""Fine-tune a Hugging Face model with LoRA: its folder read straight into shards, adapters of PEFT, compiled, resumed.

    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py                  a minute on two cores
    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py --steps 120      goes on from the last checkpoint
    torchrun --standalone --nproc-per-node 8 examples/finetune_lora.py --model FOLDER   of any causal language model

Without a folder, a small Llama with random weights is written first, whose tokens are bytes. Checkpoints are of
adapters and their optimizer; at the end stands what ``PeftModel.from_pretrained`` reads. A run that was stopped and
started again takes the batches that it would have taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fsdp_compile

BYTES = 256


def main() -> None:
    options = parse()
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    savers = dist.new_group(backend="gloo")  # a checkpoint's thread must not talk into the collectives of a step

    base = options.model or small_llama(options.out / "base")
    torch.manual_seed(0)  # of the adapters, whether the folder had to be made or not
    model = build(base, options.rank)
    fsdp_compile.auto_shard(model)  # the classes in its _no_split_modules
    fsdp_compile.load_pretrained(model, base, device=device)
    adapters = [param for param in model.parameters() if param.requires_grad]
    optim = torch.optim.AdamW(adapters, lr=options.lr, weight_decay=0.0)
    first_step = load(model, optim, options.out)
    compiled = torch.compile(model, fullgraph=True)

    text = read(options.text, base, model.config.vocab_size)
    tokens_of_step = options.batch * options.length * dist.get_world_size()
    saving: Any = None
    with bar(first_step, options.steps) as progress:
        task = progress.task_ids[0]
        for step in range(first_step, options.steps):
            begin = time.perf_counter()
            tokens = batch_of(text, options, step).to(device)
            logits = compiled(input_ids=tokens[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            norm = fsdp_compile.clip_grad_norm_(model, 1.0)
            optim.step()
            optim.zero_grad()
            dist.all_reduce(loss := loss.detach())
            rate = tokens_of_step / (time.perf_counter() - begin)
            said = f"loss {loss.item() / dist.get_world_size():.4f}  norm {norm.item():.2f}  {rate:,.0f} tokens/s"
            progress.update(task, advance=1, said=said)
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                progress.print(f"step {step + 1}: {said}", highlight=False)
                wait_for(saving, options.out)
                saving = save(model, optim, step + 1, options.out, savers)
    wait_for(saving, options.out)
    write_adapters(model, options.out / "adapters")
    dist.destroy_process_group()


# --- the model


def build(base: Path, rank: int) -> PeftModel:
    """The folder's model with adapters beside each of its linear layers, on no device."""
    config = AutoConfig.from_pretrained(base, local_files_only=True)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, lora)


def small_llama(folder: Path) -> Path:
    """A folder with a model of bytes, random weights in it; written by the first rank, unless it is there."""
    if dist.get_rank() == 0 and not (folder / "model.safetensors").exists():
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=BYTES, max_position_embeddings=512, bos_token_id=0, eos_token_id=0, **sizes)
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder


def write_adapters(model: PeftModel, folder: Path) -> None:
    """The adapters as PEFT saves them, by the first rank; the base model stays where it is."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(str(folder), state_dict=whole)
    dist.barrier()


# --- data


def read(files: list[Path], base: Path, vocab_size: int) -> Tensor:
    """The files' tokens, by the folder's tokenizer, or bytes if it has none; of Python's own library, if none given."""
    files = files or sorted(Path(os.__file__).parent.glob("*.py"))
    whole = b"\n".join(file.read_bytes() for file in files)
    if any(base.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
        return torch.tensor(tokenizer(whole.decode(errors="replace"), verbose=False).input_ids)
    if vocab_size < BYTES:
        raise ValueError(f"{base} has no tokenizer, and its {vocab_size} tokens are too few for bytes.")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def batch_of(text: Tensor, options: argparse.Namespace, step: int) -> Tensor:
    """One rank's rows of a step's batch: the step decides which, and nothing that came before."""
    if len(text) <= options.length:
        raise ValueError(f"There are {len(text)} tokens to learn, and a row has {options.length}. Give more text.")
    generator = torch.Generator().manual_seed(step)
    num_rows = options.batch * dist.get_world_size()
    starts = torch.randint(0, len(text) - options.length, (num_rows,), generator=generator)
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return torch.stack([text[start : start + options.length] for start in mine.tolist()]).long()


# --- checkpoints: what is trained, and nothing else

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def save(model: nn.Module, optim: torch.optim.Optimizer, step: int, out: Path, savers: Any) -> Any:
    """Begin to write a folder of this step's own, of which a copy is made now; training may go on."""
    of_model, of_optim = get_state_dict(model, optim, options=TRAINED)
    state = {"adapters": of_model, "optim": of_optim, "step": step}
    return dcp.async_save(state, checkpoint_id=str(out / f"step-{step}"), process_group=savers)


def wait_for(saving: Any, out: Path, keep: int = 2) -> None:
    """Have the checkpoint that is being written, then remove those before the last few."""
    if saving is None:
        return
    saving.result()
    if dist.get_rank() == 0:
        for folder in finished(out)[:-keep]:
            shutil.rmtree(folder)


def finished(out: Path) -> list[Path]:
    """Checkpoints that were written to their end, which is when they have this file; the newest is the last."""
    folders = [file.parent for file in out.glob("step-*/.metadata")]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def load(model: nn.Module, optim: torch.optim.Optimizer, out: Path) -> int:
    """The step to go on with: that of the newest checkpoint, which is loaded, or 0."""
    newest = [finished(out)[-1:] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(newest)
    if not newest[0]:
        return 0
    of_model, of_optim = get_state_dict(model, optim, options=TRAINED)
    state = {"adapters": of_model, "optim": of_optim, "step": 0}
    dcp.load(state, storage_reader=fsdp_compile.CheckedReader(newest[0][0]))
    set_state_dict(model, optim, model_state_dict=of_model, optim_state_dict=of_optim, options=TRAINED)
    return int(state["step"])


# --- the command


def bar(done: int, steps: int) -> Progress:
    """On the first rank's terminal; elsewhere it prints nothing."""
    console = Console(quiet=dist.get_rank() != 0)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}"))
    progress = Progress(*columns, console=console)
    progress.add_task("steps", total=steps, completed=done, said="compiling" if done < steps else "nothing left to do")
    return progress


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face model with LoRA. Run it by torchrun.")
    add = parser.add_argument
    add("text", nargs="*", type=Path, help="files to learn; Python's own library if none are given")
    add("--model", type=Path, help="folder of config.json and safetensors; a small one is made if none is given")
    for name, value in (("rank", 8), ("length", 128), ("batch", 8), ("steps", 60)):
        add(f"--{name}", type=int, default=value, help="default: %(default)s")
    add("--lr", type=float, default=5e-3, help="default: %(default)s")
    add("--save-every", type=int, default=30, help="steps; default: %(default)s")
    add("--out", type=Path, default=Path("runs/lora"), help="checkpoints, by step, and adapters; default: %(default)s")
    options = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun: torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py")
    return options


if __name__ == "__main__":
    main()
