"""Run the passes in their one order, on graphs with our markers only, and record what they did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from . import _torch_compat as compat
from ._torch_compat import CustomGraphPass
from ._torch_compat.kernels import leave_to_others, may_reuse_saved
from .apply.announce import announce
from .apply.check import check
from .apply.gather_by_phase import gather_by_phase
from .apply.insert import insert
from .apply.keep import follow, keep, let_go
from .apply.merge import merge
from .apply.order import hold_order
from .apply.overlap import overlap
from .apply.parts import parts
from .apply.write_out import write_out
from .budget.budget import Budget, plan_within
from .cost.profiles import HardwareProfile
from .cost.roofline import sent_by
from .ir.markers import spec_in
from .ir.meta import SHARED
from .ir.nodes import copied, tangents_of
from .ir.phases import has_phases, number_phases
from .ir.plan import Plan
from .ir.provenance import (
    annotate_reductions,
    groups_of,
    has_markers,
    name_gathers,
    name_reductions,
    reduce_nodes,
    settle_names,
    settle_names_of_phases,
    unshard_nodes,
)
from .ranks.agree import Agreement
from .ranks.settle import Settled
from .schedule.calls import name_markers
from .schedule.given import fitted
from .schedule.planner import plan_graph, plan_joint, plan_whole, step_of
from .schedule.reasons import BUDGET, GIVEN, TOLD
from .schedule.slices import chosen_slices, slices, use_first_gather
from .source import source_hash
from .wire.collectives import is_launch, let_inductor_see_collectives
from .wire.ledger import ledger
from .wire.lower import let_inductor_see_offloaded
from .wire.packing import let_inductor_call_copies

Pass = Callable[[fx.Graph, Plan], int]

# The order of all passes. A pass is (graph, plan) -> count, and only applies the plan.
JOINT_PASSES: tuple[Pass, ...] = (merge, slices, parts, chosen_slices, keep)
WHOLE_PASSES: tuple[Pass, ...] = (parts, gather_by_phase, merge, follow)
POST_GRAD_PASSES: tuple[Pass, ...] = (insert, overlap, check, announce)


@dataclass
class PassRecord:
    """What one pass did to one graph."""

    name: str
    count: int
    seconds: float


@dataclass
class GraphRecord:
    """What the passes did to one graph."""

    stage: str
    plan: Plan
    num_unshards: int
    num_reduces: int
    passes: list[PassRecord] = field(default_factory=list)
    snapshots: list[fx.Graph] = field(default_factory=list)  # before the first pass and after each, for an observer
    step: str = ""  # id of the plan of the step, in graphs that were cut
    decided_by: str = TOLD  # in a joint graph: what decided which parameters are kept
    profile: HardwareProfile | None = None  # the hardware profile that was given with a budget, if one was
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each process group, only while observed

    @property
    def graph(self) -> fx.Graph | None:
        """A copy of the graph after the last pass, if an observer wanted it."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def codes(self) -> list[str]:
        """The code of each of ``snapshots``."""
        return [one.python_code("self", verbose=False).src for one in self.snapshots]


@dataclass(frozen=True)
class Listener:
    """A callback for every graph. Records have copies of the graph while ``wants_graphs()`` is True."""

    tell: Callable[[GraphRecord], None]
    wants_graphs: Callable[[], bool]


