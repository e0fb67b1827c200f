"""Run the command: define its arguments, read them, refuse those that are wrong, plan, show."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .._torch_compat.process_groups import pretended_world
from ..passes import load_profile
from ..passes.budget.budget import bytes_of
from ..passes.budget.residency import MAY, SHARDS
from ..passes.cost.profiles import PROFILES
from ..tools.tables import console_for_output
from .forecast import ON_HOST, OPTIMIZERS, Configuration, Forecast, Hardware
from .joint import FULL, NONE, PRECISIONS, SELECTIVE, Mistake
from .layers import find_run
from .show import as_data, short_number, show_one, show_sweep, size, why_none
from .sweep import Sweep, Told, TooLarge, Weights, around, best_of, weights_of
from .target import Made, find_target

_BATCH = (1, 4096)
_FEWEST_BYTES = 1 << 20  # a number below it that has no unit was meant in GiB
_TURNS = 6  # the bar's estimate of how many graphs a configuration traces and plans


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plan a training step on ranks that are not there: whether it fits, bytes by kind, step time, communication "
        "that computation waits for, tokens a second. Nothing is allocated or sent; layers that repeat are traced a "
        "few times and extended to all. Exit code 2 where the model does not fit or meet its budget, or has no plan."
    )
    add = parser.add_argument
    add("target", metavar="MODEL", help="module:function, which returns a model, or a model and its batch (it may take "
        "batch_size and sequence); or the path of a Hugging Face config.json")  # fmt: skip
    add("--world-size", metavar="N", help="ranks in all; default: those of --mesh")
    add("--mesh", metavar="REPLICASxSHARDS", help="such as 8x64, or 512; default: all ranks share parameters out")
    add("--hardware", metavar="NAME", default="h100", help=f"{', '.join(PROFILES)}, or a file that `fsdp-compile "
        "calibrate` wrote; default: %(default)s")  # fmt: skip
    add("--batch", metavar="BATCHxSEQUENCE", help=f"of one rank; default: {_BATCH[0]}x{_BATCH[1]}")
    add("--memory", metavar="BYTES", help="what a rank may use, such as 70GiB; default: what the hardware has")
    add("--mp", choices=[*PRECISIONS], default="bf16", help="bf16, fp16: computed in it, stored as the model has it, "
        "gradients reduced in float32; bf16-only, fp32: all in one; default: %(default)s")  # fmt: skip
    add("--checkpointing", nargs="?", const=FULL, default=NONE, choices=(NONE, SELECTIVE, FULL),
        help="of each layer: all of it (full, or no word), or all but attention and every second product")  # fmt: skip
    add("--budget", metavar="BYTES", help="what forward and backward may hold, as in configure(memory_budget=...); or "
        "'rest', what --memory leaves beside the optimizer")  # fmt: skip
    add("--may", nargs="+", choices=(*MAY, SHARDS), help="what is chosen within the budget: which parameters stay "
        "gathered for backward, which activations are recomputed, which are on the host, how many layers have their "
        "shards there; default: the first two")  # fmt: skip
    add("--eager", action="store_true", help="the step of FSDP2 without torch.compile, for comparison: each operator a "
        "kernel of its own, each unit in one bucket that is copied")  # fmt: skip
    add("--optimizer", choices=[*OPTIMIZERS], default="adamw", help="whose states are counted; on-host is "
        "optim.StatesOnHost; default: %(default)s")  # fmt: skip
    add("--sweep", action="store_true", help="other meshes, batches, checkpointing and budgets too, the best marked")
    add("--json", action="store_true", help="print data in place of tables")


def run_plan(arguments: argparse.Namespace) -> int:
    """Run the command; return exit code 0 where a plan fits and meets its budget, else 2."""
    try:
        return _plan(arguments)
    except Mistake as mistake:
        print(f"fsdp-compile plan: {mistake}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace) -> int:
    hardware = _read_hardware(arguments)
    batch, sequence = _read_batch(arguments.batch)
    target = find_target(arguments.target)
    with warnings.catch_warnings(), pretended_world(hardware.num_ranks, hardware.profile.backend):
        warnings.simplefilter("ignore")  # they are meant for a process that trains
        made = target.make(batch, sequence)
        weights = weights_of(made.model, hardware.precision)
        said = _read_configuration(arguments, made, hardware, weights)
        many = len(around(said, hardware, made)) if arguments.sweep else 1
        with _bar(many) as told:
            planned = Sweep(target, hardware, weights, told)
            found: list[Forecast | TooLarge] = planned.sweep(said) if arguments.sweep else [planned.plan(said)]
    best = best_of(found, said.budget)
    _show(arguments, found, best, weights.num_params, hardware)
    if best is not None:
        return 0
    print(f"{arguments.target} {why_none(found, said.budget, weights)}", file=sys.stderr)
    return 2


def _show(
    arguments: argparse.Namespace,
    found: list[Forecast | TooLarge],
    best: Forecast | None,
    num_params: int,
    hardware: Hardware,
) -> None:
    if arguments.json:
        data = {
            "model": arguments.target,
            "parameters": num_params,
            "ranks": hardware.num_ranks,
            "hardware": hardware.profile.name,
            "precision": hardware.precision,
            "optimizer": hardware.optimizer,
            "best": None if best is None else found.index(best),
            "plans": [as_data(one) for one in found],
        }
        print(json.dumps(data, indent=1))
        return
    console = console_for_output()
    params = f"{short_number(num_params)} parameters"
    what = f"{arguments.target}, {params}, on {hardware.num_ranks:,} {hardware.profile.name}"
    if arguments.sweep:
        show_sweep(found, best, f"{what}, {hardware.precision}, {hardware.optimizer}", console)
        return
    one = found[0]
    assert isinstance(one, Forecast)
    show_one(one, f"{what}\n{one.configuration}, {hardware.precision}, {hardware.optimizer}", console)


@contextmanager
def _bar(num_configurations: int) -> Iterator[Told]:
    """Show a progress bar in a terminal, and remove it when all is planned."""
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("making the model", total=num_configurations * _TURNS)

        def told(what: str) -> None:
            progress.update(task, description=what, advance=1)

        yield told


def _read_hardware(arguments: argparse.Namespace) -> Hardware:
    try:
        profile = load_profile(arguments.hardware)
    except (ValueError, TypeError) as error:
        raise Mistake(f"--hardware: {error}") from error
    memory = profile.memory_bytes
    if arguments.memory is not None:
        memory = _bytes("--memory", arguments.memory)
    if memory > profile.memory_bytes:
        raise Mistake(
            f"--memory {arguments.memory} is more than the {size(profile.memory_bytes)} that torch may allocate on "
            f"{profile.name}: give less, or other --hardware."
        )
    return Hardware(profile, memory, math.prod(_mesh(arguments)), arguments.mp, arguments.optimizer)


def _read_configuration(
    arguments: argparse.Namespace, made: Made, hardware: Hardware, weights: Weights
) -> Configuration:
    """Read the configuration for a model that has these parameters."""
    if arguments.batch is not None and made.has_own_batch:
        raise Mistake(
            f"{arguments.target} returns a batch of its own, so --batch {arguments.batch} changes nothing: leave it "
            "out, or have the function take batch_size and sequence."
        )
    batch, sequence = made.size if made.has_own_batch else _read_batch(arguments.batch)
    budget = None
    if arguments.budget is not None:
        rest = weights.rest_bytes(_mesh(arguments), hardware)
        budget = rest if arguments.budget == "rest" else _bytes("--budget", arguments.budget)
        if budget <= 0:
            raise Mistake(
                "--budget rest leaves nothing, as shards and the optimizer's states take all of --memory: share the "
                "parameters out over more ranks, with a larger last number in --mesh."
            )
    if arguments.may and budget is None and not arguments.sweep:
        raise Mistake("--may says what is chosen within a budget, and there is none: add --budget 60GiB, or 'rest'.")
    may = tuple(arguments.may) if arguments.may else Configuration.may
    if SHARDS in may and not hardware.on_host:
        raise Mistake(
            f"--may {SHARDS} needs an optimizer that updates shards of the host on the device: add --optimizer "
            f"adamw{ON_HOST}."
        )
    if SHARDS in may and find_run(made.model) is None:
        raise Mistake(f"no layers repeat in this model, and --may {SHARDS} moves the shards of layers: take it out.")
    if SHARDS in may and arguments.sweep:
        raise Mistake(
            f"--sweep tries configurations without a budget first, and --may {SHARDS} is for those that do not fit so: "
            "take one of the two out."
        )
    if arguments.eager and (budget is not None or arguments.sweep):
        raise Mistake(
            "--eager plans FSDP2 without torch.compile, where nothing is chosen: take it out, or --budget and --sweep."
        )
    return Configuration(_mesh(arguments), batch, sequence, arguments.checkpointing, budget, may, arguments.eager)


def _mesh(arguments: argparse.Namespace) -> tuple[int, ...]:
    said = arguments.world_size
    if said is not None and len(_sizes(said)) != 1:
        raise Mistake(f"--world-size {said} is no number of ranks: give a whole number above 0.")
    num_ranks = None if said is None else int(said)
    if arguments.mesh is None:
        if num_ranks is None:
            raise Mistake("say how many ranks there are: --world-size 512, or --mesh 8x64.")
        return (num_ranks,)
    mesh = _sizes(arguments.mesh)
    if len(mesh) not in (1, 2):
        raise Mistake(
            f"--mesh {arguments.mesh} is no mesh: give how many ranks share parameters out (512), or replicas times "
            "shards (8x64)."
        )
    if num_ranks is not None and math.prod(mesh) != num_ranks:
        fitting = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        shards = min(fitting, key=lambda size: abs(size - mesh[-1]))
        fits = str(num_ranks) if len(mesh) == 1 else f"{num_ranks // shards}x{shards}"
        raise Mistake(
            f"--mesh {arguments.mesh} is {math.prod(mesh)} ranks and --world-size says {num_ranks}: give a mesh of as "
            f"many, such as {fits}."
        )
    return mesh


def _read_batch(said: str | None) -> tuple[int, int]:
    """Return the number of sequences, and their length."""
    if said is None:
        return _BATCH
    sizes = _sizes(said)
    if len(sizes) != 2:
        raise Mistake(f"--batch {said} is no batch: give sequences times their length, such as 2x8192.")
    return sizes[0], sizes[1]


def _sizes(said: str) -> tuple[int, ...]:
    """Return the whole numbers above 0 that are said, with an x between them; none if anything else is said."""
    sizes = said.split("x")
    return tuple(map(int, sizes)) if all(one.isdecimal() and int(one) for one in sizes) else ()


def _bytes(option: str, said: str) -> int:
    try:
        found = bytes_of(option, int(said) if said.isdecimal() else said)
    except ValueError as error:
        raise Mistake(f"{option} {said} is no number of bytes: give one such as 70GiB.") from error
    if said.isdecimal() and found < _FEWEST_BYTES:
        raise Mistake(f"{option} {said} has no unit, so it is {said} bytes: write {said}GiB, or {said}B for so few.")
    return found
