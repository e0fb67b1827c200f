"""Keep or regather: tell the partitioner what becomes of each gathered parameter.

    joint graph                          after
    w = unshard(shard)                   w = unshard(shard)   # recompute=MUST_RECOMPUTE
    y = mm(x, w)                         y = mm(x, w)
    ...                                  ...
    gx = mm(gy, w.t())                   (backward gathers w again; the shard is what is saved)

A slice that stands for a parameter until backward is saved. An untagged gather would be left to min-cut, which saves
collectives' results: ZeRO-2's memory by accident. It saves a cast of a gather as well (autocast, a frozen weight stored
in bf16 that its module reads as fp32), which is as large: casts are tagged like what they cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .plan import Plan
from .provenance import find_unshards
from .slices import keep_slice

# Above every id that activation checkpointing hands out: a recomputed node may only feed recomputed nodes of a
# lower id, and with id 0 a checkpointed model saved its full weights (seen on 2.11 and 2.15).
AC_GRAPH_ID = 100_000

aten = torch.ops.aten
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
VIEWS = (
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.alias.default,
    aten.detach.default,
)


def keep(graph: fx.Graph, plan: Plan) -> int:
    """Tag every unshard marker as the plan says; return how many were tagged."""
    regather = set(plan.regather)
    unshards = find_unshards(graph)
    for marker in unshards:
        policy = CheckpointPolicy.MUST_RECOMPUTE if marker.fqn in regather else CheckpointPolicy.MUST_SAVE
        tag(marker.node, policy)
        if policy is CheckpointPolicy.MUST_RECOMPUTE:
            tag_casts([marker.node])
    for node in graph.find_nodes(op="call_function", target=keep_slice):
        tag(node, CheckpointPolicy.MUST_SAVE)
    return len(unshards)


def tag_casts(fulls: Iterable[fx.Node]) -> None:
    """Have backward cast full parameters again, gathered in the graph or taken by it, that it finds gathered anyway."""
    for full in fulls:
        for cast in _casts_of(full):
            tag(cast, CheckpointPolicy.MUST_RECOMPUTE)


def tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    """Tell the partitioner what becomes of a node's result, whatever activation checkpointing does around it."""
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = AC_GRAPH_ID


def _casts_of(gathered: fx.Node) -> Iterator[fx.Node]:
    """Casts of a gathered parameter or of views of it, but for those that activation checkpointing has tagged."""
    for user in gathered.users:
        if user.target in CASTS and "recompute" not in user.meta:
            yield user
        if user.target in CASTS or user.target in VIEWS:
            yield from _casts_of(user)
