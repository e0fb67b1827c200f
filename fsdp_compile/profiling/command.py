"""``fsdp-compile profile`` and ``fsdp-compile refine``.

    fsdp-compile profile --ranks 2 -- train.py --arguments of-the-script      two processes on this machine
    torchrun ... -m fsdp_compile.cli profile -- train.py                      one of the processes that torchrun starts
    fsdp-compile refine traces -o profile.json

The script needs no change: a step ends where the optimizer that steps first ends its step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..passes import load_profile
from ..tools import script
from ..tools.tables import console_for_output, plural
from .refine import doubts_of, refine, table_of
from .session import NothingRecordedError, Profile, refuse_old_traces
from .summary import summarize
from .traces import SUFFIXES

# Set for processes that --ranks starts, because their parent prints for them.
_OF_PARENT = "FSDP_COMPILE_PROFILE_PARENT"
_PATIENCE_S = 20.0  # for the traces of the other ranks, once this one's is written
_LEAVES_S = 45.0  # for processes that are told to end: torchrun kills its own after 30


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a training script and record some of its steps: one trace a rank, for TensorBoard with torch-tb-profiler "
        "and for any viewer of Chrome traces, and a summary of what was exposed, beside the plan. Under torchrun it "
        "is one of the ranks; --ranks starts them on this machine. Exit code 2 when nothing could be recorded; the "
        "script's own where that fails, with --ranks 1."
    )
    parser.usage = "fsdp-compile profile [--out DIR] [--ranks N] [--wait N] [--active N] -- [-m] script [arguments]"
    parser.add_argument("--out", metavar="DIR", default="traces", help="where traces go (default %(default)s)")
    parser.add_argument("--ranks", type=count, help="start so many processes here; without it, this one is the rank")
    parser.add_argument(
        "--wait", type=_count_or_zero, default=2, metavar="N",
        help="steps before the one that warms up, in which graphs are compiled (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--active", type=count, default=3, metavar="N", help="recorded steps (default %(default)s)")
    parser.add_argument(
        "--hardware", metavar="PROFILE",
        help="what is planned by: a built-in profile or a file of `fsdp-compile calibrate` or `refine`",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="list every collective, not the five that are worst")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="path of a Python file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=_profile)


def add_refine(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a hardware profile from the traces of a measured run: latency and bandwidth of its collectives, and "
        "what its products of matrices reached. All else is as in the profile that the run was planned by."
    )
    parser.add_argument("folder", help="with the traces that `fsdp-compile profile` wrote")
    parser.add_argument("-o", "--out", metavar="FILE", default="profile.json", help="(default %(default)s)")
    parser.add_argument("--name", help="what the profile says of itself")
    parser.set_defaults(run=_refine)


def is_a_rank(arguments: argparse.Namespace) -> bool:
    """Whether the command runs a script in its own process."""
    return arguments.run is _profile and (arguments.ranks is None or "RANK" in os.environ)


def _profile(arguments: argparse.Namespace) -> int:
    if arguments.script == "-m" and arguments.args:  # after "--", argparse takes -m for the script
        arguments.module, arguments.script, arguments.args = True, arguments.args[0], arguments.args[1:]
    problem = _problem_of(arguments)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    folder = Path(arguments.out)
    if not is_a_rank(arguments):
        if _start_ranks(arguments):
            return 1
        if not _num_written(folder):  # the first rank has said why, if it could
            print(f"No rank wrote a trace into {folder}.", file=sys.stderr)
            return 2
        return _print_summary(folder, arguments, arguments.ranks)
    code, is_recorded = 0, False
    try:
        with _stepped_by_optimizer(arguments):
            code = _run(arguments)
        is_recorded = True
    except _RaisedError:
        return 1
    except NothingRecordedError as error:
        if _is_first():
            print(error, file=sys.stderr)
    # Other ranks, and the process that started this one, would only repeat what follows.
    if code or not _is_first() or _OF_PARENT in os.environ:
        return code
    return _print_summary(folder, arguments, int(os.environ.get("WORLD_SIZE", "1"))) if is_recorded else 2


class _RaisedError(Exception):
    """The script raised, and the traceback is printed."""


def _run(arguments: argparse.Namespace) -> int:
    """Run the script to its end, and return its exit code."""
    if arguments.module and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        script.run_script(arguments.script, arguments.args, is_module=arguments.module)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except Exception as error:
        error = error.with_traceback(_in_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)  # torch's hook names the rank; or the script's own
        raise _RaisedError from error
    return 0


def _in_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our frames: it begins with the script's own first line."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, script.__file__):
        trace = trace.tb_next
    return trace


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _problem_of(arguments: argparse.Namespace) -> str | None:
    out = Path(arguments.out)
    if not arguments.module and not os.path.isfile(arguments.script):
        return f"{arguments.script} is not a file: give the path of a script, or -m and the name of a module."
    if out.exists() and not out.is_dir():
        return f"--out {out} is a file: give a folder, which need not exist."
    if not may_write(out):
        return f"--out {out} cannot be written: give a folder that is yours."
    if arguments.ranks is not None and "RANK" in os.environ:
        return "--ranks starts processes, and torchrun has started this one already: leave --ranks out."
    try:
        if arguments.hardware is not None:
            load_profile(arguments.hardware)
        refuse_old_traces(out)
    except (ValueError, TypeError, OSError) as error:
        return str(error)
    return None


def may_write(path: Path) -> bool:
    """Whether a file or folder can be written, or created together with its missing parent folders."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)


