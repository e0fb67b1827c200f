"""`python -m benchmarks.loading`: the memory that each way to load a Hugging Face folder into shards takes on a rank.

Two ranks load a Llama of 141M parameters, trained in float32, from a folder in float32 and from one in bfloat16, in new
processes each time. Bytes are the peak of the rank's anonymous memory above what it had before. Mapped files do not
count: the kernel can drop them at any time. The exit code is 1 where our values are not the folder's.

With `--larger-than-memory`, one process is rank 0 of 512, and loads its part of a Llama of 405B parameters. The files
are sparse: they have their full size, and only the rows of rank 0 take space. Bytes of files are pages of them that the
process had mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_compile
from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.hugging_face.safetensors import File, Writer, files_in
from tests.processes import AnonymousPeak
from tests.ranks import Ranks

RANKS = 2
DTYPES = (torch.float32, torch.bfloat16)
ALL = "all"
MANY_RANKS, VALUE = 512, 0.5
LARGE = Path(__file__).parent.parent / "examples" / "plan" / "llama-3-405b.json"
CONFIG = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 6,
    "num_attention_heads": 16, "use_cache": False,
}  # fmt: skip


def on_meta(folder: str) -> Any:
    with torch.device("meta"):
        return fsdp_compile.auto_shard(LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).float())


def ours(folder: str) -> Any:
    return fsdp_compile.load_pretrained(on_meta(folder), folder)


def every_rank_whole(folder: str) -> Any:
    return fsdp_compile.auto_shard(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


def one_rank_whole(folder: str) -> Any:
    state = None
    if dist.get_rank() == 0:
        state = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return fsdp_compile.materialize(on_meta(folder), state_dict=state)


def torch_reader(folder: str) -> Any:
    model = on_meta(folder).to_empty(device="cpu")
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))  # buffers that are not saved stay empty
    return model


WAYS: dict[str, Callable[[str], Any]] = {
    "auto_shard, load_pretrained": ours,
    "from_pretrained on every rank, auto_shard": every_rank_whole,
    "from_pretrained on rank 0, materialize(state_dict=...)": one_rank_whole,
    "auto_shard, dcp.load with torch's HuggingFaceStorageReader": torch_reader,
}


def write(folder: str) -> int:
    """Write a folder for each dtype, and return how many bytes the weights are in float32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    size = sum(param.nbytes for param in model.parameters())
    for dtype in DTYPES:
        model.to(dtype).save_pretrained(f"{folder}/{dtype}", max_shard_size="200MB")
    return size


