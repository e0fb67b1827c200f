"""Finds out whether an eager forward runs in the place of a compiled one, and of which graph (see route.py)."""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any

from .._torch_compat import autograd, dynamo
from ..core.containers import tensors_in
from ..core.exchange import others_of
from ..core.unit import Unit
from ..passes.ledger import ledger
from .gathered import Gathered
from .route import Route
from .routed import Routed
from .running import Running, running
from .ways import InputsTrain, Way, own_way, way_of_others

_logger = logging.getLogger(__name__)


def enter_route(unit: Unit, around_graph: bool, inputs_train: InputsTrain) -> None:
    """Put an eager forward that begins on a route, if it runs in the place of a compiled one.

    A forward around a graph of its own follows a route only where a larger graph had the unit's parameters.
    """
    run = running(unit)
    route = _around(unit)
    if route is None:
        if run.route is not None:
            run.route.give_up_forward()
        route = _find(unit, inputs_train)
        if around_graph and route is not None and unit not in route.routed:
            route = None  # it is the route of units inside that graph
        run.route = route
    run.followed = route is not None and unit in route.routed
    if route is not None and unit in route.routed:
        routed = route.routed[unit]
        if run.gathered is not None and run.gathered is not routed:
            run.gathered.free()
        run.gathered = routed


def inputs_train(unit: Unit, args: Any, kwargs: Any) -> bool:
    """Whether an input of a forward or a parameter inside the unit requires a gradient, unsharded ones included."""
    inside = (param for module in unit.modules for param in module.parameters())
    return any(one.requires_grad for one in itertools.chain(tensors_in((args, kwargs)), inside))


def replaces_graphs(unit: Unit, args: Any, kwargs: Any) -> bool:
    """Whether a forward with graph breaks on this rank alone is to run in Python, in place of the others' one graph."""
    if autograd.in_functorch() or running(unit).iteration.depth or others_of(unit.root).is_decided:
        return False
    train = functools.partial(inputs_train, unit, args, kwargs)
    return not (ledger.has_run and own_way(unit, train) is not None) and way_of_others(unit, train) is not None


def end_route(unit: Unit) -> None:
    """End the forward of the unit's route, if the unit is the outermost one on it."""
    route = running(unit).route
    if route is not None and route.top is unit:
        route.end_forward()


def abandon_route(unit: Unit) -> None:
    """Give up the unit's route after an error, if the unit is the outermost one on it."""
    route = running(unit).route
    if route is not None and route.top is unit:
        route.give_up_forward()


def run_ahead(gathered: Gathered, target: Running) -> Gathered | None:
    """Return what to prefetch for ``target``: on a route, only units on it; otherwise, only units that are on none."""
    if isinstance(gathered, Routed):
        return gathered.route.routed.get(target.unit)
    return None if target.followed else target.current()


def _around(unit: Unit) -> Route | None:
    """Return the route whose forward runs around this one; None without one."""
    run = running(unit)
    one: Unit | None = unit
    while one is not None:
        route: Route | None = running(one).route
        if route is not None and route.stage == "forward" and (one is not unit or run.calls or run.pass_call):
            return route
        one = one.outer
    return None


def _find(unit: Unit, inputs_train: InputsTrain) -> Route | None:
    if autograd.in_functorch():
        return None
    is_compiled = ledger.has_run and dynamo.is_called_through_compile()
    if is_compiled:
        route = _route(unit, own_way(unit, inputs_train))
        if route is not None:
            return route
    if running(unit).iteration.depth or others_of(unit.root).is_decided:
        return None  # a forward around it has asked, or the answer is known
    if ledger.has_run and not is_compiled and own_way(unit, inputs_train) is not None:
        return None  # this rank has the graph, and was told to run without it
    return _route(unit, way_of_others(unit, inputs_train))


def _route(top: Unit, way: Way | None) -> Route | None:
    try:
        return None if way is None else Route(top, way)
    except ValueError as error:
        _logger.info("%s runs eagerly, and not as the compiled step did: %s", top.name, error)
        return None
