"""refine: the fit finds the latency and the bandwidth that traces were made with, over each dimension of a mesh."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile import cli
from fsdp_compile.passes import HardwareProfile, load_profile
from fsdp_compile.passes.cost.profiles import PROFILES
from fsdp_compile.passes.cost.roofline import Group, collective_seconds
from fsdp_compile.profiling.refine import refine

SIZES = (1 << 14, 1 << 20, 1 << 23)
FLOPS, SLOWED = 5e10, 0.25
# Of a mesh of two nodes with two ranks each: latency and bandwidth of what shards inside and replicates between.
INSIDE, BETWEEN = (2e-4, 3e9), (1e-3, 1e8)


def sent_bytes(kind: str, num_bytes: int) -> float:
    """Of two ranks: half of it leaves a rank; gloo's reduce-scatter is an all-reduce, which sends twice that."""
    return num_bytes / 2 * (2 if kind in ("all_reduce", "reduce_scatter") else 1)


class Written:
    """One rank's trace, event after event."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 100.0
        self.events: list[dict[str, Any]] = []

    def collective(self, kind: str, num_bytes: int, ranks: list[int], seconds: float, beside: float = 0.0) -> None:
        args = {
            "fsdp_compile": "collective", "kind": kind, "step": 0, "stage": "forward", "group": "g", "ranks": ranks,
            "dtype": "float32", "bytes": num_bytes, "parameters": ["w"], "launched_us": self.at, "waited_us": [],
            "recorded": True, "planned_us": None, "planned_exposed_us": None,
        }  # fmt: skip
        self._event(f"FSDP::{kind} {num_bytes}", "user_annotation", seconds, args)
        self.at += beside

    def product(self, width: int, seconds: float) -> None:
        sizes = {"Input Dims": [[width, width], [width, width]], "Input type": ["float", "float"]}
        self._event("aten::mm", "cpu_op", seconds, sizes)
        self.at += seconds * 1e6

    def _event(self, name: str, cat: str, seconds: float, args: dict[str, Any]) -> None:
        self.events.append(
            {"ph": "X", "name": name, "cat": cat, "ts": self.at, "dur": seconds * 1e6, "pid": 1, "tid": 1, "args": args}
        )

    def write(self, folder: Path, world_size: int, ranks_per_node: int, planned_per_node: int = 64) -> None:
        step = {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "ts": 0, "dur": 1e9, "pid": 1, "tid": 1}
        trace = {
            "traceEvents": [step, *self.events],
            "host_name": f"node{self.rank // ranks_per_node}",
            "distributedInfo": {"backend": "gloo", "rank": self.rank, "world_size": world_size},
            "fsdp_compile": {
                "version": 1, "rank": self.rank, "world_size": world_size, "num_steps": 1, "device": "cpu",
                "allows_tf32": False, "hardware": json.loads(dataclasses.replace(PROFILES["cpu"], ranks_per_node=planned_per_node).to_json()),
            },
        }  # fmt: skip
        (folder / f"node_{self.rank}.1.pt.trace.json").write_text(json.dumps(trace))


def made(folder: Path) -> None:
    """Four ranks; of each pair the second comes 5 ms late, so that only on it a collective takes what it takes."""
    for rank in range(4):
        trace = Written(rank)
        node = rank // 2 * 2
        dimensions = [([node, node + 1], INSIDE, rank % 2), ([rank % 2, rank % 2 + 2], BETWEEN, rank // 2)]
        for (ranks, (latency_s, bytes_per_s), place), kind in itertools.product(dimensions, ("all_gather", "reduce_scatter")):
            for num_bytes in SIZES:
                seconds = latency_s + sent_bytes(kind, num_bytes) / bytes_per_s
                for _ in range(3):
                    trace.collective(kind, num_bytes, ranks, seconds + (0 if place else 5e-3), beside=1e6)
                # Two at once share the wires: their times say nothing of one alone.
                for _ in range(2):
                    trace.collective(kind, num_bytes, ranks, 4 * seconds, beside=1.0)
                trace.at += 1e7
        for width in (256, 512):
            alone = 2 * width**3 / FLOPS
            trace.product(width, alone)
            trace.product(width, alone)
            trace.collective("all_gather", SIZES[0], [node, node + 1], 1.0)
            trace.product(width, alone / (1 - SLOWED))
            trace.at += 1e7
        trace.write(folder, world_size=4, ranks_per_node=2)


def test_a_fit_finds_what_the_traces_were_made_with_and_plans_by_it(tmp_path: Path) -> None:
    made(tmp_path)
    refined = refine(tmp_path)
    assert refine(tmp_path, "mine").profile.name == "mine"
    profile = HardwareProfile.from_json(refined.profile.to_json())
    assert (profile.name, profile.backend, profile.ranks_per_node) == ("cpu, refined", "gloo", 2)
    for link, (latency_s, bytes_per_s) in ((profile.inside, INSIDE), (profile.between, BETWEEN)):
        assert set(link.measured) == {"all_gather", "reduce_scatter"} and link.measured_ranks == 2
        for fit in link.measured.values():
            assert fit.latency_s == pytest.approx(latency_s, rel=1e-6)
            assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
        assert link.slows_compute == pytest.approx(SLOWED)
    assert profile.flops["float32"] == pytest.approx(FLOPS) and profile.matmul_efficiency == 1.0
    assert profile.flops["bfloat16"] == PROFILES["cpu"].flops["bfloat16"], "what no trace says is as it was"
    assert {str(one.dimension) for one in refined.fitted} == {"2 ranks inside nodes", "2 ranks between nodes"}
    assert max(one.error for one in refined.fitted) < 1e-6
    for ranks, (latency_s, bytes_per_s) in (((0, 1), INSIDE), ((0, 2), BETWEEN)):
        for kind, num_bytes in itertools.product(("all_gather", "reduce_scatter"), SIZES):
            seconds = latency_s + sent_bytes(kind, num_bytes) / bytes_per_s
            assert collective_seconds(kind, num_bytes, Group.of(ranks, profile), profile) == pytest.approx(seconds)


def test_where_no_line_begins_above_nothing_the_smallest_size_is_the_latency(tmp_path: Path) -> None:
    for rank in range(2):
        trace = Written(rank)
        for num_bytes, seconds in ((1 << 20, 1e-3), (1 << 21, 4e-3)):
            trace.collective("all_gather", num_bytes, [0, 1], seconds, beside=1e7)
        trace.write(tmp_path, world_size=2, ranks_per_node=2)
    assert refine(tmp_path).profile.inside.measured["all_gather"].latency_s == pytest.approx(1e-3)


def test_a_fit_that_is_far_off_is_written_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # the output is no terminal: the table is as wide as it is
    for rank in range(2):
        trace = Written(rank)
        for num_bytes, gather_s, reduction_s in ((1 << 20, 1e-2, 1e-3), (1 << 21, 1e-3, 2e-3), (1 << 22, 1e-2, 4e-3)):
            trace.collective("all_gather", num_bytes, [0, 1], gather_s, beside=1e7)
            trace.collective("all_to_all", num_bytes, [0, 1], reduction_s, beside=1e7)
        trace.write(tmp_path, world_size=2, ranks_per_node=2)
    out = tmp_path / "profile.json"
    assert cli.main(["refine", str(tmp_path), "-o", str(out)]) == 0
    printed = capsys.readouterr()
    worst = {one.kind: one.error for one in refine(tmp_path).fitted}
    assert worst["all_gather"] > 1 > worst["all_to_all"]
    [warning] = printed.err.splitlines()
    assert warning.startswith(f"all_gather of 2 ranks inside nodes: the fit is off by {worst['all_gather']:.0%} of what one size took")
    assert re.search(r"^ all_gather +2 ranks inside nodes .* ms .* GB/s +3 +\d+% *$", printed.out, flags=re.MULTILINE)
    assert set(load_profile(out).inside.measured) == {"all_gather", "all_to_all"}


def test_one_size_leaves_the_latency_as_it_was(tmp_path: Path) -> None:
    for rank in range(2):
        trace = Written(rank)
        trace.collective("all_gather", 1 << 20, [0, 1], 1e-2)
        trace.write(tmp_path, world_size=2, ranks_per_node=2)
    profile = refine(tmp_path).profile
    fit = profile.inside.measured["all_gather"]
    assert fit.latency_s == PROFILES["cpu"].inside.latency_s
    assert fit.latency_s + (1 << 19) / fit.bytes_per_s == pytest.approx(1e-2)
    assert profile.inside.slows_compute == PROFILES["cpu"].inside.slows_compute, "no product ran beside a collective"
    assert profile.flops == PROFILES["cpu"].flops and profile.between == PROFILES["cpu"].between


@pytest.mark.parametrize("traced", [(0, 1), (0,), (0, 1, 2, 3), (0, 4), (0, 1, 4)])
def test_ranks_that_left_no_trace_are_where_their_place_says(tmp_path: Path, traced: tuple[int, ...]) -> None:
    """Eight ranks, of nodes of four as it was planned; some of them are traced."""
    for rank in traced:
        trace = Written(rank)
        for ranks in ([0, 1, 2, 3], list(range(8))):
            for num_bytes in SIZES:
                trace.collective("all_gather", num_bytes, ranks, 1e-3 * len(ranks) + num_bytes / 1e9, beside=1e7)
        trace.write(tmp_path, world_size=8, ranks_per_node=4, planned_per_node=4)
    refined = refine(tmp_path)
    profile = refined.profile
    assert profile.ranks_per_node == 4
    assert [str(one.dimension) for one in refined.fitted] == ["4 ranks inside nodes", "8 ranks between nodes"]
    for size, ranks in ((4, range(4)), (8, range(8))):
        for num_bytes in SIZES:
            seconds = 1e-3 * size + num_bytes / 1e9
            assert collective_seconds("all_gather", num_bytes, Group.of(ranks, profile), profile) == pytest.approx(seconds, rel=1e-3)
