"""What the units under one root share during a step: the order in which they ran, and what is in flight."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import _torch_compat as compat
from ._hooks import LateHooks
from ._reduction import Traffic

if TYPE_CHECKING:
    from ._call import Call, Recording
    from ._state import UnitState


class Iteration:
    """One root's forward and backward, as far as they run eagerly."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.is_last_backward = True
        self.manual_finalization = False
        # Forward: units in the order in which they began, of the forward before and of the one that runs.
        self.forward_order: list[UnitState] = []
        self._this_forward: list[UnitState] = []
        self.depth = 0  # unit forwards that run, outside of backward
        self.forward_number = 0  # counts forwards of the root
        # Backward: calls in the order in which their forwards ended.
        self._calls: list[weakref.ref[Call]] = []
        self.tasks: list[int | None] = []  # backwards that run, a nested one behind the one around it
        self.max_reductions = 1  # in flight, in the backward that runs
        # The backward that runs will be differentiated itself: what it read is read again.
        self.creates_graph = False
        self.touched: dict[UnitState, None] = {}
        # Reads that have some of their gradients, and the backward in which the first one came.
        self.incomplete: dict[Recording, int | None] = {}
        self.hooks = LateHooks()
        # An asynchronous finalization that nobody has waited for yet.
        self.pending_handle: object | None = None

    def adopt(self, inner: Iteration) -> None:
        """Settings that were made on a module when it was the outermost one go on holding."""
        self.is_last_backward &= inner.is_last_backward
        self.manual_finalization |= inner.manual_finalization
        self.traffic = inner.traffic

    def begin_unit(self, state: UnitState) -> UnitState | None:
        """Note that a unit's forward begins; the unit that came after it the last time."""
        self.touched.setdefault(state)
        place = len(self._this_forward)
        self._this_forward.append(state)
        after = place + 1
        if self.forward_order[place : place + 1] == [state] and after < len(self.forward_order):
            return self.forward_order[after]
        return None

    def end_forward(self) -> list[UnitState]:
        """The outermost forward ended; the units that took part."""
        self.forward_order, self._this_forward = self._this_forward, []
        self._calls = [call for call in self._calls if call() is not None]
        return self.forward_order

    def abandon_forward(self) -> None:
        self._this_forward = []

    def awaits_backward(self, call: Call) -> None:
        call.place = len(self._calls)
        self._calls.append(weakref.ref(call))

    def before(self, call: Call) -> Iterator[Call]:
        """Calls whose backward comes after that of ``call``, next first; those of its own forward of the root.

        What another forward left behind may be there on one rank and gone on the next.
        """
        for reference in reversed(self._calls[: self._place(call)]):
            earlier = reference()
            if earlier is None:
                continue
            if earlier.forward_number != call.forward_number:
                return
            yield earlier

    def _place(self, call: Call) -> int:
        place = min(call.place, len(self._calls) - 1)
        while place >= 0 and self._calls[place]() is not call:  # earlier ones may have gone since
            place -= 1
        return max(place, 0)

    def in_stale_backward(self) -> bool:
        """Whether a backward began that neither ended nor runs: it raised."""
        return bool(self.tasks) and compat.backward_task() is None
