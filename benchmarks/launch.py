"""Starts the processes of one run, waits for them within a limit, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.settings import Job, RankResult

_REPOSITORY = Path(__file__).resolve().parents[1]
_POLL_S = 0.1  # the parent shares the ranks' cores: it must hardly run
_GRACE_S = 3.0  # after one rank failed, the time in which another may still report the first cause


@dataclass(frozen=True)
class Outcome:
    """Either the results of all ranks, or a sentence that says why there are none."""

    ranks: tuple[RankResult, ...] = ()
    error: str | None = None
    log_tail: str = ""


def launch(
    module: str,
    job: Job,
    num_ranks: int,
    *,
    env: Mapping[str, str],
    cache_dir: Path,
    prefixes: Sequence[Sequence[str]] = (),
) -> Outcome:
    """Run `module.measure` in one process per rank; `prefixes` go before the command (`ip netns exec ...`).

    Each rank has an Inductor cache of its own, as on machines of their own: no rank warms another's.
    """
    run_dir = Path(job.run_dir)
    run_dir.mkdir(parents=True)
    job_file = run_dir / "job.json"
    job.write(job_file)
    worker = (sys.executable, "-m", "benchmarks.worker_process")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            prefix = prefixes[rank] if prefixes else ()
            with (run_dir / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*prefix, *worker, module, str(job_file), str(rank)],
                        cwd=_REPOSITORY,
                        env=_environment(env, cache_dir / f"rank{rank}"),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # a group of its own: compilers it started die with it
                    )
                )
        error = _wait(processes, run_dir, job.timeout_s)
    finally:
        for process in processes:
            _kill_group(process)
    if error is not None:
        return Outcome(error=error, log_tail=_log_tail(run_dir))
    raw = [json.loads((run_dir / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    return Outcome(ranks=tuple(RankResult.from_json(each) for each in raw))


def _environment(extra: Mapping[str, str], cache_dir: Path) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a rank has one core; a pool would also outlive it
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir),
        "TOKENIZERS_PARALLELISM": "false",
        **extra,
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], run_dir: Path, timeout_s: float) -> str | None:
    """None when every process ended well, else what went wrong first."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return None
        if any(code not in (None, 0) for code in codes):
            until = time.monotonic() + _GRACE_S
            while time.monotonic() < until and any(process.poll() is None for process in processes):
                time.sleep(_POLL_S)
            return _first_error(processes, run_dir)
        if time.monotonic() > deadline:
            stages = ", ".join(f"rank {rank} in {_stage(run_dir, rank)!r}" for rank in range(len(processes)))
            return f"stopped after {timeout_s:.0f} s: {stages}"
        time.sleep(_POLL_S)


def _first_error(processes: Sequence[subprocess.Popen[bytes]], run_dir: Path) -> str:
    """What the rank that failed first reported (the others then miss a peer), else the exit code."""
    reports = []
    for path in run_dir.glob("rank*.error"):
        try:
            reports.append(json.loads(path.read_text()))
        except ValueError:  # killed while it wrote
            continue
    if reports:
        first = min(reports, key=lambda report: float(report["at"]))
        # Compiler errors begin with a line that names only the backend, and end with advice: take two lines.
        lines = [line.strip() for line in str(first["message"]).splitlines() if line.strip()]
        message = " ".join(lines[:2])[:300]
        return message if first["kind"] == "Unavailable" else f"{first['kind']}: {message}"
    for rank, process in enumerate(processes):
        code = process.poll()
        if code not in (None, 0):
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            lines = (run_dir / f"rank{rank}.log").read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            return f"rank {rank} ended with {how} in {_stage(run_dir, rank)!r}: {last[:200]}"
    return "a rank failed without a word"


def _stage(run_dir: Path, rank: int) -> str:
    path = run_dir / f"rank{rank}.stage"
    return path.read_text() if path.exists() else "starting"


def _log_tail(run_dir: Path, num_lines: int = 40) -> str:
    tails = []
    for path in sorted(run_dir.glob("rank*.log")):
        lines = path.read_text(errors="replace").splitlines()[-num_lines:]
        tails.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(tails)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and whatever it started. The group may outlive its leader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
