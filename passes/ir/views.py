"""Ops that pass a tensor on as it is, in another dtype, or in part."""

from __future__ import annotations

import torch
from torch import fx

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
# They read only as many elements of their first argument as they return.
LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default)


def passes_on(node: fx.Node) -> bool:
    """Whether a node is a view or a cast, which passes on the value of its first input."""
    return node.target in VIEWS or node.target in CASTS
