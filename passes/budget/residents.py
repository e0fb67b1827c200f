"""List what may stay from forward to backward, with the bytes held, for how long, and the seconds that it saves.

    bytes alive, all made again                      what staying adds, from the last read in forward
                                                     to where backward would have made it again
              ____ budget _____________________
                     /---\\                                    |======== w2 (shortest) ======|
               /----/     \\----\\                          |============= w1 ==================|
         /----/                 \\----                    |======== mm(x, w0) ==============|
         forward     |  backward

A bucket of parameters that stays saves a gather in backward, an activation saves a computation, and a slice of a
parameter makes its gather one among the ranks of a node. The seconds saved are the difference between two replays of
backward: with and without the gather or computation, or with the shorter gather. So all are compared in one currency: a
computation that runs while a collective is waited for is worth nothing, and neither is a gather that is hidden.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..cost.memory import lifetimes, results_of, saved_by
from ..cost.profiles import HardwareProfile
from ..cost.replay import Compute, Event, Launch, simulate
from ..cost.roofline import Groups, collective_seconds, group_of
from ..ir.aliases import Storage, storages_of
from ..ir.meta import ROLE, works_for
from ..ir.plan import Plan
from ..schedule.slices import inner_spec
from ..wire.collectives import is_launch
from ..wire.spec import ParamSpec
from .trial import Half, Trial

PARAMETERS, SLICES, ACTIVATION = "parameters", "slices", "activation"


@dataclass(frozen=True)
class Resident:
    """Something that may be kept: a bucket of backward's gathers, slices of a bucket, or the activations of one matrix.

    If slices of the parameters in a bucket are kept, backward gathers the bucket over few ranks.
    """

    unit: str
    fqns: tuple[str, ...]
    num_bytes: int
    since: int  # position of its last reader in forward
    until: int  # position in backward where it would be launched, or computed
    held_s: float  # between the two
    saved_s: float
    kind: str = PARAMETERS
    own_s: float = 0.0  # of an activation: to compute it, whether or not that is hidden
    launch: str = ""  # of parameters: the node that launches their gather in backward


def residents_of(again: Trial) -> list[Resident]:
    """Return the buckets that backward gathers, in the order of their launches."""
    backward, forward = again.plan.backward, again.plan.forward
    assert backward is not None and forward is not None
    last_read = _last_reads(again.forward.graph, forward)
    launched: dict[int, tuple[int, str]] = {}
    events: dict[int, set[str]] = {}
    for position, node in enumerate(again.backward.graph.nodes):
        if works_for(node, "gather"):
            index = node.meta[ROLE].bucket
            events.setdefault(index, set()).add(node.name)  # a wait's event has the name of its launch
            if is_launch(node):
                launched[index] = position, node.name
    clock = _Clock(again)
    found = []
    for index, bucket in enumerate(backward.gathers):
        if index not in launched:
            continue  # one rank has all of it
        since, (until, launch) = max(last_read.get(fqn, 0) for fqn in bucket.fqns), launched[index]
        held_s, saved_s = clock.between(since, until), clock.seconds_without(events[index])
        num_bytes = bucket.num_bytes * bucket.num_ranks
        found.append(Resident(bucket.unit, bucket.fqns, num_bytes, since, until, held_s, saved_s, launch=launch))
    return found


def slices_of(
    again: Trial,
    residents: Sequence[Resident],
    offers: Mapping[str, ParamSpec],
    profile: HardwareProfile,
    groups: Groups | None,
) -> list[Resident]:
    """Return the buckets of backward that may be kept as slices, if that saves time.

    ``offers`` has the specs of the parameters that may be kept so; all parameters of a bucket have to be in it.
    """
    clock = _Clock(again)
    found = []
    for one in residents:
        if one.kind != PARAMETERS or not {*one.fqns} <= offers.keys():
            continue
        inner = [inner_spec(offers[fqn]) for fqn in one.fqns]
        num_bytes = sum(spec.gather_bytes for spec in inner)
        shared = group_of(inner[0].group, profile, groups)
        seconds = collective_seconds("all_gather", num_bytes * inner[0].num_shards, shared, profile)
        saved_s = clock.seconds_with(one.launch, seconds, inner[0].group)
        if saved_s > 0:
            found.append(dataclasses.replace(one, num_bytes=num_bytes, saved_s=saved_s, kind=SLICES))
    return found


def activations_made_again(
    saved: Trial, again: Trial, activations: Mapping[str, Collection[str]]
) -> list[Resident]:
    """Return for each matrix the activations that trial ``saved`` saves and trial ``again`` recomputes.

    ``activations`` has the names of the joint graph's nodes, by the name of their matrix.
    """
    before, now = _saved_bytes(saved), _saved_bytes(again)
    position = {node.name: place for place, node in enumerate(again.backward.graph.nodes)}
    last = {life.storage.node.name: life.last for life in lifetimes(again.forward.graph, fused=True)}
    place = {node.name: index for index, node in enumerate(again.forward.graph.nodes)}
    clock = _Clock(again)
    found = []
    for name, nodes in activations.items():
        freed = [one for one in nodes if one in before and one not in now and one in position and one in place]
        if not freed:
            continue
        since, until = min(last.get(one, place[one]) for one in freed), max(position[one] for one in freed)
        made_again = {one for one in nodes if one in position}
        saved_s, own_s = clock.seconds_without(made_again), clock.seconds_of(made_again)
        num_bytes = sum(before[one] for one in freed)
        held_s = clock.between(since, until)
        found.append(Resident("", (name,), num_bytes, since, until, held_s, saved_s, ACTIVATION, own_s))
    return found


def fill(again: Trial, residents: Sequence[Resident], order: Sequence[Resident], room: int) -> list[Resident]:
    """Return those that fit into ``room``, taken in ``order``, each beside those taken before it.

    A bucket is kept as a whole or as slices, not both: whichever saves more.
    """
    kept: list[Resident] = []
    for one in order:
        other = next((had for had in kept if had.fqns == one.fqns and ACTIVATION not in (had.kind, one.kind)), None)
        if other is not None and other.saved_s >= one.saved_s:
            continue
        beside = [had for had in kept if had is not other]
        if peak_with(again, residents, [*beside, one]) <= room:
            kept = [*beside, one]
    return kept


def peak_with(again: Trial, residents: Sequence[Resident], kept: Sequence[Resident]) -> int:
    """Estimate the peak of a step with these kept.

    If the first unit is kept, the gathers of the next one are launched when backward begins.
    """
    weight = again.weight
    forward, backward = [0] * (len(weight.forward) + 1), [0] * (len(weight.backward) + 1)
    stays = {*kept}
    buckets = [one for one in residents if one.kind == PARAMETERS]
    steps = [list(step) for _, step in itertools.groupby(buckets, key=lambda one: one.unit)]
    launch = 0
    for index, (step, following) in enumerate(itertools.zip_longest(steps, steps[1:])):
        for one in step:
            backward[0 if one in stays else min(launch, one.until)] += one.num_bytes
            backward[one.until] -= one.num_bytes
        if following and (index > 0 or any(one not in stays for one in step)):
            launch = following[0].until
    for one in stays:
        forward[one.since + 1] += one.num_bytes
        if one.kind != PARAMETERS:
            backward[0] += one.num_bytes
            backward[one.until] -= one.num_bytes
    highest = max(map(sum, zip(weight.forward, itertools.accumulate(forward))))
    later = max(map(sum, zip(weight.backward, itertools.accumulate(backward))))
    return weight.held_bytes + max(highest, weight.returned_bytes + later)


def by_worth(residents: Sequence[Resident]) -> list[Resident]:
    """Sort those that save time by most seconds per byte and second held; then activations recomputed during waits.

    The latter save time as well, once what backward waits for is kept.
    """
    saving = [one for one in residents if one.saved_s > 0]
    hidden = [one for one in residents if one.kind == ACTIVATION and one.saved_s <= 0 < one.own_s]
    return [
        *sorted(saving, key=lambda one: one.num_bytes * max(one.held_s, 1e-9) / one.saved_s),
        *sorted(hidden, key=lambda one: one.num_bytes * max(one.held_s, 1e-9) / one.own_s),
    ]


def by_life(residents: Sequence[Resident]) -> list[Resident]:
    """Return all of them, the shortest life first."""
    return sorted(residents, key=lambda one: one.held_s)


class _Clock:
    """When nodes of a trial's graphs begin, and how much shorter its backward would be without some of them."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._forward_s, self._backward_s = _begins(trial.forward), _begins(trial.backward)
        self._bare = [_bare(event) for event in trial.backward.events]

    def between(self, since: int, until: int) -> float:
        """Return the seconds from a node of forward to one of backward."""
        return self._trial.forward.timeline.total_s - self._forward_s[since] + self._backward_s[until]

    def seconds_of(self, names: Collection[str]) -> float:
        """Return the compute seconds of these events in backward."""
        return sum(one.seconds for one in self._bare if isinstance(one, Compute) and one.name in names)

    def seconds_with(self, launch: str, seconds: float, group: str) -> float:
        """Return by how much backward is shorter if a launch takes these seconds, in this group."""
        changed = (
            dataclasses.replace(event, seconds=seconds, group=group)
            if isinstance(event, Launch) and event.name == launch
            else event
            for event in self._bare
        )
        return self._trial.backward.timeline.total_s - simulate(changed).total_s

    def seconds_without(self, names: Collection[str]) -> float:
        """Return by how much backward is shorter without these events."""
        rest = (event for event in self._bare if event.name not in names)
        return self._trial.backward.timeline.total_s - simulate(rest).total_s


