"""The order in which launches, waits and products stand is the order in which they run, whatever Inductor does.

    dw, gx products or attentions, db sums, L launch; db1 and db0 read something in common

    planned      dw1  db1  L1 (dw1, db1)  gx0  dw0  db0  L0 (dw0, db0)
    left alone   gx0  db1+db0  dw1  dw0  L1  L0                            one kernel of both; the peak that Inductor
                                                                           estimates is lower with the products last
    held         dw1  db1  L1 ----------> gx0  dw0  db0  L0                gx0 runs behind L1, so db1 and db0 are two

Inductor fuses kernels and sorts them, and does not keep the order of the FX graph. It does keep dependencies. So each
launch, wait and product depends on the one before it, and what a launch packs or casts on the last product before
that. ``behind`` says so, where data does not:

    mm_1 = mm(x, w1)
    mm_2 = mm(x, w2)        mm_2 = mm(x, w2);  behind(mm_2, mm_1)

Inductor makes no code of it. This goes last, since who reads ``mm_1`` in it reads nothing. What is fused between two
products is Inductor's to say, unless the plan has activations computed again, and so counts bytes:

    planned      ga = mm(gy, w)  u = mm(x, v)  a = gelu(u)  dw = mm(a, gy)  gu = gelu'(u, ga)    a goes before gu comes
    left alone   ga = mm(gy, w)  u = mm(x, v)  a, gu = gelu(u), gelu'(u, ga)  dw = mm(a, gy)     both read u
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from . import _torch_compat_kernels as compat
from .aliases import base_of, inputs_of, is_free
from .collectives import c10d, is_launch
from .cost import is_product
from .fusion import computes_inputs
from .insert import ROLE
from .ledger import begin
from .overlap import LARGE_END
from .spec import NAMESPACE, library

library.define("behind(Tensor node, Tensor before) -> ()")
behind = torch.ops.fsdpc.behind.default
fx.node.has_side_effect(behind)


@torch.library.register_fake(f"{NAMESPACE}::behind")
def _behind_fake(node: Tensor, before: Tensor) -> None:
    return None


def _behind_kernel(node: Tensor, before: Tensor) -> None:
    """Nothing: who runs the graph itself runs it in its order."""


library.impl("behind", _behind_kernel, "CompositeExplicitAutograd")


def hold_order(graph: fx.Graph, loops: bool) -> int:
    """Have Inductor keep the order of launches, waits and products; return how many nodes depend on more than data.

    With ``loops``, what a product reads depends on the product before it as well.
    """
    compat.lower_as_dependency(behind)
    kept: list[fx.Node] = []  # launches, waits and products: each runs behind all that stand before it
    after: dict[fx.Node, int] = {}  # the last of these that a node runs behind
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
            num_held += _hold(node, kept, last_product, after)
    return num_held


def _is_kept(node: fx.Node) -> bool:
    if ROLE in node.meta or node.op != "call_function":
        return _communicates(node)
    return node.target is begin or LARGE_END in node.meta or is_product(node) or _communicates(node)


def _communicates(node: fx.Node) -> bool:
    """Whether a node launches or waits, ours or a user's: ranks that share a group must launch in one order."""
    return is_launch(node) or getattr(node.target, "namespace", "") == c10d.name


def _hold(node: fx.Node, kept: list[fx.Node], place: int, after: dict[fx.Node, int]) -> bool:
    """Have a node run behind the kept one at this place, and those before it."""
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
    """A tensor that a node gives: itself, or one of several, which is put right behind it; None where none is read."""
    if isinstance(node.meta.get("val"), Tensor):
        return node
    element = next((user for user in node.users if isinstance(user.meta.get("val"), Tensor)), None)
    if element is not None:
        node.append(element)
    return element
