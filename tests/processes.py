"""What /proc says of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
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
