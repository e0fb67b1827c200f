"""Find the activations that backward could recompute, grouped by the matrix that they are computed with.

    unit 0      x = norm(h)   u = mm(x, w_up)   a = gelu(u)   y = mm(a, w_down)   h' = add(h, y)      -> unit 1
    w_up        x, u          the product, and the elementwise results that it reads
    w_down      a             but not y: unit 1 reads y, so without y backward would begin by redoing all of forward
    joint graph                       after, with ("w_up",)
    x, u, a                           x, u, a                    # x, u: recompute=MUST_RECOMPUTE

Activations are named after their matrix, so their names are the same on all ranks, whatever the lengths of the batches.
An activation may be recomputed if all products that read it next belong to its own unit: what units hand to each other
is saved. Random numbers are not drawn again, and nodes in a user's own checkpointed regions are left alone. To
recompute an activation is to read its matrix once more; structure.py handles that, like all reads of backward.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from ..ir.effects import read_what_is_written
from ..ir.markers import change_spec
from ..ir.meta import tag
from ..ir.nodes import can_be_done_again, is_elementwise, is_random
from ..ir.provenance import Marker, find_unshards, whole_of
from .structure import Structure, follows_a_product, is_matrix, structure_of

# The lowest region id of activation checkpointing: what a checkpointed region reads is saved for it as before.
_REGION = 0
_OUTSIDE = "outside"  # no unit has this name: a unit's name is class:path


def activations_of(graph: fx.Graph) -> dict[str, tuple[fx.Node, ...]]:
    """Return the nodes of a joint graph that backward could recompute, by the name of their matrix; each node once."""
    with _all_gathered_again(graph):
        structure = structure_of(graph)
    products = _products(graph, structure)
    reached = _units_reached(graph, structure, products)
    made_for = _made_for(graph, structure, products)
    changed = read_what_is_written(graph, structure.saved)  # recomputed from a changed input they would differ
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        owner = products.get(node) if node in structure.saved else made_for.get(node)
        may_be_again = node not in changed and "recompute" not in node.meta
        if owner is not None and reached[node] <= {owner.unit} and may_be_again:
            found.setdefault(owner.fqn, []).append(node)
    return {name: tuple(nodes) for name, nodes in found.items()}


def matrices_of(graph: fx.Graph) -> dict[fx.Node, Marker]:
    """Return a matrix for each node that forward computes: of the first product that it goes into, else comes from."""
    with _all_gathered_again(graph):
        structure = structure_of(graph)
    gathers = {one.node: one for one in find_unshards(graph) if one.spec.part < 0 and whole_of(one.node) is None}
    place = {node: index for index, node in enumerate(graph.nodes)}
    products: dict[fx.Node, Marker] = {}
    goes_into: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        if node not in structure.computed or node in structure.of_weights:
            continue
        read = {gather for one in node.all_input_nodes for gather in structure.of_weights.get(one, ())}
        matrices = [gathers[one] for one in read if one in gathers and is_matrix(one)]
        if matrices:
            products[node], goes_into[node] = min(matrices, key=lambda one: (one.spec.order, one.fqn)), node
        elif into := [goes_into[user] for user in node.users if user in goes_into]:
            goes_into[node] = min(into, key=place.__getitem__)
    found: dict[fx.Node, Marker] = {}
    for node in graph.nodes:
        if node in goes_into:
            found[node] = products[goes_into[node]]
        elif node in structure.computed and (before := [found[one] for one in node.all_input_nodes if one in found]):
            found[node] = before[-1]
        elif node.target is operator.getitem and node.args[0] in found:  # a result that only backward reads
            found[node] = found[node.args[0]]
    return found


def compute_again(graph: fx.Graph, names: Collection[str]) -> None:
    """Tag the activations of these matrices to be recomputed in backward; skip names that the graph does not have."""
    if not names:
        return
    found = activations_of(graph)
    for name in names:
        for node in found.get(name, ()):
            tag(node, CheckpointPolicy.MUST_RECOMPUTE, region=_REGION)


@contextmanager
def _all_gathered_again(graph: fx.Graph) -> Iterator[None]:
    """Mark all gathers as gathered again for a while: activations must not depend on which parameters are kept."""
    told = {one.node: one.spec.regather for one in find_unshards(graph)}
    try:
        for node in told:
            change_spec(node, regather=True)
        yield
    finally:
        for node, regather in told.items():
            change_spec(node, regather=regather)


def _products(graph: fx.Graph, structure: Structure) -> dict[fx.Node, Marker]:
    """Return the products with matrices, their views and their sums with biases, each with its first matrix."""
    gathers = {one.node: one for one in find_unshards(graph) if one.spec.part < 0 and whole_of(one.node) is None}
    products: dict[fx.Node, Marker] = {}
    for node in graph.nodes:
        before = next((products[one] for one in node.all_input_nodes if one in products), None)
        if node in structure.saved:
            read = {gather for one in node.all_input_nodes for gather in structure.of_weights.get(one, ())}
            matrices = [gathers[one] for one in read if one in gathers and is_matrix(one)]
            if matrices:
                products[node] = min(matrices, key=lambda one: (one.spec.order, one.fqn))
            elif before is not None:
                products[node] = before
        elif before is not None and node in structure.computed and follows_a_product(node):
            products[node] = before
    return products


def _units_reached(
    graph: fx.Graph, structure: Structure, products: Mapping[fx.Node, Marker]
) -> dict[fx.Node, frozenset[str]]:
    """Return for each node of forward the units whose products read it next; _OUTSIDE if it is returned or written."""
    reached: dict[fx.Node, frozenset[str]] = {}
    for node in reversed(graph.nodes):
        units: set[str] = set()
        for user in node.users if node in structure.computed else ():
            if user.op == "output" or (user in structure.computed and user.is_impure() and not is_random(user)):
                units.add(_OUTSIDE)
            elif user in structure.saved:
                units |= {products[user].unit} if user in products else reached[user]
            elif user in structure.computed:
                units |= reached[user]
        reached[node] = frozenset(units)
    return reached


def _made_for(
    graph: fx.Graph, structure: Structure, products: Mapping[fx.Node, Marker]
) -> dict[fx.Node, Marker]:
    """Return the matrix of each elementwise result: of the first product that it goes into, else that it comes from."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    light: set[fx.Node] = set()
    for node in graph.nodes:
        if node in structure.computed and _is_light(node, structure):
            of_views = node.target is not operator.getitem or node.args[0] in light or node.args[0] in products
            if of_views:  # not one of several results, such as attention's
                light.add(node)
    goes_into: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        if node in light:
            into = [
                user if user in products and user not in light else goes_into[user]
                for user in node.users
                if (user in products and user not in light) or user in goes_into
            ]
            if into:
                goes_into[node] = min(into, key=place.__getitem__)
    made_for: dict[fx.Node, Marker] = {}
    for node in graph.nodes:
        if node in goes_into:
            made_for[node] = products[goes_into[node]]
        elif node in light:
            sources = (products.get(one) or made_for.get(one) for one in node.all_input_nodes)
            owner = next((one for one in sources if one is not None), None)
            if owner is not None:
                made_for[node] = owner
    return made_for


def _is_light(node: fx.Node, structure: Structure) -> bool:
    return (
        node.op == "call_function"
        and node not in structure.of_weights
        and node not in structure.saved
        and isinstance(node.meta.get("val"), (Tensor, tuple, list))  # a tuple: the parts of a split
        and is_elementwise(node)
        and can_be_done_again(node)
    )
