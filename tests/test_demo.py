"""The demo command: what it prints, its exit codes, and that it leaves no process behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from rich.console import Console

import fsdp_compile
from fsdp_compile import cli
from fsdp_compile.demo import report as demo_report
from fsdp_compile.demo.report import following
from fsdp_compile.demo.training import OURS, UNSHARDED
from fsdp_compile.workers import Send, Workers
from tests.processes import alive, children, in_session, wait_until
from tests.ranks import PRELOAD

SMALL = ["demo", "--backend", "aot_eager", "--layers", "1", "--dim", "64", "--steps", "4"]


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a process that has imported torch: one test starts them as users do."""
    patch.setattr(demo_report, "Workers", functools.partial(Workers, preload=PRELOAD))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small run's results on disk, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        fork_workers(patch)
        assert cli.main([*SMALL, "--save", str(folder)]) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.mark.compat
def test_a_small_run_trains_one_graph_to_the_unsharded_losses(saved_run: Path) -> None:
    report = json.loads((saved_run / "report.json").read_text())
    assert report["largest_difference"] <= report["tolerance"]
    assert len(report["ranks"]) == 2
    for rank in report["ranks"]:
        assert (rank["captured"]["num_graphs"], rank["captured"]["num_graph_breaks"]) == (1, 0)
        for run in rank["runs"].values():
            assert len(run["losses"]) == 4
            assert run["losses"][-1] < run["losses"][0]
        held = {name: run["held_bytes"] for name, run in rank["runs"].items()}
        assert held[OURS] < 0.51 * held[UNSHARDED]
    assert report["ranks"][0]["runs"][OURS]["losses"] != report["ranks"][1]["runs"][OURS]["losses"], "same batch"
    plan = json.loads((saved_run / "rank0" / "00_joint" / "plan.json").read_text())
    assert "blocks.0.attn.qkv.weight" in plan["again"] and "blocks.0.attn.qkv.weight" not in plan["keep"]


