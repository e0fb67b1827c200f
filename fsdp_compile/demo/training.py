"""``fsdp-compile demo``: a small transformer trained four ways on the same data, in the processes of one machine.

    unsharded                  the reference: eager, every rank's batch, no communication
    FSDP2, eager               torch.distributed.fsdp.fully_shard
    FSDP2, compiled blocks     block.compile(), then the same
    fsdp_compile               fsdp_compile.fully_shard and one torch.compile(model, fullgraph=True)

All four take their steps in turn, so that a busy machine slows them alike. This module is what the workers run; the
parent's half, processes and tables, is ``report``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch_compat import dynamo
from ..api.fully_shard import fully_shard
from ..core.parts import local_of
from ..graph.install import manager
from ..passes import GraphRecord
from ..tools.inspect import Report, inspect
from ..tools.measure import join_group, own_device
from ..tools.memory import PeakMeter
from ..tools.trial import observing
from ..workers import Send

UNSHARDED = "unsharded"
FSDP2 = "FSDP2, eager"
FSDP2_BLOCKS = "FSDP2, compiled blocks"
OURS = "fsdp_compile"

WARMUP_STEPS = 2  # they compile graphs and create optimizer states; not timed
WEIGHED_STEPS = 3
SEED = 0


@dataclass(frozen=True)
class DemoSettings:
    """The settings from the command line, and sizes that it cannot change."""

    ranks: int = 2
    steps: int = 30
    layers: int = 4
    dim: int = 256
    backend: str = "inductor"
    save: str | None = None  # a folder
    page: str | None = None  # a file; without one it is in `save`, or else in a temporary folder
    head_dim: int = 64
    vocab: int = 2048
    seq: int = 128
    batch: int = 2
    learning_rate: float = 1e-3


class Attention(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim)
        self.attn = Attention(dim, head_dim)
        self.mlp_norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """A causal language model whose head is its token embedding; calling it gives the loss."""

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocab, settings.dim)
        self.positions = nn.Embedding(settings.seq, settings.dim)
        self.blocks = nn.ModuleList(Block(settings.dim, settings.head_dim) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.dim)
        self.head = nn.Linear(settings.dim, settings.vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build_model(settings: DemoSettings) -> Transformer:
    """Make the model, with the same weights on every rank and in every variant."""
    torch.manual_seed(SEED)
    return Transformer(settings)


def batch_of(settings: DemoSettings, rank: int) -> Tensor:
    """Return random tokens, other ones on each rank (a missing reduction shows), the same each step (losses fall)."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    return torch.randint(settings.vocab, (settings.batch, settings.seq), generator=generator)


@dataclass
class DemoRun:
    """One way to train, and its measurements."""

    name: str
    model: Callable[[Tensor], Tensor]
    params: list[nn.Parameter]
    batches: list[Tensor]  # more than one: their mean is the loss
    learning_rate: float
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    held_bytes: int = 0
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.params, lr=self.learning_rate)

    def step(self, batches: list[Tensor]) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.model(batch) / len(batches)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def train(self, num_steps: int, *, timed: bool) -> None:
        for _ in range(num_steps):
            start = time.perf_counter()
            self.losses.append(self.step(self.batches))
            if self.batches[0].is_cuda:
                torch.cuda.synchronize()
            if timed:
                self.step_s.append(time.perf_counter() - start)

    def weigh(self, meter: PeakMeter, batch: Tensor) -> None:
        """Measure the memory between steps, and how far a step on one rank's batch rises above it."""
        self.held_bytes = sum(local_of(tensor).nbytes for tensor in self._held())
        peaks = []
        for _ in range(WEIGHED_STEPS):
            self.step([batch])
            self.optimizer.zero_grad()
            peaks.append(meter.peak_above(lambda: self.step([batch])))
        self.optimizer.zero_grad()
        self.peak_bytes = None if None in peaks else int(statistics.median(peak for peak in peaks if peak is not None))

    def _held(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.params, *(value for value in states if isinstance(value, Tensor))]

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "step_s": statistics.median(self.step_s) if self.step_s else None,
            "held_bytes": self.held_bytes,
            "peak_bytes": self.peak_bytes,
        }


def shard_with_fsdp2(model: Transformer, mesh: DeviceMesh, compile_backend: str | None) -> None:
    for block in model.blocks:
        if compile_backend is not None:
            block.compile(backend=compile_backend)
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)


