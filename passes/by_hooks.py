"""A joint graph as hooks around eager modules would run it: what FSDP2 needs of memory, predicted for comparison.

    as compiled     G w0 | G b0 g0    n = norm(x, g0)  y = mm(n, w0)     saved: x, y      n is computed again
    by hooks        G w0 b0 g0        n = norm(x, g0)  y = mm(n, w0)     saved: x, n, y

One gather and one reduction for each unit, packed and unpacked; what a gradient's formula reads is saved, but where
checkpointing computes it again; and, in whoever weighs the graph, each operator with results of its own.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .provenance import reduce_nodes, unshard_nodes
from .structure import structure_of
from .tags import tag


def pack_units(graph: fx.Graph) -> None:
    """Of a joint graph that is to be planned: have each unit's parameters travel together."""
    for node in (*unshard_nodes(graph), *reduce_nodes(graph)):
        node.update_kwarg("bucketing", "group")


def save_all(graph: fx.Graph) -> None:
    """Of a joint graph that is to be cut: have nothing computed again but what is told to be."""
    structure = structure_of(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in structure.fed and "recompute" not in node.meta:
            tag(node, CheckpointPolicy.MUST_SAVE)