def test_a_saved_graph_runs_by_itself(saved_run: Path, tmp_path: Path) -> None:
    last = sorted((saved_run / "rank1" / "00_joint").glob("*.py"))[-1]
    run = subprocess.run([sys.executable, str(last)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "() torch.float32", "the loss"
    assert "(64, 64) torch.float32" in run.stdout, "a gradient's shard"
    assert "blocks.0 (Block)" in (saved_run / "rank1" / "report.txt").read_text()


def test_a_file_gets_a_line_for_each_stage_and_the_place_of_the_page(saved_run: Path) -> None:
    printed = (saved_run / "printed.txt").read_text()
    stages = re.findall(r"^(.+) \.\.\. \d+ s$", printed, flags=re.MULTILINE)
    assert stages == [
        "start 2 processes",
        "unsharded: first steps",
        "FSDP2, eager: first steps",
        "FSDP2, compiled blocks: compile",
        "fsdp_compile: trace the model",
        "fsdp_compile: cut forward from backward",
        "train all four in turn",
        "weigh their memory",
    ]
    assert "\x1b" not in printed
    assert f"The planned step, to look at in a browser: {saved_run}/step.html\n" in printed
    assert "blocks.0.attn.qkv.weight" in (saved_run / "step.html").read_text()


def without_escapes(written: str) -> str:
    """What a terminal was sent, a line for each time that the cursor went to the beginning of one."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n")


def test_a_terminal_keeps_the_same_lines_and_shows_the_present_one() -> None:
    written = io.StringIO()
    with following(Console(file=written, force_terminal=True, width=80)) as stages:
        stages.at(("compile", 0, 0))
        stages.at(("train", 1, 30))
        stages.at(("train", 2, 30))
    plain = without_escapes(written.getvalue())
    assert re.findall(r"^(.+) \.\.\. 0 s$", plain, flags=re.MULTILINE) == ["compile", "train"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stage_that_failed_is_not_said_to_have_ended(terminal: bool) -> None:
    written = io.StringIO()
    with pytest.raises(ZeroDivisionError), following(Console(file=written, force_terminal=terminal)) as stages:
        stages.at(("compile", 0, 0))
        raise ZeroDivisionError
    plain = without_escapes(written.getvalue())
    assert re.search(r"^compile \.\.\. ?$", plain, flags=re.MULTILINE)
    assert " s\n" not in plain


@pytest.fixture
def rerun(saved_run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command over the saved results, after ``change(results)``; returns its exit code."""
    results = json.loads((saved_run / "report.json").read_text())["ranks"]

    def run(change: Callable[[list[dict[str, Any]]], None] = lambda results: None, *arguments: str) -> int:
        changed = copy.deepcopy(results)
        change(changed)
        monkeypatch.setattr(demo_report, "_train", lambda *args: changed)
        return cli.main([*SMALL, *arguments])

    return run


def test_says_that_the_numbers_agree(rerun: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert rerun() == 0
    rows = _rows(capsys.readouterr().out)
    assert rows["graphs captured by Dynamo"] == ["1"]
    assert rows["graph breaks"] == ["0"]
    assert rows["parameters, each gathered and reduced by itself"] == ["11"]  # aot_eager: nothing buckets them
    assert not any("bucketing" in cell for row in rows.values() for cell in row)
    assert rows["1"][0] == rows["1"][1], "the first loss, unsharded and ours"
    assert rows["FSDP2, compiled blocks"][0].endswith("ms")
    assert rows[OURS][1].endswith("MiB")


@pytest.mark.parametrize(("step", "by"), [(0, 0.01), (3, -0.01), (2, float("nan"))])
def test_numbers_that_disagree_exit_with_1(
    rerun: Callable[..., int], capsys: pytest.CaptureFixture[str], step: int, by: float
) -> None:
    def change(results: list[dict[str, Any]]) -> None:
        results[1]["runs"][OURS]["losses"][step] += by

    assert rerun(change) == 1
    assert "The losses DISAGREE" in capsys.readouterr().out


def test_prints_collectives_before_and_after_bucketing(
    rerun: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(results: list[dict[str, Any]]) -> None:
        results[0]["captured"]["stages"] = {
            "forward": {"gathers": [11, 7], "reduces": [0, 0]},
            "backward": {"gathers": [5, 4], "reduces": [12, 8]},
        }

    monkeypatch.setattr(cli, "missing_tools", lambda settings: None)
    assert rerun(change, "--backend", "inductor") == 0
    rows = _rows(capsys.readouterr().out)
    assert rows["all-gathers in forward"] == ["11", "7"]
    assert rows["all-gathers in backward"] == ["5", "4"]
    assert rows["gradient reductions in backward"] == ["12", "8"]


def _rows(printed: str) -> dict[str, list[str]]:
    """Cells of all tables by the first cell of their row."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


def _raises(settings: dict[str, Any], rank: int, send: Send) -> None:
    if rank == 1:
        raise ZeroDivisionError("made up")
    time.sleep(600)


def test_a_crashed_worker_ends_the_run_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_workers(monkeypatch)
    monkeypatch.setattr(demo_report, "WORK", f"{__name__}:_raises")
    assert cli.main(SMALL) == 2
    error = capsys.readouterr().err
    assert "rank 1 failed" in error
    assert "in _raises\n    raise ZeroDivisionError" in error


def exit_code(*arguments: str) -> Any:
    try:
        return cli.main([*arguments])
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("demo", "--dim", "100"), "--dim 100 is not a multiple of 64"),
        (("demo", "--ranks", "0"), "argument --ranks: 0 is not a whole number above 0\n"),
        (("demo", "--ranks", "-2"), "argument --ranks: -2 is not a whole number above 0\n"),
        (("demo", "--ranks", "two"), "argument --ranks: two is not a whole number above 0\n"),
        (("demo", "--ranks", "1.5"), "argument --ranks: 1.5 is not a whole number above 0\n"),
        ((), "demo"),  # the help
    ],
)
def test_what_cannot_be_is_refused_by_name(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    assert says in capsys.readouterr().err


def test_without_a_compiler_it_says_so_at_once_and_what_runs_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_report, "Workers", None)  # nothing is started
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with inductor_config.patch({"cpp.cxx": (None, "no-such-c++")}):
        assert cli.main(["demo"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "needs a C++ compiler, and no-such-c++ does not run (CXX=... names another one)" in said.err
    assert "apt install g++" in said.err
    assert "fsdp-compile demo --backend aot_eager" in said.err


def test_on_a_gpu_it_is_tritons_c_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CC", "no-such-cc")
    assert cli.main(["demo"]) == 2
    assert "needs a C compiler, and no-such-cc was not found (CC=... names another one)" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_processes_with_a_gpu_each_train_over_nccl(tmp_path: Path) -> None:
    assert cli.main(["demo", "--ranks", "1", "--steps", "4", "--save", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["ranks"][0]["group"] == "nccl"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{fsdp_compile.__version__}"\n' in pyproject
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"fsdp-compile {fsdp_compile.__version__} (torch {torch.__version__})\n"


@pytest.mark.more
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGHUP))]
)
def test_an_interrupt_leaves_no_process_behind_and_says_one_sentence(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "fsdp_compile.cli", *SMALL, "--steps", "100000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup, if it is around the tests, is not meant
    )  # fmt: skip
    try:
        wait_until(lambda: len(children(process.pid)) == 2, "two workers run")
        workers = children(process.pid)
        time.sleep(1)
        process.send_signal(number)
        _, error = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == cli.INTERRUPTED
    assert error == "Interrupted; no worker process is left.\n"
    assert not [pid for pid in workers if alive(pid) or in_session(pid)]
    assert not list(tmp_path.glob("fsdp-compile-demo-*")), "its folder is gone as well"