class PassManager(CustomGraphPass):
    """All passes as the one object that Inductor and AOTAutograd call."""

    def __init__(self) -> None:
        self.observers: list[Callable[[GraphRecord], None]] = []
        self.listeners: list[Listener] = []
        self._agreement = Agreement()
        self._given: dict[str, Plan] = {}
        self._budgets: dict[str, tuple[str, Budget]] = {}  # by the id in markers: a name, equal on all ranks
        self.settled = Settled()
        ledger.on_text = self._agreement.check

    def __deepcopy__(self, memo: dict[int, Any]) -> PassManager:
        return self  # Inductor copies its default settings, and observers of this manager must see all graphs

    def __call__(self, graph: fx.Graph) -> None:
        """Inductor's post-grad hook, called for every graph: markers become collectives."""
        inputs = graph.find_nodes(op="placeholder")  # of a backward that holds gradients back, perhaps without markers
        leave_to_others([place for place, one in enumerate(inputs) if SHARED in one.meta])
        if has_markers(graph):
            let_inductor_see_collectives()
            let_inductor_call_copies()
            let_inductor_see_offloaded()
            stage = _stage(graph)
            if stage == "inference":
                name_markers(graph)
                for one_pass in (merge, parts):  # no joint graph was there to run them on
                    one_pass(graph, Plan(stage))
            elif stage == "whole" and step_of(graph) is None:
                self._prepare_whole(graph)
            let_go(graph)
            if stage != "whole":
                use_first_gather(graph)
            plan = plan_graph(graph, stage)
            self._run(graph, stage, plan, ((write_out,) if stage == "whole" else ()) + POST_GRAD_PASSES)
            step = step_of(graph)
            hold_order(graph, loops=step is not None and bool(step.recompute))

    def joint(self, module: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        """AOTAutograd's joint hook: markers are named, merged and tagged."""
        del inputs
        if has_markers(module.graph):
            name_markers(module.graph)
            # The plan is made after the first three passes: it names the gathers that are then in the graph.
            self._run(module.graph, "joint", None, JOINT_PASSES)
            module.recompile()
        return module

    def whole(self, module: fx.GraphModule) -> fx.GraphModule:
        """Prepare a graph that will not be cut, before a backend gets it: if it has a backward, that gathers again."""
        if has_markers(module.graph) and has_phases(module.graph):
            self._prepare_whole(module.graph)
            module.recompile()
        return module

    def _prepare_whole(self, graph: fx.Graph) -> None:
        number_phases(graph)
        name_gathers(graph)
        annotate_reductions(graph)
        self._run(graph, "joint", None, WHOLE_PASSES)

    def uuid(self) -> str:
        return f"{source_hash()}, {'' if may_reuse_saved() else 'not '}over what is saved"

    def give(self, plan: Plan) -> str:
        """Register a plan and return its id; graphs whose markers carry the id follow the plan."""
        self._given[plan.id] = plan
        return plan.id

    def give_budget(self, budget: Budget) -> str:
        """Register a budget and return a new id; graphs whose markers carry the id are planned within the budget.

        The id is unique to this process, so that no cache serves a graph that was planned for another budget or by
        another rank. Thus all ranks plan the joint graph, and a rank that waits for a decision waits for one that does.
        """
        name = f"budget {len(self._budgets)}"
        budget_id = f"{name}, {os.getpid()}.{time.time_ns()}"
        self._budgets[budget_id] = name, budget
        return budget_id

    def is_budget(self, given: str) -> bool:
        """Whether the id in a marker stands for a budget."""
        return given in self._budgets

    def kept_states_bytes(self, budget_id: str) -> int | None:
        """Return the bytes of an optimizer's states that stay on the device in every step planned for the budget.

        If there is none yet, return None.
        """
        choices = [plan.choice for plan in self.settled.decided(self._budgets[budget_id][0])]
        return min((choice.kept_states_bytes for choice in choices if choice is not None), default=None)

    def _plan_of_step(self, graph: fx.Graph) -> Plan:
        asked_for = {spec_in(node).step for node in unshard_nodes(graph)}
        if len(asked_for) > 1:
            raise ValueError("a graph reads models that were given different plans, or budgets. Compile them apart.")
        asked = "".join(asked_for)
        if asked in self._budgets:
            name, budget = self._budgets[asked]
            plan = plan_within(budget, graph, self.settled, name)
        else:
            given = self._given.get(asked)
            plan = plan_joint(graph) if given is None else fitted(given, graph)
        return plan

    def _plan_of_whole(self, graph: fx.Graph) -> Plan:
        if any(spec_in(node).step in (*self._given, *self._budgets) for node in unshard_nodes(graph)):
            raise ValueError(
                "a plan or a memory_budget was given for a model whose backward is traced into the graph of its "
                "forward, which follows none. Set torch._dynamo.config.trace_autograd_ops to False, or give neither."
            )
        return plan_whole(graph)

    def _run(self, graph: fx.Graph, stage: str, plan: Plan | None, passes: tuple[Pass, ...]) -> None:
        watched = bool(self.observers) or any(one.wants_graphs() for one in self.listeners)
        counts = len(unshard_nodes(graph)), len(reduce_nodes(graph))
        step = step_of(graph)
        asked = {spec_in(node).step for node in unshard_nodes(graph)}
        ranks = {group: compat.group_ranks(group) for group in _all_groups(graph)} if watched else {}
        records = []
        snapshots = [copied(graph)] if watched else []
        for one_pass in passes:
            start = time.perf_counter()
            if plan is None and one_pass is chosen_slices:
                settle_names(graph)
                plan = self._plan_of_step(graph)
            elif plan is None and one_pass is follow:
                name_reductions(graph)
                settle_names_of_phases(graph)
                plan = self._plan_of_whole(graph)
            count = one_pass(graph, plan or Plan(stage))
            records.append(PassRecord(one_pass.__name__, count, time.perf_counter() - start))
            if watched:
                snapshots.append(copied(graph))
        graph.lint()
        if not watched and not self.listeners:
            return
        plan = plan or Plan(stage)
        record = GraphRecord(
            stage,
            plan,
            *counts,
            records,
            snapshots,
            step="" if step is None else step.id,
            decided_by=GIVEN if asked & {*self._given} else TOLD if plan.choice is None else BUDGET,
            profile=next((self._budgets[one][1].profile for one in asked if one in self._budgets), None),
            ranks=ranks,
        )
        for observer in (*self.observers, *[one.tell for one in self.listeners]):
            observer(record)


def _stage(graph: fx.Graph) -> str:
    step = step_of(graph)
    if has_phases(graph) if step is None else step.stage == "whole":
        return "whole"
    if reduce_nodes(graph) or tangents_of(graph):
        return "backward"
    return "forward" if any("recompute" in node.meta for node in unshard_nodes(graph)) else "inference"


def _all_groups(graph: fx.Graph) -> set[str]:
    """Return the names of the process groups of our markers and of a user's own collectives."""
    return groups_of(graph) | {sent_by(node).group for node in graph.nodes if is_launch(node)}
