"""`python -m benchmarks.loading`: the memory that each way to load a Hugging Face folder into shards takes on a rank.

Two ranks load a Llama of 141M parameters, trained in float32, from a folder in float32 and from one in bfloat16, in new
processes each time. Bytes are the peak of the rank's anonymous memory above what it had before. Mapped files do not
count: the kernel can drop them at any time. The exit code is 1 where our values are not the folder's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
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
from tests.processes import AnonymousPeak
from tests.ranks import Ranks

RANKS = 2
DTYPES = (torch.float32, torch.bfloat16)
ALL = "all"
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


def main() -> int:
    console = Console(width=max(150, Console().width))
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
