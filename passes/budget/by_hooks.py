"""Change a joint graph into what eager hooks would run, to predict how much memory FSDP2 needs, for comparison.

    as compiled     G w0 | G b0 g0    n = norm(x, g0)  y = mm(n, w0)     saved: x, y      n is computed again
    by hooks        G w0 b0 g0        n = norm(x, g0)  y = mm(n, w0)     saved: x, n, y

Each unit has one gather and one reduction, packed and unpacked. What a gradient's formula reads is saved, unless
checkpointing recomputes it. trial.py then weighs the graph without fusion, so that each operator has its own result.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..ir.provenance import reduce_nodes, unshard_nodes
from ..ir.tags import tag
from ..schedule.structure import structure_of


def pack_units(graph: fx.Graph) -> None:
    """In a joint graph that is not planned yet, have each unit's parameters travel together."""
    for node in (*unshard_nodes(graph), *reduce_nodes(graph)):
        node.update_kwarg("bucketing", "group")


def save_all(graph: fx.Graph) -> None:
    """In a joint graph that is not cut yet, have only those nodes recomputed that are tagged so already."""
    structure = structure_of(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in structure.fed and "recompute" not in node.meta:
            tag(node, CheckpointPolicy.MUST_SAVE)
