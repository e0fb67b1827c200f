"""Measure by how many bytes memory rises during one call."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_THRESHOLD_BYTES = 64 << 10


class PeakMeter:
    """Reads the allocator's peak on a GPU, and the kernel's peak of resident memory on the CPU (Linux, glibc).

    The kernel's peak (``VmHWM``) can be reset, but memory that malloc keeps after a free would hide a rise. So from the
    first meter on, this process gives blocks of 64 KiB and more back to the kernel as soon as they are freed. That
    slows it down: measure times first, then memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._libc = None
        if device.type == "cpu" and sys.platform == "linux":
            libc = ctypes.CDLL(None)
            if hasattr(libc, "mallopt"):
                libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
                libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
                self._libc = libc

    def peak_above(self, call: Callable[[], object]) -> int | None:
        """Return by how many bytes ``call`` raised memory above its level before; None where that is not measurable."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            call()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - before
        if self._libc is None:
            return None
        self._libc.malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # some sandboxes do not allow it
            return None
        before = _status_bytes("VmRSS")
        call()
        return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/self/status has no {name}")