def _begins(half: Half) -> list[float]:
    points = iter(half.timeline.memory)
    now_s, begins = 0.0, []
    for node in half.graph.nodes:
        if node.op == "call_function":
            now_s = next(points).at_s
        begins.append(now_s)
    return begins


def _bare(event: Event) -> Event:
    """Return an event without memory, and a launch without its ``needs``: some of those events are left out."""
    bare = dataclasses.replace(event, allocs=(), frees=())
    return dataclasses.replace(bare, needs=()) if isinstance(bare, Launch) else bare


def _last_reads(graph: fx.Graph, plan: Plan) -> dict[str, int]:
    """Return for each parameter the position of the last node of forward that needs what its bucket brought."""
    last: dict[int, int] = {}
    for life in lifetimes(graph, fused=True):
        if works_for(life.storage.node, "gather"):
            index = life.storage.node.meta[ROLE].bucket
            last[index] = max(last.get(index, 0), life.last)
    return {fqn: last.get(index, 0) for index, bucket in enumerate(plan.gathers) for fqn in bucket.fqns}


def _saved_bytes(trial: Trial) -> dict[str, int]:
    """Return the bytes of each node that forward saves for backward; views of one storage count once, at the first."""
    forward, backward = trial.forward.graph, trial.backward.graph
    storages = storages_of(forward)
    found: dict[str, int] = {}
    seen: set[Storage] = set()
    for one in results_of(forward)[saved_by(forward, backward) :]:
        if isinstance(one, fx.Node) and one.op == "call_function":
            found[one.name] = sum(storage.num_bytes for storage in storages[one] if storage not in seen)
            seen.update(storages[one])
    return found
