"""profile: ranges of a recorded step and their numbers, beside what the trace itself says; what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compile
from fsdp_compile import cli
from fsdp_compile.passes.cost.profiles import PROFILES
from fsdp_compile.passes.wire.ledger import ledger
from fsdp_compile.profiling.annotate import Facts, annotate
from fsdp_compile.profiling.listen import Expected, Heard
from fsdp_compile.profiling.summary import summarize
from fsdp_compile.profiling.traces import read_trace
from tests.comparing import local_loss
from tests.compiling import compiled
from tests.models import Stack, mesh_of, shard
from tests.ranks import Ranks

ACTIVE = 2


def record(folder: str, backend: str, *dimensions: str) -> dict[str, Any]:
    """A training that is profiled; which parameters there are."""
    model = shard(Stack(num_blocks=1), mesh=mesh_of(*dimensions) if dimensions else None)
    run = compiled(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # No plan comes with a graph from the cache, which another file's test may have filled.
    with torch._inductor.utils.fresh_cache(), fsdp_compile.profile(run, folder, wait=1, active=ACTIVE) as profiled:
        for step in range(ACTIVE + 3):  # the last one is not recorded
            local_loss(run, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiled.step()
        assert ledger.hear is None, "it listens to steps that are not recorded"
    assert isinstance(profiled, fsdp_compile.Profile) and profiled.path is not None
    dist.barrier()
    assert isinstance(profiled.summary, fsdp_compile.Summary)
    return {"path": str(profiled.path), "sizes": {name: tuple(one.shape) for name, one in model.named_parameters()}}


@pytest.fixture(scope="module", params=[pytest.param("compiled", marks=pytest.mark.slow), "eager"])
def run(request: pytest.FixtureRequest, two_ranks: Ranks) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        found = two_ranks.run(record, folder, "inductor" if request.param == "compiled" else "eager")
        assert [sorted(Path(folder).iterdir())] == [sorted(Path(one["path"]) for one in found)], "other files are left"
        yield request.param, Path(folder), found[0]["sizes"]


def traces_in(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.pt.trace.json")]
    return sorted(found, key=lambda trace: trace["distributedInfo"]["rank"])


def ranges(trace: dict[str, Any], *prefixes: str) -> list[dict[str, Any]]:
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"].startswith(prefixes)]
    return sorted(events, key=lambda event: event["ts"])


def padded_bytes(size: tuple[int, ...], ranks: int = 2) -> int:
    """Of a float32 parameter, whole, each rank's part as long as the longest."""
    return -(-size[0] // ranks) * ranks * torch.Size(size[1:]).numel() * 4


def test_every_gather_and_reduction_is_a_range_that_names_its_parameters(run: tuple[str, Path, dict[str, Any]]) -> None:
    way, folder, sizes = run
    for trace in traces_in(folder):
        steps = ranges(trace, "ProfilerStep#")
        assert len(steps) == ACTIVE
        gathers, reductions = ranges(trace, "FSDP::gather"), ranges(trace, "FSDP::reduce")
        for step in steps:
            begin, end, number = step["ts"], step["ts"] + step["dur"], int(step["name"].partition("#")[2])
            for found in (gathers, reductions):
                inside = [one["args"] for one in found if begin <= one["args"]["launched_us"] <= end]
                assert {name for one in inside for name in one["parameters"]} == set(sizes), "not all parameters"
                for one in inside:
                    assert one["bytes"] == sum(padded_bytes(sizes[name]) for name in one["parameters"])
                    assert one["ranks"] == [0, 1] and one["recorded"] and one["planned_us"] > 0
                    assert one["step"] == number  # as TensorBoard counts it
        launched = re.compile(r"(fsdpc::all_gather_into_tensor|_c10d_functional::(all_to_all_single|reduce_scatter_tensor))")
        assert len(gathers) + len(reductions) == len([one for one in ranges(trace, "fsdpc", "_c10d") if launched.fullmatch(one["name"])])
        stages = {one["args"]["stage"] for one in gathers + reductions}
        assert stages == ({"forward", "backward"} if way == "compiled" else {"eager"})
        if way == "compiled":  # what is exposed was planned, for the graphs were compiled in the block
            assert all(one["args"]["planned_exposed_us"] is not None for one in gathers + reductions)
            assert [one["name"] for one in ranges(trace, "FSDP::forward graph", "FSDP::backward graph")] == [
                "FSDP::forward graph", "FSDP::backward graph"
            ] * ACTIVE  # fmt: skip


def busy_and_waiting(trace: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds a step of communication, of waiting, and of both at once, from what torch recorded alone.

    By slots of a microsecond, in which gloo's threads run a collective, or the thread that trains waits for one.
    """
    flights = ranges(trace, "gloo:")
    spans: set[int] = set()
    for one in flights:
        spans |= set(range(int(one["ts"]), int(one["ts"] + one["dur"])))
    waiting: set[int] = set()
    waited = 0.0
    left = list(flights)
    for wait in ranges(trace, "_c10d_functional::wait_tensor"):
        # The first of the size that gloo's threads have begun and nobody waited for yet, whole or a part of two.
        num = torch.Size(wait["args"]["Input Dims"][0]).numel()
        flight = next(one for one in left if torch.Size(one["args"]["Input Dims"][0]).numel() * (1 + ("gather" in one["name"])) == num)
        left.remove(flight)
        if flight["ts"] + flight["dur"] > wait["ts"]:
            waited += wait["dur"]
            waiting |= set(range(int(wait["ts"]), int(wait["ts"] + wait["dur"])))
    return len(spans) / 1e6 / ACTIVE, waited / 1e6 / ACTIVE, len(spans & waiting) / 1e6 / ACTIVE


def test_the_summary_is_what_the_traces_say(run: tuple[str, Path, dict[str, Any]]) -> None:
    way, folder, _ = run
    summary = summarize(folder)
    assert (summary.num_steps, summary.world_size, summary.hardware) == (ACTIVE, 2, "cpu")
    for trace, rank in zip(traces_in(folder), summary.ranks, strict=True):
        busy_s, waited_s, both_s = busy_and_waiting(trace)
        slack = 1e-6 * 2 * len(ranges(trace, "gloo:"))
        assert rank.step_s == pytest.approx(sum(one["dur"] for one in ranges(trace, "ProfilerStep#")) / 1e6 / ACTIVE, abs=1e-8)
        assert rank.communication_s == pytest.approx(busy_s, abs=slack)
        assert rank.exposed_s == pytest.approx(waited_s, abs=1e-8)  # the clock, in us, has ten digits before the point
        assert rank.overlap == pytest.approx(1 - both_s / busy_s, abs=slack / busy_s)
    assert summary.exposed_s == max(one.exposed_s for one in summary.ranks)
    # Of each collective: the n-th of its name in each step, on both ranks.
    events = [ranges(trace, "FSDP::gather", "FSDP::reduce") for trace in traces_in(folder)]
    for one in summary.collectives:
        of_ranks = [
            sorted((event for event in found if event["name"] == f"FSDP::{one.name}" and event["args"]["stage"] == one.stage),
                   key=lambda event: event["args"]["launched_us"])
            for found in events
        ]  # fmt: skip
        pairs = list(zip(*of_ranks, strict=True))
        assert one.count == len(pairs) / ACTIVE
        assert one.seconds == pytest.approx(sum(min(event["dur"] for event in pair) for pair in pairs) / len(pairs) / 1e6, abs=1e-8)
        exposed = [max(sum(end - start for start, end in event["args"]["waited_us"]) for event in pair) for pair in pairs]
        assert one.exposed_s == pytest.approx(sum(exposed) / len(pairs) / 1e6, abs=1e-8)
    longest = sorted((one.exposed_s * one.count for one in summary.collectives), reverse=True)
    assert [one.exposed_s * one.count for one in summary.worst] == [one for one in longest[:5] if one > 0]
    assert summary.takes is not None
    assert summary.takes.measured_s == pytest.approx(sum(one.seconds * one.count for one in summary.collectives))
    assert (summary.waits is not None) == (summary.graphs is not None) == (way == "compiled")
    printed = str(summary)
    assert f"{summary.ranks[1].exposed_s * 1e3:.2f}" in printed and all(one.name in printed for one in summary.worst)


def test_a_profile_is_refined_from_a_run(run: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> None:
    _, folder, _ = run
    out = tmp_path / "profile.json"
    assert cli.main(["refine", str(folder), "-o", str(out), "--name", "mine"]) == 0
    profile = fsdp_compile.passes.load_profile(out)
    assert profile.name == "mine" and profile.backend == "gloo" and profile.ranks_per_node == 64  # as planned
    assert {"all_gather", "all_to_all"} == set(profile.inside.measured) and profile.inside.measured_ranks == 2
    products = [
        2 * left[-2] * left[-1] * right[-1] * torch.Size(left[:-2]).numel() / one["dur"] * 1e6
        for trace in traces_in(folder)
        for operator, operands in (("aten::mm", slice(0, 2)), ("aten::bmm", slice(0, 2)), ("aten::addmm", slice(1, 3)))
        for one in ranges(trace, operator)
        for left, right in [one["args"]["Input Dims"][operands]]
    ]
    assert min(products) <= profile.flops["float32"] <= max(products)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["passes", "eager"])
def test_reductions_over_shards_and_over_copies_are_told_apart(four_ranks: Ranks, tmp_path: Path, backend: str) -> None:
    found = four_ranks.run(record, str(tmp_path), backend, "replicate", "shard")
    sizes = found[0]["sizes"]
    for rank, trace in enumerate(traces_in(tmp_path)):
        shards, copies = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        ways = (("FSDP::gather", shards, 1), ("FSDP::reduce copies of", copies, 2), ("FSDP::reduce ", shards, 1))
        for prefix, ranks, share in ways:
            args = [one["args"] for one in ranges(trace, prefix) if "copies" in prefix or "copies" not in one["name"]]
            assert {name for one in args for name in one["parameters"]} == set(sizes)
            for one in args:
                assert one["ranks"] == ranks and one["recorded"]
                assert one["bytes"] == sum(padded_bytes(sizes[name]) for name in one["parameters"]) // share
    summary = summarize(tmp_path)
    assert [one.rank for one in summary.ranks] == [0, 1, 2, 3]
    assert all(one.num_ranks == 2 and one.count >= 1 for one in summary.collectives)


# A rank with a GPU, as Kineto writes it: launches on the CPU, kernels on two streams.


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, correlation: int, external: int, op: str, given: list[Any], dtype: str) -> list[dict[str, Any]]:
    sizes = {"Input Dims": [given, [], []], "Input type": [dtype, "Scalar", ""], "Concrete Inputs": ["", "8", ""]}
    return [
        event(op, "cpu_op", ts, 30, **sizes),
        event("nccl:_all_gather_base", "user_annotation", ts + 5, 20, **{"External id": external + 100}),
        event("cudaLaunchKernelExC", "cuda_runtime", ts + 10, 5, correlation=correlation),
    ]


def a_gpu() -> dict[str, Any]:
    kernel = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        event("ProfilerStep#3", "user_annotation", 0, 1000),
        event("FSDP::forward #0", "user_annotation", 10, 1),
        *launch(20, 1, 11, "_c10d_functional::all_gather_into_tensor", [4, 10], "c10::BFloat16"),
        *launch(60, 2, 12, "fsdpc::all_gather_members", [[5, 10], [10]], "TensorList"),
        event("_c10d_functional::wait_tensor", "cpu_op", 100, 2, **{"Input Dims": [[32, 10]], "Input type": ["c10::BFloat16"]}),
        event("_c10d_functional::wait_tensor", "cpu_op", 105, 2, **{"Input Dims": [[576]], "Input type": ["c10::BFloat16"]}),
        event(kernel, "kernel", 200, 100, tid=20, correlation=1, **{"External id": 11}),
        event(kernel, "kernel", 300, 200, tid=20, correlation=2, **{"External id": 12}),
        event("gemm", "kernel", 260, 90, tid=7, correlation=3, **{"External id": 13}),
        event("gemm", "kernel", 380, 60, tid=7, correlation=4, **{"External id": 14}),
    ]
    return {"traceEvents": events, "host_name": "node", "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8}}


def facts(**changed: Any) -> Facts:
    launches = (
        Expected("all_gather", "shards", "bfloat16", 80, ("layers.0.w",), 90e-6, 10e-6),
        Expected("all_gather", "shards", "bfloat16", 120, ("layers.1.w", "layers.1.b")),
    )
    given = {
        "rank": 0, "world_size": 8, "num_steps": 1, "device": "cuda", "hardware": PROFILES["h100"], "allows_tf32": False,
        "heard": [Heard("forward", launches)], "ranks": {"shards": tuple(range(8))},
    }  # fmt: skip
    return Facts(**{**given, **changed})


def gpu_summary(folder: Path, **changed: Any) -> fsdp_compile.Summary:
    """Of a GPU's trace, with other facts on request."""
    (folder / "node_0.1.pt.trace.json").write_text(json.dumps(annotate(a_gpu(), facts(**changed))))
    return summarize(folder)


def test_on_a_gpu_what_is_exposed_is_what_no_kernel_computes_beside(tmp_path: Path) -> None:
    summary = gpu_summary(tmp_path)
    first, second = summary.collectives
    assert (first.name, second.name) == ("gather layers.0.w", "gather layers.1.w +1")
    assert (first.num_bytes, second.num_bytes) == (640, 960)  # of all eight ranks
    assert first.seconds == pytest.approx(100e-6) and first.exposed_s == pytest.approx(60e-6)  # 200 to 260
    assert second.seconds == pytest.approx(200e-6) and second.exposed_s == pytest.approx(90e-6)  # 350 to 380, 440 to 500
    assert first.planned_s == pytest.approx(90e-6) and second.planned_exposed_s is None
    [rank] = summary.ranks
    assert (rank.communication_s, rank.exposed_s) == (pytest.approx(300e-6), pytest.approx(150e-6))
    assert rank.overlap == pytest.approx(0.5)
    assert "Without ranks 1, 2, 3, 4, 5, 6 and 7, whose traces are not in" in str(summary)


def test_steps_are_those_of_the_cpu_and_not_what_streams_have_of_them(tmp_path: Path) -> None:
    traced = a_gpu()
    traced["traceEvents"] += [
        *(event("ProfilerStep#3", "gpu_user_annotation", 200, 300, tid=stream) for stream in (7, 20)),
        event("ProfilerStep#4", "user_annotation", 1000, 1000),
    ]
    path = tmp_path / "node_0.1.pt.trace.json"
    path.write_text(json.dumps(annotate(traced, facts(num_steps=2))))
    assert read_trace(path).steps == ((0, pytest.approx(1e-3)), (pytest.approx(1e-3), pytest.approx(2e-3)))


def record_two(folder: str, backend: str) -> None:
    """Two models whose parameters have the same names, and steps of one after the other."""
    models = [shard(Stack(num_blocks=1)) for _ in range(2)]
    runs = [compiled(one, backend) for one in models]
    with fsdp_compile.profile(models[0], folder, wait=0, active=1) as profiled:
        for step in range(3):
            for run in runs:
                local_loss(run, step).backward()
            profiled.step()
    dist.barrier()


@pytest.mark.parametrize("backend", ["eager", pytest.param("passes", marks=pytest.mark.slow)])
def test_two_models_of_one_class_are_told_apart(two_ranks: Ranks, tmp_path: Path, backend: str) -> None:
    two_ranks.run(record_two, str(tmp_path), backend)
    found: dict[str, list[tuple[str, float, tuple[str, ...]]]] = {"Stack": [], "Stack 2": []}
    for one in summarize(tmp_path).collectives:
        name, _, model = one.name.rpartition(" of ")
        found[model].append((name, one.count, one.parameters))
    assert found["Stack"] == found["Stack 2"] != []


LONG = "model.layers.17.attention.query_key_value.weight"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_no_terminal_is_too_narrow_for_a_name_or_a_number(tmp_path: Path, width: int) -> None:
    launches = (Expected("all_gather", "shards", "bfloat16", 80, (LONG,)), Expected("all_gather", "shards", "bfloat16", 120, ("b",)))
    summary = gpu_summary(tmp_path, heard=[Heard("forward", launches)])
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as printed:
        console.print(summary, summary.all_collectives())
    said = printed.get()
    assert all(len(line) <= width for line in said.splitlines()) and "…" not in said
    # A long name may go on in the next line, and so may the words of a head, but no number is parted.
    names = [line.partition(" forward ")[0] for line in said.splitlines()]
    assert f"gather{LONG}" in "".join("".join(names).split())
    numbers = re.findall(r"\d+\.\d\d\b", said)
    [rank] = summary.ranks
    seconds = [rank.step_s, rank.communication_s, rank.exposed_s]
    seconds += [value for one in summary.collectives for value in (one.seconds, one.exposed_s, one.planned_s or 0.0)]
    assert {f"{value * 1e3:.2f}" for value in seconds} <= set(numbers)
    assert "No waiting was planned" in " ".join(said.split()) and "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in "".join(said.split())


def test_what_the_plan_does_not_have_is_not_ours(tmp_path: Path) -> None:
    heard = [Heard("forward", (Expected("all_gather", "shards", "bfloat16", 120, ("layers.1.w",)),))]
    names = [one["name"] for one in annotate(a_gpu(), facts(heard=heard))["traceEvents"] if one["tid"] > 1 << 20]
    assert names[0] == "all_gather of 640 bytes, not ours" and names[1] == "FSDP::gather layers.1.w"
    said = str(gpu_summary(tmp_path, heard=[]))
    assert "Nothing was planned: these collectives are of no module that fsdp_compile shards." in said


@pytest.mark.slow
def test_torch_tb_profiler_counts_what_is_sent(run: tuple[str, Path, dict[str, Any]]) -> None:
    """Its distributed view: all ranks have as many collectives, and each the bytes of what the launch was given."""
    data = pytest.importorskip("torch_tb_profiler.profiler.data")
    _, folder, _ = run
    counts = []
    for trace in traces_in(folder):
        found = data.RunProfileData.from_json("node_0", 1, trace)
        of_rank = data.DistributedRunProfileData(found)
        assert of_rank.has_communication and [int(one) for one in of_rank.steps_names] == [2, 3]
        for node in of_rank.comm_node_list:
            node.real_time_ranges = list(node.kernel_ranges)
        of_rank.communication_parse()
        counts.append({name: (stats[0], stats[1]) for name, stats in of_rank.total_comm_stats.items()})
        for name, prefix in (("gloo:all_gather", "FSDP::gather"), ("gloo:reduce_scatter", "FSDP::reduce")):
            ours = [one["args"]["bytes"] // (2 if prefix.endswith("gather") else 1) for one in ranges(trace, prefix)]
            assert counts[-1][name] == (len(ours), sum(ours))
    assert counts[0] == counts[1] and set(counts[0]) == {"gloo:all_gather", "gloo:reduce_scatter"}


@pytest.mark.more
def test_torch_tb_profiler_reads_the_folder_as_one_run_with_all_ranks(run: tuple[str, Path, dict[str, Any]]) -> None:
    loader = pytest.importorskip("torch_tb_profiler.profiler.loader")
    caches = pytest.importorskip("torch_tb_profiler.io").Cache()
    _, folder, _ = run
    workers = sorted(path.name.partition(".")[0] for path in folder.iterdir())
    with caches:
        loaded = loader.RunLoader("traces", str(folder), caches).load()
    assert loaded.workers == ["All", *workers]
    assert [view.display_name for view in loaded.views] == ["Overview", "Operator", "Trace", "Distributed"]
    assert loaded.get_workers("Overview") == workers and loaded.get_workers("Distributed") == ["All"]
    for worker, rank in zip(workers, summarize(folder).ranks, strict=True):
        [profile] = loaded.get_profiles(worker=worker)
        assert [row[0] for row in profile.overview["steps"]["rows"]] == ["2", "3"]
        assert profile.overview["performance"][0]["value"] == pytest.approx(rank.step_s * 1e6, abs=1)


@pytest.mark.slow
def test_torch_tb_profiler_finds_the_kernels_of_collectives() -> None:
    data = pytest.importorskip("torch_tb_profiler.profiler.data")
    parser = pytest.importorskip("torch_tb_profiler.profiler.event_parser")
    trace = data.trace
    events = [trace.create_event(one, False) for one in annotate(a_gpu(), facts())["traceEvents"]]
    found = parser.EventParser()
    found.parse(sorted(filter(None, events), key=lambda one: one.ts), {})
    assert [node.name for node in found.comm_node_list] == ["nccl:all_gather"] * 2
    assert [node.kernel_ranges[-1] for node in found.comm_node_list] == [(200, 300), (300, 500)]
    assert found.role_ranges[parser.ProfileRole.Kernel] == [(260, 350), (380, 440)], "a collective counts as computing"


# Mistakes.


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line; what a script finds in its process is taken back."""
    for name, value in (("argv", ["fsdp-compile"]), ("path", list(sys.path)), ("excepthook", sys.__excepthook__)):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delenv("RANK", raising=False)
    return lambda *arguments: cli.main([str(one) for one in arguments])


def test_what_cannot_be_profiled_is_refused_with_what_to_do(tmp_path: Path, fake_group_of_four: None) -> None:
    sharded = fsdp_compile.fully_shard(nn.Linear(8, 8))
    with pytest.raises(TypeError, match=r"profile takes the model, but got str\. Give the module that is trained\."):
        fsdp_compile.profile("model", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Linear has no sharded module, .* Call fully_shard\(\.\.\.\) on it first"):
        fsdp_compile.profile(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ValueError, match=r"active is 0\. Give a number of steps, at least 1\."):
        fsdp_compile.profile(sharded, tmp_path, active=0)
    with pytest.raises(TypeError, match=r"wait is 1\.5\. Give a number of steps, at least 0\."):
        fsdp_compile.profile(sharded, tmp_path, wait=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="There is no hardware profile 'abacus'"):
        fsdp_compile.profile(sharded, tmp_path, hardware="abacus")
    ended_early = r"nothing was recorded: 1 of 2 steps had ended .* \(wait=1, and 1 to warm up\)\. Call step\(\) behind"
    with pytest.raises(RuntimeError, match=ended_early), fsdp_compile.profile(sharded, tmp_path) as profiled:
        profiled.step()
        with pytest.raises(RuntimeError, match=r"nothing is recorded yet: 1 steps ended, .* is step 5"):
            str(profiled.summary)
        with pytest.raises(RuntimeError, match="a profile is recorded in this process already"):
            fsdp_compile.profile(sharded, tmp_path).__enter__()
    assert ledger.hear is None
    with pytest.raises(ZeroDivisionError), fsdp_compile.profile(sharded, tmp_path):
        raise ZeroDivisionError  # and no word of steps that are missing
    with pytest.warns(UserWarning, match=r"recorded 1 of 3 steps: the block ended early\. Train longer in it") as warned:
        with fsdp_compile.profile(sharded, tmp_path, wait=0) as profiled:
            for _ in range(2):
                profiled.step()
        assert profiled.summary.num_steps == 1
    assert [one.filename for one in warned] == [__file__], "it blames another file than that of the block"
    (tmp_path / "node_1.1.pt.trace.json").write_text("{}")  # of another rank, which may write now
    with pytest.raises(FileExistsError, match=r"holds the trace of another run already, .*_0\..*: both would be shown"):
        fsdp_compile.profile(sharded, tmp_path).__enter__()
    assert ledger.hear is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profile", "--", "no_such.py"], "no_such.py is not a file: give the path of a script, or -m and the name"),
        (["profile", "--out", "{here}/file", "--", "{here}/script.py"], "file is a file: give a folder, which need not"),
        (["profile", "--hardware", "abacus", "--", "{here}/script.py"], "There is no hardware profile 'abacus'"),
        (["profile", "--out", "{here}/old", "--", "{here}/script.py"], "holds the trace of another run already"),
        (["profile", "--out", "{here}/new", "--", "{here}/script.py"], "Nothing was recorded: no optimizer stepped in the script"),
        (["refine", "{here}/none"], "none is no folder. Give the one that `fsdp-compile profile --out` wrote"),
        (["refine", "{here}/empty"], "empty holds no *.pt.trace.json: give a folder that"),
        (["refine", "{here}/old"], "has no ranges of fsdp_compile: a profiler of another kind wrote it"),
        (["refine", "{here}/torn"], "cannot be read as a trace"),
        (["refine", "{here}/twice"], "has two traces of rank 0, "),
        (["refine", "{here}/quiet"], "no collective and no product of matrices is recorded in it"),
        (["refine", "{here}/old", "-o", "{here}"], "is not a file in a folder that exists."),
    ],
)  # fmt: skip
def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., int], arguments: list[str], says: str
) -> None:
    silent = json.dumps(annotate({"traceEvents": []}, facts(heard=[])))
    files = {
        "file": "", "script.py": "", "old/node_0.1.pt.trace.json": '{"traceEvents": []}', "torn/node_0.1.pt.trace.json": "{",
        "twice/a_0.1.pt.trace.json": silent, "twice/b_0.1.pt.trace.json": silent, "quiet/a_0.1.pt.trace.json": silent,
    }  # fmt: skip
    (tmp_path / "empty").mkdir()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert command(*(one.format(here=tmp_path) for one in arguments)) == 2
    assert says in capsys.readouterr().err


def test_ranks_are_started_by_one_of_the_two(
    capsys: pytest.CaptureFixture[str], command: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert command("profile", "--ranks", "2", "--", __file__) == 2
    assert capsys.readouterr().err == "--ranks starts processes, and torchrun has started this one already: leave --ranks out.\n"


ALONE = """
import sys, torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.step()
exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("num_steps", "then", "rank", "code", "says"),
    [
        (2, "", "0", 2, "Nothing was recorded: the script ended after 2 steps, and the first recorded one is step 4. Train "
         "longer, or give a smaller --wait (it is 2).\n"),
        (2, "sys.exit(5)", "0", 5, "Nothing was recorded: the script ended after 2 steps, and "),
        (2, "", "1", 0, ""),  # the first rank says it, and torchrun, told of a failure here, might end that one before
        (4, "", "0", 0, "The script ended after 1 of 3 recorded steps; train longer, or give a smaller --wait or --active.\n"),
        (4, "", "1", 0, ""),
        (6, "", "0", 0, ""),
    ],
)  # fmt: skip
def test_what_a_script_recorded_too_little_of_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: Callable[..., int], monkeypatch: pytest.MonkeyPatch,
    num_steps: int, then: str, rank: str, code: int, says: str,
) -> None:  # fmt: skip
    (tmp_path / "train.py").write_text(ALONE)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert command("profile", "--out", tmp_path / "traces", "--", tmp_path / "train.py", num_steps, then) == code
    said = capfd.readouterr().err
    assert says in said and ("recorded" in said) == bool(says)


@pytest.mark.parametrize("error", ["ValueError('bad data')", "FileNotFoundError('no data')"])  # the second is an OSError
def test_a_script_that_raises_is_blamed_as_without_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., int], error: str
) -> None:
    (tmp_path / "train.py").write_text(f"def train():\n    raise {error}\ntrain()\n")
    assert command("profile", "--out", tmp_path / "traces", "--", tmp_path / "train.py") == 1
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("  File")] == [
        f'  File "{tmp_path}/train.py", line 3, in <module>', f'  File "{tmp_path}/train.py", line 2, in train'
    ]  # fmt: skip
    assert said[-1] == error.replace("('", ": ").replace("')", "")


