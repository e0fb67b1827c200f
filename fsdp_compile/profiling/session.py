"""Record some steps of a training, one trace for each rank, for TensorBoard and for a summary.

    with fsdp_compile.profile(model, "traces") as profiled:
        for batch in batches:
            train_step(batch)
            profiled.step()             # compile, warm up, record three, and train on as if nothing were here
    print(profiled.summary)             # of the ranks that have written by now

A step that is not recorded runs as without a profile: the listener ignores what the ledger tells it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity

from ..core.unit import original_class, units_in
from ..passes import HardwareProfile, load_profile
from ..passes import _torch_compat as compat
from .annotate import Facts, annotate
from .listen import StepListener
from .record import load
from .summary import Summary, summarize
from .traces import SUFFIXES

_OF_RANK = re.compile(r".*_(\d+)\.\d+\.pt\.trace\.json")
_SETTLES_S = 0.05  # gloo's threads record for a moment after the thread that waits for them goes on
_WARMUP = 1  # of the profiler: the first step that it sees takes longer


class NothingRecordedError(RuntimeError):
    """A profile ended before its first recorded step did."""


class Profile:
    """The result of ``profile``: call ``step()`` after each step; ``path`` is this rank's trace once it is written."""

    def __init__(
        self, folder: str | Path, wait: int, active: int, hardware: str | Path | HardwareProfile | None
    ) -> None:
        for name, value, least in (("wait", wait, 0), ("active", active, 1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}. Give a number of steps, at least {least}.")
            if value < least:
                raise ValueError(f"{name} is {value}. Give a number of steps, at least {least}.")
        known = hardware if hardware is None or isinstance(hardware, HardwareProfile) else load_profile(hardware)
        self.folder = Path(folder)
        self.path: Path | None = None
        self._wait, self._active = wait, active
        self._num_steps = 0
        self._failed = False
        self._place: tuple[int, int] | None = None  # rank and world size
        self._listener = StepListener(known)
        self._schedule = torch.profiler.schedule(wait=wait, warmup=_WARMUP, active=active, repeat=1)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=self._action,
            on_trace_ready=self._write,
            record_shapes=True,
            acc_events=True,  # torch 2.11 warns otherwise; there is one cycle
        )

    def __enter__(self) -> Profile:
        refuse_old_traces(self.folder)
        self._listener.start()
        try:
            self._profiler.__enter__()
        except BaseException:
            self._listener.stop()
            raise
        return self

    def step(self) -> None:
        """Note that one step of the training has ended."""
        self._num_steps += 1
        if dist.is_initialized():  # its process group may be gone when the trace is written
            self._place = _rank(), _world_size()
        self._profiler.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        if self._before < self._num_steps < self._before + self._active:
            time.sleep(_SETTLES_S)
        try:
            self._profiler.__exit__(kind, error, trace)
        finally:
            self._listener.stop()
        if self._failed:
            return
        if self.path is None:
            raise NothingRecordedError(self._nothing())
        if self._num_recorded < self._active:
            self._warn_of_early_end()

    def _nothing(self) -> str:
        """Why no step was recorded, and what to do."""
        return (
            f"nothing was recorded: {self._num_steps} of {self._before} steps had ended that stand before the "
            f"first recorded one (wait={self._wait}, and {_WARMUP} to warm up). Call step() behind each step of "
            "the training, train longer, or give a smaller wait."
        )

    def _warn_of_early_end(self) -> None:
        warnings.warn(
            f"fsdp_compile.profile recorded {self._num_recorded} of {self._active} steps: the block ended early. Train "
            "longer in it, or give a smaller wait or active.",
            stacklevel=3,  # the code that has the block
        )

    def _action(self, step: int) -> torch.profiler.ProfilerAction:
        """Return what the profiler does in the next step; torch asks between two steps."""
        if step == self._before + self._active:
            time.sleep(_SETTLES_S)  # gloo's threads still record; the last step's range has ended
        return self._schedule(step)

    @property
    def summary(self) -> Summary:
        """The summary of all ranks whose traces are in the folder by now; it prints as tables."""
        if self.path is None:
            raise RuntimeError(
                f"nothing is recorded yet: {self._num_steps} steps ended, and the last that is recorded is step "
                f"{self._before + self._active}. Ask for the summary after that one."
            )
        return summarize(self.folder)

    @property
    def _before(self) -> int:
        return self._wait + _WARMUP

    @property
    def _num_recorded(self) -> int:
        """Steps that were recorded to their ends."""
        return max(0, min(self._num_steps - self._before, self._active))

    def _write(self, profiler: Any) -> None:
        if self._failed or not self._num_recorded:
            return
        rank, world_size = self._place or (_rank(), _world_size())
        heard = self._listener.heard()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_worker(rank)}.{time.time_ns()}{SUFFIXES[0]}"
        raw = path.with_name(f".{path.name}.raw.json")  # a name that TensorBoard does not look at
        try:
            profiler.export_chrome_trace(str(raw))
            trace = load(raw)
            facts = Facts(
                rank=rank,
                world_size=world_size,
                num_steps=self._num_recorded,
                device=self._listener.device.type,
                hardware=self._listener.hardware,
                allows_tf32=compat.allows_tf32(),
                heard=heard,
                ranks=self._listener.ranks,
            )
            raw.write_text(json.dumps(annotate(trace, facts), separators=(",", ":")), encoding="utf-8")
            os.replace(raw, path)
        finally:
            raw.unlink(missing_ok=True)
        self.path = path
        self._listener.stop()


def profile(
    model: nn.Module,
    folder: str | Path,
    *,
    wait: int = 1,
    active: int = 3,
    hardware: str | Path | HardwareProfile | None = None,
) -> Profile:
    """Return a context manager that records ``active`` steps, after ``wait`` steps and one to warm up.

    Call ``step()`` of the profile after each step. Every rank writes a trace into ``folder``, for TensorBoard with
    torch-tb-profiler and any viewer of Chrome traces. The trace has a range for each gather and reduction, with its
    parameters and the time planned on ``hardware``, which is a profile's name or file; by default that of a memory
    budget, or the device's built-in one. ``summary`` says what was exposed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"profile takes the model, but got {type(model).__name__}. Give the module that is trained.")
    if not units_in(model):
        raise ValueError(
            f"{original_class(model).__name__} has no sharded module, so no range would have a name. Call "
            "fully_shard(...) on it first, or use torch.profiler."
        )
    return Profile(folder, wait, active, hardware)


def refuse_old_traces(folder: Path) -> None:
    """Raise if the folder has a trace of another run, which TensorBoard would show as this one's.

    A trace of another rank is not refused here, because that rank may have written it just now.
    """
    rank, world_size = _rank(), _world_size()
    for path in folder.iterdir() if folder.is_dir() else ():
        found = _OF_RANK.match(path.name)
        if path.name.endswith(SUFFIXES) and (found is None or int(found[1]) == rank or int(found[1]) >= world_size):
            raise FileExistsError(
                f"{folder} holds the trace of another run already, {path.name}: both would be shown as one. Give "
                "another folder, or remove it."
            )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _worker(rank: int) -> str:
    """Return a name as torch-tb-profiler reads it: the machine, and the process, for which the rank stands."""
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', socket.gethostname()) or 'node'}_{rank}"
