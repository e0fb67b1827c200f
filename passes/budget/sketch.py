"""Predict a step that keeps other weights and activations than a trial, without cutting the joint graph once more.

    a trial that keeps nothing       backward     G1 w1  G0 w0 | gx1 | gx0
    its sketch with w1 kept          given w1     G0 w0 | gx1 | gx0             nothing needs G1 any more
    forward of both                  G0 w0 y0 | G1 w1 y1 -> w1                  w1 stays until the end

The partitioner saves the same activations whichever weights are kept. So a step is what the trial has, less what
backward is given: it is left out with all that only it needs. The rest is put in the order of its own plan, and timed.
An activation that is saved is given like a weight, if the trial computes it again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..apply.away import those_that_may_leave
from ..apply.overlap import planned_order
from ..cost.copied import Copies, Leaving, to_device, to_host
from ..cost.fusion import computes_inputs, is_pointwise
from ..cost.memory import Lifetime, bytes_alive, lives_of, results_of, storages_given
from ..cost.profiles import HardwareProfile
from ..cost.replay import Compute, Event, Launch
from ..cost.roofline import Groups, collective_seconds, group_of, sent_by, slowdown
from ..cost.steps import half_along
from ..ir.aliases import Storage, base_of, is_free, tensor_bytes, tensors_of
from ..ir.meta import PARAMETER, ROLE, Role, works_for
from ..ir.nodes import closure, readers_of
from ..ir.plan import Plan
from ..schedule.planner import only
from ..schedule.slices import inner_spec
from ..wire.collectives import is_wait
from .periods import Periods
from .trial import Decision, Halves, Trial, event_of


@dataclass(frozen=True)
class _Forward:
    """Forward with its launches so far ahead: whatever is kept, it runs in this order."""

    order: Sequence[fx.Node]
    position: Mapping[fx.Node, int]
    lives: Mapping[Storage, Lifetime]  # of what it allocates, as if nothing were saved


class Sketch:
    """The steps that a trial which keeps no weights can be changed into.

    If the trial recomputes activations, ``activations`` has for each matrix the names of nodes that backward is given
    where they are not recomputed, as far as it needs them. ``matrices`` has the matrix of each node of forward, by the
    nodes' names, if activations may be on the host. ``periods`` has the nodes of the layers that repeat.
    """

    def __init__(
        self,
        trial: Trial,
        profile: HardwareProfile,
        groups: Groups | None = None,
        activations: Mapping[str, Collection[str]] | None = None,
        matrices: Mapping[str, str] | None = None,
        periods: Periods | None = None,
    ) -> None:
        self._periods = periods or Periods(trial.forward.graph)
        self._trial, self._profile, self._groups = trial, profile, groups
        self._activations = activations or {}
        self._forwards: dict[int, _Forward] = {}  # by lookahead
        self._bytes_per_s = profile.memory_bytes_per_s * profile.memory_efficiency
        backward = trial.backward
        self._fulls = _by_parameter(backward.graph)
        # In backward, a weight that is given has the memory that it had in forward, not that of a gather in backward.
        storages, self._of_forward = backward.memory.storages, _by_parameter(trial.forward.graph)
        of_forward = {
            self._fulls[fqn]: trial.forward.memory.storages[full]
            for fqn, full in self._of_forward.items()
            if fqn in self._fulls and self._fulls[fqn].op == "call_function"
        }
        self._given = backward.memory.with_given(of_forward)
        pairs = ((node, zip(self._given.storages[node], storages[node], strict=True)) for node in of_forward)
        self._gathered = [(node, taken, made) for node, its in pairs for taken, made in its]
        self._by_name = {node.name: node for node in backward.graph.nodes}
        self._events = backward.events
        self._uses = {one.fqn: one for one in trial.uses.again}
        self._starts = [*backward.graph.output_node().all_input_nodes]
        self._starts += [node for node in backward.items.order if node.is_impure() or ROLE in node.meta]
        self._own = storages_given(backward.memory, trial.weight.given_up)
        storages = trial.forward.memory.storages
        self._held_for = {self._by_name[name]: its for name, its in trial.weight.saved.items()}  # by backward's node
        for fqn, full in self._of_forward.items():
            if fqn in self._fulls:
                self._held_for[self._fulls[fqn]] = storages[full]
        may_be_saved = {*itertools.chain(*self._activations.values())}
        for node in trial.forward.graph.nodes:
            if node.name in may_be_saved and node.name in self._by_name:
                self._held_for[self._by_name[node.name]] = storages[node]
        self._unit_of = {one.fqn: one.unit for one in trial.uses.forward}
        self.leaving = self._leaving(matrices) if matrices else {}

    def _leaving(self, matrices: Mapping[str, str]) -> dict[fx.Node, str]:
        """Return what backward is given and may be on the host, with its matrix."""
        may_leave = those_that_may_leave(self._trial.forward.graph, self._trial.num_results)
        held = {node: storages for node, storages in self._held_for.items() if storages and may_leave >= {*storages}}
        names = {node: storages[0].node.name for node, storages in held.items()}
        return {node: matrices[name] for node, name in names.items() if name in matrices}

    def halves(self, decision: Decision) -> Halves | None:
        """Return the steps of both halves; None if only a trial tells them."""
        kept, sliced, lookahead = decision.kept, decision.sliced, decision.lookahead
        if decision.hosted or not self._trial.uses.sources.isdisjoint(kept):
            return None  # gathers wait for copies, or the partitioner may save what is computed of these
        roles = self._roles(self._plan(kept, sliced, lookahead))
        if roles is None:
            return None
        saved = [name for of, names in self._activations.items() if of not in decision.recomputed for name in names]
        given = {self._fulls[fqn] for fqn in kept if fqn in self._fulls}
        held = {taken for node, taken, _ in self._gathered if node in given}
        if any(taken in held and node not in given for node, taken, _ in self._gathered):
            return None  # a bucket of forward is kept in part
        given |= {self._by_name[name] for name in saved if name in self._by_name}
        left_out = {node for node in self._starts if works_for(node, "gather") and node not in roles}
        starts = (node for node in self._starts if node not in left_out and node not in given)
        live = closure(starts, lambda node: () if node in given else node.all_input_nodes)
        half = self._trial.backward
        taken = [node for node in half.graph.nodes if node in live and (node in given or node.op == "placeholder")]
        items = half.items.only([node for node in half.items.order if node in live and node not in given], roles)
        order = planned_order(items, lookahead)
        pieces = self._pieces(sliced)
        loaded_s = self._loaded(taken, live)
        events = {node: self._event(node, sliced, loaded_s) for node in order if node in self._events}
        first = self._forward(lookahead)
        away = [node for node in taken if self.leaving.get(node) in decision.offloaded]
        sent, fetched = self._sent(first, away), self._fetched(order, away, given, lookahead)
        # What stays for later steps is there from the begin of this one to its end.
        may_stay = [self._fulls[fqn] for fqn in kept if fqn in self._fulls and self._uses[fqn].spec.stays]
        stays = {one for node in may_stay if node in taken for one in self._held_for[node]}
        held_bytes = self._trial.weight.held_bytes + sum(one.num_bytes for one in stays)
        before = half_along(
            [
                (node.name, [*event_of(node, self._trial.forward.events), *sent.events.get(at, ())])
                for at, node in enumerate(first.order)
            ]
            + [("", sent.events.get(len(first.order), ()))],
            zip(self._forward_bytes(first, taken, pieces, sent.bound, stays)),
            self._periods.forward,
            (held_bytes,),
        )
        then = half_along(
            [("", ()) for node in taken if node.op == "placeholder"]
            + [(node.name, [*fetched.events.get(at, ()), *event_of(node, events)]) for at, node in enumerate(order)]
            + [("", ())],
            zip(self._backward_bytes(order, taken, pieces, fetched.bound, stays)),
            self._periods.backward,
            (held_bytes + self._trial.weight.returned_bytes,),
        )
        return Halves(
            dataclasses.replace(decision, offloaded=frozenset(self.leaving[node] for node in away)),
            before,
            then,
            [(one.node.name, one.num_bytes) for one in sent.bound],
            [(one.node.name, one.num_bytes) for one in stays],
            self._periods,
        )

    def _sent(self, first: _Forward, away: Sequence[fx.Node]) -> Copies[Storage]:
        """Return the copies to the host of what these nodes of backward need."""
        storages = {one: self._unit_of.get(self.leaving[node], "") for node in away for one in self._held_for[node]}
        leaving = [
            Leaving(one, unit, one.num_bytes, first.lives[one].last if one in first.lives else first.position[one.node])
            for one, unit in storages.items()
        ]
        return to_host(leaving, self._uses_of(self._of_forward, first.position), len(first.order), self._profile)

    def _fetched(
        self, order: Sequence[fx.Node], away: Sequence[fx.Node], given: Collection[fx.Node], lookahead: int
    ) -> Copies[fx.Node]:
        position = {node: place for place, node in enumerate(order)}
        first: dict[tuple[Storage, ...], int] = {}
        for node in away:
            readers = readers_of(node, lambda one: is_free(one) and one.op != "output")
            place = min((position[one] for one in readers if one in position), default=len(order) - 1)
            first[self._held_for[node]] = min(place, first.get(self._held_for[node], place))
        own = {self._held_for[node]: node for node in reversed(away)}  # of several views, the first
        leaving = [
            Leaving(node, self._unit_of.get(self.leaving[node], ""), sum(one.num_bytes for one in held), first[held])
            for held, node in own.items()
        ]
        fulls = {fqn: full for fqn, full in self._fulls.items() if full not in given}
        copies = to_device(leaving, self._uses_of(fulls, position), lookahead, self._profile)
        return Copies(copies.events, {node: copies.bound[own[self._held_for[node]]] for node in away})

    def _uses_of(self, fulls: Mapping[str, fx.Node], position: Mapping[fx.Node, int]) -> list[tuple[str, int]]:
        """Return the units of gathered parameters, with the places where they are used."""
        found = ((fqn, position[user]) for fqn, full in fulls.items() for user in full.users if user in position)
        return [(self._unit_of[fqn], place) for fqn, place in found if fqn in self._unit_of]

    def _plan(self, kept: Collection[str], sliced: Collection[str], lookahead: int) -> Plan:
        """Return the plan of backward."""
        uses = self._trial.uses
        left = [one for one in uses.again if one.fqn not in kept]
        again = [dataclasses.replace(one, spec=inner_spec(one.spec)) if one.fqn in sliced else one for one in left]
        found = uses.found | {self._uses[fqn].unit for fqn in kept if fqn in self._uses}
        plan = dataclasses.replace(uses, again=tuple(again), found=frozenset(found)).plan(lookahead).backward
        assert plan is not None
        there = self._trial.backward.plan
        gathered = {fqn for bucket in there.gathers for fqn in bucket.fqns}
        reduced = {fqn for bucket in there.reduces for fqn in bucket.fqns}
        return only(
            plan, [one for one in again if one.fqn in gathered], [one for one in uses.reduces if one.fqn in reduced]
        )

    def _roles(self, plan: Plan) -> dict[fx.Node, Role] | None:
        """Return the role in a plan of each node that communicates; None if a bucket is not the trial's."""
        there = self._trial.backward.plan
        turns = {launch: turn for turn, launch in enumerate(plan.order)}
        new: dict[tuple[str, int], tuple[int, int]] = {}
        for kind in ("gather", "reduce"):
            places = {bucket.fqns: index for index, bucket in enumerate(plan.buckets(kind))}
            for index, bucket in enumerate(there.buckets(kind)):
                place = places.pop(bucket.fqns, None)
                if place is not None:
                    new[kind, index] = place, turns[kind, place]
            if places:
                return None
        made: dict[tuple[str, int], Role] = {}
        roles: dict[fx.Node, Role] = {}
        for node, role in self._trial.backward.items.role.items():
            launch = ("", 0) if role is None else (role.kind, role.bucket)
            if role is not None and (role.kind == "end" or launch in new):
                if launch not in made:
                    place, turn = new.get(launch, (role.bucket, len(plan.order)))
                    made[launch] = dataclasses.replace(role, bucket=place, turn=turn)
                roles[node] = made[launch]
        return roles

    def _forward(self, lookahead: int) -> _Forward:
        if lookahead not in self._forwards:
            self._forwards[lookahead] = self._new_forward(lookahead)
        return self._forwards[lookahead]

    def _new_forward(self, lookahead: int) -> _Forward:
        half = self._trial.forward
        plan = self._trial.uses.plan(lookahead).forward
        assert plan is not None
        gathered = {fqn for bucket in half.plan.gathers for fqn in bucket.fqns}
        plan = only(plan, [one for one in self._trial.uses.forward if one.fqn in gathered], ())
        turns = {bucket: turn for turn, (_, bucket) in enumerate(plan.order)}
        roles = {
            node: dataclasses.replace(role, turn=turns[role.bucket])
            for node, role in half.items.role.items()
            if role is not None and role.kind == "gather"
        }
        planned = planned_order(half.items.only(half.items.order, roles), lookahead)
        order = [*half.graph.find_nodes(op="placeholder"), *planned]
        lives = [
            dataclasses.replace(one, last=len(order)) if one.storage in self._trial.weight.returned else one
            for one in lives_of(order, half.memory)
            if one.storage.node.op == "call_function"
        ]
        return _Forward(
            order, {node: index for index, node in enumerate(order)}, {one.storage: one for one in lives}
        )

    def _forward_bytes(
        self, first: _Forward, taken: Sequence[fx.Node], pieces: Mapping[str, Storage],
        until: Mapping[Storage, int], stays: Collection[Storage],
    ) -> list[int]:  # fmt: skip
        """Return what is alive in forward, which holds what backward takes; without what ``stays``."""
        end = len(first.order)
        lives = {**first.lives}
        for storage in dict.fromkeys(one for node in taken for one in self._held_for.get(node, ())):
            # What was computed inside its readers is written, if it is to be saved.
            if storage in lives or storage.node in self._trial.forward.memory.away:
                begin = lives[storage].first if storage in lives else first.position[storage.node]
                lives[storage] = Lifetime(storage, begin, until.get(storage, end))
        own = [life for life in lives.values() if life.storage not in stays]
        own += [Lifetime(piece, first.position[piece.node] + 1, end) for piece in pieces.values()]
        return bytes_alive(own, end + 1)

    def _backward_bytes(
        self,
        order: Sequence[fx.Node],
        taken: Sequence[fx.Node],
        pieces: Mapping[str, Storage],
        fetched: Mapping[fx.Node, int],
        stays: Collection[Storage],
    ) -> list[int]:
        """Return what is alive in backward, without what forward returned and what ``stays``."""
        half = self._trial.backward
        inputs = [node for node in taken if node.op == "placeholder"]
        given = {node: self._given.storages[node] for node in taken if node.op != "placeholder"}
        inside = {taken: made for node, taken, made in self._gathered if node not in given}
        callers = {one for node, its in given.items() if self._is_callers(node, stays) for one in its}
        nodes = [*inputs, *order, half.graph.output_node()]
        own = [
            life
            for life in lives_of(nodes, self._given, itertools.chain(*given.values()), inside)
            if (life.storage.node.op == "call_function" and life.storage not in callers) or life.storage in self._own
        ]
        since: dict[Storage, int] = {}
        for node, place in fetched.items():
            for one in self._given.storages[node]:
                since[one] = min(len(inputs) + place, since.get(one, len(nodes)))
        own = [dataclasses.replace(one, first=since.get(one.storage, one.first)) for one in own]
        for place, node in enumerate(nodes):
            if works_for(node, "gather") and is_wait(node):
                fqns = half.plan.gathers[node.meta[ROLE].bucket].fqns
                own += [Lifetime(pieces[fqn], 0, place) for fqn in fqns if fqn in pieces]
        return bytes_alive(own, len(nodes))

    def _is_callers(self, node: fx.Node, stays: Collection[Storage]) -> bool:
        """Whether what a node of backward is given ``stays``, or has the memory of an input or a result of forward."""
        held = self._held_for.get(node, ())
        return any(one in self._trial.weight.returned or one in stays or one.node.op == "placeholder" for one in held)

    def _pieces(self, sliced: Collection[str]) -> dict[str, Storage]:
        """Return the slices that are kept, cut from what forward gathers."""
        there = self._uses.keys() & self._of_forward.keys()
        return {
            fqn: Storage(self._of_forward[fqn], -1, inner_spec(self._uses[fqn].spec).gather_bytes, "")
            for fqn in sliced
            if fqn in there
        }

    def _loaded(self, taken: Sequence[fx.Node], live: Collection[fx.Node]) -> dict[fx.Node, float]:
        """Return the seconds in which readers load what backward is given, if the trial's kernels made it for them."""
        seconds: dict[fx.Node, float] = {}
        for node in taken:
            if is_pointwise(node) and node not in self._trial.backward.memory.away:
                reader = next((one for one in node.users if one in live and computes_inputs(one)), None)
                if reader is not None:
                    loaded_s = sum(map(tensor_bytes, tensors_of(node))) / self._bytes_per_s
                    seconds[reader] = seconds.get(reader, self._profile.kernel_s) + loaded_s
        return seconds

    def _event(self, node: fx.Node, sliced: Collection[str], loaded_s: Mapping[fx.Node, float]) -> Event:
        """Return the event of a node; a gather from slices is one among few ranks."""
        event = self._events[node]
        if node in loaded_s and isinstance(event, Compute):
            return dataclasses.replace(event, seconds=event.seconds + loaded_s[node])
        if not (sliced and isinstance(event, Launch) and works_for(node, "gather")):
            return event
        members = self._trial.backward.plan.gathers[node.meta[ROLE].bucket].fqns
        if not {*members} <= {*sliced}:
            return event
        name = inner_spec(self._uses[members[0]].spec).group
        group = group_of(name, self._profile, self._groups)
        seconds = collective_seconds("all_gather", sent_by(node).num_bytes, group, self._profile)
        slows = slowdown(group, self._profile)
        return dataclasses.replace(event, seconds=seconds, group=name, slows_compute=slows, link=group.link)


def saved_without(trial: Trial, activations: Mapping[str, Collection[fx.Node]]) -> dict[str, list[str]]:
    """Return for each matrix those of its activations that a trial which recomputes none saves, or would save."""
    results = results_of(trial.forward.graph)[trial.num_results :]
    saved = {base_of(one).name for one in results if isinstance(one, fx.Node)}
    must_be = CheckpointPolicy.MUST_SAVE
    saved |= {node.name for node in trial.forward.graph.nodes if node.meta.get("recompute") is must_be}
    return {of: [node.name for node in nodes if node.name in saved] for of, nodes in activations.items()}


def _by_parameter(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.meta[PARAMETER]: node for node in graph.nodes if PARAMETER in node.meta}
