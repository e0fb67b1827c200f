"""Predict a step with some parameters kept: cut a copy of the joint graph, lower both halves, weigh and time them.

    joint graph, kept          forward                                 backward
    {w1}                 ->    G0 w0 y0 | G1 w1 y1 -> y0, y1, w1  ...  y1, w1 | gx1 | G0 w0 | gx0
    bytes alive                --------/---------------------\\         \\____________________/------
    of them that stay          inputs: shards, buffers, the batch; what forward returns to its caller, until the end

The real graph is cut later, by the same partitioner, so what min-cut saves beside what is kept is known here and not
guessed. Two things are not known: what Inductor's pattern matchers make of the graph before it is cut, and whatever is
outside of it (a loss of the caller's, optimizers, gradients of an earlier backward).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from .. import _torch_compat as compat
from ..apply.insert import insert
from ..apply.keep import keep, let_go
from ..apply.overlap import overlap
from ..cost.events import events_of
from ..cost.profiles import HardwareProfile
from ..cost.replay import Event, Timeline, simulate
from ..cost.roofline import Groups
from ..cost.weigh import results_of, weigh
from ..ir.nodes import closure
from ..ir.plan import Plan
from ..schedule.planner import plan_graph, plan_keeping
from ..schedule.slices import chosen_slices, use_first_gather
from .by_hooks import pack_units, save_all


@dataclass(frozen=True)
class Half:
    """A lowered forward or backward graph, and its prediction."""

    graph: fx.Graph
    live_bytes: tuple[int, ...]  # at each node, without inputs that stay
    events: tuple[Event, ...]  # one for each call, in the graph's order
    timeline: Timeline

    def without_graph(self) -> Half:
        """Return only the figures."""
        return dataclasses.replace(self, graph=fx.Graph(), events=())


@dataclass(frozen=True)
class Trial:
    """The prediction of one step."""

    kept: frozenset[str]
    recomputed: frozenset[str]
    sliced: frozenset[str]
    plan: Plan
    forward: Half
    backward: Half
    held_bytes: int  # from begin to end: the callers' inputs
    returned_bytes: int  # while backward runs: what forward returned, and its caller may hold

    @property
    def peak_bytes(self) -> int:
        backward = self.returned_bytes + max(self.backward.live_bytes, default=0)
        return self.held_bytes + max(*self.forward.live_bytes, backward)

    @property
    def seconds(self) -> float:
        return self.forward.timeline.total_s + self.backward.timeline.total_s

    def without_graphs(self) -> Trial:
        """Return only the figures: the graphs of many trials of a large model would take gigabytes."""
        return dataclasses.replace(self, forward=self.forward.without_graph(), backward=self.backward.without_graph())

    @property
    def exposed_s(self) -> float:
        return self.forward.timeline.exposed_s + self.backward.timeline.exposed_s


def trial_of(
    joint: fx.Graph,
    kept: Collection[str],
    profile: HardwareProfile,
    groups: Groups | None = None,
    like_fsdp2: bool = False,
    recompute: Collection[str] = (),
    sliced: Collection[str] = (),
    lookahead: int = 1,
) -> Trial:
    """Predict the step of a joint graph that has gone through the passes before ``chosen_slices``; it is not changed.

    With ``like_fsdp2``, predict it as FSDP2 runs it eagerly (by_hooks.py), and not as it is compiled.
    """
    module = fx.GraphModule(joint.owning_module or {}, copy.deepcopy(joint))  # type: ignore[arg-type]
    if like_fsdp2:
        pack_units(module.graph)
    plan = plan_keeping(module.graph, kept, recompute, sliced, lookahead)
    chosen_slices(module.graph, plan)
    keep(module.graph, plan)
    if like_fsdp2:
        save_all(module.graph)
    num_results = num_forward_results(module.graph)
    forward, backward = compat.cut(module, num_results)
    for graph, stage in ((forward, "forward"), (backward, "backward")):
        let_go(graph)
        use_first_gather(graph)
        half = plan_graph(graph, stage)
        insert(graph, half)
        overlap(graph, half)
    weight = weigh(forward, backward, num_results, fused=not like_fsdp2)
    return Trial(
        frozenset(kept),
        frozenset(recompute),
        frozenset(sliced),
        plan,
        _half(forward, weight.forward, (), profile, groups),
        _half(backward, weight.backward, weight.given_up, profile, groups),
        held_bytes=weight.held_bytes,
        returned_bytes=weight.returned_bytes,
    )


def _half(
    graph: fx.Graph,
    live_bytes: tuple[int, ...],
    given_up: Collection[str],
    profile: HardwareProfile,
    groups: Groups | None,
) -> Half:
    events = events_of(graph, profile, groups, given_up)
    return Half(graph, live_bytes, tuple(events), simulate(events))


def num_forward_results(joint: fx.Graph) -> int:
    """Return how many results of a joint graph are its forward's; the gradients of inputs follow, one for each."""
    inputs = joint.find_nodes(op="placeholder")
    tangents = [node for node in inputs if node.name.startswith("tangents")]
    results = results_of(joint)
    num_results = len(results) - (len(inputs) - len(tangents))
    of_backward = closure(tangents, lambda node: node.users)
    if num_results < 0 or any(one in of_backward for one in results[:num_results]):
        raise RuntimeError(
            f"the joint graph returns {len(results)} results for {len(inputs) - len(tangents)} inputs, so what it "
            "returns of its forward is not known, and memory_budget cannot predict its peak. Leave memory_budget out."
        )
    return num_results
