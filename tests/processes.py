"""What /proc says of processes."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s until {what}"
        time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; a zombie that nobody collects yet counts as gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def alive(pid: int) -> bool:
    return bool(_stat(pid))


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def children(parent: int) -> list[int]:
    return [pid for pid in _processes() if _stat(pid)[1:2] == [str(parent)]]


def in_session(session: int) -> list[int]:
    return [pid for pid in _processes() if _stat(pid)[3:4] == [str(session)]]


class AnonymousPeak(AbstractContextManager["AnonymousPeak"]):
    """How many bytes this process holds at most inside the block, above what it held before; mapped files are apart.

    Another process looks twice a millisecond, so what the block does is not held up, and short peaks are seen.
    """

    num_bytes = 0
    num_file_bytes = 0  # of the pages of mapped files

    def __enter__(self) -> AnonymousPeak:
        gc.collect()
        give_back_freed_memory()
        self._looks = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _LOOKS, str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._looks.stdout is not None
        self._before = [int(figure) for figure in self._looks.stdout.readline().split()]
        return self

    def __exit__(self, *error: object) -> None:
        peaks, _ = self._looks.communicate("")
        self.num_bytes, self.num_file_bytes = (int(peak) - before for peak, before in zip(peaks.split(), self._before))


def give_back_freed_memory() -> None:
    """Have malloc give back what is freed from now on, else it would count on, and what was freed before.

    It still uses free places between what it has, and keeps these; called early, there are few.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)


_M_MMAP_THRESHOLD = -3  # malloc.h
_LOOKS = """
import re, select, sys
def look():
    said = open(f"/proc/{sys.argv[1]}/status").read()
    return [1024 * int(re.search(name + r":\\s+(\\d+)", said)[1]) for name in ("RssAnon", "RssFile")]
peaks = look()
print(*peaks, flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    peaks = [*map(max, peaks, look())]
print(*map(max, peaks, look()))
"""
