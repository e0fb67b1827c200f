"""Worker processes: what goes wrong in one is said, and none is left behind."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile.workers import Crew, Send, WorkerError, Workers
from tests.processes import alive, in_session, wait_until
from tests.ranks import PRELOAD

PRELOADS = [pytest.param((), id="fresh"), pytest.param(PRELOAD, id="forked")]


def _is_killed(settings: dict[str, Any], rank: int, send: Send) -> None:
    print("on its way", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_named_with_the_end_of_its_output(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match=r"rank 0 ended with SIGKILL(.|\n)*on its way"),
        Workers(f"{__name__}:_is_killed", {}, num_ranks=1, log_dir=tmp_path) as workers,
    ):
        list(workers.messages(silence_s=60))


class AbortsWhenFreed:
    """Stands in for a thread of gloo that frees a tensor while Python finalizes."""

    def __del__(self) -> None:
        os.abort()


def _is_not_finalized(settings: dict[str, Any], rank: int, send: Send) -> None:
    _kept.append(AbortsWhenFreed())
    atexit.register(Path(settings["said_goodbye"]).touch)


_kept: list[AbortsWhenFreed] = []


def test_a_worker_that_is_done_runs_exit_handlers_and_leaves_the_interpreter_as_it_is(tmp_path: Path) -> None:
    said_goodbye = tmp_path / "goodbye"
    settings = {"said_goodbye": str(said_goodbye)}
    with Workers(f"{__name__}:_is_not_finalized", settings, num_ranks=1, log_dir=tmp_path) as workers:
        assert list(workers.messages(silence_s=60)) == []
    assert said_goodbye.exists()


def _compiles_for_ever(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Stands in for a worker that waits for its compiler."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    send({"pids": [os.getpid(), child.pid]})
    child.wait()


def test_silent_workers_end_the_run_and_their_children_end_with_them(tmp_path: Path) -> None:
    pids: list[int] = []
    with (
        pytest.raises(WorkerError, match="no worker said a word for 1 s"),
        Workers(f"{__name__}:_compiles_for_ever", {}, num_ranks=2, log_dir=tmp_path) as workers,
    ):
        for _, message in workers.messages(silence_s=60):
            pids += message["pids"]
            if len(pids) == 4:
                break
        list(workers.messages(silence_s=1))
    wait_until(lambda: not any(alive(pid) for pid in pids), "workers and their children are gone")


def test_a_fresh_worker_imports_what_it_uses_and_nothing_else(tmp_path: Path) -> None:
    settings = {"modules": ["torch", "fsdp_compile", "pickle"]}
    with Workers("tests.processes:imported", settings, num_ranks=1, log_dir=tmp_path) as workers:
        assert list(workers.messages(silence_s=60)) == [(0, {"imported": ["pickle"]})]


def _one_is_killed_and_the_other_notices(settings: dict[str, Any], rank: int, send: Send) -> None:
    pid_file = Path(settings["pid_file"])
    if rank == 0:
        pid_file.with_suffix(".part").write_text(str(os.getpid()))
        pid_file.with_suffix(".part").rename(pid_file)
        time.sleep(600)
    wait_until(pid_file.exists, "rank 0 runs")
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    raise ConnectionError("rank 0 is gone")


def test_who_was_killed_is_named_before_those_who_noticed(tmp_path: Path) -> None:
    settings = {"pid_file": str(tmp_path / "pid")}
    with (
        pytest.raises(WorkerError, match=r"^rank 0 ended with SIGKILL(.|\n)*After that, rank 1: ConnectionError: rank 0") as error,
        Workers(f"{__name__}:_one_is_killed_and_the_other_notices", settings, num_ranks=2, log_dir=tmp_path) as workers,
    ):
        list(workers.messages(silence_s=60))
    assert error.value.summary == "rank 0 ended with SIGKILL, without a traceback" and not error.value.raised


def _join(settings: dict[str, Any], rank: int, send: Send) -> None:
    os.environ["RANK"] = str(rank)


def _rank_and(value: Any) -> Any:
    return int(os.environ["RANK"]), value, os.getpid()


def _fails_on(rank: int, how: str) -> None:
    if os.environ["RANK"] == str(rank):
        if how == "raises":
            pytest.fail("made up\n\nadvice\nmore advice")  # no Exception
        if how == "exits":
            os._exit(0)
    time.sleep(600)


def _starts_a_compiler() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


@pytest.fixture(scope="module", params=PRELOADS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with Crew(f"{__name__}:_join", {}, num_ranks=2, preload=request.param) as crew:
        yield crew


def test_a_crew_stays_for_several_calls_and_answers_by_rank(crew: Crew) -> None:
    first, second = crew.run(_rank_and, "a"), crew.run(_rank_and, {"b": 2})
    assert [answer[:2] for answer in first + second] == [(0, "a"), (1, "a"), (0, {"b": 2}), (1, {"b": 2})]
    assert [answer[2] for answer in first] == [answer[2] for answer in second] != [os.getpid()] * 2


@pytest.mark.parametrize(
    ("rank", "how", "summary"),
    [
        (1, "raises", "Failed: made up advice"),
        (0, "exits", "rank 0 ended with exit code 0, without a traceback"),
        (None, "", "rank 0 and rank 1 not done after 1 s"),
    ],
)
def test_a_crew_begins_anew_after_a_failure(crew: Crew, rank: int | None, how: str, summary: str) -> None:
    pids = [pid for _, _, pid in crew.run(_rank_and, None)]
    compilers = crew.run(_starts_a_compiler)
    with pytest.raises(WorkerError) as error:
        crew.run(_fails_on, rank, how, limit_s=60 if how else 1)
    assert error.value.summary == summary and error.value.raised == (how == "raises")
    if how == "raises":
        assert str(error.value).startswith("rank 1 failed.\nTraceback") and "in _fails_on" in str(error.value)
    wait_until(lambda: not any(map(alive, pids + compilers)), "all of them are gone")
    assert not set(pids) & {pid for _, _, pid in crew.run(_rank_and, None)}


def _not_here(settings: dict[str, Any], rank: int, send: Send) -> None:
    import no_such_module  # noqa: F401


@pytest.mark.parametrize("preload", PRELOADS)
def test_what_a_crew_cannot_import_is_said(preload: tuple[str, ...]) -> None:
    with Crew(f"{__name__}:_not_here", {}, num_ranks=1, preload=preload) as crew, pytest.raises(WorkerError) as error:
        crew.run(_rank_and, None)
    assert error.value.summary == "ModuleNotFoundError: No module named 'no_such_module'"


IS_KILLED = """
import os, sys
from fsdp_compile.workers import Crew
if __name__ == "__main__":
    crew = Crew("tests.test_workers:_join", {}, num_ranks=2, preload=sys.argv[1:])
    print(*crew.run(os.getpid), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("preload", [pytest.param((), id="fresh"), pytest.param(("torch",), id="forked")])
def test_workers_die_with_their_parent(preload: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "is_killed.py"
    script.write_text(IS_KILLED)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, script, *preload], env=env, stdout=subprocess.PIPE, text=True, timeout=120)
    pids = [int(word) for word in run.stdout.split()]
    assert run.returncode == -signal.SIGKILL and len(pids) == 2
    wait_until(lambda: not any(alive(pid) or in_session(pid) for pid in pids), "the workers are gone")
