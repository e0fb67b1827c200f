"""Tell what memory holds over a whole graph: bytes of each kind at each moment, and every storage alive at the peak.

    shards     ________________________          the callers', from begin to end
    gathered   __/~~\\__/~~~~\\___
    saved      ____/~~~~~~~~~~~~~~~~~~~

memory.py counts bytes. This module keeps the kinds apart, and tells which parameter or module a storage belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..ir.aliases import Storage, storages_of
from ..ir.meta import GRADIENT_OF, PARAMETER, ROLE, Role, works_for
from ..ir.plan import Plan, named
from ..ir.provenance import reader_path
from ..wire.collectives import is_launch
from .memory import (
    ACTIVATION,
    BUFFER,
    GATHERED,
    GRADIENT,
    OTHER,
    SHARD,
    GraphMemory,
    Owned,
    bytes_alive,
    kinds_of,
    own_and_callers,
    results_of,
    saved_by,
    storages_at,
    storages_given,
    taken_as,
)

INPUT = "batch and buffers"
RETURNED = "returned by forward"
KINDS = (SHARD, INPUT, RETURNED, GATHERED, BUFFER, ACTIVATION, GRADIENT, OTHER)  # in stacking order


@dataclass(frozen=True)
class MemoryOwners:
    """The memory of one graph, as Inductor compiles it, with what its callers hold."""

    events: tuple[str, ...]  # the nodes at which memory was counted: all calls
    of_kind: Mapping[str, tuple[int, ...]]  # bytes of each kind at each event
    peak: tuple[Owned, ...]  # alive at the first peak, largest first
    callers: tuple[Owned, ...]  # what callers hold: inputs that are not given up
    peak_at: str = ""  # the node at the peak, and what it holds

    @property
    def alive(self) -> list[int]:
        return [sum(column) for column in zip(*self.of_kind.values())]


def owners_of(
    graph: fx.Graph,
    plan: Plan,
    given_up: Collection[str] = (),
    kinds: Mapping[str, str] | None = None,
    held: Sequence[Owned] | None = None,
) -> MemoryOwners:
    """Return the memory of a graph by kinds and owners.

    ``kinds`` tells what those inputs hold that another graph made; ``held`` is alive throughout. Without ``held``, what
    the callers of this graph hold is alive throughout.
    """
    found, memory = kinds_of(graph), GraphMemory.of(graph)
    given = storages_given(memory, given_up)
    for storage in found:
        if is_launch(storage.node) and works_for(storage.node, "gather"):
            found[storage] = GATHERED  # also if it is unpacked before it is read
        elif storage.node.op == "placeholder":
            told = (kinds or {}).get(storage.node.name)
            is_callers = found[storage] in (ACTIVATION, OTHER) and storage not in given
            found[storage] = told or (INPUT if is_callers else found[storage])
    nodes, names = list(graph.nodes), _StorageNames(graph, plan)

    def owned(storage: Storage) -> Owned:
        return Owned(storage.node.name, names.of(storage), found[storage], storage.num_bytes)

    own, of_callers = own_and_callers(memory, given_up)
    if held is None:
        held = [owned(life.storage) for life in of_callers if life.storage.num_bytes]
    calls = [place for place, node in enumerate(nodes) if node.op == "call_function"]
    of_kind = {}
    for kind in KINDS:
        alive = bytes_alive([life for life in own if found[life.storage] == kind], len(nodes))
        stays = sum(one.num_bytes for one in held if one.kind == kind)
        of_kind[kind] = tuple(alive[place] + stays for place in calls)
    totals = [sum(column) for column in zip(*of_kind.values())]
    peak = calls[totals.index(max(totals))] if totals else 0
    ordered = sorted((*held, *map(owned, storages_at(peak, own))), key=lambda one: -one.num_bytes)
    events = tuple(nodes[place].name for place in calls)
    return MemoryOwners(events, of_kind, tuple(ordered), tuple(held), names.at(nodes[peak]) if calls else "")


def saved_kinds(forward: fx.Graph, plan: Plan, backward: fx.Graph) -> dict[str, str]:
    """Return what the tensors hold that forward saved for backward, by their names in backward."""
    kinds, storages = kinds_of(forward), storages_of(forward)
    kept = {fqn for bucket in plan.gathers for fqn in bucket.fqns}
    said = {}
    num_results = saved_by(forward, backward)
    for name, node in zip(taken_as(forward, backward, num_results), results_of(forward)[num_results:]):
        if not name or not isinstance(node, fx.Node) or not storages[node]:
            continue
        kind = kinds[storages[node][0]]
        is_whole = node.meta.get(PARAMETER) in kept
        said[name] = GATHERED if is_whole or kind in (GATHERED, BUFFER) else kind
    return said


class _StorageNames:
    """The parameters and modules that the storages of a graph belong to."""

    def __init__(self, graph: fx.Graph, plan: Plan) -> None:
        storages = storages_of(graph)
        self._said: dict[Storage, str] = {}
        self._of_node: dict[fx.Node, str] = {}
        sent: set[Role] = set()  # roles whose launch stands in front
        for node in graph.nodes:
            if works_for(node, "gather") or works_for(node, "reduce"):
                role: Role = node.meta[ROLE]
                name = named(plan.buckets(role.kind)[role.bucket].fqns)
                self._of_node[node] = _held(role.kind, is_launch(node), role in sent) + name
                for storage in storages[node]:
                    if storage.node is node:  # else the node is a view of it
                        self._said.setdefault(storage, self._of_node[node])
                reads = [one for source in node.all_input_nodes for one in storages[source] if role.kind == "gather"]
                for storage in reads:
                    self._said.setdefault(storage, name)
                if is_launch(node):
                    sent.add(role)
            for key, prefix in ((PARAMETER, ""), (GRADIENT_OF, "grad ")):
                if key in node.meta:
                    for storage in storages[node]:
                        if not is_launch(storage.node):  # that of a launch holds its whole bucket
                            self._said[storage] = prefix + node.meta[key]

    def at(self, node: fx.Node) -> str:
        """Describe a node as a place in the graph."""
        said = self._of_node.get(node, "") or module_of(node)
        return f"{node.name} ({said})" if said else node.name

    def of(self, storage: Storage) -> str:
        """Return a storage's parameters, or else the module whose code allocated it."""
        return self._said.get(storage) or module_of(storage.node)


def _held(kind: str, is_launch: bool, is_behind: bool) -> str:
    """Say what a bucket's node holds of its parameters."""
    if kind == "gather":
        return "" if is_launch or is_behind else "packed shards of "
    return "received gradients of " if is_launch else "reduced gradients of " if is_behind else "packed gradients of "


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that a node's code belongs to; empty if it is not known."""
    model, path = reader_path(node) or ("", [])
    return ".".join([*([model] if model not in ("", "self") else []), *path])
