"""Order that the data flow of a graph does not show: reads of an input before a write to it, and random numbers.

    y = add(x, buffer)          z = rand(4)
    copy_(buffer, new)          stays after all that read the buffer before it
    w = rand(4)                 stays after z: both take from one generator

AOTAutograd leaves a copy at the end of a graph for each input that forward writes to, such as a running mean. A pass
that moves nodes has to keep this order, and a pass that recomputes must not read an input that has changed by then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from .. import _torch_compat as compat
from .aliases import base_of, inputs_of
from .nodes import is_random


def held_behind(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the earlier nodes that have to stay before it, although it reads nothing of theirs."""
    writes = {node: {base_of(one) for one in written} for node in nodes if (written := compat.written_by(node))}
    inputs = {base for bases in writes.values() for base in bases if base.op == "placeholder"}
    behind: dict[fx.Node, list[fx.Node]] = {}
    last_write: dict[fx.Node, fx.Node] = {}
    since: dict[fx.Node, list[fx.Node]] = {base: [] for base in inputs}  # nodes that touched it since its last write
    last_random: list[fx.Node] = []
    for node in nodes:
        for base in inputs & {base_of(one) for one in inputs_of(node)} if inputs else ():
            if base in writes.get(node, ()):
                behind.setdefault(node, []).extend(since[base])
                last_write[base], since[base] = node, [node]
            else:
                behind.setdefault(node, []).extend([last_write[base]] if base in last_write else [])
                since[base].append(node)
        if is_random(node):
            behind.setdefault(node, []).extend(last_random)
            last_random = [node]
    return behind


def read_what_is_written(graph: fx.Graph, saved: Collection[fx.Node]) -> set[fx.Node]:
    """Return the inputs that forward writes to, and what is computed from them up to and with ``saved`` nodes."""
    found: set[fx.Node] = set(compat.written_inputs(graph))
    if found:
        for node in graph.nodes:
            if node.op == "call_function" and any(one in found and one not in saved for one in node.all_input_nodes):
                found.add(node)
    return found
