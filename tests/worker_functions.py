"""What the workers of test_workers.py do. Without torch, so that they start at once."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import wait_until

Send = Callable[[dict[str, Any]], None]


def is_killed(settings: dict[str, Any], rank: int, send: Send) -> None:
    print("on its way", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class AbortsWhenFreed:
    """Stands in for a thread of gloo that frees a tensor while Python finalizes."""

    def __del__(self) -> None:
        os.abort()


def is_not_finalized(settings: dict[str, Any], rank: int, send: Send) -> None:
    _kept.append(AbortsWhenFreed())
    atexit.register(Path(settings["said_goodbye"]).touch)


_kept: list[AbortsWhenFreed] = []


def compiles_for_ever(settings: dict[str, Any], rank: int, send: Send) -> None:
    """Stands in for a worker that waits for its compiler."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    send({"pids": [os.getpid(), child.pid]})
    child.wait()


def one_is_killed_and_the_other_notices(settings: dict[str, Any], rank: int, send: Send) -> None:
    pid_file = Path(settings["pid_file"])
    if rank == 0:
        pid_file.with_suffix(".part").write_text(str(os.getpid()))
        pid_file.with_suffix(".part").rename(pid_file)
        time.sleep(600)
    wait_until(pid_file.exists, "rank 0 runs")
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    raise ConnectionError("rank 0 is gone")


def join(settings: dict[str, Any], rank: int, send: Send) -> None:
    os.environ["RANK"] = str(rank)


def rank_and(value: Any) -> Any:
    return int(os.environ["RANK"]), value, os.getpid()


def fails_on(rank: int, how: str) -> None:
    if os.environ["RANK"] == str(rank):
        if how == "raises":
            sys.exit("made up\n\nadvice\nmore advice")  # no Exception
        if how == "exits":
            os._exit(0)
        if how == "crashes":
            ctypes.string_at(0)
    time.sleep(600)


def starts_a_compiler() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def not_here(settings: dict[str, Any], rank: int, send: Send) -> None:
    import no_such_module  # noqa: F401


def imported(settings: dict[str, Any], rank: int, send: Send) -> None:
    """A worker that says which of ``settings["modules"]`` it has."""
    send({"imported": [name for name in settings["modules"] if name in sys.modules]})
