"""Make the events of a graph that the passes have lowered, for ``simulate``.

    all_gather_into_tensor(x)      Launch("all_gather...", its seconds, its group)
    wait_tensor(all_gather...)     Wait("all_gather...")
    copies beside compute          the same, in a lane of the link to the host for each direction
    any other call                 Compute, which takes no time for a view

A buffer is allocated by the event of the node that makes it, and freed by the event of its last reader. Time and memory
are those of the code that Inductor generates, where an op that is fused into its readers takes neither, unless
``memory`` says that nothing is fused.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ..ir.aliases import base_of, inputs_of, tensor_bytes, tensors_of
from ..ir.meta import ROLE
from ..ir.provenance import has_markers
from ..wire.collectives import is_launch, is_wait
from ..wire.copies import is_awaited, is_copy, launch_to_device, to_host, wait_for_copies
from ..wire.streams import TO_DEVICE, TO_HOST
from .memory import GraphMemory, own_and_callers
from .profiles import HardwareProfile
from .replay import Compute, Event, Launch, Wait
from .roofline import Groups, copy_seconds, graph_seconds, group_of, launch_seconds, node_seconds, sent_by, slowdown


def events_of(
    graph: fx.Graph,
    profile: HardwareProfile,
    groups: Groups | None = None,
    given_up: Collection[str] = (),
    memory: GraphMemory | None = None,
) -> list[Event]:
    """Return a graph's events on this hardware, in its order; inputs in ``given_up`` are freed by their last readers.

    ``groups`` tells where the ranks of a process group are, by its name; without it, c10d does. Other inputs are the
    caller's, and not in the memory curve. ``memory`` is that of the graph, if a caller has it already.
    """
    if has_markers(graph):
        raise ValueError(
            "This graph is not lowered: give a forward, backward or inference record's graph, from a model that "
            "Inductor compiled."
        )
    memory = memory or GraphMemory.of(graph)
    if memory.fused:
        seconds = graph_seconds(graph, profile, memory.away)
    else:
        seconds = {node: node_seconds(node, profile) for node in graph.nodes if node.op == "call_function"}
    allocs, frees = _buffers(memory, given_up)
    events: list[Event] = []
    beside: list[str] = []  # copies of gradients, which one node waits for
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        held = tuple(allocs.get(node, ())), tuple(frees.get(node, ()))
        source = node.args[0] if node.args else None
        if is_launch(node):
            sent = sent_by(node)
            group = group_of(sent.group, profile, groups)
            seconds_alone, slows = launch_seconds(node, group, profile), slowdown(group, profile)
            events.append(Launch(node.name, seconds_alone, sent.group, *held, _needs(node), slows, group.link))
        elif is_copy(node) or _is_beside(node):
            lane = TO_DEVICE if node.target is launch_to_device else TO_HOST
            copy_s = copy_seconds(sum(map(tensor_bytes, tensors_of(node))), profile)
            events.append(Launch(node.name, copy_s, lane, *held, needs=_needs(node)))
            beside += [node.name] if _is_beside(node) else []
        elif is_wait(node) and isinstance(source, fx.Node) and is_awaited(source):
            events.append(Wait(source.name, *held))
        elif node.target is wait_for_copies and beside:
            *others, last = beside
            events.append(Wait(last, *held, others=tuple(others)))
        else:
            events.append(Compute(node.name, seconds.get(node, 0.0), *held, is_copy=ROLE in node.meta))
    return events


def _is_beside(node: fx.Node) -> bool:
    """Whether a node copies a gradient to the host, and ``wait_for_copies`` waits for that."""
    return node.target is to_host and not node.kwargs.get("wait", True)


def _buffers(
    memory: GraphMemory, given_up: Collection[str]
) -> tuple[dict[fx.Node, list[tuple[str, int]]], dict[fx.Node, list[str]]]:
    """Return two tables by node: the buffers that each call allocates, with their bytes, and those that it frees."""
    nodes = list(memory.graph.nodes)
    first_call = next((node for node in nodes if node.op == "call_function"), None)
    last_until: list[fx.Node | None] = []  # at each position, the last node up to it that can free something
    for node in nodes:
        ends = node.op in ("call_function", "output")
        last_until.append(node if ends else last_until[-1] if last_until else None)
    allocs: dict[fx.Node, list[tuple[str, int]]] = {}
    frees: dict[fx.Node, list[str]] = {}
    taken: set[str] = set()
    own, _ = own_and_callers(memory, given_up)
    for life in own:
        owner = life.storage.node
        if not life.storage.num_bytes:
            continue
        begin = owner if owner.op == "call_function" else first_call
        # A buffer that its last reader writes over ends one position before that reader, where no call may stand.
        last = last_until[life.last] if life.last >= 0 else None
        if begin is None or last is None:
            continue  # an input that nobody reads
        name = owner.name
        while name in taken:  # a node may allocate several
            name += "'"
        taken.add(name)
        allocs.setdefault(begin, []).append((name, life.storage.num_bytes))
        if last.op == "call_function":  # else it is returned
            frees.setdefault(last, []).append(name)
    return allocs, frees


def _needs(launch: fx.Node) -> tuple[str, ...]:
    """Return the computes and collectives that a launch has to follow, however early its packing is done."""
    found: dict[str, None] = {}
    seen: set[fx.Node] = set()
    work = [base_of(source) for source in inputs_of(launch)]
    while work:
        node = work.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if is_awaited(node):
            found[node.name] = None
        elif ROLE in node.meta:
            work.extend(base_of(source) for source in inputs_of(node))
        else:
            found[node.name] = None
    return tuple(found)
