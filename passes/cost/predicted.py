"""Predict a step: its seconds, its bytes, and for each collective whether it is hidden, and why.

    forward graph, lowered     G0 | G1 | w0 c0 | w1 c1           c0 reads the parameters of gather 0
    replayed                   gather 1: launched before c0, waited for before c1, hidden behind c0

A prediction is made from the graphs that run, when somebody asks. It is no part of a plan: its figures are those of one
rank's batch, on one profile, and ranks need not agree about them.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..ir.aliases import base_of, is_view
from ..ir.meta import GRADIENT_OF, PARAMETER, ROLE, Role
from ..ir.nodes import readers_of
from ..ir.plan import Bucket, Plan, as_size, named
from ..schedule.reasons import AGAIN, BUDGET, Residency
from ..wire.collectives import KIND_OF, is_launch, is_wait
from .events import events_of
from .memory import weigh
from .profiles import HardwareProfile
from .replay import QUEUED, SHARED, Event, ReplayedCollective, Timeline, as_ms, simulate
from .roofline import Groups
from .verdicts import COMPUTE, HIDDEN, MEMORY, Verdict, Verdicts

BEGIN, END = "begin", "end"


@dataclass(frozen=True)
class PredictedCollective:
    """One launch of a graph: where it stands, and what it costs.

    A place is named by what is computed there: "layers.0.w" where that is first read, "grad layers.0.w" where its
    gradient is computed, or "begin" and "end" of the graph.
    """

    kind: str
    unit: str
    fqns: tuple[str, ...]
    launched_behind: str
    launched_before: str
    waited_behind: str
    waited_before: str
    seconds: float  # with nothing else on the links
    beside_s: float  # of compute between its launch and its wait
    exposed_s: float  # that computation waits for it
    why: str  # the reason why it is hidden, or exposed
    cause: str  # HIDDEN, or what keeps it from being hidden: COMPUTE, MEMORY, DEPENDENCY or ORDER
    verdict: str  # the cause, in words
    launch: str  # name of its node
    group: str  # name of its process group
    dtype: str  # on the wire
    num_bytes: int  # one rank's part
    num_ranks: int
    launched_s: float  # from the begin of the graph
    start_s: float  # when the links are free for it
    end_s: float
    waited_s: float  # when computation needs it

    @property
    def is_hidden(self) -> bool:
        return not self.exposed_s

    @property
    def hidden_share(self) -> float:
        """The share of its seconds that computation does not wait for."""
        return 1 - min(self.exposed_s / self.seconds, 1.0) if self.seconds else 1.0


@dataclass(frozen=True)
class PredictedGraph:
    """One lowered graph."""

    stage: str
    seconds: float
    exposed_s: float  # part of ``seconds``: waiting for collectives
    collectives: tuple[PredictedCollective, ...]  # in the order of launch
    timeline: Timeline = field(repr=False)


@dataclass(frozen=True)
class Prediction:
    """One step, or one forward without gradients."""

    profile: str  # name of the hardware profile
    graphs: tuple[PredictedGraph, ...]  # forward and backward, or the only graph
    peak_bytes: int  # shards, gradients, activations, gathered parameters, buffers, the batch; of one rank
    held_bytes: int  # part of ``peak_bytes``: the graph's inputs, which are there before the step
    residency: Mapping[str, Residency]  # what becomes of each parameter, and why; empty without a joint graph

    @property
    def seconds(self) -> float:
        return sum(graph.seconds for graph in self.graphs)

    @property
    def exposed_s(self) -> float:
        return sum(graph.exposed_s for graph in self.graphs)

    def of(self, stage: str) -> PredictedGraph:
        """Return the graph of a stage."""
        for graph in self.graphs:
            if graph.stage == stage:
                return graph
        raise LookupError(f"no {stage} graph is predicted, only {', '.join(graph.stage for graph in self.graphs)}.")

    def __str__(self) -> str:
        stages = ", ".join(f"{graph.stage} {graph.seconds * 1e3:.3f} ms" for graph in self.graphs)
        waiting = f"{self.exposed_s * 1e3:.3f} of them waiting"
        return f"predicted on {self.profile!r}: {stages}, {waiting}; peak {as_size(self.peak_bytes)}"


def predict(
    graphs: Sequence[tuple[fx.Graph, Plan]],
    profile: HardwareProfile,
    groups: Groups | None = None,
    residency: Mapping[str, Residency] | None = None,
    budget_bytes: int | None = None,
) -> Prediction:
    """Predict a step from its lowered forward and backward, with their plans, or from its only graph.

    If the plan was made for a budget, verdicts on exposed collectives respect that budget.
    """
    weight = weigh(*(graph for graph, _ in graphs))
    predicted = []
    callers = [weight.held_bytes, weight.held_bytes + weight.returned_bytes]
    for (graph, plan), memory, taken, callers_bytes in zip(graphs, weight.memories, [(), weight.given_up], callers):
        room = None if budget_bytes is None else budget_bytes - callers_bytes
        given_back = _given_back(residency or {}) if plan.stage == "backward" else set()
        events = events_of(graph, profile, groups, taken, memory)
        predicted.append(_predicted(graph, plan, events, room, given_back))
    return Prediction(profile.name, tuple(predicted), weight.peak_bytes, weight.held_bytes, residency or {})


def _predicted(
    graph: fx.Graph,
    plan: Plan,
    events: Sequence[Event],
    room_bytes: int | None,
    given_back: set[str],
) -> PredictedGraph:
    timeline = simulate(events)
    verdicts = Verdicts(events, timeline, room_bytes)
    launches = [node for node in graph.nodes if is_launch(node) and ROLE in node.meta]
    landmarks = _Landmarks(graph)
    called = landmarks.gradients | {launch.name: _called(launch, plan) for launch in launches}
    found = []
    for launch in launches:
        flight, bucket = timeline.flights[launch.name], _bucket(launch, plan)
        [wait] = [user for user in launch.users if is_wait(user)]
        launched, waited = landmarks.around(launch), landmarks.around(wait)
        seconds, beside_s, exposed_s = flight.launch.seconds, flight.beside_s, flight.exposed_s
        why = f"{flight.reason}: {flight.detail}" if exposed_s else f"{as_ms(beside_s)} of compute stand beside it"
        why = re.sub(r"\w+", lambda word: called.get(word[0], word[0]), why)
        cause, verdict = HIDDEN, f"hidden behind {as_ms(beside_s)} of compute"
        if exposed_s:
            cause, verdict = _judged(flight, verdicts, landmarks, bucket, given_back)
            if flight.reason == QUEUED:
                verdict += f"; queued {as_ms(flight.queued_s)} behind {called.get(flight.behind, flight.behind)}"
            if flight.reason == SHARED:
                verdict += f"; it takes {as_ms(flight.shared_s)} longer, as it shares its link with another group's"
        found.append(
            PredictedCollective(
                KIND_OF[launch.target], bucket.unit, bucket.fqns, *launched, *waited, seconds, beside_s, exposed_s, why,
                cause, verdict, launch.name, flight.launch.group, bucket.dtype, bucket.num_bytes, bucket.num_ranks,
                flight.launched_s, flight.start_s, flight.end_s, flight.waited_s,
            )
        )  # fmt: skip
    return PredictedGraph(plan.stage, timeline.total_s, timeline.exposed_s, tuple(found), timeline)


def _given_back(residency: Mapping[str, Residency]) -> set[str]:
    """Return the parameters that a memory budget had no room to keep."""
    return {fqn for fqn, one in residency.items() if one.becomes == AGAIN and one.why.startswith(BUDGET)}


def _judged(
    flight: ReplayedCollective, verdicts: Verdicts, landmarks: _Landmarks, bucket: Bucket, given_back: set[str]
) -> tuple[str, str]:
    """Return what keeps a collective from being hidden, and say it with the model's names."""
    behind, _ = landmarks.around_name(flight.name)
    found = verdicts.of(flight, "" if behind == BEGIN else behind)
    if found.cause == COMPUTE and not given_back.isdisjoint(bucket.fqns):
        found = Verdict(MEMORY, f"gathered again, as the memory budget has no room to keep it; {found.words}")
    where = ""
    if found.earlier:
        behind, before = landmarks.around_name(found.earlier)
        where = f" (between {behind} and {before})"
    return found.cause, found.words.replace("launched earlier", f"launched earlier{where}", 1)


