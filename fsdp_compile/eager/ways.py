"""Finds out what compiled ranks launch where this rank runs eagerly: its own graph says it, or other ranks do.

    this rank ran the graph           own_way: of the graphs in the ledger, the one that gathers the most of the units
    it never did, others may          way_of_others: asks them once (core/exchange.py)
    a graph runs for the first time   tell: for ranks that ask
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..core.exchange import others_of
from ..core.extension import has_extension
from ..core.param import ShardedParam
from ..core.unit import Unit
from ..passes.ledger import GraphText, Launch, Member, ledger
from .running import running

_logger = logging.getLogger(__name__)

_units: weakref.WeakSet[Unit] = weakref.WeakSet()
_heard_of: set[int] = set()  # addresses of shards, in models of which one shard was gathered alone


@dataclass(frozen=True)
class Way:
    """The collectives of a forward and its backward, whose members name units as the graph does (keys of ``units``)."""

    units: Mapping[str, Unit]
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...] = ()


InputsTrain = Callable[[], bool]  # whether anything else that the forward reads requires a gradient


def _surely() -> bool:
    return True


def know(unit: Unit) -> None:
    """Register a new unit, so that graphs which read its parameters are recognized."""
    unit.made_after = ledger.made_at = ledger.num_begun
    _units.add(unit)
    ledger.on_graph, ledger.on_parameter = tell, _tell_of_parameter


def synchronizes(unit: Unit) -> bool:
    return unit.accumulation.sync and not unit.accumulation.decides_in_backward


def own_way(top: Unit, inputs_train: InputsTrain = _surely) -> Way | None:
    """Return what a graph that this rank ran launches for a forward of ``top``; None without such a graph."""
    units = top.inside()
    syncs = synchronizes(top)
    if any(synchronizes(unit) != syncs for unit in units):
        return None
    reduces = syncs and any(param.shard.requires_grad for unit in units for param in unit.params)
    stage = _stage(units, inputs_train)
    # The last search holds if no graph has run since, as in every step of a rank that stays eager.
    looked_for = ledger.num_begun, stage, reduces, len(units)
    run = running(top)
    if run.own_texts is None or run.own_texts[0] != looked_for:
        run.own_texts = looked_for, _texts_of(units, stage, reduces)
    texts = run.own_texts[1]
    if texts is None:
        return None
    forward, addresses, backward = texts
    found = _units_of(forward, addresses, _by_address(units))
    return Way(found, forward.launches, () if backward is None else backward.launches) if found else None


def _texts_of(
    units: Iterable[Unit], stage: str, reduces: bool
) -> tuple[GraphText, tuple[int, ...], GraphText | None] | None:
    """Return the texts and addresses of the graph that gathers the most of these units; of several, the last to run."""
    units = list(units)
    by_address, since = _by_address(units), max((unit.made_after for unit in units), default=0)
    backwards: dict[str, list[GraphText]] = {}  # by step, the last one to run first
    for text, _ in ledger.ran(since):
        if text.stage == "backward":
            backwards.setdefault(text.step, []).append(text)
    best: tuple[int, GraphText, tuple[int, ...], GraphText | None] | None = None
    for text, addresses in ledger.ran(since):
        if text.stage == stage:
            found = _units_of(text, addresses, by_address)
            if found and (best is None or len(found) > best[0]):
                known = backwards.get(text.step, []) if stage == "forward" else []
                backward = next((one for one in known if _reduces(one.launches) == reduces), None)
                # A backward that neither gathers nor reduces has no text.
                if backward is not None or stage == "inference" or not (known or reduces):
                    best = len(found), text, addresses, backward
    return None if best is None else best[1:]


def way_of_others(top: Unit, inputs_train: InputsTrain = _surely) -> Way | None:
    """Return what ranks that compile launch for a forward of ``top``, of which this rank has no graph."""
    others = others_of(top.root)
    syncs, units = synchronizes(top), top.root.inside()
    if any(synchronizes(unit) != syncs or _has_extension(unit) for unit in units):
        return None
    kind = _kind(syncs, _stage(top.inside(), inputs_train))
    if others.asks_for(kind) and all(map(is_here, top.inside())):
        return None  # nothing is gathered, so this rank may run the forward alone
    text = ledger.wait(others.text, kind)
    if not text:
        return None
    way = _loaded(text, units)
    inside = top.inside()
    return way if all(unit in inside for unit in way.units.values()) else None


def tell(text: GraphText, addresses: tuple[int, ...]) -> None:
    """When a graph runs for the first time, tell ranks that will never have it what it launches."""
    if text.stage == "backward":
        return
    try:
        wanted = set(addresses)
        found = [unit.root for unit in list(_units) if any(one.address in wanted for one in unit.params)]
        roots = sorted(dict.fromkeys(found), key=lambda root: root.label)  # ``others_of`` numbers them as they come
        for root in roots:
            others = others_of(root)
            if not others.is_decided:
                said = _dumped(text, addresses, root)
                if said is None:
                    others.refuse()
                else:
                    others.tell(_kind(synchronizes(root), text.stage), said)
    except Exception:  # our mistake must not stop a graph that would run right
        _logger.warning("other ranks were not told what a %s graph launches", text.stage, exc_info=True)


def _tell_of_parameter(address: int) -> None:
    """Tell other ranks that a compiler without our passes gathers each parameter by itself: no rank can follow that."""
    if address in _heard_of:
        return
    _heard_of.add(address)
    for unit in list(_units):
        if any(one.address == address for one in unit.params):
            others = others_of(unit.root)
            if not others.has_asked:  # else this is a read in a forward that runs eagerly
                others.refuse()
            _heard_of.update(one.address for inner in unit.root.inside() for one in inner.params if one.address)


def _dumped(text: GraphText, addresses: tuple[int, ...], root: Unit) -> str | None:
    then = () if text.stage == "inference" else text.then
    units = root.inside()
    found = _units_of(text, addresses, _by_address(units))
    if not found or then is None or text.stage == "whole":
        return None
    if len({*found.values()}) < len(found):  # the graph reads two models, which have the same shards
        return None
    members = {one.unit for launch in (*text.launches, *then) for one in launch.members}
    if not members <= found.keys():
        return None
    places = {name: units.index(unit) for name, unit in found.items()}
    return json.dumps([places, _rows(text.launches), _rows(then)], separators=(",", ":"))


def _loaded(text: str, units: list[Unit]) -> Way:
    places, forward, backward = json.loads(text)
    found = {name: units[place] for name, place in places.items()}
    return Way(found, tuple(starmap(_launch, forward)), tuple(starmap(_launch, backward)))


def _rows(launches: Iterable[Launch]) -> list[Any]:
    return [[one.kind, one.num_bytes, one.members] for one in launches]


def _launch(kind: str, num_bytes: int, members: list[list[str]]) -> Launch:
    """Return the launch without its group, whose name differs between ranks: the parameters say which group it is."""
    named = tuple(starmap(Member, members))
    return Launch(kind, "", "", num_bytes, tuple(one.fqn for one in named), named)


def _stage(units: Iterable[Unit], inputs_train: InputsTrain) -> str:
    """Return which graph AOTAutograd makes of a forward: one without a backward if nothing requires a gradient."""
    if not torch.is_grad_enabled():
        return "inference"
    shards_train = any(param.shard.requires_grad for unit in units for param in unit.params)
    return "forward" if shards_train or inputs_train() else "inference"


def _kind(syncs: bool, stage: str) -> str:
    return stage if syncs or stage == "inference" else f"{stage} without sync"


def _has_extension(unit: Unit) -> bool:
    """Whether a parameter says itself what travels, by an all-gather extension: no rank follows such a unit."""
    return any(isinstance(one.shard, DTensor) and has_extension(one.fqn, one.shard) for one in unit.params)


def is_here(unit: Unit) -> bool:
    """Whether a forward of the unit gathers nothing: it is gathered, or full parameters are in its shards' places."""
    gathered = running(unit).gathered
    return (gathered is not None and gathered.is_full) or all(one.param is not one.shard for one in unit.params)


def _reduces(launches: Iterable[Launch]) -> bool:
    return any(launch.kind != "all_gather" for launch in launches)


def _by_address(units: Iterable[Unit]) -> dict[int, tuple[Unit, ShardedParam]]:
    return {param.address: (unit, param) for unit in units for param in unit.params if param.address}


def _units_of(
    text: GraphText, addresses: tuple[int, ...], by_address: Mapping[int, tuple[Unit, ShardedParam]]
) -> dict[str, Unit]:
    """Return the units that a graph reads, by its names for them; none if one is another model's or not followed."""
    units = {}
    for (_, member), address in zip(text.firsts, addresses):
        unit, param = by_address.get(address, (None, None))
        if unit is None or param is None or param.fqn != member.fqn or unit.post_forward is not None:
            return {}
        if _has_extension(unit):
            return {}
        units[member.unit] = unit
    return units
