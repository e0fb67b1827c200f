"""Start worker processes on one machine, receive their messages, and never leave a worker behind.

    with Workers("package.module:function", settings, num_ranks=2, log_dir=...) as workers:
        for rank, message in workers.messages(silence_s=300):      each worker calls function(settings, rank, send);
            ...                                                    each dict that it sends arrives here

    with Crew("package.module:join", settings, num_ranks=2) as crew:
        crew.run(function, *arguments)                             each worker called join(settings, rank, send) before;
        crew.run(other, *arguments)                                run returns what the function returned, by rank

When the block is left, for whatever reason, the workers and the compilers that they started are killed. Workers also
end when this process does, however it ends.

A fresh worker runs this file by its path, which imports neither torch nor this package. So it is bound to its parent,
and its target may pin it and set its environment, before torch is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

Message = dict[str, Any]
Send = Callable[[Message], None]

# Keys of the messages that this file sends for itself.
_FAILURE = "failure"  # the arguments of a WorkerError
_RESULT = "result of run"

_PR_SET_PDEATHSIG = 1
_LAST_WORD_S = 5.0  # to wait for a worker's exit once its connection is closed
_OTHERS_S = 1.0  # to wait, after a failure, for failures that follow from it
_DUMP_STACKS, _DUMP_S, _LINES_WITH_STACKS = signal.SIGUSR1, 1.0, 200
# Not -m: it puts the working directory first in sys.path, where other modules may have our names. Workers get our path.
_BOOT = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


class WorkerError(RuntimeError):
    """A worker raised (``raised``), died or was late. ``summary`` is one line; the text has its traceback or logs."""

    def __init__(self, summary: str, text: str, raised: bool = False, at: float = 0.0) -> None:
        super().__init__(text)
        self.summary = summary
        self.raised = raised
        self.at = at  # when it failed, in seconds since the epoch


class Workers(contextlib.AbstractContextManager["Workers"]):
    """``num_ranks`` worker processes, each in a session of its own, so that Ctrl-C reaches the parent alone.

    ``prefixes``: the words before each rank's command (``ip netns exec ...``). ``preload``: names of modules; the
    workers are forked from a process that has imported them, which saves most of a start. They have that process's
    environment and output; their logs get only the stacks of a worker that crashed or was late. ``stay``: for a Crew.
    """

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any],
        *,
        num_ranks: int,
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        prefixes: Sequence[Sequence[str]] = (),
        preload: Sequence[str] = (),
        stay: bool = False,
    ) -> None:
        self._log_dir = log_dir
        self._stay = stay
        self._processes: list[subprocess.Popen[bytes] | BaseProcess] = []
        self._lines: dict[int, Connection] = {}
        try:
            for rank in range(num_ranks):
                self._lines[rank], theirs = Pipe()
                prefix = prefixes[rank] if prefixes else ()
                with theirs:
                    forked = _fork(theirs, preload, self._log(rank)) if preload else None
                    process = forked or _start(theirs, prefix, {**os.environ, **(env or {})}, self._log(rank))
                self._processes.append(process)
                self._tell(rank, (target, settings, rank, stay))
        except BaseException:
            self.stop()
            raise

    def messages(
        self, silence_s: float = math.inf, limit_s: float = math.inf, awaited: set[int] | None = None
    ) -> Iterator[tuple[int, Message]]:
        """Yield (rank, message) as messages arrive, until ``awaited``, by default all ranks, is empty.

        Workers that end leave ``awaited``, and the caller may take out others. Raises WorkerError when a worker fails,
        when no message comes for ``silence_s``, and after ``limit_s``.
        """
        awaited = set(self._lines) if awaited is None else awaited
        end = time.monotonic() + limit_s
        while awaited:
            left_s = end - time.monotonic()
            heard = self._hear(min(silence_s, left_s)) if left_s > 0 else []
            if not heard:
                ranks = " and ".join(f"rank {rank}" for rank in sorted(awaited))
                late = f"no worker said a word for {silence_s:.0f} s"
                summary = late if silence_s < left_s else f"{ranks} not done after {limit_s:.0f} s"
                self._dump_stacks(awaited)
                raise WorkerError(summary, f"{summary}.\n{self._log_tails(_LINES_WITH_STACKS)}")
            failures = {rank: said for rank, said in heard if isinstance(said, WorkerError)}
            if failures:
                raise self._first_of(failures)
            for rank, said in heard:
                if isinstance(said, dict):
                    yield rank, said
                else:
                    awaited.discard(rank)

    def run(self, function: Callable[..., Any], arguments: Sequence[Any], limit_s: float) -> list[Any]:
        """Call ``function(*arguments)`` on every worker (made with ``stay``); return the results by rank."""
        for rank in self._lines:
            self._tell(rank, (function, arguments))
        results: dict[int, Any] = {}
        awaited = set(self._lines)
        for rank, message in self.messages(limit_s=limit_s, awaited=awaited):
            if _RESULT in message:
                results[rank] = message[_RESULT]
                awaited.discard(rank)
        return [results[rank] for rank in sorted(results)]

    def _tell(self, rank: int, what: Any) -> None:
        data = pickle.dumps(what)  # by value: multiprocessing's own pickler would make ranks share tensors
        with contextlib.suppress(OSError):  # the worker died: ``messages`` reports how
            self._lines[rank].send_bytes(data)

    def _hear(self, patience_s: float) -> list[tuple[int, Message | WorkerError | None]]:
        """Return what arrives first within ``patience_s``, with its rank; None from a worker that ended normally."""
        heard: list[tuple[int, Message | WorkerError | None]] = []
        ready = wait(self._lines.values(), None if patience_s == math.inf else patience_s)
        for rank, line in [item for item in self._lines.items() if item[1] in ready]:
            try:
                message = pickle.loads(line.recv_bytes())
                heard.append((rank, WorkerError(*message[_FAILURE]) if _FAILURE in message else message))
            except (EOFError, OSError):
                self._lines.pop(rank).close()
                heard.append((rank, self._bad_end(rank)))
        return heard

    def _bad_end(self, rank: int) -> WorkerError | None:
        """Return the failure of a worker whose connection has closed, or None if it ended normally."""
        code = _exit_code(self._processes[rank], _LAST_WORD_S)
        if not self._stay and code in (0, None):  # None: it has sent everything; stop() ends it
            return None
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        summary = f"rank {rank} ended with {how}"
        # A killed worker is the cause of the others' failures; an abort may itself come from a lost connection.
        at = 0.0 if how.startswith("SIG") and how != "SIGABRT" else time.time()
        return WorkerError(summary, f"{summary}.\n{self._log_tails()}", at=at)

    def _first_of(self, failures: dict[int, WorkerError]) -> WorkerError:
        """Return the earliest failure: when one rank raises, the others lose the connection and raise soon after."""
        until = time.monotonic() + _OTHERS_S
        while self._lines and (left_s := until - time.monotonic()) > 0:
            for rank, said in self._hear(left_s):
                if isinstance(said, WorkerError):
                    failures.setdefault(rank, said)
        (_, first), *others = sorted(failures.items(), key=lambda failure: failure[1].at)
        after = [f"After that, rank {rank}: {said.summary}" for rank, said in others]
        return WorkerError(first.summary, "\n".join([str(first), *after]), first.raised)

    def _dump_stacks(self, ranks: set[int]) -> None:
        """Make each worker write the stacks of its threads to its log, which explain a hang."""
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _DUMP_STACKS)
        time.sleep(_DUMP_S)

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"rank{rank}.log"

    def _log_tails(self, num_lines: int = 40) -> str:
        tails = []
        for rank in range(len(self._processes)):
            if self._log(rank).exists():
                lines = self._log(rank).read_text(errors="replace").splitlines()[-num_lines:]
                tails.append("\n".join([f"The end of rank {rank}'s output:", *(lines or ["(nothing)"])]))
        return "\n".join(tails)

    def stop(self) -> None:
        """Kill each worker's process group: the workers, and the compilers that they wait for."""
        for process in self._processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # in case it has no process group yet
        for process in self._processes:
            _exit_code(process, None)
        for line in self._lines.values():
            line.close()
        self._processes, self._lines = [], {}

    def __exit__(self, *error: object) -> None:
        self.stop()


