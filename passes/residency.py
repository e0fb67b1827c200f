"""Which parameters stay gathered from forward to backward, where a byte budget leaves room for some.

    bytes alive, all gathered again                  what keeping a bucket adds, from its last read in forward
                                                     to where backward would have gathered it
              ____ budget _____________________
                     /---\\                                    |======== w2 (shortest) ======|
               /----/     \\----\\                          |============= w1 ==================|
         /----/                 \\----                |================== w0 =======================|
         forward     |  backward

A bucket that is kept is one gather less in backward, and saves the seconds that the replay without it is shorter. Two
lists of candidates are filled, one by seconds saved a byte and second held, one by the shortest life first, each cut
off where it proves not to fit, and the first to half of the room as well. They are tried (trial.py), and so are the
plan as the units were told, everything gathered again and everything kept. The fastest of those within the budget
wins; the one with the lowest peak where none is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx

from .choice import Candidate
from .collectives import is_launch
from .cost import Groups
from .insert import ROLE, Role
from .memory import lifetimes
from .plan import Plan
from .profiles import HardwareProfile
from .provenance import find_unshards
from .replay import Event, Launch, simulate
from .slices import whole_of
from .trial import Half, Trial, trial_of

AGAIN, AS_TOLD, KEPT = "everything gathered again", "as reshard_after_forward says", "everything kept"
WORTH, SHORT = "kept by seconds saved a byte", "kept by the shortest life"
# Of a list that was filled by estimate: what the partitioner saves otherwise, and launches that change their places,
# may make the peak another one. How many of its first ones fit is searched for.
_TRIALS = 5


@dataclass(frozen=True)
class Tried:
    """A candidate, and its trial."""

    name: str
    trial: Trial

    def as_candidate(self) -> Candidate:
        trial = self.trial
        return Candidate(self.name, len(trial.kept), trial.peak_bytes, trial.seconds, trial.exposed_s)


@dataclass(frozen=True)
class Resident:
    """One bucket of backward's gathers, and what it would mean to keep it."""

    unit: str
    fqns: tuple[str, ...]
    num_bytes: int
    since: int  # position of its last reader in forward
    until: int  # position in backward where it would be launched
    held_s: float  # between the two
    saved_s: float


