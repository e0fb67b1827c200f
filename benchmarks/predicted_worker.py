"""One rank of `benchmarks.predicted`: it predicts a step, then measures the step's memory, then its time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compile
from benchmarks.settings import Job
from benchmarks.variants import VARIANTS, Forward
from benchmarks.worker_process import Progress, finish, join_group, prime_compiler
from benchmarks.workload import batch_of, blocks, build_model, loss_of, optimizer_for
from fsdp_compile.passes import Plan
from fsdp_compile.passes.budget.residency import GATHER, KEPT, RECOMPUTE
from fsdp_compile.passes.cost.predicted import Prediction
from fsdp_compile.profiling.session import Profile
from fsdp_compile.tools.memory import PeakMeter

# The parent has malloc give back what is freed. Weighing needs that, and it would slow timing down. So before the timed
# steps, malloc gets the thresholds that it would adapt to by itself in a process that frees large tensors.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB, _LARGE = -1, -3, -6, 32 << 20

SAVED, CHECKPOINTED = "saved", "checkpointed"  # what FSDP2 does with activations


@dataclass(frozen=True)
class PredictedJob(Job):
    """A job that also says how the model is sharded."""

    profile: str | None = None  # of the hardware; by default the built-in one of the device
    traces: str | None = None  # where to record steps, after those that are timed
    reshard: bool | None = None
    budget: str | None = None
    between: float | None = None  # a budget at this share of the way from the least plan to keeping everything
    may: tuple[str, ...] = (GATHER, RECOMPUTE)  # what a budget chooses
    theirs: str | None = None  # FSDP2, which predicts nothing, and what it does with activations


@dataclass(frozen=True)
class Figures:
    """The figures of one rank. Seconds and bytes are of forward and backward alone, except ``optimizer_s``."""

    predicted_s: float
    predicted_exposed_s: float
    predicted_bytes: int  # above what is held between steps
    step_s: list[float]
    cpu_s: list[float]  # of the processor: waiting and other programs take none of it
    optimizer_s: list[float]
    peak_bytes: list[int]
    num_kept: int
    num_recomputed: int
    offloaded_bytes: int
    budget_bytes: int | None  # above what is held between steps
    losses: list[float]  # of all steps in which the optimizer ran
    planned: dict[str, int]  # launches of a step, by kind
    recorded: dict[str, float]
    summary: str  # of the record, or the traceback of why there is none


def measure(job: PredictedJob, rank: int, progress: Progress) -> Figures:
    progress("joining the group")
    mesh = join_group(job, rank, job.settings.ranks)
    settings = job.settings
    prime_compiler(settings.device)
    model, tokens = build_model(settings), batch_of(settings, rank)
    forward = _theirs(model, mesh, job) if job.theirs else _ours(model, mesh, tokens, job)
    optimizer = optimizer_for(model.parameters(), settings)
    losses: list[float] = []
    stack = contextlib.ExitStack()
    profiled = stack.enter_context(_profile(model, job)) if job.traces else None

    def step() -> tuple[float, float, float]:
        begun, cpu_begun = time.perf_counter(), time.process_time()
        loss = forward(tokens)
        loss.backward()
        finish(settings.device)
        middle, cpu_s = time.perf_counter(), time.process_time() - cpu_begun
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        finish(settings.device)
        ended = time.perf_counter()
        if profiled is not None:
            profiled.step()
        return middle - begun, cpu_s, ended - middle

    progress("first step")
    predicted, plan, planned = _first_step(model, step, job)
    progress("weighed steps")
    peaks = _weigh(settings.device, lambda: forward(tokens).backward(), lambda: optimizer.zero_grad(set_to_none=True))
    progress("warm-up")
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)
    for _ in range(settings.warmup):
        step()
    gc.collect()
    dist.barrier()
    progress("timed steps")
    seconds = [step() for _ in range(settings.steps)]
    progress("recorded steps")
    recorded, summary = _recorded(stack, profiled, step) if profiled is not None else ({}, "")
    return Figures(
        predicted.seconds if predicted else 0.0,
        predicted.exposed_s if predicted else 0.0,
        predicted.peak_bytes - predicted.held_bytes if predicted else 0,
        [step_s for step_s, _, _ in seconds],
        [cpu_s for _, cpu_s, _ in seconds],
        [optimizer_s for _, _, optimizer_s in seconds],
        peaks,
        len(plan.keep),
        len(plan.recompute),
        plan.choice.chosen.offloaded_bytes if plan.choice else 0,
        plan.choice.budget_bytes - predicted.held_bytes if plan.choice and predicted else None,
        losses,
        dict(planned),
        recorded,
        summary,
    )


def _ours(model: nn.Module, mesh: DeviceMesh, tokens: Tensor, job: PredictedJob) -> Forward:
    for block in blocks(model):
        fsdp_compile.fully_shard(block, mesh=mesh, reshard_after_forward=job.reshard)
    fsdp_compile.fully_shard(model, mesh=mesh, reshard_after_forward=job.reshard)
    if job.budget is not None or job.between is not None:
        budget = job.budget if job.between is None else _between(model, tokens, job)
        fsdp_compile.configure(model, memory_budget=budget, profile=job.profile, may=job.may)
    return partial(loss_of, torch.compile(model, fullgraph=True))


def _theirs(model: nn.Module, mesh: DeviceMesh, job: PredictedJob) -> Forward:
    if job.theirs == CHECKPOINTED:  # each block, which is compiled inside
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return VARIANTS["fsdp2_blocks"].setup(model, mesh, job.settings)


def _first_step(
    model: nn.Module, step: Callable[[], object], job: PredictedJob
) -> tuple[Prediction | None, Plan, Counter[str]]:
    """Take the first step; return what its report predicts, its plan, and its launches by kind."""
    if job.theirs:
        step()
        return None, Plan("joint"), Counter()
    with fsdp_compile.inspect(model) as report:
        step()
    launches = Counter(launch.kind for graph in report.graphs for launch in graph.launches)
    return report.joint.predict(job.profile), report.joint.plan, launches


def _profile(model: nn.Module, job: PredictedJob) -> Profile:
    """Return a profile of steps after the timed ones. It begins before the first step, to hear the plan made there."""
    assert job.traces is not None
    before = 1 + job.settings.warmup + job.settings.steps
    return fsdp_compile.profile(model, job.traces, wait=before, active=2, hardware=job.profile)


def _recorded(
    stack: contextlib.ExitStack, profiled: Profile, step: Callable[[], object]
) -> tuple[dict[str, float], str]:
    """Return a step's launches by kind, from the profile of all ranks, and the profile's summary."""
    launches: dict[str, float] = {}
    try:
        with stack:
            for _ in range(4):
                step()
        dist.barrier()  # until all ranks have written
        summary = profiled.summary
        for one in summary.collectives:
            launches[one.kind] = launches.get(one.kind, 0.0) + one.count
        return launches, f"{summary}"
    except Exception:  # figures measured before must not be lost
        return {}, traceback.format_exc()


def _between(model: nn.Module, tokens: Tensor, job: PredictedJob) -> int:
    """Return the budget in bytes, from the candidates that are tried for a budget into which nothing fits."""
    assert job.between is not None
    fsdp_compile.configure(model, memory_budget=1, profile=job.profile, may=job.may)
    with fsdp_compile.inspect(model) as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(torch.compile(model, backend="aot_eager", fullgraph=True), tokens).backward()
    choice = report.joint.plan.choice
    assert choice is not None
    for param in model.parameters():
        param.grad = None
    torch._dynamo.reset()
    peaks = {one.name: one.peak_bytes for one in (choice.chosen, *choice.lost)}
    least = min(peaks.values())
    return int(least + job.between * (peaks[KEPT] - least))


def _weigh(device: str, step: Callable[[], object], after: Callable[[], object]) -> list[int]:
    """Return by how many bytes each step raises memory above what is held between steps.

    On the CPU, M_PERTURB fills new memory, so the buffers of gathers in flight count too.
    """
    peaks = []
    ctypes.CDLL(None).mallopt(_M_PERTURB, 1)
    meter = PeakMeter(torch.device(device))
    for turn in range(4):
        gc.collect()
        dist.barrier()
        peak = meter.peak_above(step)
        assert peak is not None
        if turn:
            peaks.append(peak)
        after()
    ctypes.CDLL(None).mallopt(_M_PERTURB, 0)
    return peaks
