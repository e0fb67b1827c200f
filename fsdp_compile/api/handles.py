"""What asynchronous methods of FSDPModule return: something to wait for."""

from __future__ import annotations

from .._torch_compat import fsdp2
from ..core.unit import Unit
from ..eager.gathered import Gathered
from ..eager.running import running


class UnshardHandle(fsdp2.UNSHARD_HANDLE):  # type: ignore[misc, valid-type]  # by name alone, as FSDPModule is
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered

    def wait(self) -> None:
        """Have the parameters there; a forward does so by itself."""
        if self._gathered.launched:
            self._gathered.wait()


class GradientReductionHandle(fsdp2.GRADIENT_REDUCTION_HANDLE):  # type: ignore[misc, valid-type]
    """What ``finalize_backward(async_op=True)`` returns: wait before the next forward and the optimizer's step."""

    def __init__(self, root: Unit | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Have the gradients there."""
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
