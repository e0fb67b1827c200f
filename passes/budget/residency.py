"""Choose what stays from forward to backward within a memory budget: parameters, and activations.

    everything made again        G w2  G w1  u2 = mm(x2, w2) ...      smallest
    as much kept as fits         w2 and u2 kept, w1 gathered again    fastest within the budget
    w1 kept as a slice           G w2  g w1  ...                      g: gather among the ranks of a node
    everything kept              -                                    largest

A parameter is kept as a whole, or, if groups for that were made, as a slice, from which the ranks of a node gather. At
first only parameters are chosen among: their gathers cost time, and saved activations cost none. If not all parameters
fit, activations are recomputed as well in further candidates, and both compete for the bytes by the seconds that they
save (residents.py).

Lists of what to keep are filled by two orders: most seconds saved per byte and second held, and shortest life. A list
is cut off where it proves not to fit, and filled up where it leaves room. A list by the first order is also filled to
half of the room. All lists are tried (sketch.py), and so are the plan as the units were told, everything gathered again
and everything kept. For the best candidate, launching gathers two and three units ahead is tried, too. The fastest
candidate within the budget wins, or the one with the lowest peak if none fits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..cost.profiles import HardwareProfile
from ..cost.roofline import Groups
from ..ir.plan import Candidate, Plan
from ..ir.provenance import find_unshards, whole_of
from ..schedule.activations import activations_of, matrices_of
from ..schedule.slices import keeps_slice, offers_slice
from .residents import (
    ACTIVATION,
    PARAMETERS,
    SLICES,
    Resident,
    activations_away,
    activations_made_again,
    by_life,
    by_worth,
    fill,
    residents_of,
    slices_of,
)
from .sketch import Sketch, saved_without
from .trial import Figures, Trial, trial_of

MAY = GATHER, RECOMPUTE, OFFLOAD = "gather", "recompute", "offload"  # what a budget may choose
AGAIN, AS_TOLD, KEPT = "everything gathered again", "as reshard_after_forward says", "everything kept"
WORTH, SHORT = "kept by seconds saved a byte", "kept by the shortest life"
SLICED = "slices kept of everything"
LEAN = "everything gathered and computed again"
LEAN_WORTH, LEAN_SHORT = "kept and saved by seconds saved a byte", "kept and saved by the shortest life"
IN_HALF = ", in half of the room"
AWAY = "everything on the host"
AWAY_WORTH, AWAY_SHORT = "on the device by seconds saved a byte", "on the device by the shortest life"
# Sketches of a list that was filled by estimate. The peak may be another one, since launches change their places, and
# backward makes other nodes. If it is lower, the list is filled up; else a bisection finds how many of its first
# entries fit.
_TRIALS = 6
_LOOKAHEADS = (2, 3)


@dataclass(frozen=True)
class Tried:
    """A candidate and its figures."""

    name: str
    figures: Figures

    def as_candidate(self) -> Candidate:
        its = self.figures
        return Candidate(
            self.name,
            len(its.kept),
            its.peak_bytes,
            its.seconds,
            its.exposed_s,
            num_recomputed=len(its.recomputed),
            num_sliced=len(its.sliced),
            num_offloaded=len(its.offloaded),
            offloaded_bytes=its.offloaded_bytes,
            copied_s=its.copied_s,
        )


def choose(
    joint: fx.Graph,
    budget_bytes: Callable[[Trial], int],
    profile: HardwareProfile,
    groups: Groups | None = None,
    may: Collection[str] = (GATHER, RECOMPUTE),
) -> tuple[Tried, list[Tried]]:
    """Return the candidate to take, and those that lost, fastest first.

    ``joint`` has gone through the passes before ``chosen_slices``, and is not changed. The budget may depend on the
    bytes that are there before the step begins, which the first trial tells. ``may`` has some of MAY.
    """
    tried: dict[tuple[Any, ...], Tried] = {}

    def try_base(name: str, recompute: Collection[str] = ()) -> Trial:
        trial = trial_of(joint, (), profile, groups, recompute=recompute)
        if GATHER in may:
            tried[trial.kept, trial.recomputed, trial.sliced, 1, frozenset()] = Tried(name, Figures.of(trial))
        return trial

    def try_one(
        name: str,
        kept: Collection[str],
        recompute: Collection[str] = (),
        sliced: Collection[str] = (),
        lookahead: int = 1,
        offload: Collection[str] = (),
    ) -> Figures:
        kept = kept if GATHER in may else told
        key = frozenset(kept), frozenset(recompute), frozenset(sliced), lookahead, frozenset(offload)
        if key not in tried:
            figures = sketches[bool(recompute)].figures(*key)
            tried[key] = Tried(name, figures or cut(*key))  # a bucket that is kept in part is in no sketch
        return tried[key].figures

    def cut(kept: frozenset[str], *more: Any) -> Figures:
        gc.collect()  # graphs are cycles: the trials before this one would stay in memory
        return Figures.of(trial_of(joint, kept, profile, groups, False, *more))

    def try_listed(name: str, base: Trial, kept: Sequence[Resident]) -> Figures:
        recompute = base.recomputed - _fqns(kept, ACTIVATION)  # what is still recomputed beside these
        return try_one(name, _fqns(kept, PARAMETERS), recompute, _fqns(kept, SLICES))

    def try_filled(base: Trial, order: Sequence[Resident], room: int, name: str) -> None:
        listed: list[Resident] = []
        fits, over = 0, 0  # how many first entries of the list fit, and how many do not
        for turn in range(_TRIALS):
            first = (fits + over) // 2
            if not over:  # all that was tried fits, and its peak shows how much room is left
                more = fill(base, order, room)
                if more == listed:  # a shorter list may keep more: whole parameters in the place of slices
                    break
                fits = next((at for at, (had, one) in enumerate(zip(listed, more)) if had != one), len(listed))
                listed, first = more, len(more)
            called = name if turn == 0 else f"{name}, the first {first}"
            peak_bytes = try_listed(called, base, listed[:first]).peak_bytes
            if peak_bytes <= budget:
                fits = first
                room += budget - peak_bytes
            else:
                over = first
            if over and over - fits <= 1:
                break

    def try_lists(base: Trial, residents: Sequence[Resident], worth: str, short: str) -> None:
        keeping = may_be_kept(base, residents)
        try_filled(base, by_worth(keeping), budget, worth)
        try_filled(base, by_life(keeping), budget, short)
        # In a plan that keeps a little less, collectives may queue less.
        half = fill(base, by_worth(keeping), (budget + base.peak_bytes) // 2)
        try_listed(f"{worth}{IN_HALF}", base, half)

    def try_away(base: Trial, own: Sequence[Resident]) -> None:
        sketch, away = sketches[bool(base.recomputed)], frozenset(sketches[bool(base.recomputed)].leaving.values())
        # What takes long to compute for its bytes is copied, as far as that is faster.
        dear = [one.fqns[0] for one in sorted(own, key=lambda one: one.num_bytes / max(one.own_s, 1e-12))]
        lists = [base.recomputed - {*dear[: len(dear) * quarters // 4]} for quarters in range(5)]
        names = [f"{AWAY}, or computed again ({len(recompute)})" for recompute in lists]
        lean = [(try_one(name, (), recompute, offload=away), recompute) for name, recompute in zip(names, lists)]
        best, recompute = min(lean, key=lambda one: (max(one[0].peak_bytes, budget), one[0].seconds))
        waited_s = max(best.seconds - try_one(AGAIN, (), recompute).seconds, 0.0)
        residents = [*residents_of(base), *activations_away(base, sketch, own, waited_s)]
        for order, name in ((by_worth(residents), AWAY_WORTH), (by_life(residents), AWAY_SHORT)):
            order = [one for one in order if one.kind == ACTIVATION or {*one.fqns} <= may_stay]
            fits, over = 0, len(order) + 1
            while over - fits > 1:
                first = (fits + over) // 2
                kept, here = _fqns(order[:first], PARAMETERS), _fqns(order[:first], ACTIVATION)
                figures = try_one(f"{name}, the first {first}", kept, recompute - here, offload=away - here)
                fits, over = (first, over) if figures.peak_bytes <= budget else (fits, first)

    def may_be_kept(base: Trial, residents: Sequence[Resident]) -> list[Resident]:
        keeping = [one for one in residents if one.kind == ACTIVATION or {*one.fqns} <= may_stay]
        return [*keeping, *slices_of(base, keeping, offers, profile, groups)]

    told = told_to_keep(joint)
    again = try_base(AGAIN)
    matrices = {node.name: one.fqn for node, one in matrices_of(joint).items()} if OFFLOAD in may else {}
    sketches = {False: Sketch(again, profile, groups, matrices=matrices)}
    budget = budget_bytes(again)
    may_stay = {*keepable(joint, again.plan)}
    offers = {one.fqn: one.spec for one in find_unshards(joint) if one.fqn in may_stay and offers_slice(one.node)}
    largest_bytes = try_one(KEPT, may_stay).peak_bytes
    try_one(AS_TOLD, told)
    if GATHER in may:
        try_lists(again, residents_of(again), WORTH, SHORT)
    if offers:
        try_one(SLICED, (), sliced=offers)
    activations = activations_of(joint) if RECOMPUTE in may else {}
    base, own = again, []
    if largest_bytes > budget and activations:
        base = try_base(LEAN, activations)
        sketches[True] = Sketch(base, profile, groups, saved_without(again, activations), matrices)
        own = activations_made_again(again, base, activations)
        try_lists(base, [*residents_of(base), *own], LEAN_WORTH, LEAN_SHORT)
    if largest_bytes > budget and matrices:
        try_away(base, own)

    def rank(one: Tried) -> tuple[float, ...]:
        seconds, peak_bytes = one.figures.seconds, one.figures.peak_bytes
        return (0, seconds, peak_bytes) if peak_bytes <= budget else (1, peak_bytes, seconds)

    best = min(tried.values(), key=rank)
    its = best.figures
    if its.exposed_s > 0 and its.peak_bytes <= budget:  # earlier gathers may be hidden, but are held for longer
        for lookahead in _LOOKAHEADS:
            name = f"{best.name}, gathered {lookahead} units ahead"
            try_one(name, its.kept, its.recomputed, its.sliced, lookahead, its.offloaded)
        best = min(tried.values(), key=rank)
    exact = set()
    while best.figures.offloaded and best not in exact:  # what the partitioner makes of copies, a cut tells exactly
        key = next(key for key, one in tried.items() if one is best)
        tried[key] = Tried(best.name, cut(*key))
        exact.add(tried[key])
        best = min(tried.values(), key=rank)
    return best, sorted((one for one in tried.values() if one is not best), key=lambda one: one.figures.seconds)


def _fqns(kept: Sequence[Resident], kind: str) -> set[str]:
    return {fqn for one in kept if one.kind == kind for fqn in one.fqns}


def told_to_keep(joint: fx.Graph) -> frozenset[str]:
    """Return the parameters of units that were not told to reshard after forward."""
    return frozenset(one.fqn for one in find_unshards(joint) if not one.spec.regather)


def keepable(joint: fx.Graph, again: Plan) -> list[str]:
    """Return the parameters that backward gathers again and that forward has whole, unless their units keep slices."""
    assert again.forward is not None
    read = {fqn for bucket in again.forward.gathers for fqn in bucket.fqns} & {*again.again}
    return [
        one.fqn
        for one in find_unshards(joint)
        if one.fqn in read and one.spec.num_shards > 1 and one.spec.part < 0
        if not keeps_slice(one.node) and whole_of(one.node) is None
    ]
