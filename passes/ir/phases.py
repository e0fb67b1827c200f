"""Number the phases of a graph that has forward and backward, because backward was traced into its forward's graph.

    w = unshard(s); y = mm(x, w); loss = sum(y)               phase 0, forward
    gy = expand(ones_like(loss)); gx = mm(gy, t(w)); ...      phase 1, backward: traced inside torch.autograd.grad
    w' = unshard(s); y' = mm(x', w'); ...                     phase 2, the forward of another batch
    ...                                                       phase 3

A phase ends where the next one begins. A node behind a backward that reads no weight, such as a sum of gradients, does
not begin one.
"""

from __future__ import annotations

from torch import fx

from .. import _torch_compat as compat
from . import markers
from .nodes import passes_on

_PHASE = "fsdp_phase"


def number_phases(graph: fx.Graph) -> int:
    """Write its phase into the meta of each node; return how many phases there are."""
    last = {compat.backward_call_of(node): place for place, node in enumerate(graph.nodes)}
    weights: set[fx.Node] = set()
    phase = until = 0
    for place, node in enumerate(graph.nodes):
        reads_weights = node.target is markers.unshard or not weights.isdisjoint(node.all_input_nodes)
        if node.target is markers.unshard or (reads_weights and passes_on(node)):
            weights.add(node)
        if (call := compat.backward_call_of(node)) is not None:
            until = max(until, last[call])
        # The nodes that a custom function computes in its backward are not marked as such.
        if compat.is_of_traced_backward(node) or place < until:
            phase += not is_backward(phase)
        elif reads_weights and node.op == "call_function":
            phase += is_backward(phase)
        node.meta[_PHASE] = phase
    return phase + 1


def phase_of(node: fx.Node) -> int:
    """Return the phase of a node; 0 in a graph that has only one."""
    phase: int = node.meta.get(_PHASE, 0)
    return phase


def put_in_phase(node: fx.Node, phase: int) -> None:
    node.meta[_PHASE] = phase


def is_backward(phase: int) -> bool:
    return phase % 2 == 1


def has_phases(graph: fx.Graph) -> bool:
    """Whether a graph gathers weights in a forward, and has a backward as well."""
    gathers = graph.find_nodes(op="call_function", target=markers.unshard)
    return not all(map(compat.is_of_traced_backward, gathers)) and any(map(compat.is_of_traced_backward, graph.nodes))


def lifetime(gather: fx.Node) -> int:
    """Return a key; gathers of one weight can be merged if it is equal.

    Those of one phase have the same key, and for a kept weight those of a forward and its backward.
    """
    phase = phase_of(gather)
    return phase if markers.spec_in(gather).regather else phase // 2
