"""Pre-train a small language model on the bytes of files: built on no device, sharded, compiled, saved while it trains.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --steps 60     a minute on two cores, without a GPU
    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --steps 120    goes on from the last checkpoint

On any number of ranks, also another one than before, over NCCL where every rank has a GPU. A run that was stopped and
started again takes the batches that it would have taken.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

import fsdp_compile

BYTES = 256


class Block(nn.Module):
    """Causal attention and a gated MLP, each behind a norm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 6 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, dim: int, num_layers: int, max_length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(BYTES, dim), nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList(Block(dim, max(1, dim // 64)) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.place.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def main() -> None:
    options = parse()
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    savers = dist.new_group(backend="gloo")  # a checkpoint's thread must not talk into the collectives of a step

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model(options.dim, options.layers, options.length)
    fsdp_compile.auto_shard(model, Block)
    fsdp_compile.materialize(model, device)
    optim = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first_step = load(model, optim, options.out)
    compiled = torch.compile(model, fullgraph=True)

    text = read(options.text).to(device)
    tokens_of_step = options.batch * options.length * dist.get_world_size()
    saving: Any = None
    with bar(first_step, options.steps) as progress:
        task = progress.task_ids[0]
        for step in range(first_step, options.steps):
            begin = time.perf_counter()
            loss = compiled(batch_of(text, options, step))
            loss.backward()
            norm = fsdp_compile.clip_grad_norm_(model, 1.0)
            for group in optim.param_groups:
                group["lr"] = options.lr * warm_up_and_cosine(step, options.decay_steps)
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
    dist.destroy_process_group()


def warm_up_and_cosine(step: int, decay_steps: int, warm_up: int = 10) -> float:
    """The share of the learning rate that a step takes."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / decay_steps)))


# --- data


def read(files: list[Path]) -> Tensor:
    """The bytes of the files; of those of Python's own library, if none are given."""
    files = files or sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch_of(text: Tensor, options: argparse.Namespace, step: int) -> Tensor:
    """One rank's rows of a step's batch: the step decides which, and nothing that came before."""
    generator = torch.Generator().manual_seed(step)
    num_rows = options.batch * dist.get_world_size()
    starts = torch.randint(0, len(text) - options.length, (num_rows,), generator=generator)
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return torch.stack([text[start : start + options.length] for start in mine.tolist()]).long()


# --- checkpoints


def save(model: nn.Module, optim: torch.optim.Optimizer, step: int, out: Path, savers: Any) -> Any:
    """Begin to write a folder of this step's own, of which a copy is made now; training may go on."""
    of_model, of_optim = get_state_dict(model, optim)
    state = {"model": of_model, "optim": of_optim, "step": step}
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
    of_model, of_optim = get_state_dict(model, optim)
    state = {"model": of_model, "optim": of_optim, "step": 0}
    dcp.load(state, checkpoint_id=str(newest[0][0]))
    set_state_dict(model, optim, model_state_dict=of_model, optim_state_dict=of_optim)
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
    parser = argparse.ArgumentParser(description="Pre-train a small model on the bytes of files. Run it by torchrun.")
    add = parser.add_argument
    add("text", nargs="*", type=Path, help="files to learn; Python's own library if none are given")
    for name, value in (("dim", 128), ("layers", 4), ("length", 128), ("batch", 8), ("steps", 60)):
        add(f"--{name}", type=int, default=value, help="default: %(default)s")
    add("--lr", type=float, default=2e-3, help="default: %(default)s")
    add("--decay-steps", type=int, default=1000, help="of the learning rate; default: %(default)s")
    add("--save-every", type=int, default=30, help="steps; default: %(default)s")
    add("--out", type=Path, default=Path("runs/pretrain"), help="checkpoints, by step; default: %(default)s")
    options = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun: torchrun --standalone --nproc-per-node 2 examples/pretrain.py")
    return options


if __name__ == "__main__":
    main()
