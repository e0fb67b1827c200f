"""One rank of one training run: it builds the variant, then times its steps or weighs them; on a GPU it does both."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.settings import Job, RankResult, Settings
from benchmarks.variants import VARIANTS
from benchmarks.worker_process import Progress, finish, join_group, prime_compiler
from benchmarks.workload import autocast, batch_of, build_model, loss_of, optimizer_for

Step = Callable[[], "float | None"]


def measure(job: Job, rank: int, progress: Progress) -> RankResult:
    if job.mode == "reference":
        progress("training the reference")
        return RankResult(losses=_reference_losses(job.settings))
    progress("joining the group")
    mesh = join_group(job, rank, job.settings.ranks)
    step, setup_s = _prepare(job, rank, mesh, progress)
    weighs = job.mode == "memory"
    return _weigh(step, job.settings, progress) if weighs else _time(step, setup_s, job, rank, progress)


def _prepare(job: Job, rank: int, mesh: DeviceMesh, progress: Progress) -> tuple[Step, float]:
    """Return the step of this job's variant, and the seconds that its setup took."""
    settings = job.settings
    variant = VARIANTS[job.variant]
    if variant.compiles:
        progress("priming the compiler")
        prime_compiler(settings.device)
    progress("building the model")
    model = build_model(settings)
    tokens = batch_of(settings, rank)
    progress("setting the variant up")
    begin = time.perf_counter()
    forward = variant.setup(model, mesh, settings)
    optimizer = optimizer_for(model.parameters(), settings)
    setup_s = time.perf_counter() - begin

    def step() -> float | None:
        loss = forward(tokens)
        if loss is None:
            return None
        (loss / settings.ranks if variant.sums_gradients else loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, setup_s


def _time(step: Step, setup_s: float, job: Job, rank: int, progress: Progress) -> RankResult:
    settings = job.settings
    losses: list[float] = []

    def timed(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            loss = step()
            finish(settings.device)
            seconds.append(time.perf_counter() - begin)
            if loss is not None:
                losses.append(loss)
        return seconds

    progress("first step")
    [first_step_s] = timed(1)
    progress("warm-up")
    warmup_s = timed(settings.warmup)
    gc.collect()
    dist.barrier()
    finish(settings.device)
    on_gpu = settings.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    standing_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    progress("timed steps")
    sent_before = bytes_sent_through(job.interfaces[rank])
    own_before, all_before = time.thread_time(), time.process_time()
    step_s = timed(settings.steps)
    own_cpu_s, all_cpu_s = time.thread_time() - own_before, time.process_time() - all_before
    sent_bytes = bytes_sent_through(job.interfaces[rank]) - sent_before
    peak_bytes = [torch.cuda.max_memory_allocated()] if on_gpu else []
    progress("counting the collectives")
    return RankResult(
        losses=losses,
        setup_s=setup_s,
        first_step_s=first_step_s,
        warmup_s=warmup_s,
        step_s=step_s,
        collectives=_count_collectives(step),
        sent_bytes_per_step=sent_bytes / settings.steps,
        own_cpu_s=own_cpu_s / settings.steps,
        other_cpu_s=(all_cpu_s - own_cpu_s) / settings.steps,
        num_graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        standing_bytes=standing_bytes,
        peak_bytes=peak_bytes,
    )


def _weigh(step: Step, settings: Settings, progress: Progress) -> RankResult:
    """Measure the peak memory of a step above what is held between steps, as the kernel counts it.

    The parent set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, so that freed tensors leave the process;
    without them the high-water mark shows what malloc keeps and not what the step needs.
    """
    progress("warm-up")
    for _ in range(1 + settings.warmup):
        step()
    dist.barrier()
    progress("weighed steps")
    peaks, standing_bytes = [], 0
    for _ in range(settings.steps):
        gc.collect()
        standing_bytes = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM to the present VmRSS
        step()
        peaks.append(status_bytes("VmHWM") - standing_bytes)
    return RankResult(standing_bytes=standing_bytes, peak_bytes=peaks)


def _reference_losses(settings: Settings) -> list[float]:
    """Train plainly on the mean of all ranks' batches; data parallel training must reproduce these losses."""
    model = build_model(settings)
    optimizer = optimizer_for(model.parameters(), settings)
    batches = [batch_of(settings, rank) for rank in range(settings.ranks)]
    means = []
    for _ in range(1 + settings.warmup + settings.steps):
        total = 0.0
        for tokens in batches:
            with autocast(settings):
                loss = loss_of(model, tokens) / settings.ranks
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        means.append(total)
    return means


def _count_collectives(step: Step) -> dict[str, int]:
    """Run one more step, not timed, under the profiler, and count what the process group was really asked for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    ops = (event.name for event in profile.events() or ())
    names = (plain_name(op.removeprefix("c10d::")) for op in ops if op.startswith("c10d::"))
    return dict(sorted(Counter(names).items()))


def plain_name(op: str) -> str:
    """`_allgather_base_` and `allgather_into_tensor_coalesced_` become `all_gather`, and so on."""
    kinds = {
        "reduce_?scatter": "reduce_scatter",
        "all_?gather": "all_gather",
        "all_?reduce": "all_reduce",
        "all_?to_?all": "all_to_all",
    }
    for pattern, name in kinds.items():
        if re.search(pattern, op):
            return name
    return op.strip("_")


def bytes_sent_through(interface: str) -> int:
    """Return the bytes that left through `interface`. /proc/net/dev shows this process's own network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {name}")
