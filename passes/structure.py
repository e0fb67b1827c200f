"""What backward gathers again, and from where on it may need it, read off the structure of a joint graph.

    w, b, g = unshard(...), unshard(...), unshard(...)
    v = mul(w, mask)                 of weights         made again, with what it is made of
    y = add(mm(x, v), b)             reads a matrix     saved or not needed, never computed again: nobody needs b
    z = mul(xhat, g)                 reads a vector     saved or computed again, as the partitioner likes
    --- backward ---
    gv = mm(t(z), gu)                reads z            so g may be needed from here on
    gx = mm(gy, t(v))                reads v            so w is needed from here on

The partitioner's min-cut weighs activations, whose sizes may differ between ranks, so what decides on collectives is
taken from it. A matrix is gathered again where a gradient's formula reads it or a checkpointed region does; its readers
are products, which min-cut would save in any case. What reads a vector (a norm's scale) is cheap to compute again and
as large as an activation, so min-cut may choose; and backward gathers the vector whatever it chose. What the formulas
read depends on lengths in a few places, where a batch is at its smallest: unread.py has them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from . import _torch_compat as compat
from . import markers
from .provenance import reduce_nodes, unshard_nodes
from .slices import keep_slice, whole_of
from .tags import AC_GRAPH_ID
from .unread import read_in_larger_batches
from .views import CASTS, passes_on

RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_OURS = (markers.unshard, markers.reduce_grad, markers.beside, markers.resume, keep_slice)
_NEVER = math.inf

Weights = frozenset[fx.Node]  # gathers
_NONE: Weights = frozenset()


@dataclass(frozen=True)
class Structure:
    """Of a joint graph whose gathers are merged."""

    of_weights: dict[fx.Node, Weights]  # gathers, and what is made of them and of what stays; with those behind it
    beside: set[fx.Node]  # what else goes into that
    in_forward: set[fx.Node]  # the gathers that forward reads, or keeps
    computed: set[fx.Node]  # what forward's results take, and no gradient goes into
    saved: set[fx.Node]  # of that, what is not computed again
    again: dict[fx.Node, int]  # the gathers that backward may need, and the place of the first node that may
    read: set[fx.Node]  # those of them that backward reads in any case
    late: set[fx.Node]  # what reads weights that forward does not, though no gradient goes into it
    fed: set[fx.Node]  # what a gradient goes into


def structure_of(graph: fx.Graph) -> Structure:
    """Which gathers a backward cannot do without: a function of the graph's edges, and of no activation's size."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    tangents = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]
    fed = closure(tangents, lambda node: node.users)
    # And what custom functions compute in their backward besides.
    backward = fed | {one for one in graph.nodes if compat.is_of_backward(one) and one.target is not markers.unshard}
    backward = closure(backward, lambda node: node.users)
    forward = closure(_results_of_forward(graph, backward), lambda node: node.all_input_nodes)
    # One that is to be kept, and that forward does not read, has nothing to be kept from.
    gathers = {node for node in unshard_nodes(graph) if node.kwargs["regather"] or node not in forward}
    of_weights, beside = made_of_weights(graph, gathers, backward)
    in_forward = {node for node in unshard_nodes(graph) if node in forward and whole_of(node) is None}
    read = _NONE.union(*(_weights_read(node, of_weights) for node in backward))
    unread = read_in_larger_batches(graph, of_weights, backward)
    would_read = read.union(*(of_weights.get(node, _NONE) for node in unread))
    saved = _saved(graph, of_weights, forward - backward, would_read, bool(reduce_nodes(graph)))
    needed = _first_needed(graph, place, backward, forward, saved, unread)
    again = {node: int(needed[node]) for node in graph.nodes if node in gathers and needed[node] < _NEVER}
    elsewhere = {*forward, *fed, *of_weights}
    late = {
        node
        for node in graph.nodes
        if node.op == "call_function" and node not in elsewhere
        if node.target not in _OURS and not _weights_read(node, of_weights) <= in_forward
        if "recompute" not in node.meta and not any("recompute" in user.meta for user in node.users)
    }
    # Without elements, what no gradient goes into may as well be computed in forward.
    surely = _NONE.union(*(_weights_read(node, of_weights) for node in fed))
    computed, reads = forward - backward, set(surely) & set(again)
    return Structure(of_weights, beside, in_forward, computed, saved, again, reads, late, fed)


