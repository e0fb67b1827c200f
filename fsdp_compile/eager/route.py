"""A step that a rank runs eagerly among ranks that run it compiled: it launches what the compiled step does, in order.

    compiled    begin("gather norms, gather 0, gather 1, ...")      the text of a graph that this rank ran before
    eagerly     unit 0 is read     launch all up to "gather 0", and land what unit 0 has a part in
                a gradient came    launch all up to the last reduction that has its gradients

Where Dynamo gives up on a frame (the limit of recompilations), or is told to (``set_stance("force_eager")``), the frame
runs in Python under the very call that was to run compiled code. The other ranks know nothing of that. Which parameters
travel together, when, and which of them backward gathers again is what their graph says; this rank ran it as well.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import dynamo
from ..core.extension import has_extension
from ..core.grads import wait_for_offloaded
from ..core.param import ShardedParam
from ..core.unit import Unit
from ..passes import ParamSpec, lower
from ..passes.ledger import GraphText, ledger
from .collectives import Caller
from .gathered import Gathered
from .reduction import deliver, with_pending
from .running import Running, running

_logger = logging.getLogger(__name__)

_MOST_IN_FLIGHT = 2  # reductions that are not waited for


@dataclass(frozen=True)
class Stop:
    """One collective on the way."""

    kind: str  # "all_gather", "all_reduce" of what was reduced over shards, or one of the reductions over shards
    members: tuple[tuple[Unit, int], ...]  # and places among the unit's gathered parameters

    def gathers(self, unit: Unit) -> bool:
        return self.kind == "all_gather" and any(one is unit for one, _ in self.members)


class Flight:
    """One all-gather under way; it lands once, for all units that have a part in it."""

    def __init__(self, launched: Any, specs: list[ParamSpec], call: Caller) -> None:
        self._launched, self._specs, self._call = launched, specs, call
        self._landed: list[Tensor] | None = None

    def land(self) -> list[Tensor]:
        if self._landed is None:
            self._landed = lower.finish_gather(self._call, self._launched, self._specs)
            self._launched = None
        return self._landed


@dataclass
class Reducing:
    """One bucket of gradients under way."""

    stop: Stop
    specs: list[ParamSpec]
    launched: Any
    call: Caller
    over_replicas: bool = False


class Route:
    """All collectives of one step, and how far it has come."""

    def __init__(self, top: Unit, units: dict[str, Unit], forward: GraphText, backward: GraphText | None) -> None:
        self.top = top
        self.routed = {unit: Routed(unit, self) for unit in units.values()}
        self._forward = tuple(self._stops(forward, units))
        self._backward = () if backward is None else tuple(self._stops(backward, units))
        # What backward gathers again. Nothing else is freed behind forward: backward could not have it back.
        self.again = {member for stop in self._backward if stop.kind == "all_gather" for member in stop.members}
        self.reduces = any(stop.kind != "all_gather" for stop in self._backward)
        self.in_forward, self.in_backward = True, False
        self._left = deque(self._forward)
        self._reads: Counter[tuple[Unit, int]] = Counter()  # that autograd recorded
        self._arrived: Counter[tuple[Unit, int]] = Counter()  # gradients of these
        self._grads: dict[tuple[Unit, int], Tensor] = {}
        self._reducing: deque[Reducing] = deque()

    def _stops(self, text: GraphText, units: dict[str, Unit]) -> Iterator[Stop]:
        """The collectives of a graph; ValueError where the parameters would not travel so now."""
        for launch in text.launches:
            members = []
            for member in launch.members:
                routed = self.routed.get(units[member.unit]) if member.unit in units else None
                if routed is None or member.fqn not in routed.index:
                    raise ValueError(f"{member.fqn} of {member.unit} is not known")
                members.append((routed.unit, routed.index[member.fqn]))
            specs = [self.routed[unit].specs[index] for unit, index in members]
            gathers = launch.kind == "all_gather"
            group = specs[0].replicate_group if launch.kind == "all_reduce" else specs[0].group
            num_bytes = sum(spec.gather_bytes if gathers else spec.reduce_bytes for spec in specs)
            if (group, num_bytes) != (launch.group, launch.num_bytes):
                raise ValueError(f"{launch.names} travel otherwise now")
            yield Stop(launch.kind, tuple(members))

    # Where the step is.

    def end_forward(self) -> None:
        """The outermost forward ended; what it did not read travels all the same."""
        if self.in_forward:
            while self._left:
                self._issue(self._left.popleft())
            self.in_forward = False
            if not self._backward:
                self.leave()

    def begin_backward(self) -> None:
        if not self.in_backward:
            self.in_forward, self.in_backward = False, True
            self._left = deque(self._backward)
            self._arrived.clear()

    def end_backward(self) -> None:
        """Launch what is left, with zeros for gradients that did not come, and give the shards their gradients."""
        if self.in_backward:
            while self._left:
                self._issue(self._left.popleft())
            self._drain(0)
            if any(unit.offload for unit in self.routed):
                wait_for_offloaded()
            self.leave()

    def leave(self) -> None:
        """The step is over, or was given up; its units are gathered as they would be without it."""
        self.in_forward = self.in_backward = False
        self._left.clear()
        self._grads.clear()
        for reducing in self._reducing:
            lower.finish_reduce(reducing.call, reducing.launched, reducing.specs)
        self._reducing.clear()
        for unit, routed in self.routed.items():
            routed.free()
            if running(unit).gathered is routed:
                running(unit).gathered = None

    # How it goes on.

    def reach(self, routed: Routed, must: bool) -> None:
        """Launch everything up to the last gather that a unit has a part in; as far as gradients are there."""
        gathers = [place for place, stop in enumerate(self._left, 1) if stop.gathers(routed.unit)]
        for _ in range(gathers[-1] if gathers else 0):
            if not self._has_gradients(self._left[0]):
                if must:
                    raise RuntimeError(self._held_up(self._left[0], routed))
                return
            self._issue(self._left.popleft())

    def expect(self, routed: Routed, index: int) -> None:
        """Autograd recorded a read, whose gradient is to come. What is read again for backward has had its read."""
        if self.in_forward:
            self._reads[routed.unit, index] += 1

    def arrive(self, routed: Routed, index: int, grad: Tensor | None) -> None:
        """A gradient of one read is there, or will not come: launch the reductions that waited for it."""
        member = (routed.unit, index)
        self._arrived[member] += 1
        if grad is not None:
            known = self._grads.get(member)
            if known is None:
                alone = {index: grad}
                routed.unalias(alone)
                self._grads[member] = alone[index]
            else:
                self._grads[member] = known + grad
        ready = 0
        for place, stop in enumerate(self._left, 1):
            if not self._has_gradients(stop):
                break
            if stop.kind != "all_gather":
                ready = place
        for _ in range(ready):
            self._issue(self._left.popleft())
        self._drain(_MOST_IN_FLIGHT)

    def _has_gradients(self, stop: Stop) -> bool:
        if stop.kind in ("all_gather", "all_reduce"):
            return True
        return all(self._arrived[member] >= max(self._reads[member], 1) for member in stop.members)

    def _issue(self, stop: Stop) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if stop.kind == "all_gather":
                self._gather(stop)
            elif stop.kind == "all_reduce":
                self._over_replicas(stop)
            else:
                self._reduce(stop)

    def _gather(self, stop: Stop) -> None:
        specs = [self.routed[unit].specs[index] for unit, index in stop.members]
        call = _caller(stop)
        sources = [self.routed[unit].source(index) for unit, index in stop.members]
        flight = Flight(lower.launch_gather(call, sources, specs), specs, call)
        for place, (unit, index) in enumerate(stop.members):
            self.routed[unit].await_flight(flight, place, index)

    def _reduce(self, stop: Stop) -> None:
        grads, specs = [], []
        for unit, index in stop.members:
            routed = self.routed[unit]
            spec = routed.specs[index]
            grad = self._grads.pop((unit, index), None)
            if grad is None:
                grad = torch.zeros(spec.size, dtype=spec.reduce_dtype, device=unit.mesh.device)
            grad = with_pending(routed, {index: grad}, only=routed.params[index].fqn)[index]
            grads.append(grad)
            specs.append(routed.spec_for(index, grad))
        call = _caller(stop, num_waits_before_hook=(specs[0].num_shards > 1) + (specs[0].num_replicas > 1))
        self._reducing.append(Reducing(stop, specs, lower.launch_reduce(call, grads, specs), call))

    def _over_replicas(self, stop: Stop) -> None:
        reducing = next((one for one in self._reducing if one.stop.members == stop.members), None)
        assert reducing is not None, "the sum over the shards comes before the one over the replicas"
        reducing.launched = lower.launch_all_reduce(reducing.call, reducing.launched, reducing.specs)
        reducing.over_replicas = True

    def _drain(self, most: int) -> None:
        """Have at most so many reductions in flight; those that wait for their second collective stay."""
        while len(self._reducing) > most:
            oldest = self._reducing[0]
            if oldest.specs[0].num_replicas > 1 and not oldest.over_replicas:
                return
            self._reducing.popleft()
            with torch.no_grad():
                reduced = lower.finish_all_reduce(oldest.call, oldest.launched, oldest.specs)
            for (unit, index), local in zip(oldest.stop.members, reduced):
                deliver(self.routed[unit], index, local)

    def _held_up(self, stop: Stop, routed: Routed) -> str:
        unit, index = stop.members[0]
        return (
            f"{routed.unit.name} runs eagerly on this rank, among ranks that run it compiled. They reduce the gradient "
            f"of {self.routed[unit].params[index].fqn} of {unit.name} before they gather this unit for backward, and "
            "eagerly it is not complete by then. Have all ranks run compiled (a higher "
            "torch._dynamo.config.recompile_limit, or dynamic=True), or all of them eagerly."
        )


class Routed(Gathered):
    """A unit's full parameters, gathered as the route says: some with those of other units, some not at all."""

    def __init__(self, unit: Unit, route: Route) -> None:
        super().__init__(unit)
        self.route = route
        self._awaited: list[tuple[Flight, int, int]] = []  # place in the flight, and among the parameters
        self._here: set[int] = set()

    @property
    def launched(self) -> bool:
        return bool(self._awaited)

    def serves(self, unit: Unit) -> bool:
        return (self.route.in_forward or self.route.in_backward) and super().serves(unit)

    def free_if_stale(self) -> None:
        """Each step has its own route, which gathers what the shards hold then."""

    def await_flight(self, flight: Flight, place: int, index: int) -> None:
        self._awaited.append((flight, place, index))

    def launch(self) -> None:
        self.route.reach(self, must=False)

    def wait(self) -> list[Tensor]:
        self.route.reach(self, must=True)
        awaited, self._awaited = self._awaited, []
        with torch.inference_mode(False), torch.no_grad():
            self._keep({index: flight.land()[place] for flight, place, index in awaited})
        self._here.update(index for _, _, index in awaited)
        self.is_full = True
        assert self.fulls is not None
        return self.fulls

    def full(self, index: int) -> Tensor:
        fulls = self.wait()
        if index not in self._here:
            raise RuntimeError(
                f"{self.unit.name} runs eagerly on this rank, among ranks that run it compiled, and reads "
                f"{self.params[index].fqn} where they do not gather it (a branch, or a module that is called again). "
                "Have all ranks run compiled, or all of them eagerly."
            )
        return fulls[index]

    def free(self) -> None:
        """Behind forward, what backward gathers again; else everything."""
        keeps = self.route.in_forward and bool(self.route.again)
        for flight, _, _ in self._awaited if not keeps else ():
            flight.land()
        if not keeps:
            self._awaited.clear()
        gone = {index for index in self._here if not keeps or (self.unit, index) in self.route.again}
        self._here -= gone
        self.is_full = self.is_full and keeps
        self._give_back(gone)

    def give_up(self) -> None:
        self.route.leave()