def test_groups_that_end_before_the_profile_are_known_all_the_same(tmp_path: Path, fake_group_of_four: None) -> None:
    model = fsdp_compile.fully_shard(nn.Linear(8, 8))
    early = pytest.warns(UserWarning, match="recorded 1 of 3 steps")
    with early, fsdp_compile.profile(model, tmp_path, wait=0) as profiled:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            profiled.step()
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # for the fixture to end
    summary = profiled.summary
    assert summary.world_size == 4 and {one.name for one in summary.collectives} == {"gather weight +1", "reduce weight +1"}
    assert all(one.num_ranks == 4 and one.planned_s for one in summary.collectives) and "Measured beside planned" in str(summary)


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from fsdp_compile import fully_shard

dist.init_process_group("gloo")
model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
sys.exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["--ranks", "torchrun"])  # the second runs it as a module
def test_a_script_is_profiled_as_it_is(tmp_path: Path, starter: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ours = ["-m", "fsdp_compile.cli", "profile", "--wait", "1", "--active", "2"]
    theirs = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*ours, "--ranks", "2"] if starter == "--ranks" else [*theirs, *ours]
    script = ["train.py"] if starter == "--ranks" else ["-m", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    ran = subprocess.run(
        [sys.executable, *command, "--", *script, "5"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks, mean of 2 steps" in ran.stdout and "Wrote traces, 2 traces." in ran.stdout
    assert len(list((tmp_path / "traces").iterdir())) == 2
    assert ran.stdout.count("mean of 2 steps") == 1  # one of the two prints