def shard_with_ours(model: Transformer, mesh: DeviceMesh) -> Transformer:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# The work that begins when the passes are done with a graph of this stage.
_AFTER_PASSES = {
    "joint": "cut forward from backward",
    "forward": "kernels of the forward graph",
    "backward": "kernels of the backward graph",
}


def train_ours(
    run: DemoRun, model: Transformer, num_steps: int, say: Callable[[str], None]
) -> tuple[Report, dict[str, Any]]:
    """Run the first steps of our variant, in which it compiles; return what the passes did, and counts of it."""

    def observe(record: GraphRecord) -> None:
        say(f"{run.name}: {_AFTER_PASSES[record.stage]}")

    say(f"{run.name}: trace the model")
    num_breaks = dynamo.num_graph_breaks()
    with inspect(model) as report, observing(manager.observers, observe):
        run.train(num_steps, timed=False)
    num_breaks = dynamo.num_graph_breaks() - num_breaks
    stages = {record.stage: _counts(record) for record in report.records}
    return report, {"num_graphs": report.num_dynamo_graphs, "num_graph_breaks": num_breaks, "stages": stages}


def _counts(record: GraphRecord) -> dict[str, Any]:
    plan = record.plan
    return {
        "gathers": [record.num_unshards, len(plan.gathers)],
        "reduces": [record.num_reduces, len(plan.reduces)],
        "params": len(plan.params),
    }


def draw(report: Report, settings: DemoSettings) -> str:
    """Write the page of ``inspect`` for the step as it was planned; return its path."""
    kept = settings.save or (tempfile.mkdtemp(prefix="fsdp-compile-step-") if settings.page is None else "")
    return str(report.html(Path(settings.page or Path(kept) / "step.html")))


def work(job: dict[str, Any], rank: int, send: Send) -> None:
    """One rank: build and warm up each variant, train all of them in turn, weigh them, send the results."""
    settings = DemoSettings(**job["settings"])
    torch.set_num_threads(1)
    device = own_device(settings.ranks, rank)
    join_group(device, settings.ranks, rank, f"file://{job['rendezvous']}", timeout_s=300)
    mesh = init_device_mesh(device.type, (settings.ranks,))
    batches = [batch_of(settings, peer).to(device) for peer in range(settings.ranks)]
    num_warmup = min(WARMUP_STEPS, settings.steps)
    runs: list[DemoRun] = []

    def say(name: str, done: int = 0, total: int = 0) -> None:
        if rank == 0:
            send({"stage": (name, done, total)})

    # Ours is last: its passes are in Inductor's settings from then on, and torch's variants must run without them.
    for name in (UNSHARDED, FSDP2, FSDP2_BLOCKS, OURS):
        if name != OURS:  # train_ours reports more for ours
            say(f"{name}: compile" if name == FSDP2_BLOCKS else f"{name}: first steps")
        model = build_model(settings).to(device)
        compiled: Callable[[Tensor], Tensor] = model
        if name == FSDP2:
            shard_with_fsdp2(model, mesh, compile_backend=None)
        elif name == FSDP2_BLOCKS:
            shard_with_fsdp2(model, mesh, compile_backend=settings.backend)
        elif name == OURS:
            compiled = torch.compile(shard_with_ours(model, mesh), fullgraph=True, backend=settings.backend)
        own = batches if name == UNSHARDED else [batches[rank]]
        run = DemoRun(name, compiled, list(model.parameters()), own, settings.learning_rate)
        runs.append(run)
        if name == OURS:
            report, captured = train_ours(run, model, num_warmup, say)
        else:
            run.train(num_warmup, timed=False)
    for step in range(num_warmup, settings.steps):
        say("train all four in turn", step + 1, settings.steps)
        for run in runs:
            dist.barrier()
            run.train(1, timed=True)
    say("weigh their memory")
    meter = PeakMeter(device)
    for run in runs:
        dist.barrier()
        run.weigh(meter, batches[rank])
    page = draw(report, settings) if rank == 0 else None
    if settings.save is not None:
        report.save(Path(settings.save) / f"rank{rank}")
    send(
        {
            "result": {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread a rank",
                "group": dist.get_backend(),
                "num_params": sum(param.numel() for param in build_model(settings).parameters()),
                "runs": {run.name: run.result() for run in runs},
                "captured": captured,
                "page": page,
            }
        }
    )
    dist.barrier()
    dist.destroy_process_group()
