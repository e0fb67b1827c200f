"""Order the FX graph so that launches are early enough, and waits late enough, for collectives to overlap with compute.

    G gather, w wait, C compute that reads the gathered unit, R reduction; one unit of lookahead

    before     G1 w1 C1    G2 w2 C2    G3 w3 C3  R3 w3' ...
    after      G1 G2 w1 C1    G3 w2 C2    w3 C3  R3 ... w3' R2 ...

A unit's gathers are launched when the unit before it begins to compute, not earlier: a gather that is early holds
memory. Compute that needs no launch comes first, beside the first unit's gathers. A reduction is launched as soon as
its gradients are there, and waited for before the next unit launches its own, so that only the buffers of one unit are
in memory. With replicas, that wait starts the all-reduce over the replicas, which is waited for one unit later. If the
last gradient is a large one, such as an embedding's, all reductions are waited for before it is computed: the gradients
of the whole model are alive beside it. Everything else keeps its order. In a graph with several phases (a whole step),
each phase is ordered like a graph of its own: the first unit of backward is launched when backward begins, and not
while forward still holds it.

Copies of activations are launches as well. One from the host is launched like a gather. One to the host is launched
behind the last use in forward, and waited for like a reduction; until then the device has the activation.

Launches are in the plan's order, gathers and reductions alike, wherever compute went: two ranks that launch in
different orders hang. So what a launch sends may be computed earlier because a later launch is due, and a reduction
waits for a gather that has its turn before. Inductor fuses and sorts after the FX passes; order.py holds it to this
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from torch import fx

from .. import _torch_compat as compat
from ..ir.aliases import is_free
from ..ir.meta import LARGE_END
from ..ir.nodes import closure, readers_of
from ..ir.plan import Plan
from ..schedule.windows import begins_of, fetched_at, sent_in_turn
from .items import Items

_Copies = dict[fx.Node | None, list[fx.Node]]


def overlap(graph: fx.Graph, plan: Plan) -> int:
    """Put the FX graph in the planned order; return how many nodes changed their place."""
    return arrange(graph, Items.of(graph), plan.lookahead)


def arrange(graph: fx.Graph, items: Items, lookahead: int) -> int:
    """Put the items of a graph in the planned order; return how many changed their place."""
    planned = planned_order(items, lookahead)
    if items.drained is not None:
        items.drained.meta[LARGE_END] = True  # order.py has it computed after the waits that stand before it
    cursor = next(reversed([node for node in graph.nodes if node.op == "placeholder"]), compat.root_of(graph))
    for node in planned:
        cursor.append(node)
        cursor = node
    return sum(before is not after for before, after in zip(items.order, planned))


def planned_order(items: Items, lookahead: int) -> list[fx.Node]:
    """Return all items in the planned order."""
    return _loops_together(_pulled_in(items, lookahead), items)


def _pulled_in(items: Items, lookahead: int) -> list[fx.Node]:
    """Return the items with communication pulled in around compute, which keeps its order."""
    schedule = _Schedule(items)
    steps = _gather_steps(items)
    begins = {first_reader: index for index, (first_reader, _) in enumerate(steps) if first_reader is not None}
    fetched, sent = _fetched(items, steps, lookahead), _sent(items, steps)
    for copy in fetched.get(None, ()):
        schedule.emit(copy)
    if steps and schedule.is_next(steps[0][1]):
        schedule.launch_until(steps[0][1])  # no unit comes before the first one: launched at the start of the graph
        for item in _beside_the_first(items, steps):
            schedule.compute(item)
            schedule.reduce_what_is_ready()
    phases = [items.gathers[launches[0]].phase for _, launches in steps]
    for item in items.order:
        if items.role[item] is not None:
            continue  # communication is emitted when compute needs it
        if item is items.large_end and item not in schedule.emitted:
            schedule.drain()
            items.drained = item
        if item in items.begins_phase:
            schedule.drain()
            if items.begins_phase[item] in phases:
                schedule.launch_until(steps[phases.index(items.begins_phase[item])][1])
        for copy in fetched.get(item, ()):
            schedule.emit(copy)
        if item in begins:
            ahead = min(begins[item] + lookahead, len(steps) - 1)
            while phases[ahead] != phases[begins[item]]:
                ahead -= 1
            schedule.launch_until(steps[ahead][1])
            schedule.reduce_what_is_ready()  # a reduction that has its turn after these may be ready
        schedule.compute(item)
        for copy in sent.get(item, ()):
            schedule.emit(copy)
        schedule.reduce_what_is_ready()
        if steps and schedule.is_next(steps[0][1]):  # they come after reductions of units that were kept
            schedule.launch_until(steps[0][1])
    schedule.finish()
    return schedule.done


def _loops_together(planned: list[fx.Node], items: Items) -> list[fx.Node]:
    """On the CPU, put launches, and what loops need, in front of the loops between two products.

        planned     mm  add  launch  wait  norm  mm         two kernels
        together    mm  launch  wait  add  norm  mm         one, as in the unsharded model: add is written once, and
                                                            there is one kernel less to compile

    A loop is a pointwise op or a reduction. For the CPU Inductor makes one kernel of all loops between two calls. What
    loops do not need, such as the wait for the weight of the next product, stays behind them: they hide it.
    """
    together: list[fx.Node] = []
    behind: list[fx.Node] = []  # the nodes since the last product, or since another kernel that is no loop
    for node in planned:
        behind.append(node)
        if items.role[node] is None and items.busy.get(node) is False:
            together += [*_sorted_out(behind[:-1], items), node] if together else behind
            behind.clear()
    return together + behind


def _sorted_out(between: Sequence[fx.Node], items: Items) -> list[fx.Node]:
    """Sort into layers: what needs no loop, then all loops that need no more than that, then what needs these, ..."""
    loops = {node for node in between if items.role[node] is None and node in items.busy}
    if not loops:
        return list(between)
    needed = loops.union(node for node in between if node in items.launches)
    for node in reversed(between):
        if node in needed:
            needed.update(items.deps[node])
    turn: dict[fx.Node, int] = {}  # the layer of each node; odd layers have loops
    last_launch = 0
    for node in between:
        turn[node] = max((turn[dep] for dep in items.deps[node] if dep in turn), default=0)
        if node in items.launches:  # launches keep their order
            turn[node] = max(turn[node], last_launch)
        if node in items.busy and turn[node] % 2 != (node in loops):
            turn[node] += 1
        if node in items.launches:
            last_launch = turn[node]
    return sorted(between, key=lambda node: turn[node] if node in needed else len(between))


def _gather_steps(items: Items) -> list[tuple[fx.Node | None, list[fx.Node]]]:
    """Return gathers in the plan's order, in steps of one unit and phase, each step with its first reader."""
    first_reader: dict[fx.Node, fx.Node] = {}
    feeding: dict[fx.Node, set[fx.Node]] = {}  # communication item -> gathers whose data it passes on
    for item in items.order:
        carried: set[fx.Node] = set()
        for dep in items.deps[item]:
            carried |= feeding.get(dep, set())
        role = items.role[item]
        if role is None:
            for launch in carried:
                first_reader.setdefault(launch, item)
        else:
            if item in items.gathers:
                carried = {item}
            feeding[item] = carried
    steps: list[tuple[fx.Node | None, list[fx.Node]]] = []
    in_order = sorted(items.gathers, key=lambda gather: items.gathers[gather].bucket)
    for _, its in groupby(in_order, key=lambda gather: (items.gathers[gather].phase, items.gathers[gather].unit)):
        launches = [*its]
        readers = [first_reader[launch] for launch in launches if launch in first_reader]
        steps.append((min(readers, key=items.position.__getitem__, default=None), launches))
    return steps


