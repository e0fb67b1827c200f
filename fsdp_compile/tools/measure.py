"""The workers of ``fsdp-compile calibrate``, which time matmuls, copies and collectives on this machine.

All ranks measure at the same time, because they share memory, caches and the link, as in training. Each rank sends its
figures to the parent (``calibrate``), which takes those of the slowest.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..passes.cost.profiles import KINDS
from ..passes.wire.collectives import all_gather_of, c10d
from ..workers import Send

# Bytes of the output of a gather, and of the input of other kinds. They range from all latency to all bandwidth.
CPU_SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
GPU_SIZES = (4 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
_SMALL_BYTES, _SMALL_REPEATS, _REPEATS = 1 << 20, 31, 9
_WARMUP = 2
_MATMUL_S = 0.08  # widths are tried in turn until one matmul would take longer than this
_WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
_CPU_COPY_BYTES, _GPU_COPY_BYTES = 64 << 20, 512 << 20
_CPU_ATTENTION, _GPU_ATTENTION = (4, 8, 256, 64), (4, 16, 2048, 128)  # batch, heads, length, width
_TINY_CALLS = 2000


@dataclass(frozen=True)
class Job:
    """The settings of a worker."""

    ranks: int
    rendezvous: str
    sizes: tuple[int, ...]
    interfaces: tuple[str, ...] = ()  # one for each rank


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes in which matmuls are timed."""
    if device.type == "cuda":
        return ("float32", "tf32", "bfloat16", "float16")
    return ("float32", "float64", "bfloat16")


def stages(job: Job, device: torch.device) -> int:
    """Return how many steps the first rank will report."""
    return len(dtypes_of(device)) + 4 + len(KINDS) * len(job.sizes) + 1


def own_device(ranks: int, rank: int, has_link: bool = False) -> torch.device:
    """Return the rank's own GPU where there are enough of them, else the CPU; with a link the CPU: NCCL has no link."""
    has_gpus = not has_link and torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    return torch.device("cuda", rank) if has_gpus else torch.device("cpu")


