"""Find the layers that repeat in a joint graph, and make a graph with few of them, in which a search is cheap.

    all layers     E | a b c d e f ... x y z | H       find: the nodes of each layer, in forward and in backward
    few            E | a b       ...     y z | H       ``graph``: those in between are left out
    a choice       E | A A A A A B B ... B B | H       A, B: layers with different choices
    of the few     E | A A A A     B B B B   | H       ``compressed``, and how many layers more each block has

Layers are equal if their parameters have equal names but for the first number, and their nodes are the same operators
on the same sizes. A period is the shortest run of layers that repeats.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..apply.away import num_forward_results
from ..cost.memory import results_of
from ..cost.steps import Blocks, Turn, Unsettled
from ..ir.aliases import hint, tensor_bytes, tensors_of
from ..ir.provenance import Marker, find_reduces, find_unshards

FEW = 16  # periods that are searched: four blocks
_FEW_OF_A_BLOCK = 4  # its first and its last may differ from the two between them, of which one is repeated
_LONGEST_PERIOD = 8  # layers
_NUMBER = re.compile(r"(.*?)\b(\d+)\b(.*)")


@dataclass(frozen=True)
class Periods:
    """A joint graph with few of a step's periods; without any, if nothing repeats."""

    graph: fx.Graph
    names: tuple[tuple[str, ...], ...] = ()  # of the parameters of each period of the whole step, in one order
    few: tuple[tuple[str, ...], ...] = ()  # of those in the graph
    forward: Mapping[str, Turn] = field(default_factory=dict)  # nodes of each half, with their periods
    backward: Mapping[str, Turn] = field(default_factory=dict)
    held_bytes: int = 0  # by the caller, for one period
    left_bytes: int = 0  # behind one period: its gradients
    updated_bytes: int = 0  # of one period: gradients, and shards that get some

    @property
    def num_left_out(self) -> int:
        return len(self.names) - len(self.few)

    def everywhere(self, few: Collection[str]) -> list[frozenset[str]]:
        """Return what the names of one bucket are in all periods; names that are in no period, or several, are kept."""
        places = {name: (turn, place) for turn, names in enumerate(self.few) for place, name in enumerate(names)}
        turns = {places[name][0] if name in places else -1 for name in few}
        if len(turns) > 1 or -1 in turns:
            return [frozenset(few)]
        return [frozenset(names[places[name][1]] for name in few) for names in self.names]

    def compressed(self, *sets: Collection[str]) -> tuple[list[frozenset[str]], dict[range, int]] | None:
        """Return these sets of names for the few periods, and how many more each block has; None if few are too few.

        A block is of periods that follow one another in the same sets; some of it are left out.
        """
        if not self.num_left_out:
            return [*map(frozenset, sets)], {}
        its = [{*one} for one in sets]
        kinds = [tuple(tuple(name in one for name in names) for one in its) for names in self.names]
        blocks = [(kind, len([*same])) for kind, same in itertools.groupby(kinds)]
        lengths = [min(length, _FEW_OF_A_BLOCK) for _, length in blocks]
        for _ in range(len(self.few) - sum(lengths)):  # the next one to the shortest of those that can take it
            can = [place for place, (_, length) in enumerate(blocks) if length > lengths[place]]
            lengths[min(can, key=lengths.__getitem__)] += 1
        if sum(lengths) != len(self.few):
            return None
        inside = {name for names in self.names for name in names}
        found = [{name for name in one if name not in inside} for one in its]
        more: dict[range, int] = {}
        turn = 0
        for (kind, length), left in zip(blocks, lengths):
            if length > left:
                more[range(turn, turn + left)] = length - left
            for names in self.few[turn : turn + left]:
                for one, which in zip(found, kind):
                    one.update(name for name, is_in in zip(names, which) if is_in)
            turn += left
        return [*map(frozenset, found)], more

    def num_with(self, names: Collection[str]) -> int:
        """Return how many periods of the whole step have some of these names."""
        return sum(not {*names}.isdisjoint(its) for its in self.names)

    def num_more(self, blocks: Blocks, without: Collection[str]) -> int:
        """Return how many of the periods that were left out belong to blocks without any of these names."""
        return sum(more for turns, more in blocks.items() if {*without}.isdisjoint(self.few[turns.start]))