def _start_ranks(arguments: argparse.Namespace) -> int:
    options = ["--out", arguments.out, "--wait", str(arguments.wait), "--active", str(arguments.active)]
    options += ["--hardware", arguments.hardware] if arguments.hardware else []
    theirs = [*(["-m"] if arguments.module else []), arguments.script, *arguments.args]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command += ["-m", "fsdp_compile.cli", "profile", *options, "--", *theirs]
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": str(max(1, num_cpus // arguments.ranks))}  # else torchrun sets 1, and warns of that
    # torchrun gets its own session: told to end twice, by the terminal and by us, it would leave its ranks behind.
    started = subprocess.Popen(command, env={**threads, **os.environ, _OF_PARENT: "1"}, start_new_session=True)
    try:
        return started.wait()
    finally:
        if started.poll() is None:  # we were interrupted: torchrun ends its processes when it is told to
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(_LEAVES_S)
            started.kill()
            started.wait()


class _OfScript(Profile):
    """A profile whose messages name the options of the command line."""

    def _nothing(self) -> str:
        if not self._num_steps:
            return (
                "Nothing was recorded: no optimizer stepped in the script, and a step ends where one does. Profile a "
                "script that trains; where no torch.optim.Optimizer updates the parameters, call step() of "
                "fsdp_compile.profile(model, folder) in the script itself."
            )
        return (
            f"Nothing was recorded: the script ended after {plural(self._num_steps, 'step')}, and the first recorded "
            f"one is step {self._before + 1}. Train longer, or give a smaller --wait (it is {self._wait})."
        )

    def _warn_of_early_end(self) -> None:
        if _is_first():
            said = f"The script ended after {self._num_recorded} of {self._active} recorded steps"
            print(f"{said}; train longer, or give a smaller --wait or --active.", file=sys.stderr)


@contextlib.contextmanager
def _stepped_by_optimizer(arguments: argparse.Namespace) -> Iterator[None]:
    """Record a profile whose steps end with those of one optimizer, the first that takes a step."""
    first: list[weakref.ref[Any]] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if torch.compiler.is_compiling():
            return
        if not first:
            first.append(weakref.ref(optimizer))
        if first[0]() is optimizer:
            profile.step()

    profile = _OfScript(arguments.out, arguments.wait, arguments.active, arguments.hardware)
    hook = register_optimizer_step_post_hook(stepped)
    try:
        with profile:
            yield
    finally:
        hook.remove()


def _print_summary(folder: Path, arguments: argparse.Namespace, num_ranks: int) -> int:
    """Print a summary of the ranks that wrote within _PATIENCE_S: others may be slow, or write elsewhere."""
    until = time.monotonic() + _PATIENCE_S
    while _num_written(folder) < num_ranks and time.monotonic() < until:
        time.sleep(0.2)
    try:
        summary = summarize(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    console = console_for_output()
    console.print(summary)
    if arguments.all:
        console.print(summary.all_collectives())
    said = f"Wrote {folder}, {len(summary.ranks)} traces. To look: tensorboard --logdir {folder} (extra `profile`)"
    console.print(f"{said}; one trace: ui.perfetto.dev.", highlight=False, soft_wrap=True)
    return 0


def _num_written(folder: Path) -> int:
    return sum(path.name.endswith(SUFFIXES) for path in folder.iterdir()) if folder.is_dir() else 0


def _refine(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if out.is_dir() or not out.resolve().parent.is_dir():
        print(f"-o {out} is not a file in a folder that exists.", file=sys.stderr)
        return 2
    try:
        refined = refine(arguments.folder, arguments.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    console = console_for_output()
    console.print(table_of(refined))
    for doubt in doubts_of(refined):
        print(doubt, file=sys.stderr)
    out.write_text(refined.profile.to_json() + "\n", encoding="utf-8")
    said = f"Wrote {out}; configure(model, profile=...), predict(...) and --hardware take it."
    console.print(said, highlight=False, soft_wrap=True)
    return 0


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else count(text)