def work(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Measure on one rank: report each step as it begins, and send all samples at the end."""
    job = Job(**settings)
    device = own_device(job.ranks, rank, has_link=bool(job.interfaces))
    if job.interfaces:
        os.environ["GLOO_SOCKET_IFNAME"] = job.interfaces[rank]
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _num_cpus() // job.ranks))
    join_group(device, job.ranks, rank, job.rendezvous, timeout_s=120)
    meter = _Meter(device)

    def at(step: str) -> None:
        dist.barrier()
        if rank == 0:
            send({"step": step})

    found: dict[str, Any] = {"flops": {}, "collectives": {kind: [] for kind in KINDS}}
    for dtype in dtypes_of(device):
        at(f"matmul {dtype}")
        found["flops"][dtype] = meter.matmul_flops_per_s(dtype)
    at("attention")
    found["attention_efficiency"] = meter.attention_flops_per_s() / found["flops"][meter.attention_dtype]
    at("copies in memory")
    found["memory_bytes_per_s"] = {dtype: meter.copy_bytes_per_s(dtype) for dtype in ("float32", "bfloat16")}
    at("copies from the CPU")
    found["host_bytes_per_s"] = meter.host_bytes_per_s()
    at("kernels without work")
    found["kernel_s"] = meter.kernel_s()
    for kind in KINDS:
        for num_bytes in job.sizes:
            at(f"{kind} of {num_bytes >> 10} KiB")
            found["collectives"][kind].append((num_bytes, meter.collective_s(kind, num_bytes, job.ranks)))
    at("compute beside a collective")
    found["slows_compute"] = meter.slowed_by_collective(max(job.sizes), job.ranks)
    found["memory_bytes"] = meter.memory_bytes(job.ranks)  # beside a communicator that has been used
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found["backend"] = dist.get_backend()
    found["threads"] = torch.get_num_threads()
    found["ranks_per_node"] = _ranks_per_node(job.ranks, device)
    send({"result": found})
    dist.barrier()
    dist.destroy_process_group()


def join_group(device: torch.device, ranks: int, rank: int, rendezvous: str, timeout_s: float) -> None:
    """Join the group of all workers, which are on this machine: over NCCL on GPUs, over gloo on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks under which address others would see it
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _num_cpus() -> int:
    """Return how many CPUs this process may use. Only Linux knows that; elsewhere count all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Meter:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, call: Callable[[], object], repeats: int = _REPEATS, together: bool = False) -> float:
        """Return the median seconds of ``call``. With ``together``, all ranks begin each call at the same time."""
        times = []
        for turn in range(_WARMUP + repeats):
            if together:
                dist.barrier()
            self._finish()
            start = time.perf_counter()
            call()
            self._finish()
            if turn >= _WARMUP:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def matmul_flops_per_s(self, dtype: str) -> float:
        with _float32_precision("high" if dtype == "tf32" else "highest"):
            found = getattr(torch, "float32" if dtype == "tf32" else dtype)
            rate, width = 0.0, _WIDTHS[0]
            for width in _WIDTHS:
                flops = 2.0 * width**3
                if rate and flops / rate > _MATMUL_S:
                    break
                a, b = self._random(width, width, found), self._random(width, width, found)
                out = torch.empty_like(a)
                rate = max(rate, flops / self.seconds(lambda: torch.mm(a, b, out=out)))  # noqa: B023
            return rate

    @property
    def attention_dtype(self) -> str:
        """The dtype in which attention kernels are fastest."""
        return "bfloat16" if self._device.type == "cuda" else "float32"

    def attention_flops_per_s(self) -> float:
        """Time causal attention, whose products are small and alternate with exponentials."""
        batch, heads, length, width = _GPU_ATTENTION if self._device.type == "cuda" else _CPU_ATTENTION
        dtype = getattr(torch, self.attention_dtype)
        query = torch.rand(batch, heads, length, width, device=self._device).to(dtype)
        flops = 2.0 * batch * heads * length * length * (width + width) / 2
        return flops / self.seconds(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        )

    def copy_bytes_per_s(self, dtype: str) -> float:
        """Return the rate of a copy, counting bytes read and bytes written."""
        num_bytes = _GPU_COPY_BYTES if self._device.type == "cuda" else _CPU_COPY_BYTES
        source = self._buffer(num_bytes, getattr(torch, dtype))
        target = torch.empty_like(source)
        return 2 * source.numel() * source.itemsize / self.seconds(lambda: target.copy_(source))

    def host_bytes_per_s(self) -> float:
        on_gpu = self._device.type == "cuda"
        source = torch.zeros(_CPU_COPY_BYTES // 4, pin_memory=on_gpu)
        target = torch.empty_like(source, device=self._device)
        return source.numel() * 4 / self.seconds(lambda: target.copy_(source, non_blocking=True))

    def kernel_s(self) -> float:
        one = torch.zeros(1, device=self._device)

        def calls() -> None:
            for _ in range(_TINY_CALLS):
                one.add_(1)

        return self.seconds(calls) / _TINY_CALLS

    def memory_bytes(self, ranks: int) -> int:
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return int(free + torch.cuda.memory_reserved(self._device))
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks

    def collective_s(self, kind: str, num_bytes: int, ranks: int) -> float:
        launch = self._collective(kind, num_bytes, ranks)
        repeats = _SMALL_REPEATS if num_bytes <= _SMALL_BYTES else _REPEATS
        return self.seconds(lambda: c10d.wait_tensor(launch()), repeats, together=True)

    def slowed_by_collective(self, num_bytes: int, ranks: int) -> float:
        """Return the seconds that compute loses beside an all-gather, as a share of the all-gather's time alone."""
        launch = self._collective("all_gather", num_bytes, ranks)
        if self._device.type == "cuda":
            alone_s = self.seconds(lambda: c10d.wait_tensor(launch()), together=True)
            return slowdown_share(self._lost_beside(launch, alone_s) / alone_s)
        # Compute loses the processor time that gloo's threads take. Processor seconds hardly depend on what else this
        # machine does; a difference of two wall times was now 0 and now more than the collective itself.
        wall_s = cpu_s = 0.0
        for turn in range(_WARMUP + _REPEATS):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            c10d.wait_tensor(launch())
            if turn >= _WARMUP:
                wall_s += time.perf_counter() - start
                cpu_s += time.process_time() - cpu_start
        return slowdown_share(cpu_s / (wall_s * torch.get_num_threads()))

    def _lost_beside(self, launch: Callable[[], Tensor], alone_s: float) -> float:
        """Return by how many seconds matmuls take longer while the collective of ``launch`` is in flight."""
        width = 2048
        a, b = (self._random(width, width, torch.float32) for _ in range(2))
        out = torch.empty_like(a)
        one_s = self.seconds(lambda: torch.mm(a, b, out=out), _SMALL_REPEATS)
        # The matmuls outlast the collective, though that is slowed down too, so its whole cost is measured.
        num_calls = max(1, int(3 * alone_s / one_s))

        def compute(beside: bool) -> float:
            dist.barrier()
            self._finish()
            flying = launch() if beside else None
            start = time.perf_counter()
            for _ in range(num_calls):
                torch.mm(a, b, out=out)
            torch.cuda.current_stream(self._device).synchronize()
            seconds = time.perf_counter() - start
            if flying is not None:
                c10d.wait_tensor(flying)
            return seconds

        turns = [(compute(beside=False), compute(beside=True)) for _ in range(_REPEATS)]
        return min(beside for _, beside in turns) - min(quiet for quiet, _ in turns)

    def _collective(self, kind: str, num_bytes: int, ranks: int) -> Callable[[], Tensor]:
        """Return a function that launches the collective as a lowered graph does."""
        group = dist.group.WORLD
        assert group is not None
        name, rows = group.group_name, num_bytes // 4 // ranks
        part, whole = self._buffer(rows * 4, torch.float32), self._buffer(rows * ranks * 4, torch.float32)
        if kind == "all_gather":
            gather = all_gather_of(dist.get_backend())
            return lambda: gather(part, ranks, name)
        if kind == "reduce_scatter":
            return lambda: c10d.reduce_scatter_tensor(whole, "sum", ranks, name)
        if kind == "all_to_all":
            return lambda: c10d.all_to_all_single(whole, [rows] * ranks, [rows] * ranks, name)
        return lambda: c10d.all_reduce(whole, "sum", name)

    def _random(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.rand(rows, columns, device=self._device).to(dtype)

    def _buffer(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=self._device)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _ranks_per_node(ranks: int, device: torch.device) -> int:
    """Return how many ranks like these fit on this machine, however many run now."""
    room = torch.cuda.device_count() if device.type == "cuda" else (os.cpu_count() or 1) // torch.get_num_threads()
    return max(ranks, room)


def slowdown_share(value: float) -> float:
    """Keep a share between 0 and 0.95, because a profile does not accept 1."""
    return min(max(value, 0.0), 0.95)
