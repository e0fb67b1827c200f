"""`python -m benchmarks.planning`: what planning takes, for a large model on many ranks, and of a compilation.

The first table is of a Llama of 405B parameters on a pretended group of 1,024 ranks, in one process: nothing is
allocated, sent or generated. It is traced, planned, cut by AOTAutograd's partitioner, and both halves go through all
passes. The second is of a narrow model that Inductor compiles, where our passes are weighed against all the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from benchmarks.worker_process import prime_compiler
from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.graph.install import JointPass, manager
from fsdp_compile.passes import PassManager

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama, and its batch."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    batch: int
    seq: int


LARGE = Size(layers=126, dim=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, batch=1, seq=8192)
NARROW = Size(layers=24, dim=128, heads=2, kv_heads=2, ffn=384, vocab=8192, batch=1, seq=64)


class Clock:
    """Seconds by part. Where one part calls another, the time counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inside.pop()
                if self._inside:
                    self._inside[-1] += elapsed

        return timed

    def total(self, *names: str) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names or self.seconds)


OURS = {
    "joint graph: plan, tags": (JointPass, "__call__"),
    "forward and backward: launches, their order": (PassManager, "__call__"),
}


@contextmanager
def passes_timed(clock: Clock) -> Iterator[None]:
    """Time every way into our passes with ``clock`` while the block runs."""
    before = {name: getattr(owner, method) for name, (owner, method) in OURS.items()}
    for name, (owner, method) in OURS.items():
        setattr(owner, method, clock.timed(name, before[name]))
    try:
        yield
    finally:
        for name, (owner, method) in OURS.items():
            setattr(owner, method, before[name])


def llama(size: Size, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.dim,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocab,
        max_position_embeddings=max(2048, size.seq),
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).train()


def sharded(size: Size, ranks: int, dtype: torch.dtype) -> nn.Module:
    """Make a Llama with one unit for each layer, on the pretended group of ``ranks`` ranks."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = llama(size, dtype)
    for layer in model.get_submodule("model.layers").children():
        fsdp_compile.fully_shard(layer, mesh=mesh)
    # Only shards are allocated, and they take no memory until somebody writes: the compiler uses fake tensors.
    return fsdp_compile.fully_shard(model, mesh=mesh).to_empty(device="cpu")


class _Planned(Exception):
    """Raised when all is compiled, because nothing is to run."""


def _stop(*inputs: Any) -> Any:
    raise _Planned


def plan_large(size: Size, ranks: int, budget: str | None, console: Console) -> None:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    clock = Clock()
    num_nodes: list[int] = []

    def compiler(module: fx.GraphModule, inputs: Any) -> Any:
        num_nodes.append(len(module.graph.nodes))
        manager(module.graph)
        num_nodes.append(len(module.graph.nodes))
        return make_boxed_func(_stop)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        trace = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=clock.timed("torch: partitioner", min_cut_rematerialization_partition),
            decompositions=select_decomp_table(),
        )
        return clock.timed("torch: AOTAutograd", trace)(module, inputs)

    begun = time.perf_counter()
    model = sharded(size, ranks, torch.bfloat16)
    if budget is not None:
        fsdp_compile.configure(model, memory_budget=budget, profile="h100")
    built_s = time.perf_counter() - begun
    tokens = torch.zeros(size.batch, size.seq, dtype=torch.long)
    run = torch.compile(model, backend=backend, fullgraph=True)
    with passes_timed(clock), suppress(_Planned):
        clock.timed("torch: Dynamo", run)(input_ids=tokens, labels=tokens)
    grid = _grid(f"{size.layers} layers of dim {size.dim} on {ranks:,} ranks, {size.batch} x {size.seq} tokens")
    grid.add_row("build and shard", f"{built_s:.1f} s")
    for name, seconds in clock.seconds.items():
        grid.add_row(name, f"{seconds:.1f} s")
    grid.add_section()
    grid.add_row("our passes and planning", f"{clock.total(*OURS):.1f} s")
    grid.add_row("all", f"{built_s + clock.total():.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    grid.add_row("peak of this process", f"{peak / _GIB:.1f} GiB")
    console.print(grid)


def weigh_passes(size: Size, ranks: int, console: Console) -> None:
    clock = Clock()
    model = sharded(size, ranks, torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().zero_()
    tokens = torch.zeros(size.batch, size.seq, dtype=torch.long)
    run = torch.compile(model, fullgraph=True)

    def step() -> float:
        begun = time.perf_counter()
        run(input_ids=tokens, labels=tokens).loss.backward()
        return time.perf_counter() - begun

    with tempfile.TemporaryDirectory() as cache, torch._inductor.utils.fresh_cache(dir=cache):
        prime_compiler()
        with passes_timed(clock):
            first_s = step()
        compile_s = first_s - step()
    grid = _grid(f"Inductor on {size.layers} layers of dim {size.dim}, {ranks} ranks: {compile_s:.1f} s to compile")
    for name in OURS:
        seconds = clock.total(name)
        grid.add_row(name, f"{seconds:.2f} s", f"{seconds / compile_s:.1%}")
    grid.add_section()
    grid.add_row("our passes", f"{clock.total(*OURS):.2f} s", f"{clock.total(*OURS) / compile_s:.1%}")
    console.print(grid)


def _grid(title: str) -> Table:
    grid = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(3):
        grid.add_column(justify="left" if not grid.columns else "right")
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--layers", type=int, default=LARGE.layers, help="of the large model; 0 leaves it out; default: %(default)s")
    add("--ranks", type=int, default=1024, help="of its pretended group; default: %(default)s")
    add("--budget", metavar="BYTES", help="memory_budget of the large model, on h100: a search")
    add("--inductor-layers", type=int, default=NARROW.layers, help="of the narrow one; default: %(default)s")
    options = parser.parse_args()
    console = Console()
    if options.layers:
        with pretended_world(options.ranks):
            plan_large(dataclasses.replace(LARGE, layers=options.layers), options.ranks, options.budget, console)
    if options.inductor_layers:
        torch._dynamo.reset()
        with pretended_world(2):
            weigh_passes(dataclasses.replace(NARROW, layers=options.inductor_layers), 2, console)


if __name__ == "__main__":
    main()
