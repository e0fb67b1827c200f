"""Tell the partitioner to recompute a node's result in backward, or to save it."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

# Above every id that activation checkpointing hands out: a recomputed node may only feed recomputed nodes of a
# lower id, and with id 0 a checkpointed model saved its full weights (seen on 2.11 and 2.15).
AC_GRAPH_ID = 100_000


def tag(node: fx.Node, policy: CheckpointPolicy, region: int = AC_GRAPH_ID) -> None:
    """Tell the partitioner what becomes of a node's result, whatever activation checkpointing does around it."""
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = region
