"""Forward or backward: the phases of a graph that has both, as one has where backward was traced into its forward.

    w = unshard(s); y = mm(x, w); loss = sum(y)               phase 0, forward
    gy = expand(ones_like(loss)); gx = mm(gy, t(w)); ...      phase 1, backward: traced inside torch.autograd.grad
    w' = unshard(s); y' = mm(x', w'); ...                     phase 2, the forward of another batch
    ...                                                       phase 3

A phase ends where the next one begins. What stands behind a backward and reads no weight, as the sums of gradients do,
begins none.
"""

from __future__ import annotations

from torch import fx

from . import _torch_compat as compat
from . import markers
from .views import passes_on

_PHASE = "fsdp_phase"


def number_phases(graph: fx.Graph) -> int:
    """Write on each node which phase it is of; return how many there are."""
    last = {compat.backward_call_of(node): place for place, node in enumerate(graph.nodes)}
    weights: set[fx.Node] = set()
    phase = until = 0
    for place, node in enumerate(graph.nodes):
        reads_weights = node.target is markers.unshard or not weights.isdisjoint(node.all_input_nodes)
        if node.target is markers.unshard or (reads_weights and passes_on(node)):
            weights.add(node)
        if (call := compat.backward_call_of(node)) is not None:
            until = max(until, last[call])
        # What a custom function computes in its backward does not say so itself.
        if compat.is_of_traced_backward(node) or place < until:
            phase += not is_backward(phase)
        elif reads_weights and node.op == "call_function":
            phase += is_backward(phase)
        node.meta[_PHASE] = phase
    return phase + 1


def phase_of(node: fx.Node) -> int:
    """The phase that a node is of; 0 in a graph that has one."""
    phase: int = node.meta.get(_PHASE, 0)
    return phase


def put_in_phase(node: fx.Node, phase: int) -> None:
    node.meta[_PHASE] = phase


def is_backward(phase: int) -> bool:
    return phase % 2 == 1


def has_phases(graph: fx.Graph) -> bool:
    """Whether a graph reads weights in a forward, and has a backward behind it."""
    gathers = graph.find_nodes(op="call_function", target=markers.unshard)
    return not all(map(compat.is_of_traced_backward, gathers)) and any(map(compat.is_of_traced_backward, graph.nodes))


def lifetime(gather: fx.Node) -> int:
    """Equal for gathers of a weight that can be one: of a phase, or of a forward and its backward, where it is kept."""
    phase = phase_of(gather)
    return phase if gather.kwargs["regather"] else phase // 2
