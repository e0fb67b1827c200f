"""Whether an eager forward stands in the place of a compiled one, and of which graph (see route.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from .._torch_compat import dynamo
from ..core.extension import has_extension
from ..core.param import ShardedParam
from ..core.unit import Unit
from ..passes.ledger import GraphText, ledger
from .gathered import Gathered
from .route import Route, Routed
from .running import Running, running

_logger = logging.getLogger(__name__)


def follow(unit: Unit) -> None:
    """Have the eager forward that begins go the way of the compiled step, where it stands in the place of one."""
    run = running(unit)
    if isinstance(run.gathered, Routed):
        if run.gathered.route.in_forward:
            return
        run.gathered.route.leave()
    run.followed = False
    if not ledger.has_run or not dynamo.is_called_through_compile():
        return
    route = _route_of(unit)
    if route is not None:
        for one, routed in route.routed.items():
            known = running(one)
            if known.gathered is not None:
                known.gathered.free()
            known.gathered, known.followed = routed, True


def may_run_ahead(gathered: Gathered, target: Running) -> bool:
    """Whether a unit's gathers may be launched from another unit: all that go one way, and what goes no way."""
    if isinstance(gathered, Routed):
        return isinstance(target.gathered, Routed) and target.gathered.route is gathered.route
    return not target.followed


def end_way(gathered: Gathered, unit: Unit) -> None:
    """A unit's forward ended, and with it that of the route where the unit is the outermost one."""
    if isinstance(gathered, Routed) and gathered.route.top is unit:
        gathered.route.end_forward()


def _route_of(top: Unit) -> Route | None:
    """The way of the graph that ran last of those that gather the most of these units."""
    inside = top.inside()
    by_address = {param.address: (unit, param) for unit in inside for param in unit.params if param.address}
    stage = "forward" if torch.is_grad_enabled() else "inference"
    syncs = top.accumulation.sync
    backwards: dict[str, GraphText] = {}  # that do with gradients what is done now; the last one of each step
    for text, _ in ledger.ran():
        if text.stage == "backward" and any(one.kind != "all_gather" for one in text.launches) == syncs:
            backwards.setdefault(text.step, text)
    best: tuple[GraphText, dict[str, Unit]] | None = None
    for text, addresses in ledger.ran():
        if text.stage == stage and (stage == "inference" or text.step in backwards):
            units = _units_of(text, addresses, by_address)
            if units and (best is None or len(units) > len(best[1])):
                best = text, units
    if best is None:
        return None
    forward, units = best
    backward = backwards[forward.step] if stage == "forward" else None
    try:
        return Route(top, units, forward, backward)
    except ValueError as error:
        _logger.info("%s runs eagerly, and not as the compiled step did: %s", top.name, error)
        return None


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
