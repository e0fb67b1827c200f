"""Show forecasts as tables or data, and say what to change where one does not fit.

Each figure has three digits, however large or small it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from ..passes.budget.residency import MAY, OFFLOAD, SHARDS
from ..tools.tables import Rows
from .forecast import ON_HOST, OPTIMIZERS, Forecast
from .joint import FULL, NONE
from .sweep import TooLarge, Weights

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_COUNTS = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}


def show_one(one: Forecast, title: str, console: Console) -> None:
    console.print(title, highlight=False)
    verdict = "fits" if one.fits else "does not fit"
    memory = [[kind, size(num_bytes)] for kind, num_bytes in one.peak.items() if num_bytes]
    memory += [["peak", size(one.peak_bytes)], [f"of {size(one.hardware.memory_bytes)} of memory", verdict]]
    if one.states_away:
        memory.append(["optimizer state on the host", size(one.states_away)])
    if one.shards_away:
        memory.append([f"shards of {one.num_hosted} layers on the host", size(one.shards_away)])
    budget = one.configuration.budget
    if budget is not None:
        memory.append(["forward and backward", size(one.held_bytes)])
        memory.append([f"of a budget of {size(budget)}", "met" if one.is_met else "not met"])
    console.print(Rows("", ("on each rank, at the peak", "memory"), memory))
    time = [
        ["forward", seconds(one.forward_s)],
        ["backward", seconds(one.backward_s)],
        ["optimizer", seconds(one.optimizer_s)],
        ["step", seconds(one.step_s)],
        ["of it waiting for communication", seconds(one.exposed_s)],
        ["tokens/s", f"{one.tokens_per_s:,.0f}"],
        ["tokens/s a rank", f"{one.tokens_per_s_per_rank:,.0f}"],
        ["MFU", f"{one.mfu:.1%}"],
    ]
    console.print(Rows("", ("in a step", ""), time))
    traced = f"{one.num_traced} of {one.num_periods} repeated layers traced" if one.num_periods > 1 else "all traced"
    console.print(f"Predicted on {one.hardware.profile.name!r}; {traced}.", highlight=False)
    if one.choice is not None:
        console.print(str(one.choice), highlight=False, markup=False, soft_wrap=True)


def show_sweep(found: Sequence[Forecast | TooLarge], best: Forecast | None, title: str, console: Console) -> None:
    console.print(title, highlight=False)
    planned = [one for one in found if isinstance(one, Forecast)]
    planned.sort(key=lambda one: (not one.fits, -one.tokens_per_s))
    budgets = [one.configuration.budget for one in planned if one.configuration.budget is not None]
    unit = unit_for([*(one.peak_bytes for one in planned), *budgets])
    cells = [
        [
            f"{'->' if one is best else '  '} {'x'.join(map(str, one.configuration.mesh))}",
            f"{one.configuration.batch}x{one.configuration.sequence}",
            one.configuration.checkpointing,
            _budget(one, unit),
            _chosen(one),
            _peak(one, unit),
            seconds(one.step_s),
            seconds(one.exposed_s),
            f"{one.tokens_per_s_per_rank:,.0f}",
            f"{one.mfu:.1%}",
        ]
        for one in planned
    ]
    names = ("   mesh", "batch", "checkpointing", f"budget {unit}")
    figures = ("kept, again, host", f"peak {unit}", "step", "waiting", "tokens/s a rank", "MFU")
    styles = ["bold green" if one is best else "" if one.fits else "dim" for one in planned]
    if planned:
        console.print(Rows("", (*names, *figures), cells, styles=styles, num_names=len(names)))
    too_large = {one.configuration.mesh: one for one in found if isinstance(one, TooLarge)}
    for mesh, large in sorted(too_large.items(), key=lambda one: one[1].peak_bytes):
        shown = "x".join(map(str, mesh))
        console.print(f"Not planned: mesh {shown}: {_standing(large)} alone take {size(large.peak_bytes)}.")


def _budget(one: Forecast, unit: str) -> str:
    budget = one.configuration.budget
    return "-" if budget is None else in_unit(budget, unit) + ("" if one.is_met else " (not met)")


def _chosen(one: Forecast) -> str:
    """Return of how many parameters the gather, the product's inputs, or the activations are as the heading says."""
    its = None if one.choice is None else one.choice.chosen
    return "-" if its is None else f"{its.num_kept}, {its.num_recomputed}, {its.num_offloaded}"


def _peak(one: Forecast, unit: str) -> str:
    return in_unit(one.peak_bytes, unit) + ("" if one.fits else " (over)")


def why_none(found: Sequence[Forecast | TooLarge], budget: int | None, weights: Weights) -> str:
    """Say why none of these plans fits or meets its budget, and what to change."""
    fitting = [one for one in found if isinstance(one, Forecast) and one.fits]
    if fitting and budget is not None:
        least = min(fitting, key=lambda one: one.held_bytes)
        return f"does not meet its budget: {_advice_on_budget(least, budget)}"
    nearest = min(found, key=lambda one: one.peak_bytes)
    return f"does not fit: {advice(nearest, weights)}"


