"""Predict a step with some parameters kept: cut a copy of the joint graph, lower both halves, weigh and time them.

    joint graph, kept          forward                                 backward
    {w1}                 ->    G0 w0 y0 | G1 w1 y1 -> y0, y1, w1  ...  y1, w1 | gx1 | G0 w0 | gx0
    bytes alive                --------/---------------------\\         \\____________________/------
    of them that stay          inputs: shards, buffers, the batch; what forward returns to its caller, until the end

The real graph is cut later, by the same partitioner, so what min-cut saves beside what is kept is known here and not
guessed. Two things are not known: what Inductor's pattern matchers make of the graph before it is cut, and whatever is
outside of it (a loss of the caller's, optimizers, gradients of an earlier backward).

With ``like_fsdp2``, the copy is changed into what eager hooks would run, for comparison:

    as compiled     G w0 | G b0 g0    n = norm(x, g0)  y = mm(n, w0)     saved: x, y      n is computed again
    by hooks        G w0 b0 g0        n = norm(x, g0)  y = mm(n, w0)     saved: x, n, y

Each unit has one gather and one reduction, packed and unpacked. What a gradient's formula reads is saved, unless
checkpointing recomputes it. Nothing is fused, so each operator is a kernel and has its own result.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_compat as compat
from ..apply.away import num_forward_results
from ..apply.insert import insert
from ..apply.items import Items
from ..apply.keep import keep, let_go
from ..apply.overlap import arrange
from ..cost.events import events_of
from ..cost.memory import GraphMemory, Weight, weigh
from ..cost.profiles import HardwareProfile
from ..cost.replay import Event, Timeline, simulate
from ..cost.roofline import Groups
from ..cost.steps import NO_MORE, Blocks, Bytes, Half, Turn, Unsettled, half_along, lengthened, peak, replay, settled
from ..ir.aliases import base_of, tensor_bytes, tensors_of
from ..ir.markers import change_spec
from ..ir.meta import OFFLOADED, tag
from ..ir.plan import Plan
from ..ir.provenance import find_reduces, find_unshards, reduce_nodes, unshard_nodes
from ..schedule.planner import StepUses, plan_graph, uses_keeping
from ..schedule.slices import chosen_slices, use_first_gather
from ..schedule.structure import structure_of
from ..wire.copies import is_copy, launch_to_host
from ..wire.streams import TO_DEVICE, TO_HOST
from .periods import Periods


@dataclass(frozen=True)
class Lowered:
    """A lowered forward or backward graph, and its prediction."""

    graph: fx.Graph
    plan: Plan
    items: Items  # in the order that the partitioner left
    memory: GraphMemory
    events: Mapping[fx.Node, Event]  # of each call
    timeline: Timeline

    def steps(self, alive: Iterable[Bytes], turns: Mapping[str, Turn], held: Bytes) -> Half:
        rows = ((node.name, event_of(node, self.events)) for node in self.graph.nodes)
        return half_along(rows, alive, turns, held)


@dataclass(frozen=True)
class Decision:
    """The names of what is kept, recomputed, kept as slices and sent to the host, and how far ahead gathers go."""

    kept: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()
    sliced: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    hosted: frozenset[str] = frozenset()  # their shards are on the host
    lookahead: int = field(default=1, kw_only=True)

    @property
    def names(self) -> tuple[frozenset[str], ...]:
        return self.kept, self.recomputed, self.sliced, self.offloaded, self.hosted


@dataclass(frozen=True, kw_only=True)
class Trial(Decision):
    """The prediction of one step."""

    uses: StepUses
    plan: Plan
    forward: Lowered
    backward: Lowered
    weight: Weight
    num_results: int  # of forward; behind them it returns what backward takes

    @property
    def peak_bytes(self) -> int:
        return self.weight.peak_bytes

    @property
    def seconds(self) -> float:
        return self.forward.timeline.total_s + self.backward.timeline.total_s

    @property
    def exposed_s(self) -> float:
        return self.forward.timeline.exposed_s + self.backward.timeline.exposed_s

    def halves(self, periods: Periods | None = None) -> Halves:
        """Return the steps of both halves; some of them are those of ``periods``."""
        periods, its = periods or Periods(self.forward.graph), self.weight
        sent = self.forward.graph.find_nodes(op="call_function", target=launch_to_host)
        return Halves(
            Decision(*self.names, lookahead=self.lookahead),
            self.forward.steps(zip(its.forward), periods.forward, (its.held_bytes,)),
            self.backward.steps(zip(its.backward), periods.backward, (its.held_bytes + its.returned_bytes,)),
            [(base_of(one.all_input_nodes[0]).name, sum(map(tensor_bytes, tensors_of(one)))) for one in sent],
            [*its.stays.items()],
            periods,
        )


@dataclass(frozen=True, kw_only=True)
class Figures(Decision):
    """The peak and the seconds of a step, as a trial or a sketch predicts them."""

    peak_bytes: int
    seconds: float
    exposed_s: float
    offloaded_bytes: int
    copied_s: float


@dataclass(frozen=True)
class Halves:
    """Both halves of a step that follows one decision, as data to which any number of equal periods can be added."""

    decision: Decision
    forward: Half
    backward: Half
    sent_bytes: Sequence[tuple[str, int]]  # to the host, with the node of forward
    stay_bytes: Sequence[tuple[str, int]]  # for later steps, likewise
    periods: Periods

    def figures(self, blocks: Blocks = NO_MORE) -> Figures:
        """Return the figures of the step with ``blocks`` added; raise Unsettled if the few periods do not tell them."""
        halves, periods = (self.forward, self.backward), self.periods
        more = settled(self.forward, blocks), settled(self.backward, blocks)
        others = {name: more[0].get(turn, 0) for name, turn in periods.forward.items()}
        here = periods.num_more(blocks, self.decision.hosted)
        held_bytes = here * periods.held_bytes
        held_bytes += sum(num_bytes * others.get(name, 0) for name, num_bytes in self.stay_bytes)
        longer = lengthened(halves, more, (held_bytes,))
        left_bytes = sum(after.added()[0] - before.added()[0] for after, before in zip(longer, halves))
        if left_bytes != here * periods.left_bytes:
            raise Unsettled  # a node of some period counts for none
        try:
            timelines = [*map(replay, longer)]
        except ValueError as error:  # two waits are for the same launch
            raise Unsettled from error
        copies = [one.launch for its in timelines for one in its.flights.values()]
        return Figures(
            **vars(self.decision),
            peak_bytes=max(sum(peak(half)) for half in longer),
            seconds=sum(its.total_s for its in timelines),
            exposed_s=sum(its.exposed_s for its in timelines),
            offloaded_bytes=sum(num_bytes * (1 + others.get(name, 0)) for name, num_bytes in self.sent_bytes),
            copied_s=sum(one.seconds for one in copies if one.group in (TO_HOST, TO_DEVICE)),
        )


def event_of(node: fx.Node, events: Mapping[fx.Node, Event]) -> list[Event]:
    """Return the event of a node in a list, which is empty if the node has none."""
    return [events[node]] if node in events else []


def trial_as(
    its: Decision, joint: fx.Graph, profile: HardwareProfile, groups: Groups | None = None, like_fsdp2: bool = False
) -> Trial:
    """Predict the step of a joint graph, as ``trial_of`` does, with what was decided."""
    how = its.recomputed, its.sliced, its.lookahead, its.offloaded, its.hosted
    return trial_of(joint, its.kept, profile, groups, like_fsdp2, *how)


def trial_of(
    joint: fx.Graph,
    kept: Collection[str],
    profile: HardwareProfile,
    groups: Groups | None = None,
    like_fsdp2: bool = False,
    recompute: Collection[str] = (),
    sliced: Collection[str] = (),
    lookahead: int = 1,
    offload: Collection[str] = (),
    hosted: Collection[str] = (),
) -> Trial:
    """Predict the step of a joint graph that has gone through the passes before ``chosen_slices``; it is not changed.

    The shards of ``hosted`` are taken to be on the host, and to get their gradients there. With ``like_fsdp2``, predict
    it as FSDP2 runs it eagerly, and not as it is compiled.
    """
    graph = copy.deepcopy(joint)
    if like_fsdp2:
        for node in (*unshard_nodes(graph), *reduce_nodes(graph)):
            change_spec(node, bucketing="group")
    for one in (*find_unshards(graph), *find_reduces(graph)):
        if one.fqn in hosted:
            change_spec(one.node, device=str(one.node.meta["val"].device))
    uses = uses_keeping(graph, kept, recompute, sliced, offload)
    plan = uses.plan(lookahead)
    chosen_slices(graph, plan)
    keep(graph, plan)
    if like_fsdp2:
        _save_all(graph)
    num_results = num_forward_results(graph)
    lowered = []
    for half, stage in zip(compat.cut(graph, joint.owning_module, num_results), ("forward", "backward")):
        let_go(half)
        use_first_gather(half)
        its_plan = plan_graph(half, stage)
        insert(half, its_plan)
        items = Items.of(half)
        arrange(half, items, lookahead)
        lowered.append((half, its_plan, items))
    weight = weigh(*(half for half, _, _ in lowered), fused=not like_fsdp2)
    halves: list[Lowered] = []
    for (half, its_plan, items), memory, given_up in zip(lowered, weight.memories, ((), weight.given_up)):
        events = events_of(half, profile, groups, given_up, memory)
        of_calls = dict(zip((node for node in half.nodes if node.op == "call_function"), events))
        halves.append(Lowered(half, its_plan, items, memory, of_calls, simulate(events)))
    first, then = halves
    away = frozenset(node.meta[OFFLOADED][0] for node in first.graph.nodes if is_copy(node))
    names = frozenset(kept), frozenset(recompute), frozenset(sliced), away, frozenset(hosted)
    return Trial(
        *names, lookahead=lookahead, uses=uses, plan=plan, forward=first, backward=then, weight=weight,
        num_results=num_results,
    )  # fmt: skip


def _save_all(graph: fx.Graph) -> None:
    """In a joint graph that is not cut yet, have only those nodes recomputed that are tagged so already."""
    structure = structure_of(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in structure.fed and "recompute" not in node.meta:
            tag(node, CheckpointPolicy.MUST_SAVE)
