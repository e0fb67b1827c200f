"""The steps of a lowered graph, with the bytes of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from ..passes.budget.trial import Lowered
from ..passes.cost.memory import ACTIVATION, BUFFER, GATHERED, GRADIENT, SHARD, bytes_alive, kinds_of, own_and_callers
from ..passes.cost.steps import Half, Turn
from ..passes.ir.aliases import Storage, base_of, name_in_forward, storages_of
from ..passes.ir.meta import GRADIENT_OF, ROLE

# The kinds of bytes that a forecast tells apart, in this order.
KINDS = ("shards", "gathered weights", "gradients", "activations", "buffers", "other")
_PLACES = {SHARD: 0, GATHERED: 1, GRADIENT: 2, ACTIVATION: 3, BUFFER: 4}


def half_of(
    lowered: Lowered, turns: Mapping[str, Turn], given_up: Sequence[str], kinds_given: Mapping[str, str]
) -> Half:
    """Return the steps of a half; ``kinds_given`` are kinds of its inputs that the other half knows better."""
    kind_of = _kinds(lowered.graph, kinds_given)
    own, callers = own_and_callers(lowered.memory, given_up)
    alive = (
        bytes_alive((one for one in own if kind_of(one.storage) == kind), len(lowered.graph.nodes))
        for kind in range(len(KINDS))
    )
    held = (sum(one.storage.num_bytes for one in callers if kind_of(one.storage) == kind) for kind in range(len(KINDS)))
    return lowered.steps(zip(*alive), turns, tuple(held))


def kinds_by_name(graph: fx.Graph) -> dict[str, str]:
    """Return the kind of each node's storage, by the node's name."""
    kinds, storages = kinds_of(graph), storages_of(graph)
    return {node.name: kinds[these[0]] for node, these in storages.items() if these}


def _kinds(graph: fx.Graph, given: Mapping[str, str]) -> Callable[[Storage], int]:
    kinds = kinds_of(graph)
    of_parameters = {base_of(node) for node in graph.nodes if GRADIENT_OF in node.meta}

    def kind_of(storage: Storage) -> int:
        is_input = storage.node.op != "call_function"
        kind = given.get(name_in_forward(storage.node), kinds[storage]) if is_input else kinds[storage]
        if kind == GRADIENT and not (storage.node in of_parameters or ROLE in storage.node.meta):
            kind = ACTIVATION  # the gradient of an activation, on its way to an earlier layer
        return _PLACES.get(kind, len(KINDS) - 1)

    return kind_of
