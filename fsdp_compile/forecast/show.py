"""Show forecasts as tables or data, and say what to change where one does not fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .figures import in_unit, seconds, size, unit_for
from .forecast import Forecast
from .joint import FULL, NONE
from .sweep import TooLarge
from .tables import Column, print_columns, print_whole
from .weights import Weights

_WIDEST = len("1,234,567,890")  # the widest cell in the tables of a single plan


def show_one(one: Forecast, title: str, console: Console) -> None:
    console.print(title, highlight=False)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("on each rank, at the peak")
    grid.add_column("memory", justify="right", no_wrap=True, min_width=_WIDEST)
    for kind, num_bytes in one.peak.items():
        if num_bytes:
            grid.add_row(kind, size(num_bytes))
    grid.add_section()
    grid.add_row("peak", size(one.peak_bytes))
    verdict = "fits" if one.fits else "does not fit"
    grid.add_row(f"of {size(one.hardware.memory_bytes)} of memory", f"[bold]{verdict}[/bold]")
    budget = one.configuration.budget
    if budget is not None:
        grid.add_row("forward and backward", size(one.held_bytes))
        grid.add_row(f"of a budget of {size(budget)}", f"[bold]{'met' if one.is_met else 'not met'}[/bold]")
    print_whole(grid, console)
    grid = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    grid.add_column("")
    grid.add_column("", justify="right", no_wrap=True, min_width=_WIDEST)
    grid.add_row("forward", seconds(one.forward_s))
    grid.add_row("backward", seconds(one.backward_s))
    grid.add_row("optimizer", seconds(one.optimizer_s))
    grid.add_row("step", f"[bold]{seconds(one.step_s)}[/bold]")
    grid.add_row("of it waiting for communication", seconds(one.exposed_s))
    grid.add_row("tokens/s", f"{one.tokens_per_s:,.0f}")
    grid.add_row("tokens/s a rank", f"[bold]{one.tokens_per_s_per_rank:,.0f}[/bold]")
    grid.add_row("MFU", f"{one.mfu:.1%}")
    print_whole(grid, console)
    kept = f", {one.num_kept} of {one.num_periods} layers kept gathered for backward" if one.num_kept else ""
    traced = f"{one.num_traced} of {one.num_periods} repeated layers traced" if one.num_periods > 1 else "all traced"
    console.print(f"Predicted on {one.hardware.profile.name!r}; {traced}{kept}.", highlight=False)


def show_sweep(found: Sequence[Forecast | TooLarge], best: Forecast | None, title: str, console: Console) -> None:
    console.print(title, highlight=False)
    planned = [one for one in found if isinstance(one, Forecast)]
    planned.sort(key=lambda one: (not one.fits, -one.tokens_per_s))
    said = [one.configuration for one in planned]
    budgets = [one.budget for one in said if one.budget is not None]
    unit = unit_for([*(one.peak_bytes for one in planned), *budgets])
    columns = (
        Column("", "", ["-> " if one is best else "   " for one in planned]),
        Column("mesh", "mesh", ["x".join(map(str, one.mesh)) for one in said]),
        Column("batch", "batch", [f"{one.batch}x{one.sequence}" for one in said]),
        Column("checkpointing", "check-\npointing", [one.checkpointing for one in said]),
        Column(f"budget {unit}", f"budget\n{unit}", [_budget(one, unit) for one in planned]),
        Column("kept", "kept", [str(one.num_kept) if one.num_kept else "-" for one in planned], is_figure=True),
        Column(f"peak {unit}", f"peak\n{unit}", [_peak(one, unit) for one in planned], is_figure=True),
        Column("step", "step", [seconds(one.step_s) for one in planned], is_figure=True),
        Column("waiting", "waiting", [seconds(one.exposed_s) for one in planned], is_figure=True),
        Column(
            "tokens/s a rank",
            "tokens/s\na rank",
            [f"{one.tokens_per_s_per_rank:,.0f}" for one in planned],
            is_figure=True,
        ),
        Column("MFU", "MFU", [f"{one.mfu:.1%}" for one in planned], is_figure=True),
    )
    styles = ["bold green" if one is best else None if one.fits else "dim" for one in planned]
    if planned:
        print_columns(columns, styles, ("waiting", "kept", "MFU", f"budget {unit}"), console)
    too_large = {(one.configuration.mesh, one.num_bytes) for one in found if isinstance(one, TooLarge)}
    for mesh, num_bytes in sorted(too_large, key=lambda one: one[1]):
        shown = "x".join(map(str, mesh))
        console.print(f"Not planned: mesh {shown}: shards, gradients and optimizer alone take {size(num_bytes)}.")


def _budget(one: Forecast, unit: str) -> str:
    budget = one.configuration.budget
    return "-" if budget is None else in_unit(budget, unit) + ("" if one.is_met else " (not met)")


def _peak(one: Forecast, unit: str) -> str:
    return in_unit(one.peak_bytes, unit) + ("" if one.fits else " (over)")


def why_none(found: Sequence[Forecast | TooLarge], budget: int | None, weights: Weights) -> str:
    """Say why none of these plans fits or meets its budget, and what to change."""
    fitting = [one for one in found if isinstance(one, Forecast) and one.fits]
    if fitting and budget is not None:
        least = min(fitting, key=lambda one: one.held_bytes)
        return f"does not meet its budget: {_advice_on_budget(least, budget)}"
    nearest = min(found, key=lambda one: one.peak_bytes if isinstance(one, Forecast) else one.num_bytes)
    return f"does not fit: {advice(nearest, weights)}"


def _advice_on_budget(one: Forecast, budget: int) -> str:
    said = one.configuration
    helps = ["a smaller batch or shorter sequences", "more ranks to share the parameters out over"]
    if said.checkpointing != FULL:
        helps.insert(0, "--checkpointing full")
    return (
        f"forward and backward may hold {size(budget)} on each rank, and the least that they need ({said}) is "
        f"{size(one.held_bytes)} ({one.held_bytes:,} bytes): give a larger --budget, or {', or '.join(helps)}."
    )


def advice(one: Forecast | TooLarge, weights: Weights) -> str:
    """Say what to change so that a plan fits."""
    if isinstance(one, TooLarge):
        return (
            f"shards, their gradients and the optimizer's states alone are {size(one.num_bytes)} on each rank of "
            f"mesh {'x'.join(map(str, one.configuration.mesh))}: share the parameters out over more ranks."
        )
    memory, said = one.hardware.memory_bytes, one.configuration
    standing = weights.standing_bytes(said.mesh, one.hardware)
    needs = f"it needs {size(one.peak_bytes)} on each rank and has {size(memory)}"
    if standing > memory:
        ranks = math.ceil(said.mesh[-1] * standing / memory)
        return (
            f"{needs}: shards, their gradients and the optimizer's states alone are {size(standing)}, so share the "
            f"parameters out over at least {ranks} ranks (the last number of --mesh)."
        )
    if said.checkpointing != FULL and one.peak["activations"] > one.peak_bytes - memory:
        return f"{needs}: {size(one.peak['activations'])} of them are activations, so add --checkpointing full."
    if said.budget is not None and one.is_met:
        return f"{needs}: give a smaller --budget, or 'rest'."
    if said.batch > 1 and said.sequence > 1:
        return f"{needs}: give fewer sequences, --batch {said.batch // 2}x{said.sequence}."
    if said.checkpointing == NONE:
        return f"{needs}: add --checkpointing full, and if that is not enough, share parameters out over more ranks."
    return f"{needs}: give shorter sequences, --batch 1x{said.sequence // 2}, or share parameters out over more ranks."


def as_data(one: Forecast | TooLarge) -> dict[str, Any]:
    said = dataclasses.asdict(one.configuration)
    if isinstance(one, TooLarge):
        return {**said, "fits": False, "standing_bytes": one.num_bytes}
    return {
        **said,
        "fits": one.fits,
        "memory_bytes": one.hardware.memory_bytes,
        "peak_bytes": one.peak_bytes,
        "peak_bytes_by_kind": one.peak,
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
        "layers_kept": one.num_kept,
        "layers_traced": one.num_traced,
        "layers": one.num_periods,
    }
