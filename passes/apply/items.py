"""The nodes of a graph as ``overlap`` sees them: what each depends on, what it does, and what it needs or sends.

    launch      a collective; gathers and reductions have the plan's turns
    copy        of an activation to the host, or from there; a step has it where it has the gathers of a unit
    compute     everything else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from torch import fx

from ..cost.fusion import computes_inputs
from ..ir.aliases import base_of, is_free, tensors_of
from ..ir.effects import held_behind
from ..ir.meta import ROLE, Role
from ..ir.nodes import closure
from ..ir.phases import phase_of
from ..wire.collectives import is_launch
from ..wire.copies import launch_to_device, launch_to_host


class Items:
    """The nodes of a graph in their order, with their dependencies and roles."""

    def __init__(
        self,
        order: Sequence[fx.Node],
        deps: Mapping[fx.Node, Sequence[fx.Node]],
        role: Mapping[fx.Node, Role | None],
        busy: Mapping[fx.Node, bool],
    ) -> None:
        self.order = order
        self.position = {item: index for index, item in enumerate(order)}
        self.deps = {item: [dep for dep in deps[item] if dep in self.position] for item in order}
        self.role = {item: role[item] for item in order}
        self.busy = busy  # the nodes that run a kernel, and whether that is a loop on the CPU
        self.drained: fx.Node | None = None  # the node before which all reductions were waited for
        self.launches = {item: its for item, its in self.role.items() if its is not None and is_launch(item)}
        self.gathers = {item: its for item, its in self.launches.items() if its.kind == "gather"}
        self.reductions = {item: its for item, its in self.launches.items() if its.kind != "gather"}
        self.epilogues, self.second_of = self._follow_reductions()
        self.seconds = set(self.second_of.values())
        self.fetches = [item for item in order if item.target is launch_to_device]
        self.sent_behind = self._sent_behind()
        self.needs = self._last_launch_needed()
        self.begins_phase = self._first_of_phases()
        self.sends = {item: self._compute_sent(item) for item in self.reductions}
        self.large_end = self._find_large_end()

    @classmethod
    def of(cls, graph: fx.Graph) -> Items:
        """Return the items of a graph. They may depend on more than they read: on nodes they must stay behind."""
        order = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        behind = held_behind(order)
        deps = {item: [*item.all_input_nodes, *behind.get(item, ())] for item in order}
        role = {item: item.meta.get(ROLE) for item in order}
        return cls(order, deps, role, {item: _is_loop_on_cpu(item) for item in order if not is_free(item)})

    def only(self, order: Sequence[fx.Node], role: Mapping[fx.Node, Role]) -> Items:
        """Return some of the items, with other roles for those in ``role``."""
        return Items(order, self.deps, {**self.role, **role}, self.busy)

    def unit_of(self, item: fx.Node) -> str:
        """Return the unit that an item communicates or copies for."""
        role = self.role[item]
        return "" if role is None else role.unit

    def _first_of_phases(self) -> dict[fx.Node, int]:
        """Return the first compute of each later phase that needs a launch: constants may stand anywhere."""
        first: dict[fx.Node, int] = {}
        last = 0
        for item in self.order:
            if self.role[item] is None and self.needs[item] >= 0 and phase_of(item) > last:
                first[item] = last = phase_of(item)
        return first

    def _compute_sent(self, launch: fx.Node) -> list[fx.Node]:
        """Return the compute nodes whose results a launch sends."""
        reached = closure(self.deps[launch], lambda item: () if self.role[item] is None else self.deps[item])
        return [item for item in reached if self.role[item] is None]

    def _sent_behind(self) -> dict[fx.Node, list[fx.Node]]:
        """Return the copies to the host behind the last compute that reads, or makes, what they copy."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for copy in self.order:
            if copy.target is launch_to_host:
                base = base_of(copy.args[0])  # type: ignore[arg-type]
                views = closure([base], lambda node: [user for user in node.users if is_free(user)])
                near = (one for view in views for one in (view, *view.users))
                computes = [one for one in near if one in self.position and self.role[one] is None]
                found.setdefault(max(computes, key=self.position.__getitem__), []).append(copy)
        return found

    def _find_large_end(self) -> fx.Node | None:
        """Return the node of the last unit's largest gradient, if it is larger than all gradients of the unit before.

        If it is smaller, the peak of memory is not there, and reductions may stay in flight: compute hides them.
        """
        first = [item for item in self.reductions if item not in self.seconds]
        launches = sorted(first, key=lambda item: self.reductions[item].turn, reverse=True)
        units = [(unit, [*its]) for unit, its in groupby(launches, key=lambda item: self.reductions[item].unit)]
        if len(units) < 2:
            return None
        largest = max(units[0][1], key=lambda item: self.reductions[item].num_bytes)
        if self.reductions[largest].num_bytes <= sum(self.reductions[item].num_bytes for item in units[1][1]):
            return None
        return max(self.sends[largest], key=self.position.__getitem__, default=None)

    def _last_launch_needed(self) -> dict[fx.Node, int]:
        """Return for each item the last turn among the launches that it depends on; -1 if it needs none."""
        needs: dict[fx.Node, int] = {}
        for item in self.order:
            own = self.launches[item].turn if item in self.launches and item not in self.seconds else -1
            # A dependency besides data may still stand behind the item, and needs no launch.
            needs[item] = max([own, *(needs.get(dep, -1) for dep in self.deps[item])])
        return needs

    def _follow_reductions(self) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, fx.Node]]:
        """Return the nodes behind each reduction (its wait, divisions, slices), and the second launches of buckets.

        A bucket that is summed over replicas is launched twice.
        """
        epilogues: dict[fx.Node, list[fx.Node]] = {launch: [] for launch in self.reductions}
        seconds: dict[fx.Node, fx.Node] = {}
        owner: dict[fx.Node, fx.Node] = {}
        for item in self.order:
            role = self.role[item]
            if role is None or role.kind != "reduce":
                continue
            first = next((owner[dep] for dep in self.deps[item] if dep in owner), None)
            if item in self.reductions:
                owner[item] = item
                # Only in the same bucket: one bucket's packing may be fused with the sums of the bucket before.
                if first is not None and self.reductions[first].bucket == role.bucket:
                    seconds[first] = item
            elif first is not None:
                owner[item] = first
                epilogues[first].append(item)
        return epilogues, seconds


def _is_loop_on_cpu(node: fx.Node) -> bool:
    return computes_inputs(node) and all(one.device.type == "cpu" for one in tensors_of(node))
