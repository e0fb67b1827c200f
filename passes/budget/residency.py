"""Choose what stays from forward to backward within a memory budget: parameters, and activations.

    everything made again        G w2  G w1  u2 = mm(x2, w2) ...      smallest
    as much kept as fits         w2 and u2 kept, w1 gathered again    fastest within the budget
    w1 kept as a slice           G w2  g w1  ...                      g: gather among the ranks of a node
    everything kept              -                                    largest

Equal layers have equal choices, so a choice is of a kind (the same bucket, or the activations of the same matrix, in
every layer) and of how many layers take it, the last ones first. Kinds are taken by the seconds that they save per byte
by which they raise the peak, both as sketches predict them (sketch.py) of a graph with few of the layers (periods.py).

At first only parameters are chosen among: their gathers cost time, and saved activations cost none. If not all of them
fit, the search is repeated from a step that recomputes all activations, or has them on the host. For the best,
launching gathers two and three units ahead is tried, too. The fastest candidate within the budget wins, or the one with
the lowest peak if none fits. If shards may be on the host as well, those of the last layers are, as many as must be:
their gradients leave first, while most activations are still there.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from ..cost.profiles import HardwareProfile
from ..cost.roofline import Groups
from ..cost.steps import Unsettled
from ..ir.plan import Candidate, Plan
from ..ir.provenance import find_unshards, whole_of
from ..schedule.activations import activations_of, matrices_of
from ..schedule.slices import keeps_slice, offers_slice
from .periods import Periods, layers_of, periods_of
from .sketch import Sketch, saved_without
from .standing import Standing
from .trial import Decision, Figures, Halves, trial_as, trial_of

MAY = GATHER, RECOMPUTE, OFFLOAD = "gather", "recompute", "offload"  # what a budget may choose
SHARDS = "shards"  # what it may choose as well before a model is sharded: where the shards of layers are
AGAIN, AS_TOLD, KEPT = "everything gathered again", "as reshard_after_forward says", "everything kept"
WORTH, SLICED = "kept by seconds saved a byte", "slices kept of everything"
LEAN, LEAN_WORTH = "everything gathered and computed again", "kept and saved by seconds saved a byte"
AWAY, AWAY_WORTH = "everything on the host", "on the device by seconds saved a byte"
_LOOKAHEADS = (2, 3)
_KINDS_IN_PART = 3  # that some of the layers take and others do not


@dataclass(frozen=True)
class Tried:
    """A candidate and its figures."""

    name: str
    figures: Figures
    states_bytes: int = 0  # of the optimizer's states, for which there is no room
    states_s: float = 0.0  # for copying them, and shards on the host with their gradients
    shards_bytes: int = 0  # of shards that have to leave, beside those that the figures have on the host
    shards_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.figures.seconds + self.states_s + self.shards_s

    @property
    def peak_bytes(self) -> int:
        return self.figures.peak_bytes - self.shards_bytes

    def as_candidate(self) -> Candidate:
        its = self.figures
        return Candidate(
            self.name,
            len(its.kept),
            self.peak_bytes,
            its.seconds + self.shards_s,
            its.exposed_s + self.shards_s,
            num_recomputed=len(its.recomputed),
            num_sliced=len(its.sliced),
            num_offloaded=len(its.offloaded),
            offloaded_bytes=its.offloaded_bytes,
            copied_s=its.copied_s,
            states_bytes=self.states_bytes,
            states_s=self.states_s,
            num_hosted=len(layers_of(its.hosted)),
        )


@dataclass(frozen=True)
class Item:
    """What one layer may take: a bucket that stays gathered, or as slices, or the activations of one matrix saved."""

    names: frozenset[str]
    field: str  # of a decision

    @property
    def kind(self) -> tuple[str, ...]:
        return (self.field, *sorted(re.sub(r"\d+", "#", name) for name in self.names))


def choose(
    joint: fx.Graph,
    budget_bytes: Callable[[int], int],
    profile: HardwareProfile,
    groups: Groups | None = None,
    may: Collection[str] = (GATHER, RECOMPUTE),
    periods: Periods | None = None,
    states_bytes: int = 0,
) -> tuple[Tried, list[Tried]]:
    """Return the candidate to take, and those that lost, fastest first.

    ``joint`` has gone through the passes before ``chosen_slices``, and is not changed. The budget may depend on the
    bytes that are there before the step begins. ``may`` has some of MAY, or SHARDS. ``periods`` are of a step with more
    layers than were traced; Unsettled if they do not tell what all are like. ``states_bytes`` are of an optimizer whose
    states the budget is for as well, and which may be on the host.
    """
    try:
        return _Search(periods or periods_of(joint), profile, groups, may, states_bytes).choose(budget_bytes)
    except Unsettled:
        if periods is not None:
            raise
        return _Search(Periods(joint), profile, groups, may, states_bytes).choose(budget_bytes)


class _Search:
    def __init__(
        self,
        periods: Periods,
        profile: HardwareProfile,
        groups: Groups | None,
        may: Collection[str],
        states_bytes: int,
    ) -> None:
        self._periods, self._profile, self._groups, self._may = periods, profile, groups, may
        graph = periods.graph
        self._told = self._all(told_to_keep(graph))
        self._again = trial_of(graph, (), profile, groups)
        self._activations = activations_of(graph) if RECOMPUTE in may else {}
        self._matrices = {node.name: one.fqn for node, one in matrices_of(graph).items()} if OFFLOAD in may else {}
        self._sketches = {False: Sketch(self._again, profile, groups, matrices=self._matrices, periods=periods)}
        self._sketched: dict[Decision, Halves | None] = {}  # by what is decided for the few periods
        self._cut: dict[Decision, Halves] = {}
        self._tried: dict[Decision, Tried] = {}
        self._budget = 0
        self._standing = Standing(profile, states_bytes)
        if SHARDS in may:
            self._standing = self._with_shards(self._standing)

    def choose(self, budget_bytes: Callable[[int], int]) -> tuple[Tried, list[Tried]]:
        graph, periods, again = self._periods.graph, self._periods, self._again
        self._budget = budget_bytes(again.weight.held_bytes + periods.num_left_out * periods.held_bytes)
        may_stay = {*keepable(graph, again.plan)}
        offers = {one.fqn for one in find_unshards(graph) if one.fqn in may_stay and offers_slice(one.node)}
        assert again.plan.backward is not None
        buckets = [bucket.fqns for bucket in again.plan.backward.gathers if {*bucket.fqns} <= may_stay]
        items = [*self._items("kept", buckets), *self._items("sliced", [one for one in buckets if {*one} <= offers])]
        nothing = Decision()
        if self._try(AGAIN, nothing) is None or periods.compressed(self._told) is None:
            raise Unsettled
        everything = self._try(KEPT, Decision(self._all(may_stay)))
        self._try(AS_TOLD, Decision(self._told))
        if offers:
            self._try(SLICED, Decision(sliced=self._all(offers)))
        if GATHER not in self._may:
            items = []
        self._fill(WORTH, nothing, items)
        if everything is None or self._left(everything) < self._standing.states_bytes:
            self._lean(items)
        decision, best = self._best()
        if best.figures.exposed_s > 0 and self._left(best) >= 0:  # earlier gathers may be hidden, but stay longer
            for ahead in _LOOKAHEADS:
                self._try(f"{best.name}, gathered {ahead} units ahead", dataclasses.replace(decision, lookahead=ahead))
            decision, best = self._best()
        exact: set[Decision] = set()
        while decision not in exact:  # what the partitioner makes of recomputation and copies, a cut tells exactly
            del self._tried[decision]
            decision, figures = self._exactly(decision)
            if figures is not None:
                self._tried[decision] = self._beside_what_stands(best.name, figures)
                exact.add(decision)
            decision, best = self._best()
        lost = (one for one in self._tried.values() if one is not best)
        return best, sorted(lost, key=lambda one: one.seconds)

    def _lean(self, items: list[Item]) -> None:
        """Try steps that begin with all activations recomputed, or on the host, and save as much as fits."""
        own = self._items("saved", [(name,) for name in reversed(self._activations)])
        base = Decision(recomputed=self._all(self._activations))
        if own:
            lean = trial_of(self._periods.graph, (), self._profile, self._groups, recompute=self._activations)
            saved = saved_without(self._again, self._activations)
            self._sketches[True] = Sketch(lean, self._profile, self._groups, saved, self._matrices, self._periods)
            self._try(LEAN, base)
            self._fill(LEAN_WORTH, base, [*items, *own])
        leaving = dict.fromkeys(name for one in self._sketches.values() for name in one.leaving.values())
        if not leaving:
            return
        away = best = dataclasses.replace(base, offloaded=self._all(leaving))
        least = self._try(AWAY, away)
        # What takes long to compute for its bytes is copied, if that is faster.
        for _, its in self._by_worth(base, own):
            copied = dataclasses.replace(best, recomputed=_with(best, its).recomputed)
            tried = self._try(f"{AWAY}, or computed again ({len(copied.recomputed)})", copied)
            if tried is not None and (least is None or self._order(tried) < self._order(least)):
                best, least = copied, tried
        others = [name for name in reversed(leaving) if name not in self._activations]
        self._fill(AWAY_WORTH, best, [*items, *own, *self._items("saved", [(name,) for name in others])])

    def _fill(self, name: str, base: Decision, items: list[Item]) -> None:
        """Add to a decision the items that save most, the last layers first, as many as fit."""
        by_worth = self._by_worth(base, items)
        listed = [one for _, its in by_worth for one in its]
        # An item whose byte saves less time than a byte on the host costs is not kept in the place of that.
        leaves = [self._standing.room_beside(worth) for worth, its in by_worth for _ in its]
        taken, first = base, 0
        for _ in range(_KINDS_IN_PART):
            fits, at, over = first, len(listed), len(listed) + 1
            while over - fits > 1:
                tried = self._try(f"{name}, the first {at}", _with(taken, listed[first:at]))
                fits, over = (at, over) if tried is not None and self._left(tried) >= leaves[at - 1] else (fits, at)
                at = (fits + over) // 2
            taken = _with(taken, listed[first:fits])
            if fits == len(listed):
                break
            kind = listed[fits].kind
            first = next((at for at in range(fits, len(listed)) if listed[at].kind != kind), len(listed))

    def _by_worth(self, base: Decision, items: Iterable[Item]) -> list[tuple[float, list[Item]]]:
        """Return the kinds by the seconds that they save a byte, and the items of each, the last layer's first."""
        now = self._figures(base, cut=False)  # a trial for each would take long
        if now is None:
            return []
        found = []
        for _, same in itertools.groupby(sorted(items, key=lambda one: one.kind), lambda one: one.kind):
            its = [*same]
            figures = self._figures(_with(base, its), cut=False)
            if figures is not None and figures.seconds < now.seconds:
                more = max(figures.peak_bytes - now.peak_bytes, 1)
                found.append(((now.seconds - figures.seconds) / more, its))
        return sorted(found, key=lambda one: -one[0])

    def _items(self, field: str, few: Iterable[Sequence[str]]) -> list[Item]:
        """Return an item for each of these, which come last first, in every layer."""
        names = dict.fromkeys(one for its in few for one in reversed(self._periods.everywhere(its)))
        return [Item(one, field) for one in names]

    def _all(self, few: Collection[str]) -> frozenset[str]:
        return frozenset(name for one in few for its in self._periods.everywhere([one]) for name in its)

    def _try(self, name: str, decision: Decision) -> Tried | None:
        """Make a candidate of a decision, if its figures can be told."""
        if GATHER not in self._may:
            decision = dataclasses.replace(decision, kept=self._told, sliced=frozenset())
        figures = self._figures(decision)
        if figures is not None and decision not in self._tried:
            self._tried[decision] = self._beside_what_stands(name, figures)
        return self._tried.get(decision)

    def _figures(self, decision: Decision, sketch: bool = True, cut: bool = True) -> Figures | None:
        """Return the figures of a sketch, or else of a trial of its own; None if few layers do not tell them."""
        found = self._periods.compressed(*decision.names)
        if found is None:
            return None
        sets, more = found
        of_few = Decision(*sets, lookahead=decision.lookahead)
        try:
            halves = self._sketch(of_few) if sketch else None
            if halves is None and cut:
                halves = self._cut_as(of_few)
            figures = None if halves is None else halves.figures(more)
        except Unsettled:
            figures = None
        if figures is None:
            return None
        took = dataclasses.replace(decision, offloaded=decision.offloaded & self._all(figures.offloaded))
        return dataclasses.replace(figures, **vars(took))

    def _sketch(self, of_few: Decision) -> Halves | None:
        if of_few not in self._sketched:
            self._sketched[of_few] = self._sketches[bool(of_few.recomputed)].halves(of_few)
        return self._sketched[of_few]

    def _cut_as(self, of_few: Decision) -> Halves:
        if of_few not in self._cut:
            gc.collect()  # graphs are cycles: the trials before this one would stay in memory
            trial = trial_as(of_few, self._periods.graph, self._profile, self._groups)
            self._cut[of_few] = trial.halves(self._periods)
        return self._cut[of_few]

    def _best(self) -> tuple[Decision, Tried]:
        if not self._tried:
            raise Unsettled
        return min(self._tried.items(), key=lambda both: self._order(both[1]))

    def _order(self, tried: Tried) -> tuple[float, ...]:
        """Return what the best of the candidates has least of."""
        return max(tried.peak_bytes, self._budget), tried.seconds, tried.peak_bytes

    def _left(self, tried: Tried) -> int:
        """Return the bytes of the budget that forward and backward leave."""
        return self._budget - tried.figures.peak_bytes

    def _beside_what_stands(self, name: str, figures: Figures) -> Tried:
        """Return a candidate with what has to be on the host for it."""
        standing, peak_bytes = self._standing, figures.peak_bytes
        states_bytes = standing.states_away(peak_bytes, self._budget)
        shards_bytes = 0 if figures.hosted else standing.shards_away(peak_bytes, self._budget)
        states_s = standing.states_seconds(states_bytes + self._updated_bytes(figures.hosted))
        return Tried(name, figures, states_bytes, states_s, shards_bytes, standing.shards_seconds(shards_bytes))

    def _with_shards(self, standing: Standing) -> Standing:
        """Return what stands with the shards of all layers, by a trial that has them on the host."""
        hosted = frozenset(name for names in self._periods.names for name in names)
        here, away = self._figures(Decision()), self._figures(Decision(hosted=hosted))
        if not hosted or here is None or away is None:
            return standing
        updated_s = standing.states_seconds(self._updated_bytes(hosted))
        longer_s = max(away.seconds - here.seconds, 0.0) + updated_s
        return dataclasses.replace(standing, shards_bytes=max(here.peak_bytes - away.peak_bytes, 0), shards_s=longer_s)

    def _updated_bytes(self, hosted: Collection[str]) -> int:
        """Return the bytes of these shards and of their gradients, which an optimizer's step copies to the device."""
        return self._periods.num_with(hosted) * self._periods.updated_bytes

    def _exactly(self, decision: Decision) -> tuple[Decision, Figures | None]:
        """Return a decision with the shards of about as few layers on the host as it needs, and its figures."""
        figures = self._figures(decision, sketch=False)
        if figures is None or figures.hosted or not self._standing.shards_away(figures.peak_bytes, self._budget):
            return decision, figures
        found: tuple[Decision, Figures | None] = decision, figures
        layers, without = self._periods.names, figures.peak_bytes
        of_a_layer = self._standing.shards_bytes / len(layers)
        at, over, fits = math.ceil((without - self._budget) / of_a_layer), 0, len(layers) + 1
        while fits - over > 1:
            at = min(max(at, over + 1), fits - 1)
            hosted = dataclasses.replace(decision, hosted=frozenset(name for names in layers[-at:] for name in names))
            figures = self._figures(hosted, sketch=False)
            missing = None if figures is None else figures.peak_bytes - self._budget
            is_met = missing is not None and missing <= 0
            over, fits = (over, at) if is_met else (at, fits)
            if is_met or at == len(layers):
                found = hosted, figures
            if missing is None:  # few layers do not tell it
                at = (over + fits + 1) // 2
                continue
            of_a_layer = max((without - self._budget - missing) / at, 1.0)
            if is_met and -missing < of_a_layer:
                break
            at += math.ceil(missing / of_a_layer)
        return found


def _with(decision: Decision, items: Iterable[Item]) -> Decision:
    names: dict[str, set[str]] = {"kept": set(), "sliced": set(), "saved": set()}
    for one in items:
        names[one.field] |= one.names
    kept = decision.kept | names["kept"]
    return dataclasses.replace(
        decision,
        kept=kept,
        sliced=(decision.sliced | names["sliced"]) - kept,
        recomputed=decision.recomputed - names["saved"],
        offloaded=decision.offloaded - names["saved"],
    )


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
