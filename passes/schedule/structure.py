"""What backward gathers again, and from where on it may need it, read off the structure of a joint graph.

    w, b, g = unshard(...), unshard(...), unshard(...)
    v = mul(w, mask)                 of weights         made again, with what it is made of
    y = add(mm(x, v), b)             reads a matrix     the product is saved or not needed, never computed again
    z = mul(xhat, g)                 reads a vector     saved or computed again, as the partitioner likes
    --- backward ---
    gz = ...                         backward arrives at the unit of w, b and g: from here on it may need them
    gx = mm(gy, t(v))

Ranks have batches of different sizes, so neither what a graph reads nor what the partitioner saves may decide on
collectives. A unit is gathered again as a whole, whether or not a formula reads each weight, where backward arrives at
it: at the last operation with one of its weights, or with one of a unit inside it, that a gradient comes to. Autograd
numbers operations as forward runs them, and goes through them from the highest number to the lowest. Units that no
gradient comes to, as frozen layers before the first one that trains, are not gathered again, nor are the tables of
embeddings. If another unit's backward would compute something of a weight again before the weight's unit is gathered,
forward saves that result. The eager path gathers the same where backward arrives at a unit's outputs.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_compat as compat
from ..ir import markers
from ..ir.meta import AC_GRAPH_ID
from ..ir.nodes import aten, can_be_done_again, closure, is_elementwise, is_random, is_size, passes_on, tangents_of
from ..ir.provenance import Marker, find_reduces, find_unshards, unshard_nodes, whole_of
from ..wire.spec import without_use
from .slices import is_sliced
from .uses import by_unit, units_around

RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_OURS = (markers.unshard, markers.reduce_grad, markers.beside, markers.resume, markers.keep_slice)
_NOTHING = -1  # no operation's number

# What a gradient does not flow through.
_CUTS = (aten.detach.default, aten.alias.default)

Weights = frozenset[fx.Node]  # gathers
_NONE: Weights = frozenset()


class Arrival(NamedTuple):
    """Where backward arrives at a unit, in the order in which it does."""

    place: int  # of the first node of backward that may need the unit
    needed: int = 0  # minus autograd's number of the last operation that backward may need it for
    used: int = 0  # minus that of the last operation of forward that uses it
    depth: int = 0  # how many units it is inside of


@dataclass(frozen=True)
class Structure:
    """What backward needs of the weights of a joint graph whose gathers are merged."""

    # The weights behind a node, as gathers. The nodes are the gathers themselves, and those that are computed from
    # gathered weights alone, or together with masks, scales or constants.
    of_weights: dict[fx.Node, Weights]
    beside: set[fx.Node]  # the operations that compute those masks, scales and constants
    in_forward: set[fx.Node]  # the gathers that forward reads, or keeps
    computed: set[fx.Node]  # what forward's results take, and no gradient goes into
    saved: set[fx.Node]  # of that, what is not computed again
    again: dict[fx.Node, Arrival]  # the gathers of backward, and where it may need each of them first
    read: set[fx.Node]  # those of them that backward reads in any case
    late: set[fx.Node]  # what reads weights that forward does not, though no gradient goes into it
    fed: set[fx.Node]  # what a gradient goes into


def structure_of(graph: fx.Graph) -> Structure:
    """Find out which weights backward gathers again: a function of the graph's edges, and of no activation's size."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    fed = closure(tangents_of(graph), lambda node: node.users)
    # And what custom functions compute in their backward besides.
    backward = fed | {one for one in graph.nodes if compat.is_of_backward(one) and one.target is not markers.unshard}
    backward = closure(backward, lambda node: node.users)
    forward = closure(_results_of_forward(graph, backward), lambda node: node.all_input_nodes)
    # One that is to be kept, and that forward does not read, has nothing to be kept from.
    gathers = {node for node in unshard_nodes(graph) if markers.spec_in(node).regather or node not in forward}
    of_weights, beside = made_of_weights(graph, gathers, backward)
    in_forward = {node for node in unshard_nodes(graph) if node in forward and whole_of(node) is None}
    unshards, reduces = find_unshards(graph), find_reduces(graph)
    flowing = _flowing(graph, unshards, reduces, backward)
    used, wanted = _wanted_for(graph, of_weights, flowing, backward)
    without = _uses_without_gradient(unshards, reduces)
    whole = [one for one in unshards if one.node in gathers and not is_sliced(one.node) and one.unit not in without]
    arrivals, since = _arrivals(place, whole, reduces, used, wanted, backward)
    saved = _saved(graph, of_weights, forward - backward, arrivals)
    saved, needed = _read_ahead(graph, place, of_weights, backward, forward - backward, saved, since)
    again = {
        node: min(arrivals.get(node, Arrival(len(place))), Arrival(needed[node]))
        for node in graph.nodes
        if node in gathers and (node in arrivals or needed[node] < len(place))
    }
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


