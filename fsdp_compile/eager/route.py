"""Lets a rank run a step eagerly among compiled ranks: it launches what the compiled step launches, in its order.

    compiled    begin("gather norms, gather 0, gather 1, ...")      the text of a graph, on this rank or another
    eagerly     unit 0 is read     launch all up to "gather 0", and wait for the gathers of unit 0
                a gradient came    launch all up to the last reduction that has its gradients

Where Dynamo gives up on a frame (the limit of recompilations), or is told to (``set_stance("force_eager")``), the frame
runs in Python inside the call that was to run compiled code. The other ranks do not know that. Their graph says which
parameters travel together, when, and which of them backward gathers again; ``ways`` finds out what it says.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.grads import wait_for_offloaded
from ..core.unit import Unit
from ..passes import ParamSpec, lower
from ..passes.collectives import c10d
from ..passes.ledger import Launch
from ..passes.slices import inner_spec
from .collectives import Caller
from .gathered import without_autograd
from .reduction import deliver, hold_back, with_pending
from .routed import Flight, Routed
from .running import running
from .ways import Way

Stage = Literal["forward", "between", "backward", "over"]

_MOST_IN_FLIGHT = 1  # reductions in flight

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stop:
    """One collective of a route."""

    kind: str  # "all_gather", "all_reduce" over the replicas, or the name of a reduction over shards
    members: tuple[tuple[Unit, int], ...]  # each a unit, and an index among its gathered parameters
    from_slices: bool = False  # it gathers slices that forward kept

    def gathers(self, unit: Unit) -> bool:
        return self.kind == "all_gather" and any(one is unit for one, _ in self.members)


@dataclass
class Reducing:
    """One bucket of gradients in flight."""

    stop: Stop
    specs: list[ParamSpec]
    launched: Any
    call: Caller
    over_replicas: bool = False


class Route:
    """All collectives of one step, and how far the step has come."""

    def __init__(self, top: Unit, way: Way) -> None:
        self.top = top
        self.routed = {unit: Routed(unit, self) for unit in way.units.values()}
        self._backward = tuple(self._stops(way.backward, way.units))
        # The parameters that backward gathers again. Others are not freed after forward: backward would not have them.
        self.again = {member for stop in self._backward if stop.kind == "all_gather" for member in stop.members}
        self.sliced = {member for stop in self._backward if stop.from_slices for member in stop.members}
        # The parameters that it reduces, even if sync is off by the time it runs: the graph reduces them, too.
        self.reduced = {member for stop in self._backward if stop.kind != "all_gather" for member in stop.members}
        self._check_reductions()
        self.stage: Stage = "forward"
        self._left = deque(self._stops(way.forward, way.units))
        self._reads: Counter[tuple[Unit, int]] = Counter()  # number of reads that autograd recorded
        self._arrived: Counter[tuple[Unit, int]] = Counter()  # number of their gradients that came
        self._grads: dict[tuple[Unit, int], Tensor] = {}
        self._reducing: deque[Reducing] = deque()

    def _stops(self, launches: Iterable[Launch], units: Mapping[str, Unit]) -> Iterator[Stop]:
        """Yield the collectives of a graph; ValueError where the parameters would travel otherwise now."""
        for launch in launches:
            members = []
            for member in launch.members:
                routed = self.routed.get(units[member.unit]) if member.unit in units else None
                if routed is None or member.fqn not in routed.index:
                    raise ValueError(f"{member.fqn} of {member.unit} is not known")
                members.append((routed.unit, routed.index[member.fqn]))
            specs = [self.routed[unit].specs[index] for unit, index in members]
            gathers = launch.kind == "all_gather"
            # More bytes than shards have: the plan keeps slices, which are longer.
            from_slices = gathers and launch.num_bytes > sum(spec.gather_bytes for spec in specs)
            if from_slices and all(spec.inner_offered for spec in specs):
                specs = [inner_spec(spec) for spec in specs]
            group = specs[0].replicate_group if launch.kind == "all_reduce" else specs[0].group
            num_bytes = sum(spec.gather_bytes if gathers else spec.reduce_bytes for spec in specs)
            if num_bytes != launch.num_bytes or launch.group not in ("", group):
                raise ValueError(f"{launch.names} travel otherwise now")
            yield Stop(launch.kind, tuple(members), from_slices)

    def _check_reductions(self) -> None:
        """Raise ValueError if gradients are summed over shards or replicas alone, or parameters were frozen since."""
        over_shards = [stop.members for stop in self._backward if stop.kind not in ("all_gather", "all_reduce")]
        over_replicas = {stop.members for stop in self._backward if stop.kind == "all_reduce"}
        replicated = {one for one in over_shards if self._spec(one[0]).num_replicas > 1}
        if replicated != over_replicas:
            raise ValueError("gradients are summed over shards or over replicas alone")
        if not all(self.routed[unit].shards[index].requires_grad for unit, index in self.reduced):
            raise ValueError("parameters were frozen since")

    def _spec(self, member: tuple[Unit, int]) -> ParamSpec:
        unit, index = member
        return self.routed[unit].specs[index]

    def end_forward(self) -> None:
        """End the outermost forward; launch the gathers that it did not need, since other ranks launch them."""
        if self.stage == "forward":
            self._flush()
            for routed in self.routed.values():
                routed.drop()
                routed.keep_slices()  # also of parameters that forward did not free: backward has no other source
            self.stage = "between"
            if not self._backward:
                self.leave()
            self._let_go()

    def give_up_forward(self) -> None:
        """Leave the route, if its forward has not ended."""
        if self.stage == "forward":
            self.leave()

    def begin_backward(self) -> None:
        if self.stage != "backward":
            self.stage = "backward"
            self._left = deque(self._backward)
            self._arrived.clear()
            for unit, routed in self.routed.items():
                if running(unit).gathered is None:
                    running(unit).gathered = routed  # for forwards that checkpointing recomputes

    def end_backward(self, keeps: bool) -> None:
        """Launch what is left, give shards their gradients, and hold back gradients that no collective took.

        If no gradient came, the caller asked for gradients of inputs alone, and no shard gets one.
        """
        if self.stage != "backward":
            return
        self.flush()
        for (unit, index), grad in self._grads.items():
            hold_back(self.routed[unit], {index: grad})
        self._grads.clear()
        if any(unit.offload for unit in self.routed):
            wait_for_offloaded()
        self._decide_late()
        if keeps:
            self.stage = "between"
            self._let_go()
        else:
            self.leave()

    def _decide_late(self) -> None:
        """If sync was turned off after forward, do as the graph does: it has reduced, and then decides in backward.

        Its next forward lets backward decide (graph/sink.py), and so does this rank's.
        """
        reduced = {unit for unit, _ in self.reduced}
        for unit in self.routed:
            accumulation = unit.accumulation
            if unit in reduced and not accumulation.sync and not accumulation.decides_in_backward:
                accumulation.decides_in_backward = True
                unit.watch.follow_mode()

    def _let_go(self) -> None:
        """Drop the units' references to the route, so that only calls with a backward to come hold it."""
        if running(self.top).route is self:
            running(self.top).route = None
        for unit, routed in self.routed.items():
            if running(unit).gathered is routed:
                running(unit).gathered = None

    def give_up_reducing(self) -> None:
        """Drop the reductions: the caller asked autograd for gradients, so each is reduced alone, as on eager ranks."""
        self._left = deque(stop for stop in self._left if stop.kind == "all_gather")

    def flush(self) -> None:
        """Launch and finish what is left of backward, before it ends or another route begins its own."""
        if self.stage == "backward":
            self._flush()
            self._drain(0, bool(self._arrived))

    def leave(self) -> None:
        """End the step, finished or given up: wait, free, and let the units gather as they would without a route."""
        self.stage = "over"
        self._left.clear()
        self._grads.clear()
        for one in self._reducing:
            if one.over_replicas or one.specs[0].num_shards > 1:
                c10d.wait_tensor.default(one.launched)
        self._reducing.clear()
        for routed in self.routed.values():
            routed.free()
        self._let_go()

    def reach(self, routed: Routed, must: bool) -> None:
        """Launch everything up to the last gather with parameters of a unit.

        A reduction that lacks gradients holds up what comes after it. If the unit ``must`` be gathered, the gathers
        overtake the reduction: other eager ranks do so as well, and compiled ranks are told that ranks diverged.
        """
        gathers = [place for place, stop in enumerate(self._left, 1) if stop.gathers(routed.unit)]
        passed: list[Stop] = []
        for _ in range(gathers[-1] if gathers else 0):
            stop = self._left.popleft()
            if self._has_gradients(stop) and not (passed and stop.kind != "all_gather"):
                self._issue(stop)
                continue
            passed.append(stop)
            if not must:
                break
            _logger.info("%s is gathered ahead of a reduction that has no gradients yet", routed.unit.name)
        self._left.extendleft(reversed(passed))

    def expect(self, routed: Routed, index: int) -> None:
        """Count a read that autograd recorded, whose gradient is to come. Reads of recomputed forwards do not count."""
        if self.stage == "forward":
            self._reads[routed.unit, index] += 1

    def arrive(self, routed: Routed, index: int, grad: Tensor | None) -> None:
        """Take the gradient of one read (None: it will not come), and launch the reductions that waited for it."""
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

    def _flush(self) -> None:
        while self._left:
            self._issue(self._left.popleft())

    def _issue(self, stop: Stop) -> None:
        with without_autograd():
            if stop.kind == "all_gather":
                self._gather(stop)
            elif stop.kind == "all_reduce":
                self._over_replicas(stop)
            else:
                self._reduce(stop)

    def _gather(self, stop: Stop) -> None:
        specs = [self._spec(member) for member in stop.members]
        call = _caller(stop)
        if stop.from_slices:
            specs = [inner_spec(spec) for spec in specs]
            sources = [self.routed[unit].slice(index) for unit, index in stop.members]
        else:
            sources = [self.routed[unit].source(index) for unit, index in stop.members]
        flight = Flight(lower.launch_gather(call, sources, specs), specs, call)
        for place, (unit, index) in enumerate(stop.members):
            self.routed[unit].await_flight(flight, place, index)

    def _reduce(self, stop: Stop) -> None:
        grads, specs = [], []
        for unit, index in stop.members:
            routed = self.routed[unit]
            grad = self._grads.pop((unit, index), None)
            if grad is None:
                spec = routed.specs[index]
                grad = torch.zeros(spec.size, dtype=spec.reduce_dtype, device=unit.mesh.device)
            if unit.accumulation.sync and self._arrived:
                grad = with_pending(routed, {index: grad}, only=routed.params[index].fqn)[index]
            grads.append(grad)
            specs.append(routed.spec_for(index, grad))
        call = _caller(stop, num_waits_before_hook=specs[0].num_reductions)
        self._reducing.append(Reducing(stop, specs, lower.launch_reduce(call, grads, specs), call))

    def _over_replicas(self, stop: Stop) -> None:
        reducing = next(one for one in self._reducing if one.stop.members == stop.members)
        reducing.launched = lower.launch_all_reduce(reducing.call, reducing.launched, reducing.specs)
        reducing.over_replicas = True

    def _drain(self, most: int, delivers: bool = True) -> None:
        """Finish the oldest reductions until ``most`` are in flight; stop at one that waits for its all-reduce."""
        while len(self._reducing) > most:
            oldest = self._reducing[0]
            if oldest.specs[0].num_replicas > 1 and not oldest.over_replicas:
                return
            self._reducing.popleft()
            with torch.no_grad():
                reduced = lower.finish_all_reduce(oldest.call, oldest.launched, oldest.specs)
            for (unit, index), local in zip(oldest.stop.members, reduced) if delivers else ():
                # A parameter without a gradient on any rank arrives as zeros, and its shard is to have none.
                if self._arrived[unit, index] or local.any():
                    deliver(self.routed[unit], index, local)


def _caller(stop: Stop, num_waits_before_hook: int = 0) -> Caller:
    units = [unit for unit, _ in stop.members]
    return Caller(units[0], num_waits_before_hook=num_waits_before_hook, units=units)
