"""Run the command: read its arguments, plan, show."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .._torch_compat.process_groups import pretended_world
from ..tools.tables import console_for_output
from .figures import count
from .forecast import Forecast, Hardware
from .mistake import Mistake
from .options import read_batch, read_configuration, read_hardware
from .show import as_data, show_one, show_sweep, why_none
from .sweep import Sweep, Told, TooLarge, around, best_of
from .target import find_target
from .weights import weights_of

_TURNS = 6  # the bar's estimate of how many graphs a configuration traces and plans


def run_plan(arguments: argparse.Namespace) -> int:
    """Run the command; return exit code 0 where a plan fits and meets its budget, else 2."""
    try:
        return _plan(arguments)
    except Mistake as mistake:
        print(f"fsdp-compile plan: {mistake}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace) -> int:
    hardware = read_hardware(arguments)
    batch, sequence = read_batch(arguments.batch)
    target = find_target(arguments.target)
    with warnings.catch_warnings(), pretended_world(hardware.num_ranks, hardware.profile.backend):
        warnings.simplefilter("ignore")  # they are meant for a process that trains
        made = target.make(batch, sequence)
        weights = weights_of(made.model, hardware.precision)
        said = read_configuration(arguments, made, hardware, weights)
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
    what = f"{arguments.target}, {count(num_params)} parameters, on {hardware.num_ranks:,} {hardware.profile.name}"
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
