"""Handles that asynchronous methods of FSDPModule return, to wait for their collectives."""

from __future__ import annotations

from .._torch_compat import fsdp2
from ..core.unit import Unit
from ..eager.gathered import Gathered
from ..eager.running import running


class UnshardHandle(fsdp2.UNSHARD_HANDLE):  # type: ignore[misc, valid-type]  # by name alone, as FSDPModule is
    """The handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered

    def wait(self) -> None:
        """Wait until the parameters are gathered; a forward does so by itself."""
        self._gathered.land()


class GradientReductionHandle(fsdp2.GRADIENT_REDUCTION_HANDLE):  # type: ignore[misc, valid-type]
    """The handle of ``finalize_backward(async_op=True)``: wait before the next forward and the optimizer's step."""

    def __init__(self, root: Unit | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait until the shards have their gradients."""
        if self._root is None:
            return
        iteration = running(self._root).iteration
        if iteration.pending_handle is not self:
            raise RuntimeError(
                "This gradient reduction handle was invalidated: reset_iter_state() dropped its gradients. Run the "
                "step anew."
            )
        iteration.traffic.finish()
        iteration.pending_handle = None
        self._root = None
