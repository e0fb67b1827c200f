"""The uses of parameters that a schedule is made of, by the units that these belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import fx

from ..ir import markers
from ..ir.nodes import passes_on, readers_of
from ..wire.spec import ParamSpec

# Uses are sorted by their turns: a place in the step, and a key that orders the uses of one place.
Turn = tuple[int, tuple[int | str, ...]]


@dataclass(frozen=True)
class UsedParam:
    """A parameter, and where a step uses it; of a reduction, where the gradient is there."""

    unit: str
    fqn: str  # in the model
    spec: ParamSpec
    place: tuple[int, ...]

    @property
    def turn(self) -> Turn:
        """The place, and the order of the parameters that one operation uses."""
        return self.place[0], (*self.place[1:], self.spec.order, self.fqn)


class _OfUnit(Protocol):
    @property
    def unit(self) -> str: ...


T = TypeVar("T", bound=_OfUnit)


def by_unit(found: Iterable[T]) -> dict[str, list[T]]:
    """Return what belongs to each unit, in its order."""
    units: dict[str, list[T]] = {}
    for one in found:
        units.setdefault(one.unit, []).append(one)
    return units


def units_around(units: Collection[str]) -> dict[str, list[str]]:
    """Return, for each unit, those of the others that it is inside of, by their paths in the model."""
    at: dict[str, list[str]] = {}
    for unit in units:
        for path in _path_of(unit).split(", "):  # a unit of several modules has as many paths
            at.setdefault(path, []).append(unit)
    around = {}
    for unit in units:
        steps = _path_of(unit).split(", ")[0].split(".")
        first = 1 if steps[0].startswith("@") else 0  # that use of the model itself is around
        paths = [".".join(steps[:length]) for length in range(first, len(steps))] if steps != [""] else []
        around[unit] = [*dict.fromkeys(outer for path in paths for outer in at.get(path, ()))]
    return around


def outermost(around: Mapping[str, Collection[str]]) -> set[str]:
    """Return the units that have others inside and none around them: in forward, their buckets come one by one."""
    return {one for outer in around.values() for one in outer if not around[one]}


def first_read(gathered: fx.Node, place: Mapping[fx.Node, int]) -> int:
    """Where a graph first computes with a parameter, looking through views and casts; its end when it never does."""
    readers = readers_of(gathered, lambda one: passes_on(one) or one.target in (markers.keep_slice, markers.unshard))
    return min((place[one] for one in readers), default=len(place))


def _path_of(unit: str) -> str:
    return unit.partition(":")[2]
