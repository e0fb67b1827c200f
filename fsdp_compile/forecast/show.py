"""Forecasts as tables, as data, and what to change where one does not fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .forecast import Forecast
from .joint import FULL, NONE
from .sweep import TooLarge, standing_bytes

_GIB = 2**30


def show_one(one: Forecast, title: str, console: Console) -> None:
    console.print(title, highlight=False)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("on each rank, at the peak")
    grid.add_column("GiB", justify="right")
    for kind, num_bytes in one.peak.items():
        if num_bytes:
            grid.add_row(kind, _gib(num_bytes))
    grid.add_section()
    grid.add_row("peak", _gib(one.peak_bytes))
    verdict = "fits" if one.fits else "does not fit"
    grid.add_row(f"of {_gib(one.hardware.memory_bytes)}", f"[bold]{verdict}[/bold]")
    console.print(grid)
    grid = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    grid.add_column("")
    grid.add_column("", justify="right")
    grid.add_row("forward", _seconds(one.forward_s))
    grid.add_row("backward", _seconds(one.backward_s))
    grid.add_row("optimizer", _seconds(one.optimizer_s))
    grid.add_row("step", f"[bold]{_seconds(one.step_s)}[/bold]")
    grid.add_row("of it waiting for communication", _seconds(one.exposed_s))
    grid.add_row("tokens/s", f"{one.tokens_per_s:,.0f}")
    grid.add_row("tokens/s a rank", f"[bold]{one.tokens_per_s_per_rank:,.0f}[/bold]")
    grid.add_row("MFU", f"{one.mfu:.1%}")
    console.print(grid)
    kept = f", {one.num_kept} of {one.num_periods} layers kept gathered for backward" if one.num_kept else ""
    traced = f"{one.num_traced} of {one.num_periods} repeated layers traced" if one.num_periods > 1 else "all traced"
    console.print(f"Predicted on {one.hardware.profile.name!r}; {traced}{kept}.", highlight=False)


def show_sweep(found: Sequence[Forecast | TooLarge], best: Forecast | None, title: str, console: Console) -> None:
    console.print(title, highlight=False)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "mesh", "batch", "checkpointing", "budget GiB"):
        grid.add_column(heading)
    for heading in ("kept", "peak GiB", "step", "waiting", "tokens/s a rank", "MFU"):
        grid.add_column(heading, justify="right")
    planned = [one for one in found if isinstance(one, Forecast)]
    for one in sorted(planned, key=lambda one: (not one.fits, -one.tokens_per_s)):
        marked, said = one is best, one.configuration
        row = [
            "-> " if marked else "   ",
            *_said(said),
            "-" if said.budget is None else _gib(said.budget),
            str(one.num_kept) if one.num_kept else "-",
            _gib(one.peak_bytes) + ("" if one.fits else " (over)"),
            _seconds(one.step_s),
            _seconds(one.exposed_s),
            f"{one.tokens_per_s_per_rank:,.0f}",
            f"{one.mfu:.1%}",
        ]
        grid.add_row(*row, style="bold green" if marked else None if one.fits else "dim")
    too_large = {(one.configuration.mesh, one.num_bytes) for one in found if isinstance(one, TooLarge)}
    console.print(grid)
    for mesh, num_bytes in sorted(too_large, key=lambda one: one[1]):
        shown = "x".join(map(str, mesh))
        console.print(f"Not planned: mesh {shown}: shards, gradients and optimizer alone take {_gib(num_bytes)} GiB.")


def advice(one: Forecast | TooLarge, num_params: int) -> str:
    """What to change so that it fits."""
    if isinstance(one, TooLarge):
        return (
            f"shards, their gradients and the optimizer's states alone are {_gib(one.num_bytes)} GiB on each rank of "
            f"mesh {'x'.join(map(str, one.configuration.mesh))}: share the parameters out over more ranks."
        )
    memory, said = one.hardware.memory_bytes, one.configuration
    standing = standing_bytes(num_params, said, one.hardware)
    needs = f"it needs {_gib(one.peak_bytes)} GiB on each rank and has {_gib(memory)}"
    if standing > memory:
        ranks = math.ceil(said.mesh[-1] * standing / memory)
        return (
            f"{needs}: shards, their gradients and the optimizer's states alone are {_gib(standing)} GiB, so share the "
            f"parameters out over at least {ranks} ranks (the last number of --mesh)."
        )
    if said.checkpointing != FULL and one.peak["activations"] > one.peak_bytes - memory:
        return f"{needs}: {_gib(one.peak['activations'])} of them are activations, so add --checkpointing full."
    if one.num_kept or said.budget is not None:
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


def _said(said: Any) -> tuple[str, str, str]:
    return "x".join(map(str, said.mesh)), f"{said.batch}x{said.sequence}", said.checkpointing


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}" if num_bytes >= _GIB / 10 else f"{num_bytes / _GIB:.4f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"