def follow(unit: Unit) -> None:
    """Have the eager forward that begins go the way of the compiled step, where it stands in the place of one."""
    run = running(unit)
    if isinstance(run.gathered, Routed):
        if run.gathered.route.in_forward:
            return
        run.gathered.route.leave()
    run.followed = False
    if not ledger.has_run or not dynamo.is_called_through_compile():
        return
    route = _route_of(unit)
    if route is not None:
        for one, routed in route.routed.items():
            known = running(one)
            if known.gathered is not None:
                known.gathered.free()
            known.gathered, known.followed = routed, True


def may_run_ahead(gathered: Gathered, target: Running) -> bool:
    """Whether a unit's gathers may be launched from another unit: all that go one way, and what goes no way."""
    if isinstance(gathered, Routed):
        return isinstance(target.gathered, Routed) and target.gathered.route is gathered.route
    return not target.followed


def end_way(gathered: Gathered, unit: Unit) -> None:
    """A unit's forward ended, and with it that of the route where the unit is the outermost one."""
    if isinstance(gathered, Routed) and gathered.route.top is unit:
        gathered.route.end_forward()


def _route_of(top: Unit) -> Route | None:
    """The way of the graph that ran last of those that gather the most of these units."""
    inside = top.inside()
    by_address = {param.address: (unit, param) for unit in inside for param in unit.params if param.address}
    stage = "forward" if torch.is_grad_enabled() else "inference"
    best: tuple[GraphText, dict[str, Unit]] | None = None
    for text, addresses in ledger.ran():
        if text.stage == stage:
            units = _units_of(text, addresses, by_address)
            if units and (best is None or len(units) > len(best[1])):
                best = text, units
    if best is None:
        return None
    forward, units = best
    backward = None
    if stage == "forward":
        syncs = top.accumulation.sync
        texts = (text for text, _ in ledger.ran() if (text.stage, text.step) == ("backward", forward.step))
        backward = next((text for text in texts if _reduces(text) == syncs), None)
        if backward is None:
            return None
    try:
        return Route(top, units, forward, backward)
    except ValueError as error:
        _logger.info("%s runs eagerly, and not as the compiled step did: %s", top.name, error)
        return None


def _units_of(
    text: GraphText, addresses: tuple[int, ...], by_address: Mapping[int, tuple[Unit, ShardedParam]]
) -> dict[str, Unit]:
    """The units that a graph reads, by what it calls them; none where one of them is another model's."""
    units = {}
    for (_, member), address in zip(text.firsts, addresses):
        unit, param = by_address.get(address, (None, None))
        if unit is None or param is None or param.fqn != member.fqn or unit.post_forward is not None:
            return {}
        if any(isinstance(one.shard, DTensor) and has_extension(one.fqn, one.shard) for one in unit.params):
            return {}
        units[member.unit] = unit
    return units


def _reduces(text: GraphText) -> bool:
    return any(launch.kind != "all_gather" for launch in text.launches)


def _caller(stop: Stop, num_waits_before_hook: int = 0) -> Caller:
    unit = stop.members[0][0]
    alone = all(one is unit for one, _ in stop.members)
    return Caller(unit, num_waits_before_hook=num_waits_before_hook, names_unit=alone)