def measure(way: str, folder: str) -> tuple[int, float, str]:
    """Load a folder in one way; return the peak bytes, the seconds, and which values are right."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as small:  # a first load, which imports what the way needs
        LlamaForCausalLM(LlamaConfig(**{**CONFIG, "vocab_size": 8, "hidden_size": 16})).save_pretrained(small)
        WAYS[way](told_by_first(small))
        dist.barrier()
    with AnonymousPeak() as peak:
        began = time.perf_counter()
        model = WAYS[way](folder)
        seconds = time.perf_counter() - began
    return peak.num_bytes, seconds, what_is_right(model, folder)


def told_by_first(folder: str) -> str:
    told = [folder]
    dist.broadcast_object_list(told)
    return told[0]


@torch.no_grad()
def what_is_right(model: Any, folder: str) -> str:
    expected = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = expected.state_dict()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if whole.dtype != torch.float32 or not torch.equal(whole, state[name]):
            return f"not {name}"
    buffers = dict(expected.named_buffers())
    if not all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers()):
        return "weights alone: buffers that are not saved are empty"
    return ALL


@dataclass(frozen=True)
class Part:
    """What one of many ranks took to load its part of a folder."""

    folder_bytes: int
    shard_bytes: int
    anonymous_bytes: int  # the peak, above what was held before
    mapped_bytes: int  # the peak of the files' pages, above what was mapped before
    is_right: bool  # whether the values are the folder's
    shard_s: float
    load_s: float


def write_sparse(model: Any, num_ranks: int, folder: Path) -> None:
    """Write a model's folder, a file for each layer: rank 0's rows are ``VALUE``, and the others are holes."""
    files: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        of_layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{of_layer}.safetensors", {})[name] = param
    for file, params in files.items():
        path = folder / file
        Writer(path, {name: (param.dtype, tuple(param.shape)) for name, param in params.items()}).close()
        os.truncate(path, path.stat().st_size + sum(param.nbytes for param in params.values()))
        entries = File(path).entries
        with path.open("r+b") as opened:
            for name, param in params.items():
                rows = torch.full((-(-len(param) // num_ranks), *param.shape[1:]), VALUE, dtype=param.dtype)
                opened.seek(entries[name].begin)
                opened.write(rows.view(torch.uint8).numpy().data)
    places = {name: file for file, params in files.items() for name in params}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def load_part(model: Any, num_ranks: int, folder: Path) -> Part:
    """Shard a model on meta over ranks of which only this one is there, and load its part of a folder."""
    with pretended_world(num_ranks), AnonymousPeak() as peak:
        began = time.perf_counter()
        fsdp_compile.auto_shard(model)
        sharded = time.perf_counter()
        fsdp_compile.load_pretrained(model, folder)
        ended = time.perf_counter()
    shards = [param.to_local() for param in model.parameters()]
    return Part(
        folder_bytes=sum(file.stat().st_size for file in files_in(folder)),
        shard_bytes=sum(shard.nbytes for shard in shards),
        anonymous_bytes=peak.num_bytes,
        mapped_bytes=peak.num_file_bytes,
        is_right=all(bool((shard == VALUE).all()) for shard in shards),
        shard_s=sharded - began,
        load_s=ended - sharded,
    )


def larger_than_memory(config: LlamaConfig, num_ranks: int) -> Part:
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-loading-") as folder:
        with torch.device("meta"):
            model = LlamaForCausalLM(config).bfloat16()
        write_sparse(model, num_ranks, Path(folder))
        return load_part(model, num_ranks, Path(folder))


def show_larger_than_memory(console: Console) -> int:
    small = {**CONFIG, "vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 1}
    larger_than_memory(LlamaConfig(**small), 4)  # imports what it needs
    part = larger_than_memory(LlamaConfig.from_pretrained(LARGE), MANY_RANKS)
    table = Table(title=f"{part.folder_bytes / 1e9:,.0f} GB in files, loaded by one of {MANY_RANKS} ranks")
    for column in ("shards", "peak", "of files", "shard", "load", "right"):
        table.add_column(column, justify="right")
    sizes = (f"{size / 1e6:,.0f} MB" for size in (part.shard_bytes, part.anonymous_bytes, part.mapped_bytes))
    table.add_row(*sizes, f"{part.shard_s:.1f} s", f"{part.load_s:.1f} s", ALL if part.is_right else "not all")
    console.print(table)
    return 0 if part.is_right else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.partition("\n")[0])
    parser.add_argument("--larger-than-memory", action="store_true", help="405B parameters, as one of 512 ranks")
    console = Console(width=max(150, Console().width))
    if parser.parse_args().larger_than_memory:
        return show_larger_than_memory(console)
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-loading-") as folder:
        with Ranks(1) as ranks:
            [size] = ranks.run(write, folder)
        table = Table(title=f"{size / 1e6:.0f} MB of weights in float32, of which each of {RANKS} ranks has a part")
        for column in ("file", "way", *(f"peak of rank {rank}" for rank in range(RANKS)), "seconds", "right"):
            table.add_column(column, justify="left" if column in ("file", "way", "right") else "right")
        ours_is_right = True
        for dtype in DTYPES:
            for way in WAYS:
                with Ranks(RANKS) as ranks:
                    rows = ranks.run(measure, way, f"{folder}/{dtype}")
                right = next((said for _, _, said in rows if said != ALL), ALL)
                ours_is_right &= right == ALL or WAYS[way] is not ours
                peaks = [f"{peak / 1e6:.0f} MB" for peak, _, _ in rows]
                table.add_row(str(dtype)[6:], way, *peaks, f"{max(one for _, one, _ in rows):.1f}", right)
            table.add_section()
    console.print(table)
    return 0 if ours_is_right else 1


if __name__ == "__main__":
    sys.exit(main())
