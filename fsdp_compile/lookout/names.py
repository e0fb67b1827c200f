"""Turn entries of the ledger, which are quick to write, into links of chains, with the same names on every rank.

    eager        unit, "0.weight"                              ->  layers.3.0.weight      where the root finds it
    graph        "up.weight", first of all the shard at 7f..   ->  layers.3.up.weight     by the shard's address
    marker       "weight", the shard at 7f..                   ->  layers.3.up.weight     likewise
                 "weight"                                      ->  weight
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.param import ShardedParam
from ..core.unit import Unit, names_in, paths_in, unit_of
from ..passes.wire.ledger import Called, Issued, Launch
from ..passes.wire.spec import ParamSpec, with_part
from .chain import Link, Piece

_COPY = re.compile(r"@\d+$")  # the suffix of a parameter's name when a graph has it once more
_MOST = 4096  # pieces that are remembered; each belongs to a bucket, or to a graph


class Namer:
    """Knows the units of this process; used by the thread that compares, while others train."""

    def __init__(self) -> None:
        self._units: weakref.WeakSet[Unit] = weakref.WeakSet()
        self._by_address: dict[int, tuple[weakref.ref[ShardedParam], str, weakref.ref[Unit]]] = {}
        self._places: weakref.WeakKeyDictionary[Unit, tuple[int, dict[str, str]]] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[Unit, tuple[int, dict[str, str]]] = weakref.WeakKeyDictionary()
        self._pieces: dict[tuple[Any, ...], tuple[Any, Piece]] = {}
        self._placed: dict[tuple[Any, ...], tuple[Any, Piece]] = {}  # those whose names were found by an address

    def know(self, unit: Unit) -> None:
        self._units.add(unit)

    def another(self) -> Namer:
        """Return a namer that knows the same units, for another thread."""
        made = Namer()
        made._units.update(self._units)
        return made

    def of_launch(self, issued: Issued) -> Piece:
        """Return what was issued eagerly, as a piece of one link."""
        address = issued.address
        unit = issued.unit()
        key = (issued.kind, address, id(unit), *map(id, issued.specs))
        pieces = self._placed if address else self._pieces
        known = pieces.get(key)
        if known is None:
            specs, reduces = issued.specs, issued.kind != "all_gather"
            dtype = specs[0].reduce_dtype if reduces else specs[0].dtype
            num_bytes = sum(spec.reduce_bytes if reduces else spec.gather_bytes for spec in specs)
            wire = _wire(issued.kind, str(dtype).removeprefix("torch."), num_bytes, len(specs))
            names, sure, root = self._eager_names(unit, specs, address)
            link = Link(wire, names, sure, self._places_of(names, root))
            # The specs stay alive with the piece, so that their ids stay theirs.
            known = issued.specs, Piece((link,), "eager")
            _remember(pieces, key, known)
        return known[1]

    def of_call(self, called: Called) -> dict[str, Piece]:
        """Return what a graph issues, one piece a group."""
        text, addresses = called.text, called.addresses
        pieces = self._placed if addresses else self._pieces
        found: dict[str, Piece] = {}
        for group in text.groups:
            key = (id(text), group, addresses)
            known = pieces.get(key)
            if known is None:
                shown = {
                    one.unit: (name, self._at(address)) for (name, one), address in zip(text.firsts, addresses)
                }
                launches = [one for one in text.launches if one.group == group]
                links = []
                for one in launches:
                    first, (name, root) = shown.get(one.members[0].unit, ("", (None, None)))
                    names = _names_of(one, first, name)
                    wire = _wire(one.kind, one.dtype, one.num_bytes, len(names))
                    links.append(Link(wire, names, name is not None, self._places_of(names, root)))
                # The text stays alive with the piece, so that its id stays its own.
                known = text, Piece(tuple(links), f"{text.stage} graph of {len(text.launches)}")
                _remember(pieces, key, known)
            found[group] = known[1]
        return found

    def root_at(self, address: int) -> Unit | None:
        """Return the outermost unit around the parameter whose shard is at ``address`` now."""
        if not address:
            return None
        found = (unit for unit in list(self._units) if any(param.address == address for param in unit.params))
        return next((unit.root for unit in found), None)

    def forget_addresses(self) -> None:
        """Forget what was found by address: shards may move between two looks, and others take their places."""
        self._by_address.clear()
        self._placed.clear()

    def _eager_names(
        self, unit: Unit | None, specs: Sequence[ParamSpec], address: int
    ) -> tuple[tuple[str, ...], bool, Unit | None]:
        """Return the parameters' names, whether these are certain, and the outermost unit around the parameters."""
        if unit is None:
            shown, root = self._at(address) if len(specs) == 1 else (None, None)
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

    def _at(self, address: int) -> tuple[str, Unit] | tuple[None, None]:
        """Return the name of the parameter whose shard is at ``address`` now, and the outermost unit around it."""
        if not address:
            return None, None
        if address not in self._by_address:
            self._by_address = dict(self._look())
        ref, name, owner = self._by_address.get(address, (lambda: None, "", lambda: None))
        param, unit = ref(), owner()
        if param is None or unit is None or param.address != address:
            return None, None
        return name, unit.root

    def _look(self) -> Iterable[tuple[int, tuple[weakref.ref[ShardedParam], str, weakref.ref[Unit]]]]:
        for unit in list(self._units):
            names = self._names_in(unit)
            for param in unit.params:
                if param.address:
                    yield param.address, (weakref.ref(param), names.get(param.fqn, param.fqn), weakref.ref(unit))


def _remember(pieces: dict[tuple[Any, ...], tuple[Any, Piece]], key: tuple[Any, ...], known: tuple[Any, Piece]) -> None:
    if len(pieces) >= _MOST:
        pieces.clear()
    pieces[key] = known


def _wire(kind: str, dtype: str, num_bytes: int, num_params: int) -> str:
    return f"{kind} {dtype} {num_bytes} bytes a rank, {num_params} parameter{'s' if num_params > 1 else ''}"


def _names_of(launch: Launch, first: str, shown: str | None) -> tuple[str, ...]:
    """Return a launch's names, given the name of a parameter of its unit in the graph and, if known, in the model."""
    names = tuple(_COPY.sub("", name) for name in launch.names)
    if shown is None:
        return names
    return tuple(_moved(name, _COPY.sub("", first).partition(":")[0], shown) for name in names)


def _moved(name: str, first: str, shown: str) -> str:
    """Turn a name in a graph into one in the model, given the two names of another parameter of the unit."""
    same = 0
    while same < min(len(first), len(shown)) and first[-1 - same] == shown[-1 - same]:
        same += 1
    there, here = first[: len(first) - same], shown[: len(shown) - same]
    return here + name.removeprefix(there) if name.startswith(there) else name