def _beside_the_first(items: Items, steps: Sequence[tuple[fx.Node | None, list[fx.Node]]]) -> list[fx.Node]:
    """Return the compute of the first unit that needs no launch: nothing else can run beside its own gathers.

    In a backward this is the gradient of the last product's weight.
    """
    first, second = (steps[place][0] if place < len(steps) else None for place in (0, 1))
    if first is None:
        return []
    end = len(items.order) if second is None else items.position[second]
    fetched = closure(items.fetches, lambda node: node.users)
    beside = (item for item in items.order[:end] if items.role[item] is None and items.needs[item] < 0)
    return [item for item in beside if item not in fetched]


def _fetched(items: Items, steps: Sequence[tuple[fx.Node | None, list[fx.Node]]], lookahead: int) -> _Copies:
    """Return the copies from the host to launch in front of each item; None is the begin."""
    first: dict[fx.Node, int] = {}
    for fetch in items.fetches:
        readers = readers_of(fetch, lambda one: is_free(one) and one.op != "output")
        first[fetch] = min((items.position[one] for one in readers if one in items.position), default=len(items.order))
    found: _Copies = {}
    for fetch, place in fetched_at(first, _begins(items, steps, first), lookahead).items():
        found.setdefault(items.order[place] if place >= 0 else None, []).append(fetch)
    return found


