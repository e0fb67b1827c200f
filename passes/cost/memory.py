"""Count the bytes alive at each position of a graph, and list what owns them at the peak.

    position          0 x (input)   1 w = gather(s)   2 y = mm(x, w)   3 v = view(y)   4 z = relu(v)   5 output z
    alive             -             w                 w y              y               y z             z

A storage lives from the node that allocates it to the last one that reads it, or a view of it. A returned storage lives
to the end, and the input of a collective lives until the wait. Inputs are the caller's and counted apart, except those
that the caller gives up, as it gives up saved tensors in backward: they are freed by their last reader. If an
accelerator computes, only its memory counts, so offloaded shards do not. Activations on the host do not, even if the
host computes. Scratch memory of kernels does not count.

Over the two halves of a step, the caller holds forward's inputs and results:

    forward     inputs, and what each node needs                       inputs: shards, buffers, the batch
    backward    inputs, what forward returned, what each node needs    saved activations: until their last reader
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..ir import markers
from ..ir.aliases import HOST, Storage, note_taken, storages_of, tensors_of
from ..ir.meta import ROLE, SHARED_NAME, works_for
from ..wire.collectives import is_wait
from ..wire.copies import is_awaited
from .fusion import fused_away, is_pointwise

SHARD = "parameter shard"
GATHERED = "gathered"
GRADIENT = "gradient"
ACTIVATION = "activation"
BUFFER = "communication buffer"
OTHER = "other"


@dataclass(frozen=True)
class Owned:
    """One storage that is alive at the peak."""

    name: str  # of the node that allocated it, or of the input
    of: str  # the parameters or the module that it belongs to, if that is known
    kind: str
    num_bytes: int


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
    live_bytes: tuple[int, ...]  # at each node, without inputs that stay the caller's
    input_bytes: int  # bytes of these inputs
    peak_owners: tuple[Owned, ...]  # at the first position of the peak, largest first

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def peak_at(self) -> str:
        """Name of the first node at the peak."""
        return self.names[self.live_bytes.index(self.peak_bytes)]

    def __str__(self) -> str:
        lines = [f"peak {self.peak_bytes:,} bytes at {self.peak_at}, inputs {self.input_bytes:,} bytes"]
        lines += [f"    {one.num_bytes:>15,}  {one.kind:<20}  {one.name}" for one in self.peak_owners]
        return "\n".join(lines)


@dataclass(frozen=True)
class Weight:
    """The bytes that one rank holds, in a step of two halves or in the only graph, which counts as forward."""

    memories: tuple[GraphMemory, ...] = field(repr=False)  # of each graph
    forward: tuple[int, ...]  # at each node, without inputs that stay
    held_bytes: int  # from begin to end: the callers' inputs
    backward: tuple[int, ...] = ()
    returned_bytes: int = 0  # while backward runs: what forward returned, and its caller may hold
    given_up: tuple[str, ...] = ()  # inputs of backward that their last readers free
    stays: Mapping[str, int] = field(default_factory=dict)  # bytes that both hold for later steps, by forward's node
    returned: Collection[Storage] = field(default=(), repr=False)  # by forward, to its caller
    saved: Mapping[str, tuple[Storage, ...]] = field(default_factory=dict, repr=False)  # by backward's input

    @property
    def peak_bytes(self) -> int:
        backward = self.returned_bytes + max(self.backward, default=0)
        return self.held_bytes + max(*self.forward, backward)


def memory_curve(graph: fx.Graph, given_up: Collection[str] = (), fused: bool = False) -> MemoryCurve:
    """Return the bytes alive at each node; ``given_up`` names the inputs that live no longer than their last reader.

    With ``fused``, count them as Inductor compiles the graph, else as it runs node by node.
    """
    own, callers = own_and_callers(GraphMemory.of(graph, fused), given_up)
    live_bytes = bytes_alive(own, len(graph.nodes))
    peak = live_bytes.index(max(live_bytes)) if live_bytes else 0
    kinds = kinds_of(graph)
    owners = [Owned(one.node.name, "", kinds[one], one.num_bytes) for one in storages_at(peak, own)]
    return MemoryCurve(
        names=tuple(node.name for node in graph.nodes),
        live_bytes=tuple(live_bytes),
        input_bytes=sum(life.storage.num_bytes for life in callers),
        peak_owners=tuple(sorted(owners, key=lambda one: -one.num_bytes)),
    )


def weigh(forward: fx.Graph, backward: fx.Graph | None = None, *, fused: bool = True) -> Weight:
    """Return the bytes that the two halves of a step hold, or its only graph.

    Forward returns its results first, and then the tensors that backward takes. The inputs of backward know from now on
    which storages of forward they keep. A parameter that stays for later launches counts from the begin of forward to
    the end of backward.
    """
    first = GraphMemory.of(forward, fused)
    own, callers_lives = own_and_callers(first, ())
    held_bytes = sum(life.storage.num_bytes for life in callers_lives)
    if backward is None:
        return Weight((first,), _curve(own, forward), held_bytes)
    num_results = saved_by(forward, backward)
    results = [first.storages[one] if isinstance(one, fx.Node) else () for one in results_of(forward)]
    returned = {one for these in results[:num_results] for one in these}
    saved = {name: its for name, its in zip(taken_as(forward, backward, num_results), results[num_results:]) if name}
    for node in backward.find_nodes(op="placeholder"):
        if node.name in saved:
            note_taken(node, saved[node.name])
    stays = {one for name, its in saved.items() if name.startswith(SHARED_NAME) for one in its}
    own = [dataclasses.replace(life, first=0) if life.storage in stays else life for life in own]
    made = stays | {one for one in returned if one.node.op == "call_function"}
    # A saved tensor that shares memory with an input or a result of forward is the caller's while backward runs.
    callers = {name for name, its in saved.items() if any(one in made or one.node.op == "placeholder" for one in its)}
    given_up = tuple(name for name in saved_inputs(backward) if name not in callers)
    then = GraphMemory.of(backward, fused)
    return Weight(
        (first, then),
        _curve(own, forward),
        held_bytes,
        _curve(own_and_callers(then, given_up)[0], backward),
        sum(one.num_bytes for one in made),
        given_up,
        {one.node.name: one.num_bytes for one in stays},
        returned,
        saved,
    )


def _curve(lives: Iterable[Lifetime], graph: fx.Graph) -> tuple[int, ...]:
    return tuple(bytes_alive(lives, len(graph.nodes)))


def saved_by(forward: fx.Graph, backward: fx.Graph) -> int:
    """Return how many results of a forward graph come before what its backward takes."""
    return max(len(results_of(forward)) - len(_saved(backward)), 0)


def results_of(graph: fx.Graph) -> tuple[object, ...]:
    """Return the results of a graph."""
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return tuple(results)


def taken_as(forward: fx.Graph, backward: fx.Graph, num_results: int) -> list[str]:
    """Return backward's name for each value that forward saves: forward has tensors first, backward sizes."""
    saved = [one if isinstance(one, fx.Node) else None for one in results_of(forward)[num_results:]]
    taken = _saved(backward)
    names = {one.name for one in taken}
    if all(one is None or one.name in names for one in saved):
        return ["" if one is None else one.name for one in saved]
    # Inductor's passes rename what forward returns.
    tensors, sizes = iter(_by_kind(taken, True)), iter(_by_kind(taken, False))
    return [next(tensors if one is not None and tensors_of(one) else sizes, "") for one in saved]


