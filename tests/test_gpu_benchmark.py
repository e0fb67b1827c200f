"""`benchmarks.gpu` is to work the first time that a GPU can be had: here it runs at a tiny size on the CPU."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).parents[1]
STEPS = " s a step ("
REPORTED = {  # of each part, what its result says
    "tests": "skipped",
    "2: collectives_rs": "{'all_gather': 4, 'reduce_scatter': 2}",
    "1: reference": "losses of the plain model",
    "1: ours_eager": STEPS,
    "2: predicted": "launches of the plan {'all_gather': ",
}


@pytest.mark.slow
def test_each_part_leaves_its_result(tmp_path: Path) -> None:
    """One part of each kind; the other ones of `--quick` are rows as well."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--out", str(tmp_path), "--only", *REPORTED]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1000)
    results = (tmp_path / "results.txt").read_text()
    assert run.returncode == 0, run.stdout
    parts = dict(section.split("\n", 1) for section in results.split("\n== ")[1:])
    assert list(parts) == list(REPORTED)
    for name, said in REPORTED.items():
        assert said in parts[name], parts[name]
    assert "off by 0.0e+00 at most from the plain model's" in parts["1: ours_eager"]
    assert {path.name for path in tmp_path.glob("rows-*.json")} == {"rows-of-1.json", "rows-of-2.json"}
    assert len(list((tmp_path / "traces-of-2").iterdir())) == 2


class _Failing(gpu.Runner):
    def parts(self) -> Iterator[gpu.Part]:
        def fail(limit_s: float) -> None:
            raise ValueError("of this part")

        yield gpu.Part("first", 30, fail)
        yield gpu.Part("second", 30, lambda limit_s: self._results.say("done"))


def _made(kind: type[gpu.Runner], folder: Path, quick: bool) -> gpu.Runner:
    (folder / "work").mkdir()
    return kind(argparse.Namespace(quick=quick, out=folder), folder / "work")


def test_a_part_that_fails_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    assert _made(_Failing, tmp_path, quick=True).run(60, []) == 1
    results = (tmp_path / "results.txt").read_text()
    assert "Traceback" in results and "ValueError: of this part" in results
    assert "== second\ndone\n" in results and results.endswith("failed: first\n")


def test_a_part_for_which_no_time_is_left_says_how_to_run_it(tmp_path: Path) -> None:
    assert _made(_Failing, tmp_path, quick=True).run(5, ["second"]) == 1
    assert "Run it alone: --only 'second'" in (tmp_path / "results.txt").read_text()


def test_a_part_that_hangs_leaves_those_behind_it_what_they_need(tmp_path: Path) -> None:
    parts, left_s = list(_made(gpu.Runner, tmp_path, quick=False).parts()), gpu._SECONDS
    for place, part in enumerate(parts):
        limit_s = gpu.limit_of(part, parts[place + 1 :], left_s)
        assert part.needs_s <= limit_s <= left_s
        left_s -= limit_s


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(gpu, "_has_gpu", lambda: False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert gpu.main() == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "No GPU is visible to PyTorch here" in capsys.readouterr().err