def choose(
    joint: fx.Graph,
    budget_bytes: Callable[[Trial], int],
    profile: HardwareProfile,
    groups: Groups | None = None,
) -> tuple[Tried, list[Tried]]:
    """The candidate to take, and those that lost, fastest first.

    ``joint`` has gone through all passes but ``keep``, and stays as it is. The budget may depend on what is there
    before the step begins, which the first trial tells.
    """
    tried: dict[frozenset[str], Tried] = {}

    def try_one(name: str, kept: Collection[str]) -> Trial:
        key = frozenset(kept)
        if key not in tried:
            tried[key] = Tried(name, trial_of(joint, key, profile, groups).without_graphs())
        return tried[key].trial

    again = trial_of(joint, (), profile, groups)
    tried[frozenset()] = Tried(AGAIN, again.without_graphs())
    budget = budget_bytes(again)
    may_stay = {*keepable(joint, again.plan)}
    residents = residents_of(again)
    keeping = [one for one in residents if {*one.fqns} <= may_stay]
    try_one(KEPT, may_stay)
    try_one(AS_TOLD, told_to_keep(joint))
    for name, order in ((WORTH, _by_worth(keeping)), (SHORT, sorted(keeping, key=lambda one: one.held_s))):
        listed = fill(again, residents, order, budget)
        fits, over, first = 0, len(listed) + 1, len(listed)
        for _ in range(_TRIALS):
            called = name if first == len(listed) else f"{name}, the first {first}"
            if try_one(called, _fqns(listed[:first])).peak_bytes <= budget:
                fits = first
            else:
                over = first
            if over - fits <= 1:
                break
            first = (fits + over) // 2
    # Of the plan that keeps a little less the collectives may queue less.
    half = fill(again, residents, _by_worth(keeping), (budget + again.peak_bytes) // 2)
    try_one(f"{WORTH}, in half of the room", _fqns(half))
    best = min(
        tried.values(),
        key=lambda one: (
            (0, one.trial.seconds, one.trial.peak_bytes)
            if one.trial.peak_bytes <= budget
            else (1, one.trial.peak_bytes, one.trial.seconds)
        ),
    )
    return best, sorted((one for one in tried.values() if one is not best), key=lambda one: one.trial.seconds)


def told_to_keep(joint: fx.Graph) -> frozenset[str]:
    """The parameters of units that were not told to reshard after forward."""
    return frozenset(one.fqn for one in find_unshards(joint) if not one.spec.regather)


def keepable(joint: fx.Graph, again: Plan) -> list[str]:
    """The parameters that backward gathers again, and that forward has whole: not those that it keeps slices of."""
    assert again.forward is not None
    read = {fqn for bucket in again.forward.gathers for fqn in bucket.fqns} & {*again.again}
    return [
        one.fqn
        for one in find_unshards(joint)
        if one.fqn in read and one.spec.num_shards > 1 and one.spec.inner_shards == 1 and one.spec.part < 0
        if whole_of(one.node) is None
    ]


def residents_of(again: Trial) -> list[Resident]:
    """The buckets of backward, in the order of their launches."""
    backward, forward = again.plan.backward, again.plan.forward
    assert backward is not None and forward is not None
    last_read = _last_reads(again.forward.graph, forward)
    position = {node: index for index, node in enumerate(again.backward.graph.nodes)}
    launched = {
        role.bucket: node
        for node in again.backward.graph.nodes
        if (role := _gathering(node)) is not None and is_launch(node)
    }
    forward_s, backward_s = _clock(again.forward), _clock(again.backward)
    found = []
    for index, bucket in enumerate(backward.gathers):
        if index not in launched:
            continue  # one rank has all of it
        since, until = max(last_read.get(fqn, 0) for fqn in bucket.fqns), position[launched[index]]
        waits_s = again.forward.timeline.total_s - forward_s[since]
        saved_s = again.backward.timeline.total_s - _seconds_without(again.backward, index)
        num_bytes = bucket.num_bytes * bucket.num_ranks
        found.append(
            Resident(bucket.unit, bucket.fqns, num_bytes, since, until, waits_s + backward_s[until], saved_s)
        )
    return found


def fill(again: Trial, residents: Sequence[Resident], order: Sequence[Resident], room: int) -> list[Resident]:
    """As many of these as fit, each if it does beside those before it."""
    kept: list[Resident] = []
    for one in order:
        if peak_with(again, residents, [*kept, one]) <= room:
            kept.append(one)
    return kept


def peak_with(again: Trial, residents: Sequence[Resident], kept: Sequence[Resident]) -> int:
    """The peak that a step should have with these kept.

    What is gathered behind the first unit, where that is kept, is launched when backward begins.
    """
    forward, backward = [0] * (len(again.forward.live_bytes) + 1), [0] * (len(again.backward.live_bytes) + 1)
    stays = {one.fqns for one in kept}
    steps = [list(step) for _, step in itertools.groupby(residents, key=lambda one: one.unit)]
    launch = 0
    for index, (step, following) in enumerate(itertools.zip_longest(steps, steps[1:])):
        for one in step:
            is_kept = one.fqns in stays
            backward[0 if is_kept else min(launch, one.until)] += one.num_bytes
            backward[one.until] -= one.num_bytes
            if is_kept:
                forward[one.since + 1] += one.num_bytes
        if following and (index > 0 or any(one.fqns not in stays for one in step)):
            launch = following[0].until
    highest = max(map(sum, zip(again.forward.live_bytes, itertools.accumulate(forward))))
    later = max(map(sum, zip(again.backward.live_bytes, itertools.accumulate(backward))))
    return again.held_bytes + max(highest, again.returned_bytes + later)


def _by_worth(residents: Sequence[Resident]) -> list[Resident]:
    """Those that save time, most for a byte and second first."""
    saving = [one for one in residents if one.saved_s > 0]
    return sorted(saving, key=lambda one: one.num_bytes * max(one.held_s, 1e-9) / one.saved_s)


def _fqns(residents: Sequence[Resident]) -> list[str]:
    return [fqn for one in residents for fqn in one.fqns]


def _last_reads(graph: fx.Graph, plan: Plan) -> dict[str, int]:
    """The position of the last node of a forward graph that needs what a parameter's bucket brought."""
    last: dict[int, int] = {}
    for life in lifetimes(graph, fused=True):
        role = _gathering(life.storage.node)
        if role is not None:
            last[role.bucket] = max(last.get(role.bucket, 0), life.last)
    return {fqn: last.get(index, 0) for index, bucket in enumerate(plan.gathers) for fqn in bucket.fqns}


def _clock(half: Half) -> list[float]:
    """When each node of a graph begins."""
    points = iter(half.timeline.memory)
    now_s, begins = 0.0, []
    for node in half.graph.nodes:
        if node.op == "call_function":
            now_s = next(points).at_s
        begins.append(now_s)
    return begins


def _seconds_without(half: Half, bucket: int) -> float:
    """How long a backward takes that finds a bucket gathered."""
    roles = ((node.name, _gathering(node)) for node in half.graph.nodes)
    left_out = {name for name, role in roles if role is not None and role.bucket == bucket}
    # A wait's event has the name of its launch.
    return simulate(_bare(event) for event in half.events if event.name not in left_out).total_s


def _bare(event: Event) -> Event:
    """Without memory, and what a launch needs: of those, some are left out."""
    bare = dataclasses.replace(event, allocs=(), frees=())
    return dataclasses.replace(bare, needs=()) if isinstance(bare, Launch) else bare


def _gathering(node: fx.Node) -> Role | None:
    role = node.meta.get(ROLE)
    return role if isinstance(role, Role) and role.kind == "gather" else None