def _saved(backward: fx.Graph) -> list[fx.Node]:
    inputs = backward.find_nodes(op="placeholder")
    return [one for one in inputs if not one.name.startswith(("tangents", "bwd_"))]


def _by_kind(nodes: Sequence[fx.Node], are_tensors: bool) -> list[str]:
    return [one.name for one in nodes if bool(tensors_of(one)) == are_tensors]


def own_and_callers(memory: GraphMemory, given_up: Collection[str]) -> tuple[list[Lifetime], list[Lifetime]]:
    """Return the lifetimes of what a graph allocates and of the inputs in ``given_up``, and those of other inputs."""
    given = storages_given(memory, given_up)
    own: list[Lifetime] = []
    callers: list[Lifetime] = []
    for life in lives_of(memory.graph.nodes, memory):
        is_own = life.storage.node.op == "call_function" or life.storage in given
        (own if is_own else callers).append(life)
    return own, callers


def storages_at(position: int, lives: Iterable[Lifetime]) -> list[Storage]:
    """Return the storages of these that are alive at a position of their graph, without empty ones."""
    return [one.storage for one in lives if one.first <= position <= one.last and one.storage.num_bytes]


def bytes_alive(lives: Iterable[Lifetime], num_nodes: int) -> list[int]:
    """Return how many bytes of these are alive at each position of their graph."""
    changes = [0] * (num_nodes + 1)
    for life in lives:
        changes[life.first] += life.storage.num_bytes
        changes[life.last + 1] -= life.storage.num_bytes
    return [*itertools.accumulate(changes[:num_nodes])]


