"""What a pass leaves in the ``meta`` of nodes for those that come after it, and for the partitioner."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..wire.ledger import Member

# Of markers: the plan of the step, made where AOTAutograd had all of it in one graph.
STEP = "fsdp_step"
# Of the node that computes a large gradient at the end.
LARGE_END = "fsdp_large_end"
# Of every node that ``insert`` adds: its ``Role``.
ROLE = "fsdp_role"
# Parameters' names, for predictions: on the node that readers read, and on the gradient.
PARAMETER, GRADIENT_OF = "fsdp_parameter", "fsdp_gradient_of"
# Of gathered parameters that may stay for later launches, and of their views: not the graph's alone. Their names begin
# so, too: caches tell a backward that saves one by the names of its inputs.
SHARED, SHARED_NAME = "fsdp_shared", "shared_"
# Of backward's inputs that forward saved: the memory that they keep, for each tensor its name, place and bytes.
TAKEN = "fsdp_taken"
# Of copies of activations to the host and back: the name of the matrix that they are of, and its unit.
OFFLOADED = "fsdp_offloaded"
# Above every id that activation checkpointing hands out: a recomputed node may only feed recomputed nodes of a
# lower id, and with id 0 a checkpointed model saved its full weights (seen on 2.11 and 2.15).
AC_GRAPH_ID = 100_000


@dataclass(frozen=True)
class Role:
    """What a node does, and for which bucket; it is on every node that ``insert`` adds."""

    kind: str  # "gather" or "reduce"; "copy" of an activation; "end" for the wait at the end of a graph
    bucket: int
    unit: str
    turn: int  # place of its launch among all launches of the graph
    members: tuple[Member, ...] = ()  # of the bucket
    shown: tuple[int, ...] = ()  # for each unit in the bucket, its first member that has rows on every rank
    step: str = ""  # id of the plan of the step
    phase: int = 0
    num_bytes: int = 0  # of the bucket


def tag(node: fx.Node, policy: CheckpointPolicy, region: int = AC_GRAPH_ID) -> None:
    """Tell the partitioner what becomes of a node's result, whatever activation checkpointing does around it."""
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = region


def works_for(node: fx.Node, kind: str) -> bool:
    """Whether ``insert`` added a node for a "gather", or for a "reduce"."""
    role: Role | None = node.meta.get(ROLE)
    return role is not None and role.kind == kind
