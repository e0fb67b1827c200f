"""Whether an eager forward stands in the place of a compiled one, and of which graph (see route.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dynamo
from ..core.extension import has_extension
from ..core.param import ShardedParam
from ..core.unit import Unit
from ..passes.ledger import GraphText, ledger
from .gathered import Gathered
from .route import Route, Routed
from .running import Running, running

_logger = logging.getLogger(__name__)


def enter_route(unit: Unit, around_graph: bool) -> None:
    """Have the eager forward that begins launch what a compiled one does, where it stands in the place of one.

    One that stands around a graph of its own does so only where a larger graph had the unit's parameters.
    """
    run = running(unit)
    route = _around(unit)
    if route is None:
        if run.route is not None:
            run.route.give_up_forward()
        route = _find(unit)
        if around_graph and route is not None and unit not in route.routed:
            route = None  # what is inside of that graph has another one's
        run.route = route
    run.followed = route is not None and unit in route.routed
    if route is not None and unit in route.routed:
        routed = route.routed[unit]
        if run.gathered is not None and run.gathered is not routed:
            run.gathered.free()
        run.gathered = routed


def end_route(unit: Unit) -> None:
    """A unit's forward ended, and with it that of the route where the unit is the outermost one."""
    route = running(unit).route
    if route is not None and route.top is unit:
        route.end_forward()


def abandon_route(unit: Unit) -> None:
    """It raised."""
    route = running(unit).route
    if route is not None and route.top is unit:
        route.give_up_forward()


def run_ahead(gathered: Gathered, target: Running) -> Gathered | None:
    """What to launch of a unit from another one: on a route, of units on it; else of those that were on none."""
    if isinstance(gathered, Routed):
        return gathered.route.routed.get(target.unit)
    return None if target.followed else target.current()


def _around(unit: Unit) -> Route | None:
    """The route whose forward runs around this one."""
    run = running(unit)
    one: Unit | None = unit
    while one is not None:
        route: Route | None = running(one).route
        if route is not None and route.stage == "forward" and (one is not unit or run.calls or run.pass_call):
            return route
        one = one.outer
    return None


def _find(unit: Unit) -> Route | None:
    if not ledger.has_run or autograd.in_functorch() or not dynamo.is_called_through_compile():
        return None
    return _route_of(unit)


def _route_of(top: Unit) -> Route | None:
    """The way of the graph that ran last of those that gather the most of these units."""
    inside = top.inside()
    by_address = {param.address: (unit, param) for unit in inside for param in unit.params if param.address}
    stage = "forward" if torch.is_grad_enabled() else "inference"
    syncs = _synchronizes(top)
    if any(_synchronizes(unit) != syncs for unit in inside):
        return None
    reduces = syncs and any(param.shard.requires_grad for unit in inside for param in unit.params)
    backwards: dict[str, list[GraphText]] = {}  # of each step, the last one first
    for text, _ in ledger.ran():
        if text.stage == "backward":
            backwards.setdefault(text.step, []).append(text)
    best: tuple[int, GraphText, dict[str, Unit], GraphText | None] | None = None
    for text, addresses in ledger.ran():
        if text.stage == stage:
            units = _units_of(text, addresses, by_address)
            if units and (best is None or len(units) > best[0]):
                known = backwards.get(text.step, []) if stage == "forward" else []
                backward = next((one for one in known if _reduces(one) == reduces), None)
                # One that neither gathers nor reduces has no text.
                if backward is not None or stage == "inference" or not (known or reduces):
                    best = len(units), text, units, backward
    if best is None:
        return None
    _, forward, units, backward = best
    try:
        return Route(top, units, forward, backward)
    except ValueError as error:
        _logger.info("%s runs eagerly, and not as the compiled step did: %s", top.name, error)
        return None


def _reduces(text: GraphText) -> bool:
    return any(launch.kind != "all_gather" for launch in text.launches)


def _synchronizes(unit: Unit) -> bool:
    return unit.accumulation.sync and not unit.accumulation.decides_in_backward


def _units_of(
    text: GraphText, addresses: tuple[int, ...], by_address: Mapping[int, tuple[Unit, ShardedParam]]
) -> dict[str, Unit]:
    """The units that a graph reads, by what it calls them; none where one of them is another model's."""
    units = {}
    for (_, member), address in zip(text.firsts, addresses):
        unit, param = by_address.get(address, (None, None))
        if unit is None or param is None or param.fqn != member.fqn or unit.post_forward is not None:
            return {}
        if any(isinstance(one.shard, DTensor) and has_extension(one.fqn, one.shard) for one in unit.params):
            return {}
        units[member.unit] = unit
    return units