def _results_of_forward(graph: fx.Graph, backward: set[fx.Node]) -> list[fx.Node]:
    """What a joint graph returns of its forward, and what forward writes in place."""
    written = [node for node in graph.nodes if node.op == "call_function" and node.is_impure()]
    return [node for node in (*graph.output_node().all_input_nodes, *written) if node not in backward]


def made_of_weights(
    graph: fx.Graph, gathers: set[fx.Node], backward: set[fx.Node]
) -> tuple[dict[fx.Node, Weights], set[fx.Node]]:
    """The gathers and what is made of them alone; and what constants were made for that.

    Other inputs, and random numbers, may join element by element, as masks and scales do: whether such an input is a
    buffer or a batch, the graph does not tell. What is made with them goes on element by element.
    """
    found: dict[fx.Node, Weights] = {node: frozenset({node}) for node in gathers}
    alone = set(gathers)
    constant: set[fx.Node] = set()
    apart = set(graph.find_nodes(op="placeholder")) - compat.written_inputs(graph)
    for node in graph.nodes:
        if node.op == "get_attr" or _is_size(node):
            constant.add(node)
        if node.op != "call_function" or node in found or node in constant or node.target in _OURS or node in backward:
            continue
        reads = node.all_input_nodes
        weights = _weights_read(node, found)
        if weights and node.meta.get("ac_graph_id") == AC_GRAPH_ID:  # of what an extension sent, as ``parts`` saw
            found[node] = weights
            alone.add(node)
            continue
        if not all(one in found or one in constant or one in apart for one in reads):
            continue
        of_constants = all(one in alone or one in constant for one in reads)
        if not of_constants and not is_elementwise(node):
            continue
        if not weights and (can_be_done_again(node) or is_random(node)):
            (constant if of_constants and not is_random(node) else apart).add(node)
        elif weights and can_be_done_again(node):
            found[node] = weights
            if of_constants:
                alone.add(node)
    feeding = closure(
        (one for node in found if node not in gathers for one in node.all_input_nodes),
        lambda node: [] if node.target in _OURS else node.all_input_nodes,
    )
    return found, {node for node in feeding if node.op == "call_function" and (node in constant or node in apart)}


def _saved(
    graph: fx.Graph, of_weights: Mapping[fx.Node, Weights], forward: set[fx.Node], read: Weights, reduces: bool
) -> set[fx.Node]:
    """Forward's products with matrices, and the sums of these with a bias that backward has no other need of.

    And whatever else reads a weight in a graph without reductions: frozen vectors are not gathered for what min-cut
    might compute again, unless a checkpointed region has them.
    """
    saved: set[fx.Node] = set()
    products: set[fx.Node] = set()  # and what becomes of them on the way to the bias
    kept = {node for node in unshard_nodes(graph) if node not in of_weights and is_matrix(node)}  # or views of it
    for node in graph.nodes:
        if node.op != "call_function" or node not in forward or node in of_weights or node.target in _OURS:
            continue
        if passes_on(node) and kept & set(node.all_input_nodes[:1]):
            kept.add(node)
        elif kept & set(node.all_input_nodes):
            products.add(node)
        if follows_a_product(node) and node.all_input_nodes and set(node.all_input_nodes[:1]) <= products:
            products.add(node)
        weights = _weights_read(node, of_weights)
        if not weights or not isinstance(node.meta.get("val"), Tensor) or compat.may_alias(node.target):
            continue
        others = [one for one in node.all_input_nodes if one not in of_weights and not _is_size(one)]
        reads_matrix = node in products or any(map(is_matrix, weights)) or not reduces
        # The gradient of a sum reads neither operand, though backward may read the bias for another's sake.
        is_sum = node.target is torch.ops.aten.add.Tensor
        adds_bias = bool(others) and all(one in products for one in others) and (is_sum or not weights & read)
        if reads_matrix or adds_bias:
            products.add(node)
            if not _is_recomputed(node):
                saved.add(node)
    return saved


