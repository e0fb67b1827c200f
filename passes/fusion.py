"""What Inductor does not keep in memory: pointwise results that are computed inside of the kernel that reads them.

x -> mul -> add -> gelu -> mm        mul and add are nowhere, gelu is written for mm
x -> exp -> sum                      exp is nowhere, sum is written
"""

from __future__ import annotations

import torch
from torch import fx

from . import _torch_compat as compat
from .aliases import is_free
from .keep import CASTS

aten = torch.ops.aten

# Inductor writes these into whatever reads them, though they are not tagged as pointwise.
_INLINED = {
    *CASTS, aten.constant_pad_nd.default, aten.full.default, aten.full_like.default, aten.zeros.default,
    aten.ones.default, aten.arange.start_step, aten.scalar_tensor.default, torch.ops.prims.iota.default,
    aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.embedding.default,
}  # fmt: skip


def fused_away(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose results nobody reads but pointwise ops and reductions, which compute them on the way."""
    return {node for node in graph.nodes if is_pointwise(node) and not is_free(node) and not _is_stored(node)}


def is_pointwise(node: fx.Node) -> bool:
    if node.target in _INLINED:
        return True
    return isinstance(node.target, compat.OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_stored(node: fx.Node) -> bool:
    """Whether somebody reads a pointwise result, or a view of it, who cannot compute it on the way."""
    work = [node]
    while work:
        for user in work.pop().users:
            if user.op == "call_function" and is_free(user):
                work.append(user)
            elif not (is_pointwise(user) or _is_reduction(user)):
                return True
    return not node.users


def _is_reduction(node: fx.Node) -> bool:
    return isinstance(node.target, compat.OpOverload) and torch.Tag.reduction in node.target.tags