def _uses_without_gradient(unshards: Sequence[Marker], reduces: Sequence[Marker]) -> set[str]:
    """Return the uses of units that no gradient comes to, such as those under ``no_grad``, but to others of them."""
    trained = {without_use(one.fqn) for one in reduces}
    return {one.unit for one in unshards if without_use(one.fqn) in trained} - {one.unit for one in reduces}


def _results_of_forward(graph: fx.Graph, backward: set[fx.Node]) -> list[fx.Node]:
    """Return the results of a joint graph that are forward's, and the operations by which forward writes in place."""
    written = [node for node in graph.nodes if node.op == "call_function" and node.is_impure()]
    return [node for node in (*graph.output_node().all_input_nodes, *written) if node not in backward]


def made_of_weights(
    graph: fx.Graph, gathers: set[fx.Node], backward: set[fx.Node]
) -> tuple[dict[fx.Node, Weights], set[fx.Node]]:
    """Return the gathers, with what is computed of them alone, and the constants that are computed for that.

    Other inputs, and random numbers, may join element by element, as masks and scales do: whether such an input is a
    buffer or a batch, the graph does not tell. What is made with them goes on element by element.
    """
    found: dict[fx.Node, Weights] = {node: frozenset({node}) for node in gathers}
    alone = set(gathers)
    constant: set[fx.Node] = set()
    apart = set(graph.find_nodes(op="placeholder")) - compat.written_inputs(graph)
    for node in graph.nodes:
        if node.op == "get_attr" or is_size(node):
            constant.add(node)
        if node.op != "call_function" or node in found or node in constant or node.target in _OURS or node in backward:
            continue
        reads = node.all_input_nodes
        weights = _weights_read(node, found)
        if node.target is aten.embedding.default and any(map(_is_table, weights)):
            continue  # its rows are an activation, even those of constant positions
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


def _arrivals(
    place: Mapping[fx.Node, int],
    gathers: Sequence[Marker],
    reduces: Sequence[Marker],
    used: Mapping[fx.Node, int],
    wanted: Mapping[fx.Node, int],
    backward: Collection[fx.Node],
) -> tuple[dict[fx.Node, Arrival], dict[fx.Node, int]]:
    """Return two places in backward for each weight that it gathers.

    The first is where backward arrives at the weight's unit. The second is where it last used another unit before that,
    or reduced its gradients. Backward arrives at all units of a checkpointed region at once, which it gathers from the
    last one to the first.
    """
    # But a checkpointed region looks rows up once more.
    tables = {one.node for one in gathers if one.spec.is_table and not any(map(_is_recomputed, one.node.users))}
    units = by_unit(one for one in gathers if one.node not in tables)
    around = units_around(units)
    last, end = dict.fromkeys(units, _NOTHING), dict.fromkeys(units, _NOTHING)
    for unit, members in units.items():
        for latest, numbers in ((last, wanted), (end, used)):
            own = max(numbers.get(one.node, _NOTHING) for one in members)
            for one in (unit, *around[unit]):
                latest[one] = max(latest[one], own)
    reached: list[tuple[int, int]] = []  # ever lower numbers, negated, and the places where backward comes to them
    for node, at in place.items():
        number = node.meta.get("seq_nr")
        if number is not None and node in backward and (not reached or -number > reached[-1][0]):
            reached.append((-number, at))
    arrivals: dict[fx.Node, Arrival] = {}
    for unit, members in units.items():
        if last[unit] > _NOTHING:
            first = bisect_left(reached, (-last[unit], 0))
            at = reached[first][1] if first < len(reached) else len(place) - 1
            arrival = Arrival(at, -last[unit], -end[unit], len(around[unit]))
            arrivals.update((one.node, arrival) for one in members)
    events = [(arrivals[one.node].place, one.unit) for one in gathers if one.node in arrivals]
    of_others = _last_of_others([*events, *((place[one.node], one.unit) for one in reduces)])
    return arrivals, {one.node: of_others[one.unit] for one in gathers if one.node in arrivals}