def _first_needed(
    graph: fx.Graph,
    place: Mapping[fx.Node, int],
    backward: set[fx.Node],
    forward: set[fx.Node],
    saved: set[fx.Node],
    unread: Mapping[fx.Node, int],
) -> dict[fx.Node, float]:
    """For each node of forward, the first place of backward that may need it: read it, or what is computed of it."""
    needed: dict[fx.Node, float] = {}
    for node in reversed(graph.nodes):
        first: float = unread.get(node, _NEVER)
        for user in node.users:
            if user in backward:
                first = min(first, place[user])
            elif user.op != "output" and user not in saved and not _is_kept(user, forward):
                first = min(first, needed[user])
        needed[node] = first
    return needed


def _is_kept(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether activation checkpointing, or a slice in a parameter's place, has the partitioner save a node's result."""
    if node.target is keep_slice:
        return True
    policy = node.meta.get("recompute")
    if policy in RECOMPUTED:
        return not _is_recomputed(node)
    return policy is CheckpointPolicy.MUST_SAVE and node in forward and not compat.may_alias(node.target)


def _is_recomputed(node: fx.Node) -> bool:
    """Whether activation checkpointing has the partitioner compute a node again.

    It saves what one checkpointed region hands to the next, and the result of a region behind which a hook stands.
    """
    if node.meta.get("recompute") not in RECOMPUTED:
        return False
    users = [user for user in node.users if user.meta.get("recompute") in RECOMPUTED]
    if node.meta.get("has_backward_hook") and not users:
        return False
    return not any(user.meta.get("ac_graph_id", 0) > node.meta.get("ac_graph_id", 0) for user in users)


def _weights_read(node: fx.Node, of_weights: Mapping[fx.Node, Weights]) -> Weights:
    return _NONE.union(*(of_weights.get(one, _NONE) for one in node.all_input_nodes))


def is_matrix(gather: fx.Node) -> bool:
    """Whether a parameter has more than one dimension that is not 1."""
    size: list[int] = gather.kwargs["size"]  # type: ignore[assignment]
    return sum(length != 1 for length in size) > 1


def follows_a_product(node: fx.Node) -> bool:
    """Views, casts, and what is left of a product where a batch of one made it a sum of products, times one."""
    times_a_number = node.target is torch.ops.aten.mul.Tensor and len(node.all_input_nodes) == 1
    return passes_on(node) or times_a_number or node.target is torch.ops.aten.sum.dim_IntList


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_elementwise(node: fx.Node) -> bool:
    """Whether an operation computes each element of its result from one of each argument, or is none at all."""
    return compat.has_tag(node.target, torch.Tag.pointwise) or compat.may_alias(node.target) or node.target in CASTS


def is_random(node: fx.Node) -> bool:
    return compat.has_tag(node.target, torch.Tag.nondeterministic_seeded)


def can_be_done_again(node: fx.Node) -> bool:
    """Whether an operation gives the same once more, and nothing else happens."""
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, compat.OpOverload)
        and not node.is_impure()
        and not is_random(node)
        and "unbacked_bindings" not in node.meta
    )


def closure(starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """What steps lead to from some nodes, these included, but for the graph's output."""
    reached = set(starts)
    work = list(reached)
    while work:
        for node in step(work.pop()):
            if node not in reached and node.op != "output":
                reached.add(node)
                work.append(node)
    return reached
