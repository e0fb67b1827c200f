"""``fsdp-compile calibrate``: a hardware profile of this machine, measured in local processes.

    workers (measure.py)   seconds of matmuls, copies, collectives of several sizes
    fit                    seconds = latency + bytes on the wire / bandwidth, least squares
    profile                the input of the passes' cost model (passes/cost/profiles.py), as JSON
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..passes.cost.profiles import KINDS, Fit, HardwareProfile, Link, load_profile
from ..passes.cost.roofline import Group, collective_seconds, wire_bytes
from ..workers import Workers
from . import link, measure
from .tables import Rows

WORK = "fsdp_compile.tools.measure:work"
SILENCE_S = 120.0
_LATENCY_SHARE = 0.5  # of a collective's latency, what it takes once; steps from rank to rank take the rest


@dataclass(frozen=True)
class CalibrationSettings:
    """The arguments of the command line."""

    ranks: int = 2
    name: str = "this machine"
    out: str = "profile.json"
    link: str | None = None  # a rate; the ranks then run in two network namespaces that are joined at it


def run_calibrate(settings: CalibrationSettings, console: Console) -> HardwareProfile:
    """Measure, print, and write the profile."""
    samples = measured(settings, console)
    profile = profile_of(samples, settings)
    console.print(compute_table(samples, profile))
    console.print(fits_table(samples, profile, settings.ranks))
    Path(settings.out).write_text(profile.to_json() + "\n")
    said = f"Wrote {settings.out}; configure(model, profile=...), predict(...) and --hardware take it."
    console.print(said, highlight=False, soft_wrap=True)
    return profile


def measured(settings: CalibrationSettings, console: Console) -> list[dict[str, Any]]:
    """Run the workers, and return what each rank measured, by rank."""
    device = measure.own_device(settings.ranks, 0, has_link=settings.link is not None)
    sizes = measure.GPU_SIZES if device.type == "cuda" else measure.CPU_SIZES
    results: list[dict[str, Any]] = [{}] * settings.ranks
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-compile-calibrate-"))
        wire = stack.enter_context(link.SlowLink(settings.link)) if settings.link else None
        job = measure.Job(
            settings.ranks, f"file://{scratch}/rendezvous", sizes, interfaces=wire.interfaces if wire else ()
        )
        prefixes = wire.prefixes if wire else ()
        workers = Workers(
            WORK, dataclasses.asdict(job), num_ranks=settings.ranks, log_dir=Path(scratch), prefixes=prefixes
        )
        stack.enter_context(workers)
        columns = (TextColumn("{task.description:<28}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
        task = stack.enter_context(bar).add_task("start processes", total=measure.stages(job, device))
        for num_before, (rank, message) in enumerate(workers.messages(SILENCE_S)):
            if "result" in message:
                results[rank] = message["result"]
            else:  # a step begins; results come behind all steps
                bar.update(task, description=message["step"], completed=num_before)
    return results


def fit_line(points: Sequence[tuple[float, float]], latency_s: float = 0.0) -> Fit:
    """Fit latency (at least ``latency_s``) and bandwidth to (bytes on the wire, seconds), by weighted least squares.

    Weights are 1 / seconds. Without weights, the largest size would decide alone. With 1 / seconds ** 2, which fits
    relative errors, the smallest sizes would, and a link may pass these faster than it can for long.
    """
    if not points or any(num_bytes <= 0 or seconds <= 0 for num_bytes, seconds in points):
        raise ValueError(f"Cannot fit {list(points)}: give at least one pair of bytes and seconds, all above 0.")
    weights = [1 / seconds for _, seconds in points]
    total = sum(weights)
    mean_bytes = sum(w * x for w, (x, _) in zip(weights, points)) / total
    mean_s = sum(w * y for w, (_, y) in zip(weights, points)) / total
    spread = sum(w * (x - mean_bytes) ** 2 for w, (x, _) in zip(weights, points))
    slope = sum(w * (x - mean_bytes) * (y - mean_s) for w, (x, y) in zip(weights, points)) / spread if spread else 0.0
    found_s = mean_s - slope * mean_bytes
    if slope > 0 and found_s >= latency_s:
        return Fit(found_s, 1 / slope)
    squares = sum(w * x * x for w, (x, _) in zip(weights, points))
    slope = sum(w * x * (y - latency_s) for w, (x, y) in zip(weights, points)) / squares
    if slope > 0:
        return Fit(latency_s, 1 / slope)
    largest, seconds = max(points)  # no size took longer than the latency
    return Fit(latency_s, largest / seconds)


def profile_of(samples: Sequence[dict[str, Any]], settings: CalibrationSettings) -> HardwareProfile:
    """Return the profile in which each figure is that of the slowest rank."""
    first, ranks = samples[0], settings.ranks
    backend = first["backend"]
    fits = {}
    for kind in KINDS:
        points = [(wire_bytes(kind, size, ranks, backend), seconds) for size, seconds in slowest(samples, kind)]
        fits[kind] = fit_line(points, latency_s=min(points)[1])  # the smallest size is almost only latency
    slows_compute = max(sample["slows_compute"] for sample in samples)
    here = measured_link(fits, Group(ranks, ranks), fits["all_gather"].bytes_per_s, slows_compute)
    memory = [min(sample["memory_bytes_per_s"].values()) for sample in samples]
    return HardwareProfile(
        name=settings.name,
        backend=backend,
        flops={dtype: min(sample["flops"][dtype] for sample in samples) for dtype in first["flops"]},
        matmul_efficiency=1.0,
        memory_bytes=min(sample["memory_bytes"] for sample in samples),
        memory_bytes_per_s=min(memory),
        host_bytes_per_s=min(sample["host_bytes_per_s"] for sample in samples),
        memory_efficiency=1.0,
        kernel_s=max(sample["kernel_s"] for sample in samples),
        ranks_per_node=min(sample["ranks_per_node"] for sample in samples),
        inside=here,
        between=load_profile("h100" if backend == "nccl" else "cpu").between,  # this machine has none to measure
        attention_efficiency=min(1.0, *(sample["attention_efficiency"] for sample in samples)),
    )


def measured_link(fits: Mapping[str, Fit], group: Group, bytes_per_s: float, slows_compute: float) -> Link:
    """Return the link of a group whose collectives were fitted.

    One number of ranks cannot tell the fixed latency from what each step adds, so each gets half.
    """
    latency_s = min(fit.latency_s for fit in fits.values())
    return Link(
        latency_s=_LATENCY_SHARE * latency_s,
        step_s=(1 - _LATENCY_SHARE) * latency_s / (group.num_ranks - 1),  # a ring has num_ranks - 1 steps
        bytes_per_s=bytes_per_s,
        efficiency=1.0,
        slows_compute=slows_compute,
        measured=fits,
        measured_ranks=group.num_ranks,
        measured_per_node=group.ranks_per_node if group.spans_nodes else 1,
    )


def slowest(samples: Sequence[dict[str, Any]], kind: str) -> list[tuple[int, float]]:
    """Return the sizes of one kind of collective, each with the seconds of the rank that took longest."""
    by_rank = [sample["collectives"][kind] for sample in samples]
    return [(points[0][0], max(seconds for _, seconds in points)) for points in zip(*by_rank)]


def compute_table(samples: Sequence[dict[str, Any]], profile: HardwareProfile) -> Rows:
    first = samples[0]
    threads = "" if first["device"] != "CPU" else f", {first['threads']} of its threads a rank"
    cells = []
    for dtype, flops in profile.flops.items():
        copies = [sample["memory_bytes_per_s"].get(dtype) for sample in samples]
        cells.append([dtype, f"{flops / 1e9:,.1f} GFLOP/s", "" if None in copies else _rate(min(copies))])
    cells += [
        ["attention", f"{profile.attention_efficiency:.0%} of matmuls", ""],
        ["kernel without work", f"{profile.kernel_s * 1e6:.1f} us", ""],
        ["copy from the CPU", "", _rate(profile.host_bytes_per_s)],
        ["compute beside a collective", f"{profile.inside.slows_compute:.0%} slower", ""],
    ]
    return Rows(
        f"{len(samples)} ranks on {first['device']}{threads}: the slowest rank's",
        ("", "matmul", "copy, read and written"),
        cells,
    )


def fits_table(samples: Sequence[dict[str, Any]], profile: HardwareProfile, ranks: int) -> Rows:
    """Return a table of each kind's fitted line, its largest error, and the measured time of its largest size."""
    cells = []
    for kind, fit in profile.inside.measured.items():
        points = slowest(samples, kind)
        group = Group(ranks, ranks)
        errors = [abs(collective_seconds(kind, size, group, profile) / seconds - 1) for size, seconds in points]
        largest, took = max(points)
        latency, error = f"{fit.latency_s * 1e3:.3f} ms", f"{max(errors):.0%}"
        cells.append(
            [kind, latency, _rate(fit.bytes_per_s), error, f"{largest / 2**20:.2f} MiB", f"{took * 1e3:.2f} ms"]
        )
    return Rows(
        f"Collectives of {ranks} ranks over {profile.backend}",
        ("", "latency", "bandwidth", "error", "largest", "took"),
        cells,
        "seconds = latency + bytes each rank sends / bandwidth; error: the line's largest, of a size's time",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s"
