"""What code written for FSDP2 finds where it reaches behind the public methods.

torch.distributed.pipelining does: on 2.11 it runs the end of a backward through the state's private methods, on 2.15
it compares the identity of communication contexts. An object of this class stands where it looks for FSDP2's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._state import UnitState


class FSDP2View:
    """One unit, under the names of FSDP2's state."""

    def __init__(self, state: UnitState, end_backward: Callable[[UnitState], None]) -> None:
        self._state = state
        self._end_backward = end_backward

    @property
    def _state_ctx(self) -> FSDP2View:
        return self

    @property
    def all_states(self) -> list[FSDP2View]:
        """Of the iteration; one is enough, since its end looks at every unit."""
        return [self]

    @property
    def _comm_ctx(self) -> object:
        return self._state.iteration.traffic

    @property
    def _fsdp_param_group(self) -> FSDP2View:
        return self

    def post_backward(self, *unused: Any) -> None:
        """Nothing: what backward did not reduce, its end does."""

    def _root_post_backward_final_callback(self) -> None:
        root = self._state.root
        root.iteration.is_last_backward = True
        self._end_backward(root)