def periods_of(graph: fx.Graph, more: int = 0, few_are: int = FEW) -> Periods:
    """Return a graph with few of the periods of a joint graph; ``few_are`` is how many at most.

    If ``more`` layers of the step were not traced, raise Unsettled where nothing tells what they are like.
    """
    run = few = _find(graph)
    if run is not None and len(run.names) > few_are:
        shorter = _shortened(graph, run, len(run.names) - few_are)
        few = None if shorter is None else _find(shorter)
        if shorter is None or few is None or len(few.names) != few_are:
            run = None
        else:
            graph = shorter
    if run is None or few is None or more % run.period:
        if more:
            raise Unsettled
        return Periods(graph)
    held = {one.fqn: sum(map(tensor_bytes, tensors_of(one.shard))) for one in find_unshards(graph)}
    half = len(run.names) // 2
    others = [
        tuple(_NUMBER.sub(rf"\g<1>{turn + 1}0000\g<2>\g<3>", name) for name in run.names[0])
        for turn in range(more // run.period)
    ]
    left = {one.fqn: sum(map(tensor_bytes, tensors_of(one.node))) for one in find_reduces(graph)}
    nodes = [*graph.nodes]
    in_backward = _turns(nodes, few.backward)
    behind: Mapping[str, Turn] = {name: (True, turn) for name, (_, turn) in in_backward.items()}
    return Periods(
        graph,
        (*run.names[:half], *others, *run.names[half:]),
        few.names,
        {**behind, **_turns(nodes, few.forward)},
        in_backward,
        sum(held[name] for name in few.names[-1]),
        sum(left.get(name, 0) for name in few.names[-1]),
        sum(left[name] + held[name] for name in few.names[-1] if name in left),
    )


def layers_of(names: Iterable[str]) -> set[tuple[str, str]]:
    """Return the layers that parameters are in, by the first number in their names."""
    return {(matched[1], matched[2]) for matched in map(_NUMBER.fullmatch, names) if matched}


def _turns(nodes: Sequence[fx.Node], half: Sequence[range]) -> dict[str, Turn]:
    return {node.name: (False, turn) for turn, its in enumerate(half) for node in nodes[its.start : its.stop]}


@dataclass(frozen=True)
class _Run:
    """Periods that follow one another: their parameters, and the places of their nodes in forward and in backward."""

    period: int  # layers
    names: tuple[tuple[str, ...], ...]
    forward: tuple[range, ...]
    backward: tuple[range, ...]


def _find(graph: fx.Graph) -> _Run | None:
    """Return the run that covers most layers; of those, the one with the shortest period."""
    texts = [_text(node) for node in graph.nodes]
    place = {node: index for index, node in enumerate(graph.nodes)}
    reduced = {one.fqn: place[one.node] for one in find_reduces(graph)}
    layers = _layers(find_unshards(graph))
    best, most = None, 1
    for period in range(1, min(_LONGEST_PERIOD, len(layers) // 2) + 1):
        groups = [
            [one for its in layers[first : first + period] for one in its]
            for first in range(0, len(layers) - period + 1, period)
        ]
        begins = [min(place[one.node] for one in group) for group in groups]
        ends = [max((reduced.get(one.fqn, -1) for one in group), default=-1) + 1 for group in groups]
        forward, backward = (
            [range(*both) for both in itertools.pairwise(begins)],
            [range(end, begin) for begin, end in itertools.pairwise(ends)],
        )
        texts_of = [[texts[its.start : its.stop] for its in both] for both in zip(forward, backward)]
        for _, turns in itertools.groupby(range(len(texts_of)), texts_of.__getitem__):
            run = [turn for turn in turns if all(any(its) for its in texts_of[turn])]
            if len(run) > 1 and len(run) * period > most:
                most = len(run) * period
                best = _Run(
                    period,
                    tuple(tuple(one.fqn for one in groups[turn]) for turn in run),
                    tuple(forward[turn] for turn in run),
                    tuple(backward[turn] for turn in run),
                )
    return best


def _layers(unshards: Sequence[Marker]) -> list[list[Marker]]:
    """Return the parameters of each layer of the longest list of layers, by the first number in their names."""
    found: dict[str, dict[int, list[Marker]]] = {}
    for one in unshards:
        if matched := _NUMBER.fullmatch(one.fqn):
            found.setdefault(matched[1], {}).setdefault(int(matched[2]), []).append(one)
    return [its for _, its in sorted(max(found.values(), key=len, default={}).items())]


def _text(node: fx.Node) -> str:
    values = [([hint(size) for size in one.shape], one.dtype) for one in tensors_of(node)]
    return f"{node.op} {node.target if node.op == 'call_function' else ''} {values} {node.meta.get('recompute')}"


def _shortened(graph: fx.Graph, run: _Run, num_left_out: int) -> fx.Graph | None:
    """Return a copy of the graph without so many periods in the middle of a run; None if what is left reads of them.

    A result of the last of them may be read: that of the period before them takes its place.
    """
    nodes = [*graph.nodes]
    first = (len(run.names) - num_left_out) // 2
    out = slice(first, first + num_left_out)
    gone: set[fx.Node] = set()
    instead: dict[fx.Node, fx.Node] = {}
    for its in (run.forward[out], run.backward[out][::-1]):
        left_out = range(its[0].start, its[-1].stop)
        gone |= {nodes[at] for at in left_out}
        instead |= {nodes[at]: nodes[at - len(left_out)] for at in its[-1]}
    inputs, results = graph.find_nodes(op="placeholder"), results_of(graph)
    gone |= {one for one in inputs if one.users and gone.issuperset(one.users)}
    of_inputs = len(results) - num_forward_results(graph)
    are_left = [True] * num_forward_results(graph) + [one not in gone for one in inputs[:of_inputs]]
    copy = fx.Graph(graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    try:
        for node in nodes[:-1]:
            if node not in gone:
                copies[node] = copy.node_copy(node, lambda one: copies[instead.get(one, one)])
        left: list[Any] = [one for one, is_left in zip(results, are_left) if is_left]
        output = copy.output(fx.map_arg(left, lambda one: copies[instead.get(one, one)]))
    except KeyError:
        return None
    output.meta = {**graph.output_node().meta}
    if output.meta.get("desc"):
        output.meta["desc"] = [one for one, is_left in zip(output.meta["desc"], are_left) if is_left]
    return copy
