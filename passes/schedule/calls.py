"""Tell the uses of a unit apart, where a graph's forward calls it again after another unit: each has its own markers.

    calls                    a   a   b   a   b            Dynamo counts the calls of each module
    uses                     a   .   b   a@2 b@2          a call that follows one of the same unit goes on with its use

A use is gathered and reduced by itself, as on the eager path, and the begin of another unit's use ends it. A unit that
is called inside the second use of another one is named so: ``outer@2.inner``; ``@2`` is that of the model itself. In
the outermost unit, whose buckets come one by one, each bucket that is read for the first time ends the uses of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from ..ir.provenance import Marker, annotate_reductions, calls_around, find_unshards, name_gathers, put_in_use
from ..wire.spec import with_part
from .buckets import gather_buckets
from .uses import first_read, outermost, units_around


class _Call(NamedTuple):
    """A call of one of a unit's modules."""

    unit: _Unit
    member: str  # the module's path in the unit's name
    path: str  # by which it is called: another one, if the module stands in two places of the model
    number: int  # of its calls that came before


@dataclass(eq=False)
class _Unit:
    """A unit, as far as the graph has been read."""

    members: tuple[str, ...]  # the paths of its modules
    bucket_of: dict[str, int]  # that of each parameter, if the unit's buckets come one by one
    use: int = 0
    path: str = ""  # the unit's name in this use
    call: _Call | None = None
    begun: set[_Call] = field(default_factory=set)
    not_run_yet: set[str] = field(default_factory=set)  # modules that have yet to run in this use
    has_ended: bool = False
    read: set[int] = field(default_factory=set)  # buckets, in this use


def name_markers(graph: fx.Graph) -> None:
    """Name all markers of a graph that was not cut: by parameter, unit and use."""
    name_gathers(graph)
    _number_uses(graph)
    annotate_reductions(graph)


def _number_uses(graph: fx.Graph) -> None:
    """Write on each gather which use of its unit it is of, if the graph calls a module more than once."""
    gathers = find_unshards(graph)
    calls = {one.node: [*calls_around(one.node)] for one in gathers}
    known_calls = {call for around in calls.values() for call in around}
    if len(known_calls) == len({module for module, *_ in known_calls}):
        return  # no module is called twice
    place = {node: index for index, node in enumerate(graph.nodes)}
    units = _units_of(gathers)
    by_path = {path: (unit, path) for unit in units.values() for path in unit.members}
    known = {module: by_path[path] for module, path, _ in known_calls if path in by_path}
    times: Counter[str] = Counter()
    for one in sorted(gathers, key=lambda one: min(first_read(one.node, place), len(place) - 1)):
        running = [_Call(*known[module], path, number) for module, path, number in calls[one.node] if module in known]
        if "" in by_path and by_path[""] not in known.values():  # the frame's own module is in no stack
            running.insert(0, _Call(*by_path[""], "", 0))
        _begin(running, units.values(), times)
        unit = units[one.unit]
        bucket = unit.bucket_of.get(with_part(one.spec.fqn, one.spec.part))
        if bucket is not None and bucket not in unit.read:
            unit.read.add(bucket)
            _end_others(units.values(), running)
        if unit.use > 1:
            put_in_use(one.node, unit.use, unit.path)


def _units_of(gathers: Sequence[Marker]) -> dict[str, _Unit]:
    members: dict[str, dict[str, Marker]] = {}
    for one in gathers:
        members.setdefault(one.unit, {})[with_part(one.spec.fqn, one.spec.part)] = one
    in_parts = outermost(units_around(members))
    units = {}
    for name, its in members.items():
        buckets = gather_buckets([one.spec for one in its.values()]) if name in in_parts else []
        fqns = list(its)
        bucket_of = {fqns[index]: number for number, bucket in enumerate(buckets) for index in bucket}
        units[name] = _Unit(tuple(name.partition(":")[2].split(", ")), bucket_of)
    return units


def _begin(running: Sequence[_Call], units: Iterable[_Unit], times: Counter[str]) -> None:
    """Begin the calls around a read that have not begun yet; each goes on with its unit's use, or begins the next."""
    around: _Unit | None = None
    for depth, call in enumerate(running):
        unit = call.unit
        if call not in unit.begun:
            if around is None and unit.use:  # nothing goes on from one forward of the outermost unit to the next
                for one in units:
                    one.has_ended, one.not_run_yet = True, set()
            goes_on_at_once = bool(unit.use) and not unit.has_ended and not unit.not_run_yet
            if unit.has_ended or not unit.use:
                paths = [_inside(path, around) for path in unit.members]
                name = ", ".join(paths)
                times[name] += 1
                unit.path = name if times[name] == 1 else ", ".join(f"{path}@{times[name]}" for path in paths)
                unit.use, unit.not_run_yet, unit.read = unit.use + 1, {*unit.members}, set()
            unit.call, unit.has_ended = call, False
            unit.begun.add(call)
            unit.not_run_yet.discard(call.member)
            if not goes_on_at_once:
                _end_others(units, running[: depth + 1])
        around = unit


def _end_others(units: Iterable[_Unit], running: Sequence[_Call]) -> None:
    """End the uses of units that do not run, unless some of a unit's modules have yet to run in its use."""
    for unit in units:
        unit.has_ended |= bool(unit.use) and unit.call not in running and not unit.not_run_yet


def _inside(path: str, around: _Unit | None) -> str:
    """Return a unit's path, behind the name of the use that calls it."""
    for member, used in zip(around.members, around.path.split(", ")) if around is not None else ():
        if not member:  # the model itself
            return f"{used}.{path}" if used else path
        if path.startswith(f"{member}."):
            return used + path[len(member) :]
    return path