class Crew(contextlib.AbstractContextManager["Crew"]):
    """Workers that stay and call one function after another. ``run`` starts them at first, and again after a failure.

    They begin with ``join(settings, rank, send)``; settings also hold "num_ranks" and "rendezvous", a URL for
    ``init_process_group``. ``env``, ``prefixes`` and ``preload`` are those of Workers.
    """

    def __init__(
        self,
        join: str,
        settings: Mapping[str, Any],
        *,
        num_ranks: int,
        env: Mapping[str, str] | None = None,
        prefixes: Sequence[Sequence[str]] = (),
        preload: Sequence[str] = (),
    ) -> None:
        self.num_ranks = num_ranks
        self._join, self._settings = join, settings
        self._begun_with: dict[str, Any] = {"env": env, "prefixes": prefixes, "preload": preload}
        self._scope = contextlib.ExitStack()
        self._workers: Workers | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float = 400) -> list[Any]:
        """Call a module's function on every worker; return the results by rank. Raises WorkerError as Workers does."""
        try:
            if self._workers is None:
                self._workers = self._start()
            return self._workers.run(function, arguments, limit_s)
        except BaseException:
            self.stop()
            raise

    def _start(self) -> Workers:
        folder = Path(self._scope.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-compile-crew-")))
        return self._scope.enter_context(
            Workers(
                self._join,
                {**self._settings, "num_ranks": self.num_ranks, "rendezvous": f"file://{folder}/rendezvous"},
                num_ranks=self.num_ranks,
                log_dir=folder,
                stay=True,
                **self._begun_with,
            )
        )

    def stop(self) -> None:
        """End the workers; the next ``run`` starts new ones."""
        self._workers = None
        self._scope.close()

    def __exit__(self, *error: object) -> None:
        self.stop()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM inside the block, also where a shell has SIGINT ignored.

    SIGHUP, which comes when the terminal is closed, does the same, unless ``nohup`` has it ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(line: Connection, prefix: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    arguments = ["\n".join(sys.path), __file__, str(line.fileno()), str(os.getpid())]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*prefix, sys.executable, "-c", _BOOT, *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(line.fileno(),),
            start_new_session=True,
        )


def _fork(line: Connection, preload: Sequence[str], log: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    process = context.Process(target=_work, args=(line, None, log), daemon=True)
    process.start()
    return process


def _exit_code(process: subprocess.Popen[bytes] | BaseProcess, patience_s: float | None) -> int | None:
    """Return the exit code, negative after a signal; None if the process has not ended within ``patience_s``."""
    if isinstance(process, BaseProcess):
        process.join(patience_s)
        return process.exitcode
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    return process.returncode


def _work(line: Connection, parent: int | None = None, crash_log: Path | None = None) -> NoReturn:
    """Run as a worker: call the target and, with ``stay``, every function that is sent from then on."""
    output = crash_log.open("wb") if crash_log else sys.stderr
    faulthandler.enable(output)
    faulthandler.register(_DUMP_STACKS, output, all_threads=True)
    if parent is None:  # forked, by a server that ends when the process that started it ends
        os.setsid()
        parent = os.getppid()
    _die_with_parent(parent)

    def send(message: Message) -> None:
        line.send_bytes(pickle.dumps(message))

    rank = None
    try:
        target, settings, rank, stay = pickle.loads(line.recv_bytes())
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(settings, rank, send)
        while stay:
            function, arguments = pickle.loads(line.recv_bytes())
            send({_RESULT: function(*arguments)})
    except BaseException as error:
        # A compiler's errors begin with a line that names only the backend, and end with advice: take two lines.
        lines = [text.strip() for text in str(error).splitlines() if text.strip()]
        summary = f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
        text = f"rank {rank} failed.\n{traceback.format_exc()}"
        with contextlib.suppress(OSError):  # the parent is gone
            send({_FAILURE: (summary, text, True, time.time())})
        os._exit(1)  # a clean exit may wait for peers in a collective
    line.close()
    _leave()


def _leave() -> NoReturn:
    """End this process with exit code 0, without tearing the interpreter down.

    torch's caches of DTensor specs keep a mesh, and with it gloo's threads, alive beyond ``destroy_process_group``. A
    thread that frees a tensor while Python finalizes aborts the process (pytorch issue 190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent(parent: int) -> None:
    """End this process when the parent ends, even one that was killed or crashed and could not stop us (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this worker is gone")


if __name__ == "__main__":
    fd, parent_pid = map(int, sys.argv[1:])
    os.set_inheritable(fd, False)  # or a compiler that we start holds it open after our end
    _work(Connection(fd), parent_pid)
