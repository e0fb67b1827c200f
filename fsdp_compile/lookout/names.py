"""Turn entries of the ledger, which are quick to write, into links of chains, with the same names on every rank.

    eager        unit, "0.weight"                             ->  layers.3.0.weight      where the root finds it
    graph        "up.weight" of a unit, a shard of it at 7f.. ->  layers.3.up.weight     by the shard's address
    marker       "weight", the shard at 7f..                  ->  layers.3.up.weight     likewise
                 "weight"                                     ->  weight
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ..core.param import ShardedParam
from ..core.unit import Unit, names_in, paths_in, unit_of
from ..passes.wire.ledger import Called, Issued
from ..passes.wire.spec import with_part, without_use
from .chain import ChainLink

T = TypeVar("T")
# ``_seen`` of a unit when the unit was looked through; and, by FQN, the name and the place in the model of each of its
# parameters.
_Known = tuple[tuple[int, int, int], dict[str, tuple[str, str]]]


class Namer:
    """Knows the units of this process; used by the thread that compares, while others train."""

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self._units: list[weakref.ref[Unit]] = []  # a copy of a list is whole, whatever other threads do meanwhile
        self._by_address: dict[int, tuple[weakref.ref[ShardedParam], weakref.ref[Unit]]] = {}
        self._known: weakref.WeakKeyDictionary[Unit, _Known] = weakref.WeakKeyDictionary()
        self._made: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        for unit in units:
            self.know(unit)

    def know(self, unit: Unit) -> None:
        """Add a unit, so that its parameters can be named."""
        self._units.append(weakref.ref(unit, self._units.remove))

    @property
    def units(self) -> list[Unit]:
        """The units that there are."""
        return [unit for one in [*self._units] if (unit := one()) is not None]

    def of_launch(self, issued: Issued) -> ChainLink:
        """Return what was issued eagerly."""
        specs, address, unit = issued.specs, issued.address, issued.unit()

        def make() -> ChainLink:
            reduces = issued.kind != "all_gather"
            dtype = specs[0].reduce_dtype if reduces else specs[0].dtype
            num_bytes = sum(spec.reduce_bytes if reduces else spec.gather_bytes for spec in specs)
            wire = _wire(issued.kind, str(dtype).removeprefix("torch."), num_bytes, len(specs))
            owner = self.at(address) if unit is None else unit  # a marker knows no unit
            fqns = [with_part(spec.fqn, spec.part) for spec in specs]
            return self._link(wire, [(owner, fqn, fqn) for fqn in fqns], "eager")

        return self._once((issued.kind, address, id(unit), *map(id, specs)), specs, make)

    def of_call(self, called: Called) -> dict[str, list[ChainLink]]:
        """Return what a graph issues, by group."""
        text, addresses = called.text, called.addresses

        def make() -> dict[str, list[ChainLink]]:
            owners = {unit: self.at(address) for unit, address in zip(text.units, addresses)}
            source = f"{text.stage} graph of {len(text.launches)}"
            found: dict[str, list[ChainLink]] = {group: [] for group in text.groups}
            for one in text.launches:
                params = [
                    (owners.get(member.unit), member.fqn, without_use(name))
                    for member, name in zip(one.members, one.names, strict=True)
                ]
                wire = _wire(one.kind, one.dtype, one.num_bytes, len(params))
                found[one.group].append(self._link(wire, params, source))
            return found

        return self._once((id(text), addresses), text, make)

    def _link(self, wire: str, params: Sequence[tuple[Unit | None, str, str]], source: str) -> ChainLink:
        """Return a link that names these parameters.

        Each is given by its unit, its FQN in the unit, and another name, which is used if the unit or the FQN is not
        known. The link's names are sure if no such name is used.
        """
        names: list[str] = []
        places: list[str] = []
        for unit, fqn, otherwise in params:
            base, colon, part = fqn.partition(":")
            found = None if unit is None else self._in(unit).get(base)
            if found is None:
                names.append(otherwise)
            else:
                names.append(f"{found[0]}{colon}{part}")
                places.append(f"{found[1]}{colon}{part}")
        sure = len(places) == len(names)
        return ChainLink(wire, tuple(names), sure, tuple(places) if sure else (), source)

    def _once(self, key: tuple[Any, ...], kept: Any, make: Callable[[], T]) -> T:
        """Return what is made for this key, made once; with it stays ``kept``, whose ids are in the key."""
        if key not in self._made:
            self._made[key] = kept, make()
        made: T = self._made[key][1]
        return made

    def forget_addresses(self) -> None:
        """Forget what was found by address: shards may move between two looks, and others take their places."""
        self._by_address.clear()
        self._made.clear()

    def _in(self, unit: Unit) -> dict[str, tuple[str, str]]:
        """Return the names and places of a unit's parameters, by FQN."""
        known = self._known.get(unit)
        if known is None or known[0] != _seen(unit):
            self._look_through(unit)
            known = self._known[unit]
        return known[1]

    def _look_through(self, unit: Unit) -> None:
        """Find the names and places of a unit's parameters, and, on the same walk, of all in the model with it."""
        root, place = unit.root, itertools.count()
        paths = paths_in(root.modules)
        inside = (inner for module in paths if (inner := unit_of(module)) is not None)
        for one in dict.fromkeys((*inside, unit)):
            seen, names = _seen(one), names_in(one, paths)
            self._known[one] = seen, {fqn: (name, f"{next(place)} of {root.label}") for fqn, name in names.items()}

    def at(self, address: int) -> Unit | None:
        """Return the unit of the parameter whose shard is at ``address`` now."""
        if address and self._looked_up(address) is None:
            self._by_address = {
                param.address: (weakref.ref(param), weakref.ref(unit))
                for unit in self.units
                for param in unit.params
                if param.address
            }
        return self._looked_up(address)

    def _looked_up(self, address: int) -> Unit | None:
        """Return that as the last look at all units found it; None if it is not so any more."""
        ref, owner = self._by_address.get(address, (lambda: None, lambda: None))
        param = ref()
        return None if param is None or param.address != address else owner()


def _seen(unit: Unit) -> tuple[int, int, int]:
    """Return what the names and places of a unit's parameters depend on."""
    return unit.version, id(unit.root), unit.root.version


def _wire(kind: str, dtype: str, num_bytes: int, num_params: int) -> str:
    return f"{kind} {dtype} {num_bytes} bytes a rank, {num_params} parameter{'s' if num_params > 1 else ''}"
