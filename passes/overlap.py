"""Launch early enough, wait late enough: one order, given to the FX graph and again to Inductor's scheduler.

    G gather, w wait, C compute that reads the gathered unit, R reduction; one unit of lookahead

    before     G1 w1 C1    G2 w2 C2    G3 w3 C3  R3 w3' ...
    after      G1 G2 w1 C1    G3 w2 C2    w3 C3  R3 ... R2 w3' ...

A unit's gathers are launched when the unit before it begins to compute, not earlier: a gather that is early holds
memory. A reduction is launched as soon as its gradients are there and waited for when the next unit has launched its
own; where that wait starts the all-reduce over replicas, it is waited for one unit later still. Everything else keeps
its order. Gathers have the plan's order among themselves, and reductions theirs, wherever compute went: two ranks that
launch in different orders hang. Inductor fuses and sorts after the FX passes, so the same rule is applied once more to
what it will generate, through its documented hook for scheduler passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from torch import fx

from . import _torch_compat as compat
from .collectives import is_launch
from .insert import ROLE, Role
from .plan import Plan

T = TypeVar("T", bound=Hashable)


def overlap(graph: fx.Graph, plan: Plan) -> int:
    """Put the FX graph in the planned order; return how many nodes changed their place."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    items = Items(
        order=nodes,
        deps=lambda node: node.all_input_nodes,
        role=lambda node: node.meta.get(ROLE),
        is_launch=lambda node: ROLE in node.meta and is_launch(node),
    )
    planned = planned_order(items, plan.lookahead)
    cursor = next(reversed([node for node in graph.nodes if node.op == "placeholder"]), compat.root_of(graph))
    for node in planned:
        cursor.append(node)
        cursor = node
    return sum(before is not after for before, after in zip(nodes, planned))


class Items(Generic[T]):
    """What the order is made of: FX nodes, or the scheduler's nodes, seen through four questions."""

    def __init__(
        self,
        order: Sequence[T],
        deps: Callable[[T], Iterable[T]],
        role: Callable[[T], Role | None],
        is_launch: Callable[[T], bool],
    ) -> None:
        self.order = order
        self.position = {item: index for index, item in enumerate(order)}
        known = self.position
        self.deps = {item: [dep for dep in deps(item) if dep in known and dep is not item] for item in order}
        self.role = {item: role(item) for item in order}
        # Launches with their roles, in order; a bucket that replicas reduce has two among the reductions.
        self.gathers: dict[T, Role] = {}
        self.reductions: dict[T, Role] = {}
        for item in order:
            its_role = self.role[item]
            if its_role is not None and is_launch(item):
                (self.gathers if its_role.kind == "gather" else self.reductions)[item] = its_role


def planned_order(items: Items[T], lookahead: int) -> list[T]:
    """All items in the planned order: compute as it was, communication pulled in around it."""
    schedule = _Schedule(items)
    steps = _gather_steps(items)
    begins = {first_reader: index for index, (first_reader, _) in enumerate(steps) if first_reader is not None}
    launched = 0
    if steps:
        for launch in steps[0][1]:  # no unit comes before the first one: launched at the start of the graph
            schedule.emit(launch)
        launched = 1
    for item in items.order:
        if items.role[item] is not None:
            continue  # communication is emitted when compute asks for it
        if item in begins:
            upto = min(begins[item] + lookahead + 1, len(steps))
            for _, launches in steps[launched:upto]:
                for launch in launches:
                    schedule.emit(launch)
            launched = max(launched, upto)
        schedule.emit(item)
        schedule.reduce_what_is_ready()
    schedule.finish()
    return schedule.done


def _gather_steps(items: Items[T]) -> list[tuple[T | None, list[T]]]:
    """Gathers in the plan's order, neighbours of one unit together, each step with its first reader."""
    first_reader: dict[T, T] = {}
    feeding: dict[T, set[T]] = {}  # communication item -> gathers that it carries on
    for item in items.order:
        carried: set[T] = set()
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
    steps: list[tuple[T | None, list[T]]] = []
    previous = None
    for gather in sorted(items.gathers, key=lambda gather: items.gathers[gather].bucket):
        unit = items.gathers[gather].unit
        if unit != previous:
            steps.append((None, []))
            previous = unit
        steps[-1][1].append(gather)
    for index, (_, launches) in enumerate(steps):
        readers = [first_reader[launch] for launch in launches if launch in first_reader]
        steps[index] = min(readers, key=items.position.__getitem__, default=None), launches
    return steps


class _Schedule(Generic[T]):
    """The order as it grows: emits an item after what it depends on."""

    def __init__(self, items: Items[T]) -> None:
        self.items = items
        self.done: list[T] = []
        self.emitted: set[T] = set()
        self._epilogues, self._seconds = self._follow_reductions()
        # Not launched yet; a bucket's second launch is part of what follows its first.
        first = [launch for launch in items.reductions if launch not in self._seconds.values()]
        self._waiting = sorted(first, key=lambda launch: items.reductions[launch].bucket)
        # Launched and not waited for, each with the unit whose reductions were being launched then.
        self._in_flight: list[tuple[T, str]] = []

    def emit(self, item: T) -> None:
        """Emit ``item``, and before it whatever it needs; an explicit stack, for graphs deeper than Python's."""
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

    def reduce_what_is_ready(self) -> None:
        """Launch the reductions whose gradients are computed; wait for what was launched while the unit before was."""
        while self._waiting and self._ready(self._waiting[0]):
            launch = self._waiting.pop(0)
            self.emit(launch)
            unit = self.items.reductions[launch].unit
            while self._in_flight and self._in_flight[0][1] != unit:
                self._complete(self._in_flight.pop(0)[0], unit)
            self._in_flight.append((launch, unit))

    def finish(self) -> None:
        """Emit what nothing asked for: the last reductions, and whatever only outputs read."""
        while self._in_flight:
            self._complete(*self._in_flight.pop(0))
        for item in self.items.order:
            self.emit(item)

    def _complete(self, launch: T, unit: str) -> None:
        """Wait for a reduction; where a second one follows, that is in flight from here on."""
        for item in self._epilogues[launch]:
            self.emit(item)
        if launch in self._seconds:
            second = self._seconds[launch]
            self.emit(second)
            self._in_flight.append((second, unit))

    def _ready(self, launch: T) -> bool:
        """Whether all compute that the reduction needs has been emitted (its packing may come now)."""
        work, seen = list(self.items.deps[launch]), set()
        while work:
            item = work.pop()
            if item in self.emitted or item in seen:
                continue
            if self.items.role[item] is None:
                return False
            seen.add(item)
            work.extend(self.items.deps[item])
        return True

    def _follow_reductions(self) -> tuple[dict[T, list[T]], dict[T, T]]:
        """What follows from a launch: its wait, divisions, slices; and the second launch of a bucket that has two."""
        epilogues: dict[T, list[T]] = {launch: [] for launch in self.items.reductions}
        seconds: dict[T, T] = {}
        owner: dict[T, T] = {}
        for item in self.items.order:
            role = self.items.role[item]
            if role is None or role.kind != "reduce":
                continue
            first = next((owner[dep] for dep in self.items.deps[item] if dep in owner), None)
            if item in self.items.reductions:
                owner[item] = item
                # Of the same bucket: one bucket's packing may be fused with the sums of the one before.
                if first is not None and self.items.reductions[first].bucket == role.bucket:
                    seconds[first] = item
            elif first is not None:
                owner[item] = first
                epilogues[first].append(item)
        return epilogues, seconds
