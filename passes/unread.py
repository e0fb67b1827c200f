"""What backward would read in a larger batch, where the smallest ones have it read nothing.

A step of a recurrence: the first one begins with a state that takes no gradient. A rank whose sequences have one
element has no second step, in which backward reads what the state is multiplied with.

    h0 = full([2, 24], 0)
    h1 = tanh(mm(x1, w_in) + mm(h0, w_rec))
    h2 = tanh(mm(x2, w_in) + mm(h1, w_rec))    not with one element
    --- backward ---
    gh1 = mm(gz2, t(w_rec))                    not with one element
    r   = reduce_grad(...)                     so w_rec is needed from here on, at the latest

A first layer's weight is not read either, for any length: what it is multiplied with comes from outside. So a state
that is an input, and takes no gradient, looks like a first layer.

A batch of no rows: where no elements are, zeros stand in the place of what a norm's formula gives, and then nobody asks
for the gradient that it would take.

    z = add(mul(xhat, g), b)
    y = mm(z, w)
    --- backward ---
    gw = mm(t(z), gy)                                  but not  gz = mm(gy, t(w))
    gx, gg, gb = full([0, 24], 0), full([24], 0), full([24], 0)     for  mul(gz, g), sum(mul(gz, xhat)), sum(gz)

So there, forward says what formulas read: a product's that of an operand the other one, a sum's nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, fx

from . import _torch_compat as compat
from .provenance import find_reduces, find_unshards
from .slices import whole_of
from .views import CASTS, passes_on

aten = torch.ops.aten

_CONVOLUTIONS = (aten.convolution.default,)
_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.mul.Tensor,  # and what products of one row are made of
    *_CONVOLUTIONS,
)
# What no gradient flows through.
_CUTS = (aten.detach.default, aten.alias.default)
# Of what is computed element by element: their formulas read no tensor that took a gradient.
_LINEAR = (
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.neg.default,
    aten.where.self,
    aten.clone.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    *CASTS,
)
# They read no element of what they are given.
_FILLED_LIKE = (
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
)


def read_in_larger_batches(
    graph: fx.Graph, of_weights: Collection[fx.Node], backward: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """Nodes of a joint graph's forward that backward reads in a larger batch, and the place where it would by then.

    Given what is made of gathered weights, and the nodes of backward.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    found = _of_no_elements(graph, backward, place)
    states = _states(graph, backward)
    reduction = _reductions(graph)
    gathers = [marker.node for marker in find_unshards(graph) if marker.node in of_weights]
    for gather in gathers:
        if _meets(gather, of_weights, states):
            at = place[reduction[gather]] if gather in reduction else len(place) - 1
            found[gather] = min(at, found.get(gather, at))
    return found


def _states(graph: fx.Graph, backward: Collection[fx.Node]) -> dict[fx.Node, int]:
    """What the graph fills with numbers by itself, and what of it stands beside other things in one tensor.

    With the dimension in which it does, from the end; 0 where it stands alone. Random numbers may join, as in a
    dropout, but are none: whoever begins with noise (a generator of images) begins with a first layer.
    """
    states: dict[fx.Node, int] = {}
    random: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            states[node] = 0
        if node.op != "call_function" or node in backward:
            continue
        reads = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), (Tensor, tuple, list))]
        filled = [one for one in reads if states.get(one) == 0]
        if compat.has_tag(node.target, torch.Tag.nondeterministic_seeded) and not filled:
            random.update([node] if not reads else [])
        elif node.target in _FILLED_LIKE or all(one in random or one in filled for one in reads):
            if filled or not reads or node.target in _FILLED_LIKE:
                states[node] = 0
            else:
                random.add(node)
        elif node.target is aten.cat.default and filled and isinstance(value, Tensor):
            dim = node.args[1] if len(node.args) > 1 else 0
            states[node] = dim if dim < 0 else dim - value.dim()
        elif passes_on(node) and node.all_input_nodes[0] in states:
            states[node] = states[node.all_input_nodes[0]]
    return states


def _meets(gather: fx.Node, of_weights: Collection[fx.Node], states: Mapping[fx.Node, int]) -> bool:
    """Whether a weight, or what is made of it and others, is multiplied with a state that is no single number."""
    work, seen = [gather], {gather}
    while work:
        weight = work.pop()
        for user in weight.users:
            others = [one for one in user.all_input_nodes if one in states and one not in seen]
            if weight in _factors(user) and any(_is_contracted(one, states[one], user) for one in others):
                return True
            if user in of_weights and user not in seen and passes_on(user):
                seen.add(user)
                work.append(user)
    return False