def _bucket(launch: fx.Node, plan: Plan) -> Bucket:
    role: Role = launch.meta[ROLE]
    return plan.buckets(role.kind)[role.bucket]


def _called(launch: fx.Node, plan: Plan) -> str:
    return f"{KIND_OF[launch.target]} of {named(_bucket(launch, plan).fqns)}"


class _Landmarks:
    """The positions in a lowered graph where parameters are first read, and where gradients are computed."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: place for place, node in enumerate(graph.nodes)}
        self._by_name = {node.name: node for node in graph.nodes}
        self.gradients: dict[str, str] = {}  # by the names of their nodes
        names: dict[int, str] = {}
        for node in graph.nodes:
            if GRADIENT_OF in node.meta:
                made = base_of(node)
                self.gradients[made.name] = f"grad {node.meta[GRADIENT_OF]}"
                names.setdefault(self._position[made], self.gradients[made.name])
            if PARAMETER in node.meta:
                readers = (one for one in readers_of(node, is_view) if one.op == "call_function")
                places = [self._position[one] for one in readers if ROLE not in one.meta]
                if places:
                    names.setdefault(min(places), node.meta[PARAMETER])
        self._places = sorted(names)
        self._names = [names[place] for place in self._places]

    def around_name(self, name: str) -> tuple[str, str]:
        """Return the landmarks around the node with this name; a wait's event has the name of its launch."""
        return self.around(self._by_name[name])

    def around(self, node: fx.Node) -> tuple[str, str]:
        """Return the landmarks behind and in front of which a node stands."""
        place = bisect.bisect(self._places, self._position[node])
        behind = self._names[place - 1] if place else BEGIN
        return behind, self._names[place] if place < len(self._names) else END
