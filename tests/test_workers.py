"""Worker processes: what goes wrong in one is said, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_compile.workers import Crew, WorkerError, Workers
from tests import worker_functions
from tests.processes import alive, in_session, wait_until
from tests.ranks import PRELOAD

PRELOADS = [pytest.param((), id="fresh"), pytest.param(PRELOAD, id="forked")]


def test_a_killed_worker_is_named_with_the_end_of_its_output(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match=r"rank 0 ended with SIGKILL(.|\n)*on its way"),
        Workers("tests.worker_functions:is_killed", {}, num_ranks=1, log_dir=tmp_path) as workers,
    ):
        list(workers.messages(silence_s=60))


def test_a_worker_that_is_done_runs_exit_handlers_and_leaves_the_interpreter_as_it_is(tmp_path: Path) -> None:
    said_goodbye = tmp_path / "goodbye"
    settings = {"said_goodbye": str(said_goodbye)}
    with Workers("tests.worker_functions:is_not_finalized", settings, num_ranks=1, log_dir=tmp_path) as workers:
        assert list(workers.messages(silence_s=60)) == []
    assert said_goodbye.exists()


@pytest.mark.parametrize("preload", PRELOADS)
def test_silent_workers_end_the_run_say_where_they_are_and_end_with_their_children(
    preload: tuple[str, ...], tmp_path: Path
) -> None:
    pids: list[int] = []
    target = "tests.worker_functions:compiles_for_ever"
    with (
        pytest.raises(WorkerError, match=r"no worker said a word for 1 s(.|\n)*in compiles_for_ever"),
        Workers(target, {}, num_ranks=2, log_dir=tmp_path, preload=preload) as workers,
    ):
        for _, message in workers.messages(silence_s=60):
            pids += message["pids"]
            if len(pids) == 4:
                break
        list(workers.messages(silence_s=1))
    wait_until(lambda: not any(alive(pid) for pid in pids), "workers and their children are gone")


def test_a_fresh_worker_imports_what_it_uses_and_nothing_else(tmp_path: Path) -> None:
    settings = {"modules": ["torch", "fsdp_compile", "pickle"]}
    with Workers("tests.worker_functions:imported", settings, num_ranks=1, log_dir=tmp_path) as workers:
        assert list(workers.messages(silence_s=60)) == [(0, {"imported": ["pickle"]})]


def test_who_was_killed_is_named_before_those_who_noticed(tmp_path: Path) -> None:
    settings = {"pid_file": str(tmp_path / "pid")}
    with (
        pytest.raises(WorkerError, match=r"^rank 0 ended with SIGKILL(.|\n)*After that, rank 1: ConnectionError: rank 0") as error,
        Workers("tests.worker_functions:one_is_killed_and_the_other_notices", settings, num_ranks=2, log_dir=tmp_path) as workers,
    ):
        list(workers.messages(silence_s=60))
    assert error.value.summary == "rank 0 ended with SIGKILL" and not error.value.raised


@pytest.fixture(scope="module", params=PRELOADS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with Crew("tests.worker_functions:join", {}, num_ranks=2, preload=request.param) as crew:
        yield crew


def test_a_crew_stays_for_several_calls_and_answers_by_rank(crew: Crew) -> None:
    first, second = crew.run(worker_functions.rank_and, "a"), crew.run(worker_functions.rank_and, {"b": 2})
    assert [answer[:2] for answer in first + second] == [(0, "a"), (1, "a"), (0, {"b": 2}), (1, {"b": 2})]
    assert [answer[2] for answer in first] == [answer[2] for answer in second] != [os.getpid()] * 2


@pytest.mark.parametrize(
    ("rank", "how", "summary"),
    [
        (1, "raises", "SystemExit: made up advice"),
        (0, "exits", "rank 0 ended with exit code 0"),
        (None, "", "rank 0 and rank 1 not done after 1 s"),
    ],
)
def test_a_crew_begins_anew_after_a_failure(crew: Crew, rank: int | None, how: str, summary: str) -> None:
    pids = [pid for _, _, pid in crew.run(worker_functions.rank_and, None)]
    compilers = crew.run(worker_functions.starts_a_compiler)
    with pytest.raises(WorkerError) as error:
        crew.run(worker_functions.fails_on, rank, how, limit_s=60 if how else 1)
    assert error.value.summary == summary and error.value.raised == (how == "raises")
    if how == "raises":
        assert str(error.value).startswith("rank 1 failed.\nTraceback") and "in fails_on" in str(error.value)
    wait_until(lambda: not any(map(alive, pids + compilers)), "all of them are gone")
    assert not set(pids) & {pid for _, _, pid in crew.run(worker_functions.rank_and, None)}


def test_where_a_worker_crashed_is_said(crew: Crew) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 ended with SIGSEGV\.(.|\n)*Segmentation fault(.|\n)* in fails_on") as error:
        crew.run(worker_functions.fails_on, 1, "crashes")
    assert error.value.summary == "rank 1 ended with SIGSEGV"


@pytest.mark.parametrize("preload", PRELOADS)
def test_what_a_crew_cannot_import_is_said(preload: tuple[str, ...]) -> None:
    with Crew("tests.worker_functions:not_here", {}, num_ranks=1, preload=preload) as crew, pytest.raises(WorkerError) as error:
        crew.run(worker_functions.rank_and, None)
    assert error.value.summary == "ModuleNotFoundError: No module named 'no_such_module'"


# Fresh workers, and forked ones; what they import themselves is next to nothing.
IS_KILLED = """
import os
if __name__ == "__main__":
    from fsdp_compile.workers import Crew
    of = "tests.worker_functions"
    crews = [Crew(f"{of}:join", {}, num_ranks=1, preload=preload) for preload in ((), (of,))]
    print(*(pid for crew in crews for pid in crew.run(os.getpid)), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "is_killed.py"
    script.write_text(IS_KILLED)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, script], env=env, stdout=subprocess.PIPE, text=True, timeout=120)
    pids = [int(word) for word in run.stdout.split()]
    assert run.returncode == -signal.SIGKILL and len(pids) == 2
    wait_until(lambda: not any(alive(pid) or in_session(pid) for pid in pids), "the workers are gone")