def _factors(node: fx.Node) -> list[fx.Node]:
    """What a product multiplies, without what it adds."""
    if node.target not in _PRODUCTS:
        return []
    first = int(node.target in (aten.addmm.default, aten.baddbmm.default, aten.addmv.default))
    return [one for one in node.args[first : first + 2] if isinstance(one, fx.Node)]


def _is_contracted(state: fx.Node, dim: int, product: fx.Node) -> bool:
    """Whether a product sums over the elements of a state, and over those beside it, if it is a part of a tensor."""
    value = state.meta["val"]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if product.target in _CONVOLUTIONS:
        return dim == 0 or dim == 1 - value.dim()
    return dim in (0, -1)


def _reductions(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each gather the reduction of its gradient; else the first one of its unit, else the last of all."""
    reduces = find_reduces(graph)
    own = {marker.fqn: marker.node for marker in reversed(reduces)}
    of_unit = {marker.unit: marker.node for marker in reversed(reduces)}
    unshards = find_unshards(graph)
    names = {marker.node: marker.fqn for marker in unshards}
    found = {}
    for marker in unshards:
        fqn = names.get(whole_of(marker.node) or marker.node, marker.fqn)
        reduction = own.get(fqn) or of_unit.get(marker.unit) or (reduces[-1].node if reduces else None)
        if reduction is not None:
            found[marker.node] = reduction
    return found


def _of_no_elements(
    graph: fx.Graph, backward: Collection[fx.Node], place: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """What formulas of gradients would read, had the batch rows; and where these formulas stand, or would."""
    differentiable = _trained(graph)
    found: dict[fx.Node, int] = {}
    formulas: list[tuple[int, int]] = []  # backward goes through forward's sequence numbers from the last to the first
    for node in graph.nodes:
        if node in backward and "seq_nr" in node.meta and node.op == "call_function":
            formulas.append((node.meta["seq_nr"], place[node]))
    for node in graph.nodes:
        if node.op != "call_function" or node in backward or node in differentiable:
            continue
        if node.target in _CUTS or not any(one in differentiable for one in node.all_input_nodes):
            continue
        differentiable.add(node)
        reads = list(_read_by_formula(node, differentiable))
        if not any(map(_is_empty, (*reads, *node.all_input_nodes))):
            continue
        number = node.meta.get("seq_nr", 0)
        at = next((at for formula, at in formulas if formula <= number), len(place) - 1)
        for one in reads:
            found[one] = min(at, found.get(one, at))
    return found


def _trained(graph: fx.Graph) -> set[fx.Node]:
    """The gathers and the inputs of a joint graph that gradients are computed of."""
    reduced = {marker.fqn for marker in find_reduces(graph)}
    unshards = find_unshards(graph)
    names = {marker.node: marker.fqn for marker in unshards}
    return {
        one.node
        for one in unshards
        if names.get(whole_of(one.node) or one.node) in reduced or any(arg is not None for arg in one.node.args[1:2])
    } | compat.inputs_with_gradients(graph)


def _read_by_formula(node: fx.Node, differentiable: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What the formula of a node's gradient reads: of a product the factors, else what goes into it and comes out."""
    factors = _factors(node)
    if factors and len(node.all_input_nodes) > 1:
        yield from (one for one in factors if any(other in differentiable for other in factors if other is not one))
    elif node.target is aten.mul.Scalar and node.args[1] == 0:
        yield from _of_attention(node)
    elif _is_curved(node) and not factors:
        yield from (node, *node.all_input_nodes)


def _is_curved(node: fx.Node) -> bool:
    """Whether a derivative depends on where it is taken: an elementwise operation's, or a norm's statistics."""
    elementwise = compat.has_tag(node.target, torch.Tag.pointwise) and not compat.may_alias(node.target)
    return node.target is aten.var_mean.correction or (elementwise and node.target not in _LINEAR)


def _of_attention(node: fx.Node) -> Iterator[fx.Node]:
    """What goes into attention, which without elements is 0 times the sum of all that goes into it."""
    work = list(node.all_input_nodes)
    while work:
        one = work.pop()
        if one.target is aten.add.Tensor:
            work += one.all_input_nodes
        elif one.target is aten.sum.default:
            yield from one.all_input_nodes


def _is_empty(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(isinstance(size, int) and size == 0 for size in value.shape)
