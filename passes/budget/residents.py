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
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..cost.clock import Clock
from ..cost.memory import Lifetime, lives_of, results_of, saved_by
from ..cost.profiles import HardwareProfile
from ..cost.roofline import Groups, collective_seconds, group_of
from ..ir.aliases import Storage
from ..ir.meta import ROLE, works_for
from ..ir.plan import Plan
from ..schedule.slices import inner_spec
from ..wire.collectives import is_launch
from ..wire.spec import ParamSpec
from .sketch import Sketch
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
    last_read = _last_reads(again.forward, forward)
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
    saved: Trial, again: Trial, activations: Mapping[str, Collection[fx.Node]]
) -> list[Resident]:
    """Return for each matrix the activations that trial ``saved`` saves and trial ``again`` recomputes.

    ``activations`` are the joint graph's nodes, by the name of their matrix.
    """
    before, now = _saved_bytes(saved), _saved_bytes(again)
    position = {node.name: place for place, node in enumerate(again.backward.graph.nodes)}
    last = {life.storage.node.name: life.last for life in _lives(again.forward)}
    place = {node.name: index for index, node in enumerate(again.forward.graph.nodes)}
    clock = _Clock(again)
    found = []
    for name, its in activations.items():
        nodes = [node.name for node in its]
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


def activations_away(
    base: Trial, sketch: Sketch, made_again: Sequence[Resident], waited_s: float
) -> list[Resident]:
    """Return for each matrix the activations that could be on the host, or are computed again, as kept on the device.

    Copies share one link. So of the seconds that copies are waited for, each saves a share by its bytes.
    """
    since = {life.storage: life.last for life in _lives(base.forward)}
    place = {node: index for index, node in enumerate(base.backward.graph.nodes)}
    clock, own = _Clock(base), {one.fqns[0]: one for one in made_again}
    total = sum(map(sketch.num_bytes, sketch.leaving)) or 1
    found: dict[str, Resident] = {}
    for node, name in sketch.leaving.items():
        last = min((since[one] for one in sketch.held_for(node) if one in since), default=0)
        first = min((place[user] for user in node.users if user in place), default=place[node])
        num_bytes, held_s = sketch.num_bytes(node), clock.between(last, first)
        made = own.get(name)
        one = found.get(name) or Resident(
            "", (name,), 0, last, first, 0.0, made.saved_s if made else 0.0, ACTIVATION, made.own_s if made else 0.0
        )
        found[name] = dataclasses.replace(
            one,
            num_bytes=one.num_bytes + num_bytes,
            held_s=max(one.held_s, held_s),
            saved_s=one.saved_s + waited_s * num_bytes / total,
        )
    return [*found.values()]


def fill(again: Trial, order: Sequence[Resident], room: int) -> list[Resident]:
    """Return those that fit into ``room``, taken in ``order``, each beside those taken before it.

    A bucket is kept as a whole or as slices, not both: whichever saves more.
    """
    held = Held(again, order)
    kept: dict[tuple[str, ...], Resident] = {}
    for one in order:
        key = (one.kind, *one.fqns) if one.kind == ACTIVATION else one.fqns
        other = kept.get(key)
        if other is not None and other.saved_s >= one.saved_s:
            continue
        if other is not None:
            held.add(other, -1)
        held.add(one)
        if held.peak_bytes <= room:
            kept.pop(key, None)
            kept[key] = one
        else:
            held.add(one, -1)
            if other is not None:
                held.add(other)
    return [*kept.values()]


class Held:
    """An estimate of the bytes alive in a step that keeps more than a trial: launches stay where the trial has them.

    The positions between which nothing begins or ends to stay are one.
    """

    def __init__(self, again: Trial, residents: Sequence[Resident]) -> None:
        self._weight = again.weight
        self._since = sorted({one.since + 1 for one in residents})
        self._until = sorted({one.until for one in residents})
        self._forward = _highest(again.weight.forward, self._since)
        self._backward = _highest(again.weight.backward, self._until)

    def add(self, one: Resident, times: int = 1) -> None:
        """Keep one more; with -1, no longer."""
        first, num_bytes = bisect_left(self._since, one.since + 1) + 1, times * one.num_bytes
        self._forward[first:] = [alive + num_bytes for alive in self._forward[first:]]
        end = bisect_left(self._until, one.until) + 1
        self._backward[:end] = [alive + num_bytes for alive in self._backward[:end]]

    @property
    def peak_bytes(self) -> int:
        return self._weight.held_bytes + max(*self._forward, self._weight.returned_bytes + max(self._backward))


def _highest(alive: Sequence[int], begins: Sequence[int]) -> list[int]:
    """Return the most that is alive in front of the first of these positions, from each to the next, and to the end."""
    edges = [0, *begins, len(alive)]
    return [max(alive[begin:end], default=0) for begin, end in itertools.pairwise(edges)]


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


class _Clock(Clock):
    """The clock of a trial's backward, which also tells when nodes of both graphs begin."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.backward.events)
        self._trial = trial
        self._forward_s, self._backward_s = _begins(trial.forward), _begins(trial.backward)

    def between(self, since: int, until: int) -> float:
        """Return the seconds from a node of forward to one of backward."""
        return self._trial.forward.timeline.total_s - self._forward_s[since] + self._backward_s[until]


def _begins(half: Half) -> list[float]:
    points = iter(half.timeline.memory)
    now_s, begins = 0.0, []
    for node in half.graph.nodes:
        if node.op == "call_function":
            now_s = next(points).at_s
        begins.append(now_s)
    return begins


def _lives(half: Half) -> list[Lifetime]:
    return lives_of(half.graph.nodes, half.memory)


def _last_reads(half: Half, plan: Plan) -> dict[str, int]:
    """Return for each parameter the position of the last node of forward that needs what its bucket brought."""
    last: dict[int, int] = {}
    for life in _lives(half):
        if works_for(life.storage.node, "gather"):
            index = life.storage.node.meta[ROLE].bucket
            last[index] = max(last.get(index, 0), life.last)
    return {fqn: last.get(index, 0) for index, bucket in enumerate(plan.gathers) for fqn in bucket.fqns}


def _saved_bytes(trial: Trial) -> dict[str, int]:
    """Return the bytes of each node that forward saves for backward; views of one storage count once, at the first."""
    forward, backward = trial.forward.graph, trial.backward.graph
    storages = trial.forward.memory.storages
    found: dict[str, int] = {}
    seen: set[Storage] = set()
    for one in results_of(forward)[saved_by(forward, backward) :]:
        if isinstance(one, fx.Node) and one.op == "call_function":
            found[one.name] = sum(storage.num_bytes for storage in storages[one] if storage not in seen)
            seen.update(storages[one])
    return found