def saved_inputs(graph: fx.Graph) -> list[str]:
    """Return the inputs of a backward graph that its caller gives up: saved tensors and tangents, not forward's inputs.

    AOTAutograd calls forward's inputs primals, in both graphs.
    """
    return [one.name for one in graph.find_nodes(op="placeholder") if not one.name.startswith("primals")]


def storages_given(memory: GraphMemory, given_up: Collection[str]) -> set[Storage]:
    """Return the storages of the inputs in ``given_up``, except those that the caller holds by another input as well.

    Raise ValueError for a name that is none of the graph's inputs.
    """
    inputs = {node.name: node for node in memory.graph.find_nodes(op="placeholder")}
    for name in given_up:
        if name not in inputs:
            known = ", ".join(inputs)
            raise ValueError(f"given_up has {name!r}, which is no input of the graph. Give some of {known}.")
    kept = {storage for name, node in inputs.items() if name not in given_up for storage in memory.storages[node]}
    return {storage for name in given_up for storage in memory.storages[inputs[name]]} - kept


@dataclass(frozen=True)
class GraphMemory:
    """The storages of a graph, and who needs them, in whatever order its nodes run."""

    graph: fx.Graph
    storages: dict[fx.Node, tuple[Storage, ...]]
    needed: dict[fx.Node, tuple[Storage, ...]]  # by each node, as if nothing were fused
    away: set[fx.Node]  # the nodes that are computed inside their readers
    over_inputs: set[fx.Node]  # pointwise results that may take the place of an input
    fused: bool  # as Inductor compiles the graph; else each operator is a kernel of its own

    @classmethod
    def of(cls, graph: fx.Graph, fused: bool = True) -> GraphMemory:
        """Find the storages of a graph, as Inductor compiles it if it is ``fused``."""
        away = fused_away(graph) if fused else set()
        storages = storages_of(graph)
        pointwise = (node for node in graph.nodes if fused and node not in away and is_pointwise(node))
        over_inputs = {node for node in pointwise if storages[node] and storages[node][0].node is node}
        needed = {node: tuple(_needed_by(node, storages)) for node in graph.nodes}
        return cls(graph, storages, needed, away, over_inputs, fused)

    def with_given(self, given: Mapping[fx.Node, Sequence[Storage]]) -> GraphMemory:
        """Return the same, but these calls count as inputs that take storages of forward."""
        storages = storages_of(self.graph, given)
        needed = {node: tuple(_needed_by(node, storages)) for node in self.graph.nodes}
        return dataclasses.replace(self, storages=storages, needed=needed)


