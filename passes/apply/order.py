"""Make Inductor run launches, waits and products in the order in which they stand in the graph.

    dw, gx products or attentions, db sums, L launch; db1 and db0 read something in common

    planned      dw1  db1  L1 (dw1, db1)  gx0  dw0  db0  L0 (dw0, db0)
    left alone   gx0  db1+db0  dw1  dw0  L1  L0                            one kernel of both; the peak that Inductor
                                                                           estimates is lower with the products last
    held         dw1  db1  L1 ----------> gx0  dw0  db0  L0                gx0 runs after L1, so db1 and db0 are two

Inductor fuses kernels and sorts them, and does not keep the order of the FX graph. It does keep dependencies. So this
pass makes each launch, wait and product depend on the one before it, and what a launch packs or casts on the last
product before that. The op ``behind`` adds a dependency where data does not:

    mm_1 = mm(x, w1)
    mm_2 = mm(x, w2)        mm_2 = mm(x, w2);  behind(mm_2, mm_1)

Inductor makes no code of it. The pass runs last, since ``behind`` looks like a reader of ``mm_1`` and reads nothing.
Inductor may fuse what stands between two products, unless the plan has activations recomputed, so that bytes count:

    planned      ga = mm(gy, w)  u = mm(x, v)  a = gelu(u)  dw = mm(a, gy)  gu = gelu'(u, ga)    a is freed before gu
    left alone   ga = mm(gy, w)  u = mm(x, v)  a, gu = gelu(u), gelu'(u, ga)  dw = mm(a, gy)     both read u
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .._torch_compat import kernels as compat
from ..cost.fusion import computes_inputs
from ..cost.roofline import is_product
from ..ir.aliases import base_of, inputs_of, is_free
from ..ir.meta import LARGE_END, ROLE
from ..wire.collectives import c10d, wait_tensor
from ..wire.copies import is_awaited
from ..wire.ledger import begin
from ..wire.spec import define_op


def _behind(node: Tensor, before: Tensor) -> None:
    """Do nothing: without Inductor a graph runs in its own order."""


behind = define_op("behind(Tensor node, Tensor before) -> ()", _behind)
fx.node.has_side_effect(behind)


def hold_order(graph: fx.Graph, loops: bool) -> int:
    """Have Inductor keep the order of launches, waits and products; return how many nodes depend on more than data.

    With ``loops``, the pointwise ops and reductions that such a node reads depend on the last product before them.
    """
    compat.lower_as_dependency(behind)
    kept: list[fx.Node] = []  # launches, waits and products: each runs after all that stand before it
    after: dict[fx.Node, int] = {}  # the last of these that a node runs after
    last_product, num_held = -1, 0
    read = {base_of(one) for node in graph.nodes if _is_kept(node) for one in inputs_of(node)}
    for node in list(graph.nodes):
        after[node] = max((after[source] for source in node.all_input_nodes), default=-1)
        if _is_kept(node):
            num_held += _hold(node, kept, len(kept) - 1, after)
            after[node] = len(kept)
            kept.append(node)
            last_product = last_product if _communicates(node) else after[node]
        elif node in read and (not is_free(node) if ROLE in node.meta else loops and computes_inputs(node)):
            if node.target is torch.ops.aten.constant_pad_nd.default:
                after[node] = -1  # Inductor fills the padding by a kernel of its own, which reads nothing
            num_held += _hold(node, kept, last_product, after)
    return num_held


def _is_kept(node: fx.Node) -> bool:
    if ROLE in node.meta or node.op != "call_function":
        return _communicates(node)
    return node.target is begin or LARGE_END in node.meta or is_product(node) or _communicates(node)


def _communicates(node: fx.Node) -> bool:
    """Whether a node is a launch or a wait, ours or a user's: ranks that share a group must launch in one order."""
    is_ours = is_awaited(node) or node.target is wait_tensor
    return is_ours or getattr(node.target, "namespace", "") == c10d.name


def _hold(node: fx.Node, kept: list[fx.Node], place: int, after: dict[fx.Node, int]) -> bool:
    """Have a node run after the kept one at this place, and so after those before it; return whether that was new."""
    if after[node] >= place:
        return False
    held, before = _given(node), _given(kept[place])
    if held is None or before is None:
        return False
    with node.graph.inserting_after(held):
        node.graph.call_function(behind, (held, before)).meta["val"] = None
    after[node] = place
    return True


def _given(node: fx.Node) -> fx.Node | None:
    """Return a node with a tensor: this one, or an element of its results, moved right behind it; None without one."""
    if isinstance(node.meta.get("val"), Tensor):
        return node
    element = next((user for user in node.users if isinstance(user.meta.get("val"), Tensor)), None)
    if element is not None:
        node.append(element)
    return element
