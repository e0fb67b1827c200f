"""Have backward gather again, in a graph that no partitioner cuts.

    whole step                         after
    w  = unshard(s)                    w  = unshard(s)                of phase 0, like what follows
    v  = mul(w, mask)                  v  = mul(w, mask)
    y  = mm(x, v)                      y  = mm(x, v)                  from here on nothing holds w or v
    ...                                ...
                                       w2 = unshard(s)                of phase 1
                                       v2 = mul(w2, mask)
    gx = mm(gy, t(v))                  gx = mm(gy, t(v2))
    r  = reduce_grad(mm(t(x), gy))     r  = reduce_grad(mm(t(x), gy))

What is made of weights alone, and is as large, is made again with them, by the rule of structure.py. A weight that is
kept stays as it is. If a slice of a weight is kept, backward gathers from slices:

                                       piece = keep_slice(w)
                                       ...
                                       w2 = unshard(piece, group of n ranks)

``merge`` keeps the gathers of different phases apart, and merges those of one phase.
"""

from __future__ import annotations

from torch import fx

from ..ir import markers
from ..ir.nodes import closure
from ..ir.phases import is_backward, phase_of, put_in_phase
from ..ir.plan import Plan
from ..ir.provenance import unshard_nodes
from ..schedule.slices import gather_from_slice, keeps_slice
from ..schedule.structure import made_of_weights


def gather_by_phase(graph: fx.Graph, plan: Plan) -> int:
    """Have each phase gather those weights of another phase that it reads; return how many gathers that adds."""
    del plan  # the markers say which are kept
    gathers = {node for node in unshard_nodes(graph) if markers.spec_in(node).regather}
    of_backward = {node for node in graph.nodes if is_backward(phase_of(node))}
    made, _ = made_of_weights(graph, gathers, of_backward)
    place = {node: index for index, node in enumerate(graph.nodes)}
    again: dict[tuple[fx.Node, int], fx.Node] = {}
    for reader in list(graph.nodes):
        phase = phase_of(reader)
        reads = [one for one in reader.all_input_nodes if one in made and phase_of(one) != phase]
        if reader in made or reader.op != "call_function" or not reads:
            continue
        needed = closure(reads, lambda node: [one for one in node.all_input_nodes if one in made])
        for node in sorted(needed, key=place.__getitem__):
            if (node, phase) not in again:
                again[node, phase] = _once_more(graph, node, phase, reader, again)
        for node in reads:
            reader.replace_input_with(node, again[node, phase])
    for node in reversed(made):
        if not node.users:  # it was made in forward, and only backward read it
            graph.erase_node(node)
    return sum(node.target is markers.unshard for node, _ in again)


def _once_more(
    graph: fx.Graph, node: fx.Node, phase: int, reader: fx.Node, again: dict[tuple[fx.Node, int], fx.Node]
) -> fx.Node:
    """Copy a gather, or what is made of gathers, in front of its first reader in a phase."""
    is_sliced = node.target is markers.unshard and keeps_slice(node)
    if is_sliced and is_backward(phase) and phase == phase_of(node) + 1:
        copy = gather_from_slice(graph, node, reader)
    else:
        with graph.inserting_before(reader):
            copy = graph.node_copy(node, lambda source: again.get((source, phase), source))
    put_in_phase(copy, phase)
    return copy