def _last_of_others(events: list[tuple[int, str]]) -> dict[str, int]:
    """Return for each unit the last place that another unit has before the first place of this one; -1 without one.

    Each event is a place and the unit that has it.
    """
    found: dict[str, int] = {}
    last, before = (-1, ""), -1  # the last event, and the last place of another unit than the event's
    for at, unit in sorted(events):
        if unit != last[1]:
            before = last[0]
        last = (at, unit)
        found.setdefault(unit, before)
    return found


def _wanted_for(
    graph: fx.Graph,
    of_weights: Mapping[fx.Node, Weights],
    flowing: set[fx.Node],
    backward: Collection[fx.Node],
) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """Return for each weight the last operation that uses it, and the last one that backward may need it for.

    Autograd's number stands for the operation. Backward may need a weight for an operation that reads it, if a gradient
    comes to that; and for the operations behind that, if it computes its result again. Before it comes to a
    checkpointed region it runs all of it once more. Weights that no operation needs are left out.
    """
    numbers: dict[fx.Node, int] = {}
    ends: dict[int, int] = {}  # of each region, its last operation that a gradient comes to
    number = 0
    for node in graph.nodes:
        if node not in backward:
            number = max(number, node.meta.get("seq_nr", number))
            numbers[node] = _NOTHING if flowing.isdisjoint(node.all_input_nodes) else number
            ends[_region_of(node)] = max(ends.get(_region_of(node), _NOTHING), numbers[node])
    ends[0] = _NOTHING
    used: dict[fx.Node, int] = {}
    wanted: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if node in of_weights and node.users:
            used[node] = max((used.get(user, numbers.get(user, _NOTHING)) for user in node.users), default=_NOTHING)
            behind = [wanted.get(user, numbers.get(user, _NOTHING)) for user in node.users]
            wanted[node] = max([*behind, *(ends.get(_region_of(user), _NOTHING) for user in node.users)])
        elif _is_recomputed(node):
            wanted[node] = max([numbers.get(node, _NOTHING), *(wanted.get(user, _NOTHING) for user in node.users)])
    return used, {node: number for node, number in wanted.items() if number > _NOTHING}