def _advice_on_budget(one: Forecast, budget: int) -> str:
    said = one.configuration
    helps = ["a smaller batch or shorter sequences", "more ranks to share the parameters out over"]
    if said.checkpointing != FULL:
        helps.insert(0, "--checkpointing full")
    if OFFLOAD not in said.may:
        helps.insert(0, f"--may {' '.join(MAY)}")
    elif SHARDS not in said.may and one.hardware.on_host and one.num_periods > 1:
        helps.insert(0, f"--may {' '.join(said.may)} {SHARDS}")
    return (
        f"forward and backward may hold {size(budget)} on each rank, and the least that they need ({said}) is "
        f"{size(one.held_bytes)} ({one.held_bytes:,} bytes): give a larger --budget, or {', or '.join(helps)}."
    )


def advice(one: Forecast | TooLarge, weights: Weights) -> str:
    """Say what to change so that a plan fits."""
    if isinstance(one, TooLarge):
        return (
            f"{_standing(one)} alone are {size(one.peak_bytes)} on each rank of mesh "
            f"{'x'.join(map(str, one.configuration.mesh))}: share the parameters out over more ranks."
        )
    memory, said = one.hardware.memory_bytes, one.configuration
    standing = weights.standing_bytes(said.mesh, one.hardware)
    needs = f"it needs {size(one.peak_bytes)} on each rank and has {size(memory)}"
    if standing > memory and SHARDS not in said.may:
        ranks = math.ceil(said.mesh[-1] * standing / memory)
        other = f"{one.hardware.optimizer}{ON_HOST}"
        others = dataclasses.replace(one.hardware, optimizer=other) if other in OPTIMIZERS else one.hardware
        helps = f", or try --optimizer {others.optimizer}" if others.on_host else ""
        if weights.standing_bytes(said.mesh, others) > memory:
            leaves = bool(helps) and one.num_periods > 1
            helps = f"{helps} --budget rest --may {' '.join((*MAY, SHARDS))}" if leaves else ""
        return (
            f"{needs}: {_standing(one)} alone are {size(standing)}, so share the parameters out over at least {ranks} "
            f"ranks (the last number of --mesh){helps}."
        )
    if said.budget is not None and said.budget > memory and one.is_met:
        return f"{needs}: give a smaller --budget, or 'rest'."
    if said.checkpointing != FULL and one.peak["activations"] > one.peak_bytes - memory:
        return f"{needs}: {size(one.peak['activations'])} of them are activations, so add --checkpointing full."
    if said.budget is not None and one.is_met:
        return f"{needs}: give a smaller --budget, or 'rest'."
    if said.batch > 1 and said.sequence > 1:
        return f"{needs}: give fewer sequences, --batch {said.batch // 2}x{said.sequence}."
    if said.checkpointing == NONE:
        return f"{needs}: add --checkpointing full, and if that is not enough, share parameters out over more ranks."
    return f"{needs}: give shorter sequences, --batch 1x{said.sequence // 2}, or share parameters out over more ranks."


def _standing(one: Forecast | TooLarge) -> str:
    """Return the words for what a rank holds throughout a step."""
    their = "shards and their gradients", "shards, their gradients and the optimizer's states"
    return their[not one.hardware.on_host]


def as_data(one: Forecast | TooLarge) -> dict[str, Any]:
    said = dataclasses.asdict(one.configuration)
    if isinstance(one, TooLarge):
        return {**said, "fits": False, "standing_bytes": one.peak_bytes}
    return {
        **said,
        "fits": one.fits,
        "memory_bytes": one.hardware.memory_bytes,
        "peak_bytes": one.peak_bytes,
        "peak_bytes_by_kind": one.peak,
        "optimizer_bytes_on_host": one.states_away,
        "layers_with_shards_on_host": one.num_hosted,
        "shard_bytes_on_host": one.shards_away,
        "forward_backward_bytes": one.held_bytes,
        "budget_met": None if one.configuration.budget is None else one.is_met,
        "step_s": one.step_s,
        "forward_s": one.forward_s,
        "backward_s": one.backward_s,
        "optimizer_s": one.optimizer_s,
        "exposed_s": one.exposed_s,
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_s_per_rank": one.tokens_per_s_per_rank,
        "mfu": one.mfu,
        "choice": None if one.choice is None else dataclasses.asdict(one.choice),
        "layers_traced": one.num_traced,
        "layers": one.num_periods,
    }


def short_number(number: int) -> str:
    """Format a number of parameters: 919K, 8.03B."""
    for letter, scale in _COUNTS.items():
        shown = f"{number / scale:.3g}"
        if float(shown) >= 1:  # 999,999 are 1M
            return shown + letter
    return str(number)


def size(num_bytes: int) -> str:
    """Format a number of bytes in the unit that fits it: 6.13 MiB."""
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    unit = next(name for name, scale in _UNITS.items() if num_bytes >= scale)
    return f"{in_unit(num_bytes, unit)} {unit}"


def unit_for(sizes: Iterable[int]) -> str:
    """Return one unit for a whole column, by the smallest figure in it."""
    least = min(sizes, default=0)
    return next((name for name, scale in _UNITS.items() if least >= scale / 10), "KiB")


def in_unit(num_bytes: int, unit: str) -> str:
    return _digits(num_bytes / _UNITS[unit])


def seconds(number: float) -> str:
    return f"{number:.3f} s" if number >= 1 else f"{number * 1e3:.3f} ms"


def _digits(value: float) -> str:
    if value <= 0:
        return "0"
    before = math.floor(math.log10(value)) + 1  # digits before the point
    return f"{value:.{max(3 - before, 1)}f}"
