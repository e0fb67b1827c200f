"""calibrate: the line through the samples, the profile that they make, what is refused, and a run of the workers."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from fsdp_compile import cli
from fsdp_compile.passes import Group, collective_seconds, load_profile
from fsdp_compile.passes.cost.profiles import KINDS
from fsdp_compile.passes.cost.roofline import wire_bytes
from fsdp_compile.tools import calibrate, link, measure

SIZES = (1 << 8, 1 << 20, 1 << 24)


def test_a_line_is_found_again_and_noise_is_weighed_as_numpy_does() -> None:
    exact = calibrate.fit_line([(size, 2e-4 + size / 3e9) for size in SIZES])
    assert (exact.latency_s, exact.bytes_per_s) == (pytest.approx(2e-4), pytest.approx(3e9))
    rng = random.Random(0)
    noisy = [(size, (2e-4 + size / 3e9) * rng.uniform(0.8, 1.2)) for size in SIZES * 3]
    fit = calibrate.fit_line(noisy)
    sizes, seconds = np.array(noisy).T
    slope, latency = np.polyfit(sizes, seconds, 1, w=seconds**-0.5)  # whose square numpy weighs by
    assert (fit.latency_s, 1 / fit.bytes_per_s) == (pytest.approx(latency), pytest.approx(slope))


def test_no_line_has_a_latency_below_zero_or_a_bandwidth_without_end() -> None:
    steep = calibrate.fit_line([(1e6, 1e-4), (2e6, 4e-4)])  # a line through both is at -2e-4 for no bytes
    assert steep.latency_s == 0
    for latency in (0.0, 5e-5):
        # Of all slopes behind that latency, the one of the least squares.
        slopes = np.linspace(5e-11, 3e-10, 20_001)
        errors = (latency + slopes * 1e6 - 1e-4) ** 2 / 1e-4 + (latency + slopes * 2e6 - 4e-4) ** 2 / 4e-4
        fit = calibrate.fit_line([(1e6, 1e-4), (2e6, 4e-4)], latency)
        assert (fit.latency_s, 1 / fit.bytes_per_s) == (latency, pytest.approx(slopes[errors.argmin()], rel=1e-3))
    falling = calibrate.fit_line([(1e6, 4e-4), (2e6, 1e-4)])
    assert falling.latency_s == 0 and 0 < falling.bytes_per_s < float("inf")
    assert calibrate.fit_line([(1e6, 4e-4), (2e6, 4e-4)], latency_s=5e-4).bytes_per_s == 2e6 / 4e-4
    assert calibrate.fit_line([(1e6, 1e-3)]).bytes_per_s == pytest.approx(1e9)
    for points in ([], [(0.0, 1.0)], [(1.0, 0.0)]):
        with pytest.raises(
            ValueError, match=r"Cannot fit .*: give at least one pair of bytes and seconds, all above 0"
        ):
            calibrate.fit_line(points)


def samples(num_ranks: int, backend: str, slower: float = 1.0) -> dict[str, Any]:
    """What one rank would find on a machine of these figures."""
    return {
        "device": "CPU", "backend": backend, "threads": 1, "ranks_per_node": 8, "memory_bytes": 10**9, "kernel_s": 2e-6 * slower,
        "flops": {"float32": 9e10 / slower, "bfloat16": 18e10 / slower}, "slows_compute": 0.3 * slower,
        "attention_efficiency": 0.6 / slower,
        "memory_bytes_per_s": {"float32": 1e10 / slower, "bfloat16": 2e10 / slower}, "host_bytes_per_s": 5e9 / slower,
        "collectives": {
            kind: [(size, (1e-4 + wire_bytes(kind, size, num_ranks, backend) / 2e9) * slower) for size in SIZES]
            for kind in KINDS
        },
    }  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (4, "gloo"), (8, "nccl")])
def test_a_profile_gives_back_what_was_measured_of_the_slowest_rank(num_ranks: int, backend: str) -> None:
    ranks = [samples(num_ranks, backend) for _ in range(num_ranks)]
    ranks[1] = samples(num_ranks, backend, slower=2.0)
    profile = calibrate.profile_of(ranks, calibrate.CalibrationSettings(ranks=num_ranks, name="mine"))
    assert (profile.name, profile.backend, profile.ranks_per_node) == ("mine", backend, 8)
    assert profile.flops == {"float32": 4.5e10, "bfloat16": 9e10} and profile.kernel_s == 4e-6
    assert (profile.memory_bytes_per_s, profile.host_bytes_per_s) == (5e9, 2.5e9)
    assert profile.attention_efficiency == 0.3
    assert profile.inside.slows_compute == 0.6
    for kind in KINDS:
        for size, seconds in ranks[1]["collectives"][kind]:
            predicted = collective_seconds(kind, size, Group(num_ranks, num_ranks), profile)
            assert predicted == pytest.approx(seconds, rel=1e-2)  # the smallest one counts as latency alone


def test_the_tables_show_the_fit_and_how_far_off_it_is() -> None:
    ranks = [samples(2, "gloo") for _ in range(2)]
    ranks[0]["collectives"]["all_gather"][0] = (SIZES[0], 1e-2)  # one size took too long on one rank
    profile = calibrate.profile_of(ranks, calibrate.CalibrationSettings())
    console = Console(file=io.StringIO(), width=120)
    console.print(calibrate.compute_table(ranks, profile), calibrate.fits_table(ranks, profile, 2))
    assert isinstance(console.file, io.StringIO)
    rows = {line.split("  ")[0].strip(): line for line in console.file.getvalue().splitlines()}
    assert "90.0 GFLOP/s" in rows["float32"] and "10.00 GB/s" in rows["float32"]
    assert re.search(r"0\.100 ms .* 2\.00 GB/s .* 0% .* 16\.00 MiB", rows["all_reduce"])
    assert not re.search(r" 0% ", rows["all_gather"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "1"], "--ranks 1 leaves nobody to communicate with: give at least 2."),
        (["--out", "no/such/folder/p.json"], "--out no/such/folder/p.json is not a file in a folder that exists."),
        (["--out", "."], "--out . is not a file in a folder that exists."),
        (["--ranks", "3", "--link", "1gbit"], "--link joins two namespaces, one a rank: leave --ranks out."),
        (["--name", ""], "--name is empty: give the profile a name, such as 'h100', or leave --name out."),
        (["--out", "/profile.json"], "--out /profile.json cannot be written: give a file in a folder that is yours."),
        (["--link", "0gbit"], "--link 0gbit lets nothing through: give a rate above 0, such as 1gbit."),
        (["--link", "fast"], "--link takes a rate such as 1gbit or 500mbit, not 'fast'."),
        (["--link", "1gbit"], "--link makes network namespaces and needs root: run as root, or leave --link out."),
    ],
)
def test_the_command_line_refuses_what_cannot_be_before_it_measures(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "run_calibrate", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/"))
    assert cli.main(["calibrate", *arguments]) == 2
    assert capsys.readouterr().err == f"{says}\n"


def signal_handlers() -> list[Any]:
    return [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_a_link_that_cannot_be_built_ends_the_run_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where no veth pair can be made, whose namespaces are taken away without an interruption."""
    before, while_it_deletes = signal_handlers(), []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "delete" in command:
            while_it_deletes.append(signal_handlers())
        return subprocess.CompletedProcess(command, 2 if "veth" in command else 0, "", "Unknown device type")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(link.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(link.subprocess, "run", run)
    assert cli.main(["calibrate", "--link", "1gbit", "--out", str(tmp_path / "p.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("The run ended early: --link: `ip link add fclink0") and "failed: Unknown device type" in said
    assert while_it_deletes == [[signal.SIG_IGN] * 3] * 2  # nothing may leave half of the link
    assert signal_handlers() == before


def test_a_link_is_measured_on_the_cpu_and_without_affinity_all_cpus_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure.torch.cuda, "device_count", lambda: 2)
    assert [measure.own_device(2, 1, has_link=one).type for one in (False, True)] == ["cuda", "cpu"]
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert measure._num_cpus() == os.cpu_count()


def test_a_worker_measures_all_that_a_profile_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"_WIDTHS": (32, 64), "_CPU_COPY_BYTES": 1 << 16, "_TINY_CALLS": 10, "_REPEATS": 2, "_SMALL_REPEATS": 2}
    for name, value in small.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: False)
    sent: list[dict[str, Any]] = []
    sizes = (1 << 12, 1 << 14)
    job = measure.Job(ranks=1, rendezvous=f"file://{tmp_path}/rendezvous", sizes=sizes)
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    threads = torch.get_num_threads()
    try:
        measure.work(job.__dict__, 0, sent.append)
        assert not dist.is_initialized()
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():
            dist.destroy_process_group()
    steps, found = [message["step"] for message in sent[:-1]], sent[-1]["result"]
    assert len(steps) == measure.stages(job, measure.own_device(1, 0)) == len(set(steps))
    assert set(found["flops"]) == {"float32", "float64", "bfloat16"} and min(found["flops"].values()) > 0
    assert list(found["collectives"]) == list(KINDS)
    assert all([size for size, _ in points] == list(sizes) for points in found["collectives"].values())
    assert set(found) == set(samples(2, "gloo"))


@pytest.mark.slow
def test_calibrate_writes_a_profile_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    assert cli.main(["calibrate", "--out", str(out), "--name", "here"]) == 0
    profile = load_profile(out)
    assert profile.name == json.loads(out.read_text())["name"] == "here"
    assert set(profile.inside.measured) == set(KINDS) and profile.inside.measured_ranks == 2
    rates = [*profile.flops.values(), profile.memory_bytes_per_s, profile.inside.bytes_per_s]
    assert all(rate > 0 and math.isfinite(rate) for rate in rates)
    printed = capsys.readouterr().out
    assert "Collectives of 2 ranks over" in printed and f"Wrote {out}; configure(model, profile=...), predict(...) and --hardware take it." in printed
