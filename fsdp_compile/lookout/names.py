"""Turn entries of the ledger, which are quick to write, into links of chains, with the same names on every rank.

    eager        unit, "0.weight"                              ->  layers.3.0.weight      where the root finds it
    graph        "up.weight", first of all the shard at 7f..   ->  layers.3.up.weight     by the shard's address
    marker       "weight", the shard at 7f..                   ->  layers.3.up.weight     likewise
                 "weight"                                      ->  weight
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ..core.param import ShardedParam
from ..core.unit import Unit, names_in, paths_in, unit_of
from ..passes.wire.ledger import Called, Issued, ListedLaunch
from ..passes.wire.spec import ParamSpec, with_part, without_use
from .chain import ChainLink

T = TypeVar("T")


class Namer:
    """Knows the units of this process; used by the thread that compares, while others train."""

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self._units: list[weakref.ref[Unit]] = []  # a copy of a list is whole, whatever other threads do meanwhile
        self._by_address: dict[int, tuple[weakref.ref[ShardedParam], str, weakref.ref[Unit]]] = {}
        self._places: weakref.WeakKeyDictionary[Unit, tuple[int, dict[str, str]]] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[Unit, tuple[int, dict[str, str]]] = weakref.WeakKeyDictionary()
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
            names, sure, root = self._eager_names(unit, specs, address)
            return ChainLink(wire, names, sure, self._places_of(names, root))

        return self._once((issued.kind, address, id(unit), *map(id, specs)), specs, make)

    def of_call(self, called: Called) -> dict[str, list[ChainLink]]:
        """Return what a graph issues, by group."""
        text, addresses = called.text, called.addresses

        def make() -> dict[str, list[ChainLink]]:
            shown = {one.unit: (name, self.at(address)) for (name, one), address in zip(text.firsts, addresses)}
            found: dict[str, list[ChainLink]] = {group: [] for group in text.groups}
            for one in text.launches:
                first, (name, root) = shown.get(one.members[0].unit, ("", (None, None)))
                names = _names_of(one, first, name)
                wire = _wire(one.kind, one.dtype, one.num_bytes, len(names))
                source = f"{text.stage} graph of {len(text.launches)}"
                found[one.group].append(ChainLink(wire, names, name is not None, self._places_of(names, root), source))
            return found

        return self._once((id(text), addresses), text, make)

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

    def _eager_names(
        self, unit: Unit | None, specs: Sequence[ParamSpec], address: int
    ) -> tuple[tuple[str, ...], bool, Unit | None]:
        """Return the parameters' names, whether these are certain, and the outermost unit around the parameters."""
        if unit is None:
            shown, root = self.at(address) if len(specs) == 1 else (None, None)
            return tuple(with_part(shown or spec.fqn, spec.part) for spec in specs), shown is not None, root
        known = self._names_in(unit)
        return tuple(with_part(known.get(spec.fqn, spec.fqn), spec.part) for spec in specs), True, unit.root

    def _places_of(self, names: tuple[str, ...], root: Unit | None) -> tuple[str, ...]:
        """Return the places in the model of the parameters with these names; empty if the model is not known."""
        if root is None:
            return ()
        known = self._places.get(root)
        if known is None or known[0] != root.version:
            all_names = (name for unit in root.inside() for name in self._names_in(unit).values())
            places = {name: f"{place} of {root.label}" for place, name in enumerate(all_names)}
            known = self._places[root] = root.version, places
        bases = [name.partition(":") for name in names]
        return tuple(f"{known[1].get(base, base)}{colon}{part}" for base, colon, part in bases)

    def _names_in(self, unit: Unit) -> dict[str, str]:
        known = self._names.get(unit)
        if known is None or known[0] != unit.version:
            self._look_through(unit)
        return self._names[unit][1]

    def _look_through(self, unit: Unit) -> None:
        """Find the names of a unit's parameters, and, on the same walk, of all that are in the model with it."""
        paths = paths_in(unit.root.modules)
        for one in dict.fromkeys((unit, *(inner for module in paths if (inner := unit_of(module)) is not None))):
            self._names[one] = one.version, names_in(one, paths)

    def at(self, address: int) -> tuple[str, Unit] | tuple[None, None]:
        """Return the name of the parameter whose shard is at ``address`` now, and the outermost unit around it."""
        if not address:
            return None, None
        if self._looked_up(address) is None:
            self._by_address = {}
            for unit in self.units:
                names = self._names_in(unit)
                for param in unit.params:
                    if param.address:
                        found = weakref.ref(param), names.get(param.fqn, param.fqn), weakref.ref(unit)
                        self._by_address[param.address] = found
        return self._looked_up(address) or (None, None)

    def _looked_up(self, address: int) -> tuple[str, Unit] | None:
        """Return that as the last look at all units found it; None if it is not so any more."""
        ref, name, owner = self._by_address.get(address, (lambda: None, "", lambda: None))
        param, unit = ref(), owner()
        return None if param is None or unit is None or param.address != address else (name, unit.root)


def _wire(kind: str, dtype: str, num_bytes: int, num_params: int) -> str:
    return f"{kind} {dtype} {num_bytes} bytes a rank, {num_params} parameter{'s' if num_params > 1 else ''}"


def _names_of(launch: ListedLaunch, first: str, shown: str | None) -> tuple[str, ...]:
    """Return a launch's names, given the name of a parameter of its unit in the graph and, if known, in the model."""
    names = tuple(without_use(name) for name in launch.names)
    if shown is None:
        return names
    return tuple(_moved(name, without_use(first).partition(":")[0], shown) for name in names)


def _moved(name: str, first: str, shown: str) -> str:
    """Turn a name in a graph into one in the model, given the two names of another parameter of the unit."""
    same = 0
    while same < min(len(first), len(shown)) and first[-1 - same] == shown[-1 - same]:
        same += 1
    there, here = first[: len(first) - same], shown[: len(shown) - same]
    return here + name.removeprefix(there) if name.startswith(there) else name
