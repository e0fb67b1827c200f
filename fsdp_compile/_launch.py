"""Worker processes on one machine: started, listened to, and never left behind.

    with Workers("package.module:function", settings, num_ranks=2, log_dir=...) as workers:
        for rank, message in workers.messages(silence_s=300):
            ...

Each worker calls ``function(settings, rank, send)``; what it sends arrives as a message, a dict. The loop ends when all
workers have. Leaving the block, for whatever reason, kills them and the compilers that they started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

Message = dict[str, Any]
Send = Callable[[Message], None]

_FAILURE = "failure"  # the key of a worker's last message when it raised
_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0  # between a worker's last word and its exit
# Not -m: that puts the working directory in front, where other modules of our names may lie. Workers import what we do.
_BOOT = "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from fsdp_compile._launch import work; work()"


class WorkerError(RuntimeError):
    """A worker raised, died or fell silent; the text says which and holds its traceback or the end of its log."""


class Workers:
    """``num_ranks`` processes, each in a session of its own, so that Ctrl-C reaches the parent alone."""

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any],
        *,
        num_ranks: int,
        log_dir: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        try:
            for rank in range(num_ranks):
                self._start(rank, target, settings, {**os.environ, **(env or {})})
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int, target: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        ours, theirs = os.pipe()
        self._pipes.append(ours)
        arguments = ["\n".join(sys.path), target, json.dumps(settings), str(rank), str(theirs), str(os.getpid())]
        try:
            with self._log(rank).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *arguments],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        self._processes.append(process)

    def messages(self, silence_s: float) -> Iterator[tuple[int, Message]]:
        """What the workers say, as it comes; WorkerError when one fails, or when none says a word for ``silence_s``."""
        with selectors.DefaultSelector() as selector:
            unread = {}
            for rank, pipe in enumerate(self._pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
                unread[rank] = b""
            while unread:
                ready = selector.select(silence_s)
                if not ready:
                    raise WorkerError(f"no worker said a word for {silence_s:.0f} s.\n{self._log_tails()}")
                arrived: list[tuple[int, Message]] = []
                closed = []
                for key, _ in ready:
                    rank = key.data
                    chunk = os.read(key.fd, 1 << 16)
                    *lines, unread[rank] = (unread[rank] + chunk).split(b"\n")
                    arrived += [(rank, json.loads(line)) for line in lines]
                    if not chunk:
                        closed.append(rank)
                        selector.unregister(key.fd)
                        del unread[rank]
                self._raise_first_failure(arrived)
                yield from arrived
                for rank in closed:
                    self._require_good_end(rank)

    def _raise_first_failure(self, arrived: list[tuple[int, Message]]) -> None:
        """The earliest: when one rank raises, the others raise over the lost connection a moment later."""
        failures = [(message["at"], rank, message[_FAILURE]) for rank, message in arrived if _FAILURE in message]
        if failures:
            _, rank, text = min(failures)
            raise WorkerError(f"rank {rank} failed.\n{text}")

    def _require_good_end(self, rank: int) -> None:
        try:
            code = self._processes[rank].wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return  # said all it had to say; stop() ends it
        if code != 0:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise WorkerError(f"rank {rank} ended with {how}, without a traceback.\n{self._log_tails()}")

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"rank{rank}.log"

    def _log_tails(self, num_lines: int = 20) -> str:
        tails = []
        for rank in range(len(self._processes)):
            lines = self._log(rank).read_text(errors="replace").splitlines()[-num_lines:]
            tails.append("\n".join([f"The end of rank {rank}'s output:", *(lines or ["(nothing)"])]))
        return "\n".join(tails)

    def stop(self) -> None:
        """Kill each worker's process group: the workers, and the compilers that they wait for."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            os.close(pipe)
        self._processes, self._pipes = [], []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt in here, also where a shell started us with SIGINT ignored.

    So does SIGHUP, which comes when the terminal is closed, unless ``nohup`` keeps it away.
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


def work() -> None:
    """A worker's main function."""
    target, settings, rank, pipe, parent = sys.argv[1:]
    _die_with_parent(int(parent))
    fd = int(pipe)
    os.set_inheritable(fd, False)  # or a compiler holds it open after we are gone

    def send(message: Message) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    try:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(json.loads(settings), int(rank), send)
    except Exception:
        send({_FAILURE: traceback.format_exc(), "at": time.time()})
        os._exit(1)  # a clean exit may wait for peers in a collective
    os.close(fd)
    leave()


def leave() -> NoReturn:
    """End this process well, without tearing the interpreter down.

    torch's caches of DTensor specs keep a mesh, and with it gloo's threads, alive beyond ``destroy_process_group``. A
    thread that frees a tensor while Python finalizes aborts the process (pytorch issue 190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent(parent: int) -> None:
    """Also where the parent had no chance to stop us: killed, or crashed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this worker is gone")
