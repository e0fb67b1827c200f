"""The steps of a lowered graph, with the bytes of each kind that they add and drop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from ..passes.cost.events import events_of
from ..passes.cost.memory import ACTIVATION, BUFFER, GATHERED, GRADIENT, SHARD, kinds_of, lifetimes, storages_given
from ..passes.cost.profiles import HardwareProfile
from ..passes.cost.replay import Compute
from ..passes.cost.steps import Bytes, Half, Step, Turn, in_order, plus, step_of
from ..passes.ir.aliases import Storage, base_of, storages_of
from ..passes.ir.meta import GRADIENT_OF, ROLE

# The kinds of bytes that a forecast tells apart, in this order.
KINDS = ("shards", "gathered weights", "gradients", "activations", "buffers", "other")
_PLACES = {SHARD: 0, GATHERED: 1, GRADIENT: 2, ACTIVATION: 3, BUFFER: 4}
NO_BYTES: Bytes = (0,) * len(KINDS)


def half_of(
    graph: fx.Graph,
    profile: HardwareProfile,
    given_up: Sequence[str] = (),
    kinds_given: Mapping[str, str] | None = None,
    turns: Mapping[str, Turn] | None = None,
) -> Half:
    """Return the half of a lowered graph; ``kinds_given`` are kinds of its inputs that another graph knows better.

    ``turns`` has the periods of its nodes, by name.
    """
    kind_of = _kinds(graph, kinds_given or {})
    given = storages_given(graph, given_up)
    nodes = list(graph.nodes)
    are_calls = (place for place, node in enumerate(nodes) if node.op == "call_function")
    calls = {place: number for number, place in enumerate(are_calls)}
    first_call = next(iter(calls), len(nodes))
    adds: list[dict[int, int]] = [{} for _ in calls]
    drops: list[dict[int, int]] = [{} for _ in calls]
    held, begin = NO_BYTES, NO_BYTES
    for life in lifetimes(graph, fused=True):
        kind, num_bytes = kind_of(life.storage), life.storage.num_bytes
        size = tuple(num_bytes if place == kind else 0 for place in range(len(KINDS)))
        if life.storage.node.op != "call_function" and life.storage not in given:
            held = plus(held, size)
            continue
        if life.storage.node.op != "call_function":
            begin = plus(begin, size)
        else:
            _add(adds[calls[life.first]], kind, num_bytes)
        if life.last in calls:
            _add(drops[calls[life.last]], kind, num_bytes)
        elif life.last < first_call:  # nobody reads it
            begin = plus(begin, size, -1)
    events = events_of(graph, profile, None, given_up)
    steps: list[Step] = []
    begins: dict[Turn, int] = {}
    launched: dict[str, int] = {}
    for node, event, its_adds, its_drops in zip(map(nodes.__getitem__, calls), events, adds, drops, strict=True):
        is_long = isinstance(event, Compute) and event.seconds > 0
        if turns and node.name in turns and (is_long or (turns[node.name][0] and (its_adds or its_drops))):
            begins.setdefault(turns[node.name], len(steps))
        if not isinstance(event, Compute) or event.seconds or its_adds or its_drops:
            steps.append(step_of(event, str(node.target), _as_bytes(its_adds), _as_bytes(its_drops), launched))
    return Half(held, begin, tuple(steps), in_order(begins))


def kinds_by_name(graph: fx.Graph) -> dict[str, str]:
    """Return the kind of each node's storage, by the node's name."""
    kinds, storages = kinds_of(graph), storages_of(graph)
    return {node.name: kinds[these[0]] for node, these in storages.items() if these}


def _kinds(graph: fx.Graph, given: Mapping[str, str]) -> Callable[[Storage], int]:
    kinds = kinds_of(graph)
    of_parameters = {base_of(node) for node in graph.nodes if GRADIENT_OF in node.meta}

    def kind_of(storage: Storage) -> int:
        is_input = storage.node.op != "call_function"
        kind = given.get(storage.node.name, kinds[storage]) if is_input else kinds[storage]
        if kind == GRADIENT and not (storage.node in of_parameters or ROLE in storage.node.meta):
            kind = ACTIVATION  # the gradient of an activation, on its way to an earlier layer
        return _PLACES.get(kind, len(KINDS) - 1)

    return kind_of


def _add(to: dict[int, int], kind: int, num_bytes: int) -> None:
    if num_bytes:
        to[kind] = to.get(kind, 0) + num_bytes


def _as_bytes(some: Mapping[int, int]) -> Bytes:
    return tuple(some.get(place, 0) for place in range(len(KINDS)))
