"""Bytes alive over a graph, position by position, and who owns them where there are most.

    position          0 x (input)   1 w = gather(s)   2 y = mm(x, w)   3 v = view(y)   4 z = relu(v)   5 output z
    alive             -             w                 w y              y               y z             z

A storage lives from the node that allocates it to the last one that reads it, or a view of it; what is returned lives
to the end; what a collective reads lives until it is waited for. Inputs are the caller's and counted apart, but for
those that the caller gives up, as compiled code is given saved tensors: they go with their last reader. Where an
accelerator computes, its memory is meant: offloaded shards are not there. What a kernel needs for itself is not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import fx

from . import markers
from .aliases import Storage, storages_of
from .collectives import c10d, is_launch
from .fusion import fused_away, is_pointwise
from .insert import ROLE, Role

SHARD = "parameter shard"
GATHERED = "gathered"
GRADIENT = "gradient"
ACTIVATION = "activation"
BUFFER = "communication buffer"
OTHER = "other"


@dataclass(frozen=True)
class Owner:
    """One storage: the node that allocated it, or the input that it came with."""

    name: str
    num_bytes: int
    kind: str


@dataclass(frozen=True)
class Lifetime:
    """A storage and the positions of the first and the last node that need it."""

    storage: Storage
    first: int
    last: int


@dataclass(frozen=True)
class MemoryCurve:
    """What is alive while each node of a graph runs."""

    names: tuple[str, ...]  # of the nodes, in their order
    live_bytes: tuple[int, ...]  # without inputs that stay the caller's
    input_bytes: int  # of those
    peak_owners: tuple[Owner, ...]  # at the first highest position, largest first

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def peak_at(self) -> str:
        """Name of the first node at which most is alive."""
        return self.names[self.live_bytes.index(self.peak_bytes)]

    def __str__(self) -> str:
        lines = [f"peak {self.peak_bytes:,} bytes at {self.peak_at}, inputs {self.input_bytes:,} bytes"]
        lines += [f"    {one.num_bytes:>15,}  {one.kind:<20}  {one.name}" for one in self.peak_owners]
        return "\n".join(lines)


def memory_curve(graph: fx.Graph, given_up: Collection[str] = (), fused: bool = False) -> MemoryCurve:
    """Bytes alive at each node of a graph; ``given_up`` names the inputs that live no longer than their last reader.

    ``fused``: as Inductor compiles it, else as it runs node by node.
    """
    counted, live_bytes, callers = _counted(graph, given_up, fused)
    peak = live_bytes.index(max(live_bytes)) if live_bytes else 0
    kinds = kinds_of(graph)
    owners = [
        Owner(life.storage.node.name, life.storage.num_bytes, kinds[life.storage])
        for life in counted
        if life.first <= peak <= life.last and life.storage.num_bytes
    ]
    return MemoryCurve(
        names=tuple(node.name for node in graph.nodes),
        live_bytes=tuple(live_bytes),
        input_bytes=callers,
        peak_owners=tuple(sorted(owners, key=lambda one: -one.num_bytes)),
    )


def live_bytes(graph: fx.Graph, given_up: Collection[str] = (), fused: bool = False) -> tuple[tuple[int, ...], int]:
    """The bytes of a memory curve alone, and those of inputs: nobody is asked whose they are."""
    _, alive, callers = _counted(graph, given_up, fused)
    return tuple(alive), callers


def _counted(graph: fx.Graph, given_up: Collection[str], fused: bool) -> tuple[list[Lifetime], list[int], int]:
    given = storages_given(graph, given_up)
    counted, callers = [], 0
    for life in lifetimes(graph, fused):
        if life.storage.node.op == "call_function" or life.storage in given:
            counted.append(life)
        else:
            callers += life.storage.num_bytes
    num_nodes = len(graph.nodes)
    changes = [0] * (num_nodes + 1)
    for life in counted:
        changes[life.first] += life.storage.num_bytes
        changes[life.last + 1] -= life.storage.num_bytes
    alive, live_bytes = 0, []
    for change in changes[:num_nodes]:
        alive += change
        live_bytes.append(alive)
    return counted, live_bytes, callers


def saved_inputs(graph: fx.Graph) -> list[str]:
    """Inputs of a backward graph that its caller gives up: what forward saved and tangents, not forward's own inputs.

    AOTAutograd calls forward's inputs primals, in both graphs.
    """
    return [one.name for one in graph.find_nodes(op="placeholder") if not one.name.startswith("primals")]


def storages_given(graph: fx.Graph, given_up: Collection[str]) -> set[Storage]:
    """Those of the inputs in ``given_up``, but for what the caller has under another name as well.

    ValueError for a name that is none of the graph's inputs.
    """
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for name in given_up:
        if name not in inputs:
            known = ", ".join(inputs)
            raise ValueError(f"given_up has {name!r}, which is no input of the graph. Give some of {known}.")
    storages = storages_of(graph)
    kept = {storage for name, node in inputs.items() if name not in given_up for storage in storages[node]}
    return {storage for name in given_up for storage in storages[inputs[name]]} - kept


def lifetimes(graph: fx.Graph, fused: bool = False) -> list[Lifetime]:
    """Of every storage on the device that computes, in the order in which they come to be; inputs begin with the graph.

    ``fused``: as Inductor compiles it. What is computed inside of its readers has no memory, and they read what it
    reads; a pointwise result takes the place of an input that it is the last to read.
    """
    storages = storages_of(graph)
    away = fused_away(graph) if fused else set()
    # In dicts and not in sets, whose order is another one in each process.
    read_for: dict[fx.Node, dict[Storage, None]] = {}  # what a fused node reads, when its readers run
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    reads: dict[fx.Node, dict[Storage, None]] = {}
    for position, node in enumerate(graph.nodes):
        needed: dict[Storage, None] = {}
        for storage in _needed_by(node, storages):
            needed |= read_for[storage.node] if storage.node in away else {storage: None}
        if node in away:
            read_for[node] = needed
            continue
        reads[node] = needed
        for storage in storages[node]:
            if storage.node not in away:
                first.setdefault(storage, position if node.op == "call_function" else 0)
                last[storage] = position
        last.update(dict.fromkeys(needed, position))
    if fused:
        for position, node in enumerate(graph.nodes):
            if node in reads and is_pointwise(node) and storages[node] and storages[node][0].node is node:
                for storage in reads[node]:
                    fits = storage.num_bytes == storages[node][0].num_bytes and last[storage] == position
                    if fits and storage.node.op == "call_function" and not is_launch(storage.node):
                        last[storage] = position - 1
                        break
    devices = {storage.device for storage in first}
    computing = next((device for device in sorted(devices) if device != "cpu"), "cpu")
    return [Lifetime(one, begin, last[one]) for one, begin in first.items() if one.device == computing]


def _needed_by(node: fx.Node, storages: dict[fx.Node, tuple[Storage, ...]]) -> Iterable[Storage]:
    yield from (storage for source in node.all_input_nodes for storage in storages[source])
    if node.target is c10d.wait_tensor.default:
        launch = node.args[0]
        assert isinstance(launch, fx.Node)
        if is_launch(launch):  # still reading what it was given
            yield from (storage for source in launch.all_input_nodes for storage in storages[source])


def kinds_of(graph: fx.Graph) -> dict[Storage, str]:
    """What each storage of a graph holds, by the markers, or by the roles that ``insert`` gave to what it wrote.

    Gradients are what depends on a tangent; what is computed from gathered parameters alone is a gathered parameter.
    """
    storages = storages_of(graph)
    kinds: dict[Storage, str] = {}
    of_tangents: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.name.startswith("tangents") or any(source in of_tangents for source in sources):
            of_tangents.add(node)
        for storage in storages[node]:
            if storage not in kinds:
                read = {kinds[one] for source in sources for one in storages[source]}
                kinds[storage] = _kind(node, read, node in of_tangents)
    for node in graph.nodes:  # what only the readers tell
        if _is_reduction(node):
            # Packed gradients are gradients still, but a copy of them.
            for source in node.all_input_nodes:
                if ROLE not in source.meta:
                    kinds.update(dict.fromkeys(storages[source], GRADIENT))
        elif ROLE not in node.meta:
            for source in node.all_input_nodes:
                for storage in storages[source]:
                    if kinds[storage] == BUFFER and ROLE in storage.node.meta:
                        kinds[storage] = GATHERED if _role(storage.node).kind == "gather" else GRADIENT
    for storage in _shards(graph, storages):
        kinds[storage] = SHARD
    return kinds


def _kind(node: fx.Node, read: set[str], is_gradient: bool) -> str:
    if node.target is markers.unshard:
        return GATHERED
    if node.target is markers.reduce_grad:
        return GRADIENT
    if ROLE in node.meta:
        return BUFFER  # unless somebody who computes reads it
    if is_gradient:
        return GRADIENT
    if node.op == "call_function" and read and read <= {GATHERED, BUFFER}:
        return GATHERED
    value = node.meta.get("val")
    dtype = getattr(value[0] if isinstance(value, (tuple, list)) and value else value, "dtype", None)
    return ACTIVATION if dtype is not None and (dtype.is_floating_point or dtype.is_complex) else OTHER


def _shards(graph: fx.Graph, storages: dict[fx.Node, tuple[Storage, ...]]) -> Iterable[Storage]:
    """Inputs that a gather takes, or what packs for it."""
    for node in graph.nodes:
        if node.target is markers.unshard or (ROLE in node.meta and _role(node).kind == "gather"):
            for source in node.all_input_nodes:
                yield from (storage for storage in storages[source] if storage.node.op == "placeholder")


def _is_reduction(node: fx.Node) -> bool:
    return node.target is markers.reduce_grad or (ROLE in node.meta and _role(node).kind == "reduce")


def _role(node: fx.Node) -> Role:
    role = node.meta[ROLE]
    assert isinstance(role, Role)
    return role
