"""What stays from forward to backward, where a byte budget leaves room for some: parameters, and activations.

    everything made again        G w2  G w1  u2 = mm(x2, w2) ...      smallest
    as much kept as fits         w2 and u2 kept, w1 gathered again    fastest within the budget
    everything kept              -                                    largest

Where the budget holds everything but some gathered parameters, parameters alone are chosen among: their gathers cost
time, and what is saved of activations costs none. Else activations are computed again as well, and both compete for
the bytes by the seconds that they save (residents.py). Lists of what to keep are filled, by seconds saved a byte and
second held, and by the shortest life, and cut off where they prove not to fit; the first to half of the room as well.
They are tried (trial.py), and so are the plan as the units were told, everything gathered again and everything kept.
The fastest of those within the budget wins; the one with the lowest peak where none is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx

from .activations import activations_of
from .choice import Candidate
from .cost import Groups
from .plan import Plan
from .profiles import HardwareProfile
from .provenance import find_unshards
from .residents import Resident, activations_made_again, by_life, by_worth, fill, residents_of
from .slices import whole_of
from .trial import Trial, trial_of

AGAIN, AS_TOLD, KEPT = "everything gathered again", "as reshard_after_forward says", "everything kept"
WORTH, SHORT = "kept by seconds saved a byte", "kept by the shortest life"
LEAN = "everything gathered and computed again"
LEAN_WORTH, LEAN_SHORT = "kept and saved by seconds saved a byte", "kept and saved by the shortest life"
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
        return Candidate(
            self.name,
            len(trial.kept),
            trial.peak_bytes,
            trial.seconds,
            trial.exposed_s,
            num_recomputed=len(trial.recomputed),
        )


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
    tried: dict[tuple[frozenset[str], frozenset[str]], Tried] = {}

    def try_one(name: str, kept: Collection[str], recompute: Collection[str] = ()) -> Trial:
        key = frozenset(kept), frozenset(recompute)
        if key not in tried:
            trial = trial_of(joint, key[0], profile, groups, recompute=key[1])
            tried[key] = Tried(name, trial.without_graphs())
        return tried[key].trial

    def try_filled(
        base: Trial, residents: Sequence[Resident], order: Sequence[Resident], room: int, name: str
    ) -> None:
        listed = fill(base, residents, order, room)
        fits, over, first = 0, len(listed) + 1, len(listed)
        for _ in range(_TRIALS):
            called = name if first == len(listed) else f"{name}, the first {first}"
            if try_one(called, _parameters(listed[:first]), _computed(base, listed[:first])).peak_bytes <= budget:
                fits = first
            else:
                over = first
            if over - fits <= 1:
                break
            first = (fits + over) // 2

    again = trial_of(joint, (), profile, groups)
    tried[frozenset(), frozenset()] = Tried(AGAIN, again.without_graphs())
    budget = budget_bytes(again)
    may_stay = {*keepable(joint, again.plan)}
    residents = residents_of(again)
    keeping = [one for one in residents if {*one.fqns} <= may_stay]
    kept = try_one(KEPT, may_stay)
    try_one(AS_TOLD, told_to_keep(joint))
    try_filled(again, residents, by_worth(keeping), budget, WORTH)
    try_filled(again, residents, by_life(keeping), budget, SHORT)
    # Of the plan that keeps a little less the collectives may queue less.
    half = fill(again, residents, by_worth(keeping), (budget + again.peak_bytes) // 2)
    try_one(f"{WORTH}, in half of the room", _parameters(half))
    activations = {name: [node.name for node in nodes] for name, nodes in activations_of(joint).items()}
    if kept.peak_bytes > budget and activations:
        base = trial_of(joint, (), profile, groups, recompute=activations)
        tried[frozenset(), frozenset(activations)] = Tried(LEAN, base.without_graphs())
        residents = [*residents_of(base), *activations_made_again(again, base, activations)]
        keeping = [one for one in residents if one.is_activation or {*one.fqns} <= may_stay]
        try_filled(base, residents, by_worth(keeping), budget, LEAN_WORTH)
        try_filled(base, residents, by_life(keeping), budget, LEAN_SHORT)
    best = min(
        tried.values(),
        key=lambda one: (
            (0, one.trial.seconds, one.trial.peak_bytes)
            if one.trial.peak_bytes <= budget
            else (1, one.trial.peak_bytes, one.trial.seconds)
        ),
    )
    return best, sorted((one for one in tried.values() if one is not best), key=lambda one: one.trial.seconds)


def _parameters(kept: Sequence[Resident]) -> list[str]:
    return [fqn for one in kept if not one.is_activation for fqn in one.fqns]


def _computed(base: Trial, kept: Sequence[Resident]) -> frozenset[str]:
    """What is left to be computed again beside these."""
    return base.recomputed - {fqn for one in kept if one.is_activation for fqn in one.fqns}


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