def lives_of(
    order: Iterable[fx.Node],
    memory: GraphMemory,
    given: Iterable[Storage] = (),
    inside: Mapping[Storage, Storage] | None = None,
) -> list[Lifetime]:
    """Return the lifetimes on the device that computes, as positions in an order of the graph's nodes.

    Inputs live from its begin. If the graph is fused, a node that is computed inside its readers has no memory, and
    they read what it reads; a pointwise result takes the place of an input that it is the last to read. The order may
    leave out nodes. What others need of them is ``given``, as inputs are. Storages may be ``inside`` of others.
    """
    inside = inside or {}
    order, storages, away = list(order), memory.storages, memory.away
    # These are dicts and not sets, whose order differs between processes.
    read_for: dict[fx.Node, dict[Storage, None]] = {}  # what a fused node reads, when its readers run
    first = dict.fromkeys(given, 0)
    last, inputs = dict(first), {*first}
    reads: dict[fx.Node, dict[Storage, None]] = {}
    for position, node in enumerate(order):
        needed: dict[Storage, None] = {}
        for storage in memory.needed[node]:
            needed |= read_for.get(storage.node, {inside.get(storage, storage): None})
        if node in away:
            read_for[node] = needed
            continue
        reads[node] = needed
        for own in storages[node]:
            storage = inside.get(own, own)
            if storage.node not in away:
                first.setdefault(storage, position if node.op == "call_function" else 0)
                last[storage] = position
        last.update(dict.fromkeys(needed, position))
    for position, node in enumerate(order):
        if node in memory.over_inputs:
            for storage in reads[node]:
                fits = storage.num_bytes == storages[node][0].num_bytes and last[storage] == position
                is_own = storage.node.op == "call_function" and storage not in inputs
                if fits and is_own and not is_awaited(storage.node):
                    last[storage] = position - 1
                    break
    devices = {storage.device for storage in first}
    computing = next((device for device in sorted(devices) if device not in ("cpu", HOST)), "cpu")
    return [Lifetime(one, begin, last[one]) for one, begin in first.items() if one.device == computing]


def _needed_by(node: fx.Node, storages: dict[fx.Node, tuple[Storage, ...]]) -> Iterable[Storage]:
    yield from (storage for source in node.all_input_nodes for storage in storages[source])
    if is_wait(node):
        launch = node.args[0]
        assert isinstance(launch, fx.Node)
        if is_awaited(launch):  # until the wait, the launch still reads its inputs
            yield from (storage for source in launch.all_input_nodes for storage in storages[source])


def kinds_of(graph: fx.Graph) -> dict[Storage, str]:
    """Return what each storage of a graph holds, by the markers, or by the roles of the nodes that ``insert`` added.

    A gradient depends on a tangent. What is computed from gathered parameters alone counts as a gathered parameter.
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
    for node in graph.nodes:  # kinds that only the readers tell
        if node.target is markers.reduce_grad or works_for(node, "reduce"):
            # What is packed for a reduction is a gradient; the packed copy stays a buffer.
            for source in node.all_input_nodes:
                if ROLE not in source.meta:
                    kinds.update(dict.fromkeys(storages[source], GRADIENT))
        elif ROLE not in node.meta:
            for source in node.all_input_nodes:
                for storage in storages[source]:
                    if kinds[storage] == BUFFER and ROLE in storage.node.meta:
                        kinds[storage] = GATHERED if works_for(storage.node, "gather") else GRADIENT
    for storage in _shards(graph, storages):
        kinds[storage] = SHARD
    return kinds


def _kind(node: fx.Node, read: set[str], is_gradient: bool) -> str:
    if node.target is markers.unshard:
        return GATHERED
    if node.target is markers.reduce_grad:
        return GRADIENT
    if ROLE in node.meta:
        return ACTIVATION if works_for(node, "copy") else BUFFER  # unless a node without a role reads it
    if is_gradient:
        return GRADIENT
    if node.op == "call_function" and read and read <= {GATHERED, BUFFER}:
        return GATHERED
    value = node.meta.get("val")
    dtype = getattr(value[0] if isinstance(value, (tuple, list)) and value else value, "dtype", None)
    return ACTIVATION if dtype is not None and (dtype.is_floating_point or dtype.is_complex) else OTHER


def _shards(graph: fx.Graph, storages: dict[fx.Node, tuple[Storage, ...]]) -> Iterable[Storage]:
    """Yield the storages of inputs that a gather reads, or its packing."""
    for node in graph.nodes:
        if node.target is markers.unshard or works_for(node, "gather"):
            for source in node.all_input_nodes:
                yield from (storage for storage in storages[source] if storage.node.op == "placeholder")