def _sent(items: Items, steps: Sequence[tuple[fx.Node | None, list[fx.Node]]]) -> _Copies:
    """Return the copies to the host to launch behind each item, and the waits for earlier ones."""
    last = {copy: items.position[item] for item, copies in items.sent_behind.items() for copy in copies}
    found: _Copies = {}
    for copy, waited in sent_in_turn(last, _begins(items, steps, last)):
        found.setdefault(items.order[last[copy]], []).extend([copy, *(wait for one in waited for wait in one.users)])
    return found


def _begins(
    items: Items, steps: Sequence[tuple[fx.Node | None, list[fx.Node]]], copied_at: Mapping[fx.Node, int]
) -> list[int]:
    gathered = [(launches[0], items.position[reader]) for reader, launches in steps if reader is not None]
    used = [(items.unit_of(item), place) for item, place in (*gathered, *copied_at.items())]
    return begins_of(one for one in used if one[1] < len(items.order))


class _Schedule:
    """Builds the order: emits each item after what it depends on, and launches in their turns."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self.done: list[fx.Node] = []
        self.emitted: set[fx.Node] = set()
        # Launches still to come; a bucket's second launch is part of what follows its first.
        first = [launch for launch in items.launches if launch not in items.seconds]
        self._waiting = sorted(first, key=lambda launch: items.launches[launch].turn)
        # Reductions in flight, each with the unit that was being reduced at its launch.
        self._in_flight: list[tuple[fx.Node, str]] = []

    def compute(self, item: fx.Node) -> None:
        """Emit an item, and before it whatever it needs, and all launches up to the last turn that it needs."""
        while self._waiting and self._turn(self._waiting[0]) <= self.items.needs[item]:
            self._launch(self._waiting.pop(0))
        self.emit(item)

    def launch_until(self, launches: Iterable[fx.Node]) -> None:
        """Launch these, and all launches that have their turn before one of them."""
        last = max(map(self._turn, launches))
        while self._waiting and self._turn(self._waiting[0]) <= last:
            self._launch(self._waiting.pop(0))

    def is_next(self, launches: Sequence[fx.Node]) -> bool:
        """Whether one of these launches has the next turn."""
        return bool(self._waiting) and self._waiting[0] in launches

    def reduce_what_is_ready(self) -> None:
        """Launch the reductions that have their turn and their gradients."""
        while self._waiting and self._waiting[0] in self.items.reductions and self._ready(self._waiting[0]):
            self._launch(self._waiting.pop(0))

    def drain(self) -> None:
        """Launch the reductions that have their turn and their gradients; wait for all that are in flight."""
        self.reduce_what_is_ready()
        while self._in_flight:
            self._complete(*self._in_flight.pop(0))

    def finish(self) -> None:
        """Emit what is left: the last launches, and whatever only outputs read."""
        while self._waiting:
            self._launch(self._waiting.pop(0))
        self.drain()
        for item in self.items.order:
            self.emit(item)

    def emit(self, item: fx.Node) -> None:
        """Emit ``item``, and before it whatever it needs. The stack is explicit: graphs may be deeper than Python's."""
        stack = [item]
        while stack:
            top = stack[-1]
            missing = [dep for dep in self.items.deps[top] if dep not in self.emitted]
            if top in self.emitted:
                stack.pop()
            elif missing:
                missing.sort(key=self.items.position.__getitem__, reverse=True)
                stack.extend(missing)
            else:
                stack.pop()
                self.emitted.add(top)
                self.done.append(top)

    def _launch(self, launch: fx.Node) -> None:
        if launch not in self.items.reductions:
            self.emit(launch)
            return
        unit = self.items.reductions[launch].unit
        while self._in_flight and self._in_flight[0][1] != unit:  # of the unit before
            self._complete(self._in_flight.pop(0)[0], unit)
        self.emit(launch)
        self._in_flight.append((launch, unit))

    def _complete(self, launch: fx.Node, unit: str) -> None:
        """Wait for a reduction; if its bucket has a second one, launch that, which is in flight from here on."""
        for item in self.items.epilogues[launch]:
            self.emit(item)
        if launch in self.items.second_of:
            second = self.items.second_of[launch]
            self.emit(second)
            self._in_flight.append((second, unit))

    def _turn(self, launch: fx.Node) -> int:
        return self.items.launches[launch].turn

    def _ready(self, launch: fx.Node) -> bool:
        """Whether all compute that the reduction needs has been emitted (its packing may come now)."""
        return all(item in self.emitted for item in self.items.sends[launch])
