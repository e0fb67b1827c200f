"""The command ``fsdp-compile``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from . import __version__
from .demo.report import missing_tools, run_demo
from .demo.training import DemoSettings
from .forecast.command import add_options, run_plan
from .profiling import command as profiling
from .tools import calibrate, link
from .workers import WorkerError, interruptible

INTERRUPTED = 130
_HEAD_DIM = DemoSettings.head_dim


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; ``profile`` returns the code of its script.

    0: success. 1: the numbers disagree. 2: it could not run to its end, or a plan does not fit. 130: interrupted.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        # A script that is profiled in this process handles signals as it does under Python alone.
        with contextlib.nullcontext() if profiling.is_a_rank(arguments) else interruptible():
            return arguments.run(arguments)
    except KeyboardInterrupt:
        print("Interrupted; no worker process is left.", file=sys.stderr)
        return INTERRUPTED
    except (WorkerError, OSError, link.LinkError) as error:
        print(f"The run ended early: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fsdp-compile", description="Fully sharded data parallelism, compiled.")
    version = f"fsdp-compile {__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a small transformer sharded and unsharded, and compare"))
    _add_calibrate(commands.add_parser("calibrate", help="measure this machine for the cost model, into a JSON file"))
    profiling.add_profile(commands.add_parser("profile", help="run a script and record some of its steps"))
    profiling.add_refine(commands.add_parser("refine", help="write a hardware profile from recorded steps"))
    plan = commands.add_parser("plan", help="what a model takes on hardware that is not there: does it fit?")
    add_options(plan)
    plan.set_defaults(run=run_plan)
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    default = DemoSettings()
    parser.description = (
        "Train a small transformer in local processes: unsharded, with torch's FSDP2, with FSDP2 over compiled blocks, "
        "and with fsdp_compile under torch.compile. On GPUs, over NCCL, where each process gets one; else on the CPU, "
        "over gloo. Prints losses, graphs, memory and time. Compiles into an empty cache: one to three minutes on two "
        "cores. "
        "Exit code 1 when the losses disagree, 2 when it cannot run or a worker fails."
    )
    width = f"width, a multiple of {_HEAD_DIM}"
    counts = {"ranks": "processes", "steps": "AdamW steps", "layers": "blocks", "dim": width}
    for name, what in counts.items():
        said = f"{what} (default %(default)s)"
        parser.add_argument(f"--{name}", type=profiling.count, default=getattr(default, name), help=said)
    parser.add_argument(
        "--backend", choices=("inductor", "aot_eager"), default=default.backend,
        help="torch.compile's (default %(default)s); aot_eager needs no C++ compiler, and buckets nothing",
    )  # fmt: skip
    parser.add_argument("--save", metavar="DIR", help="keep results, plans, and the graphs before and after each pass")
    parser.add_argument(
        "--page", metavar="FILE",
        help="the planned step as a page for a browser (default: step.html in DIR, or else in a temporary folder)",
    )  # fmt: skip
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.dim % _HEAD_DIM:
        print(f"--dim {arguments.dim} is not a multiple of {_HEAD_DIM}, the size of a head.", file=sys.stderr)
        return 2
    settings = DemoSettings(
        ranks=arguments.ranks,
        steps=arguments.steps,
        layers=arguments.layers,
        dim=arguments.dim,
        backend=arguments.backend,
        save=None if arguments.save is None else str(Path(arguments.save).resolve()),
        page=None if arguments.page is None else str(Path(arguments.page).resolve()),
    )
    missing = missing_tools(settings)
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    for option, given, is_right in (("--save", arguments.save, Path.is_dir), ("--page", arguments.page, Path.is_file)):
        path = Path(given or ".")
        if given is not None and not (profiling.may_write(path) and (is_right(path) or not path.exists())):
            what = "folder" if option == "--save" else "file"
            print(f"{option} {given} is not a {what} that can be written: give another one.", file=sys.stderr)
            return 2
    if arguments.save is not None:
        Path(arguments.save).mkdir(parents=True, exist_ok=True)
    if arguments.page is not None:
        Path(arguments.page).resolve().parent.mkdir(parents=True, exist_ok=True)
    return run_demo(settings, Console())


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    default = calibrate.CalibrationSettings()
    parser.description = (
        "Time matmuls, copies and collectives in local processes, on GPUs over NCCL where each process gets one, else "
        "on the CPU over gloo, and write a hardware profile. Takes less than a minute on two cores. Exit code 2 when "
        "it cannot run or a worker fails."
    )
    parser.add_argument("--ranks", type=profiling.count, default=default.ranks, help="processes (default %(default)s)")
    parser.add_argument("--out", metavar="FILE", default=default.out, help="the profile (default %(default)s)")
    parser.add_argument("--name", default=default.name, help="what the profile says of itself (default %(default)r)")
    parser.add_argument(
        "--link", metavar="RATE",
        help="two ranks on the CPU, in network namespaces joined at e.g. 1gbit (Linux, as root); the profile has this "
        "link as the one inside of a node",
    )  # fmt: skip
    parser.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    problem, out = None, Path(arguments.out)
    if arguments.ranks < 2:
        problem = "--ranks 1 leaves nobody to communicate with: give at least 2."
    elif arguments.link and arguments.ranks != 2:
        problem = "--link joins two namespaces, one a rank: leave --ranks out."
    elif out.is_dir() or not out.resolve().parent.is_dir():
        problem = f"--out {arguments.out} is not a file in a folder that exists."
    elif not profiling.may_write(out):
        problem = f"--out {arguments.out} cannot be written: give a file in a folder that is yours."
    elif not arguments.name:
        problem = "--name is empty: give the profile a name, such as 'h100', or leave --name out."
    elif arguments.link:
        try:
            link.bytes_per_s(arguments.link)
            link.check_possible()
        except link.LinkError as refused:
            problem = str(refused)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    settings = calibrate.CalibrationSettings(
        ranks=arguments.ranks, name=arguments.name, out=arguments.out, link=arguments.link
    )
    calibrate.run_calibrate(settings, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