def _flowing(
    graph: fx.Graph, unshards: Sequence[Marker], reduces: Sequence[Marker], backward: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the nodes of forward that a gradient flows through: from inputs and weights that take one."""
    reduced = {marker.fqn for marker in reduces}
    names = {marker.node: marker.fqn for marker in unshards}
    flowing = compat.inputs_with_gradients(graph) | {
        one.node
        for one in unshards
        if names.get(whole_of(one.node) or one.node) in reduced or any(arg is not None for arg in one.node.args[1:2])
    }
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or node in backward or node.target in _CUTS or is_size(node):
            continue
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        if not flowing.isdisjoint(node.all_input_nodes):
            flowing.add(node)
    return flowing


def _saved(
    graph: fx.Graph,
    of_weights: Mapping[fx.Node, Weights],
    forward: set[fx.Node],
    again: Collection[fx.Node],
) -> set[fx.Node]:
    """Return what forward saves: products with matrices, and other readers of weights that backward does not gather.

    Forward also saves what a checkpointed region hands on. Otherwise backward would run the region in the turn of the
    operation that follows it.
    """
    saved: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_handed_on(node, forward):
            saved.add(_whose_view(node))
        if node.op != "call_function" or node not in forward or node in of_weights or node.target in _OURS:
            continue
        weights = _weights_read(node, of_weights)
        if not weights or not isinstance(node.meta.get("val"), Tensor) or compat.may_alias(node.target):
            continue
        if (any(map(is_matrix, weights)) or not weights.issubset(again)) and not _is_recomputed(node):
            saved.add(node)
    return saved


def _read_ahead(
    graph: fx.Graph,
    place: Mapping[fx.Node, int],
    of_weights: Mapping[fx.Node, Weights],
    backward: Collection[fx.Node],
    forward: set[fx.Node],
    saved: Collection[fx.Node],
    since: Mapping[fx.Node, int],
) -> tuple[set[fx.Node], dict[fx.Node, int]]:
    """Add to what is saved; return that, and for each node the first place of backward that may need it.

    Backward needs a node where it reads the node, or where it reads something that it computes again from the node. If
    it would so read a weight in the turn of another unit, the result is saved. An example is a norm behind a residual
    sum: every later block would take the norm's scale to compute the norm's result again.
    """
    saved = set(saved)
    needed: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        first = len(place)
        for user in node.users:
            if user in backward:
                first = min(first, place[user])
            elif user.op != "output" and user not in saved and not _is_kept(user, forward):
                first = min(first, needed[user])
        needed[node] = first
        weights = _weights_read(node, of_weights) if node in forward and node not in of_weights else _NONE
        if any(first <= since.get(one, -1) for one in weights) and not _is_recomputed(node):
            saved.add(node)
    return saved, needed


def _is_kept(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether activation checkpointing, or a slice in a parameter's place, has the partitioner save a node's result."""
    if node.target is markers.keep_slice:
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


def _region_of(node: fx.Node) -> int:
    """Return the number of the checkpointed region that a node is in; 0 outside of all."""
    region: int = node.meta.get("ac_graph_id", 0)
    return region if region < AC_GRAPH_ID else 0


def _is_handed_on(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether a node is computed in a checkpointed region, and read behind the region in forward."""
    if not _is_recomputed(node) or not _region_of(node):
        return False
    return any(user in forward and "recompute" not in user.meta for user in node.users)


def _whose_view(node: fx.Node) -> fx.Node:
    """Return the node in the same checkpointed region that ``node`` is a view of; ``node`` itself if it is none."""
    while compat.may_alias(node.target):
        source = node.all_input_nodes[0]
        is_result = node.target is operator.getitem and not compat.may_alias(source.target)
        if is_result or not _is_recomputed(source):
            break
        node = source
    return node


def _is_table(gathered: fx.Node) -> bool:
    """Whether a node is the gather of a table. In a graph inside an eager forward, weights are inputs instead."""
    return gathered.target is markers.unshard and markers.spec_in(gathered).is_table


def _weights_read(node: fx.Node, of_weights: Mapping[fx.Node, Weights]) -> Weights:
    return _NONE.union(*(of_weights.get(one, _NONE) for one in node.all_input_nodes))


def is_matrix(gather: fx.Node) -> bool:
    """Whether a parameter has more than one dimension that is not 1."""
    return sum(length != 1 for length in markers.spec_in(gather).size) > 1


def follows_a_product(node: fx.Node) -> bool:
    """Views, casts, and what is left of a product where a batch of one made it a sum of products, times one."""
    times_a_number = node.target is torch.ops.aten.mul.Tensor and len(node.all_input_nodes) == 1
    return passes_on(node) or times_a_number or node.target is torch.ops.aten.sum.dim_IntList
