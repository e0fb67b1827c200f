"""Keep or regather: tell the partitioner what becomes of each gathered parameter.

    joint graph                          after
    w = unshard(shard)                   w = unshard(shard)   # recompute=MUST_RECOMPUTE
    y = mm(x, w)                         y = mm(x, w)
    ...                                  ...
    gx = mm(gy, w.t())                   (backward gathers w again; the shard is what is saved)

A slice that stands for a parameter until backward is saved. An untagged gather would be left to min-cut, which saves
collectives' results: ZeRO-2's memory by accident.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .plan import Plan
from .provenance import find_unshards
from .slices import keep_slice

# Above every id that activation checkpointing hands out: a recomputed node may only feed recomputed nodes of a
# lower id, and with id 0 a checkpointed model saved its full weights (seen on 2.11 and 2.15).
AC_GRAPH_ID = 100_000


def keep(graph: fx.Graph, plan: Plan) -> int:
    """Tag every unshard marker as the plan says; return how many were tagged."""
    regather = set(plan.regather)
    unshards = find_unshards(graph)
    for marker in unshards:
        policy = CheckpointPolicy.MUST_RECOMPUTE if marker.fqn in regather else CheckpointPolicy.MUST_SAVE
        marker.node.meta["recompute"] = policy
        marker.node.meta["ac_graph_id"] = AC_GRAPH_ID
    for node in graph.find_nodes(op="call_function", target=keep_slice):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        node.meta["ac_graph_id"] = AC_GRAPH_ID
    return len(unshards)
