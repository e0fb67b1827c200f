"""A unit's full parameters in one step, gathered as a route says.

    Call --> Routed ..> Route          strong reference -->, weak ..>
    Call --> Route --> each Routed

Calls that backward will come to hold the route, and the route holds the ``Routed`` of each unit. If no backward comes,
all of this is freed with the loss, without waiting for the garbage collector.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._torch_compat import subclasses
from ..core.unit import Unit
from ..passes import ParamSpec, lower
from .collectives import Caller
from .gathered import Gathered, slice_of, without_autograd

_logger = logging.getLogger(__name__)


class Flight:
    """One all-gather in flight; it is waited for once, for all units with parameters in it."""

    def __init__(self, launched: Any, specs: list[ParamSpec], call: Caller) -> None:
        self._launched, self._specs, self._call = launched, specs, call
        self._landed: list[Tensor] | None = None

    def land(self) -> list[Tensor]:
        if self._landed is None:
            self._landed = lower.finish_gather(self._call, self._launched, self._specs)
            self._launched = None
        return self._landed


class Routed(Gathered):
    """One unit's full parameters: some are gathered together with other units', some not at all."""

    def __init__(self, unit: Unit, route: Any) -> None:
        super().__init__(unit)
        self._route = weakref.ref(route)
        self._awaited: list[tuple[Flight, int, int]] = []  # index in the flight, and among the parameters
        self._here: set[int] = set()
        self._pieces: dict[int, Tensor] = {}  # slices that forward kept, as the plan says

    @property
    def launched(self) -> bool:
        return bool(self._awaited)

    @property
    def route(self) -> Any:
        """The ``Route``; None once nobody can come back to this step."""
        return self._route()

    @property
    def stage(self) -> str:
        return "over" if self.route is None else self.route.stage

    def serves(self, unit: Unit) -> bool:
        return self.stage in ("forward", "backward") and super().serves(unit)

    def free_if_stale(self) -> None:
        """Do nothing: each step has its own route, which gathers what the shards hold then."""

    def await_flight(self, flight: Flight, place: int, index: int) -> None:
        self._awaited.append((flight, place, index))

    def launch(self) -> None:
        self.route.reach(self, must=False)

    def wait(self) -> list[Tensor]:
        self.route.reach(self, must=True)
        self._land_awaited()
        if self.stage == "backward" and self.fulls is not None:
            # A unit that was called twice is freed between the two; the compiled step gathers it once for both.
            for index, full in enumerate(self.fulls):
                if full is not None and index not in self._here and (self.unit, index) in self.route.again:
                    self._gather_alone(index)
        self.is_full = True
        return self.fulls or []

    def full(self, index: int) -> Tensor:
        self.wait()
        if index not in self._here:
            self._gather_alone(index)
        assert self.fulls is not None
        full: Tensor = self.fulls[index]
        return full

    def _gather_alone(self, index: int) -> None:
        """Gather what the graph does not: right if all ranks are eager; compiled ranks are told that ranks diverged."""
        _logger.info("%s of %s is gathered by itself: no compiled rank does so", self.params[index].fqn, self.unit.name)
        specs, call = [self.specs[index]], Caller(self.unit)
        with without_autograd():
            launched = lower.launch_gather(call, [self.source(index)], specs)
        self.await_flight(Flight(launched, specs, call), 0, index)
        self._land_awaited()

    def _land_awaited(self) -> None:
        awaited, self._awaited = self._awaited, []
        with without_autograd():
            self._keep({index: flight.land()[place] for flight, place, index in awaited})
        self._here.update(index for _, _, index in awaited)

    def slice(self, index: int) -> Tensor:
        """Return this rank's slice of one parameter, where backward gathers from slices."""
        return self._pieces[index]

    def keep_slices(self) -> None:
        """Cut slices of all gathered parameters that backward gathers from slices, whether freed now or not."""
        if self.fulls is not None:
            self._cut_slices({index: self.fulls[index] for index in self._here})

    def _cut_slices(self, fulls: Mapping[int, Tensor]) -> None:
        sliced = set() if self.route is None or self.stage != "forward" else self.route.sliced
        for index, full in fulls.items():
            if (self.unit, index) in sliced and index not in self._pieces:
                self._pieces[index] = slice_of(full, self.specs[index])

    def free(self) -> None:
        """Free what is gathered; until backward, only the parameters that backward gathers again.

        Tensors that autograd saved alias the others, which are freed with these: backward may yet run twice.
        """
        comes_again = set() if self.route is None else self.route.again
        again = {index for index in self._here if (self.unit, index) in comes_again}
        self.keep_slices()
        self._give_back(again)
        self._here -= again
        if self.stage in ("backward", "over") or not comes_again:
            self.drop()
            for index in self._here:
                self._forget(index)
            self._here.clear()
            self.is_full = False

    def drop(self) -> None:
        """Wait for gathers that nothing read, and keep only the slices that backward needs."""
        with without_autograd():
            for flight, place, index in self._awaited:
                self._cut_slices({index: flight.land()[place]})
        self._awaited.clear()

    def give_away(self, tensors: list[Tensor]) -> None:
        given = subclasses.addresses_in(*tensors)
        gone = [one for one in self._here if self.fulls and given & subclasses.addresses_in(self.fulls[one])]
        for index in gone:
            self._cut_slices({index: self.fulls[index]})  # type: ignore[index]
            self._here.discard(index)
            self._forget(index)

    def _forget(self, index: int) -> None:
        if self.fulls is not None:
            self.fulls[index] = None
            self._memory.pop(index, None)

    def give_up(self) -> None:
        if self.route is not None:
            self.route.leave()
