"""Tensor hooks of shards, which see gradients that the eager path reduces.

    autograd    grads of a unit's reads -> [_Read] -> None -> a shard's hooks, as autograd runs them: not now
    reduction   grads of a unit's reads -> bucket -> gradient of the shard -> its hooks -> shard.grad

So what a rank sends does not depend on its hooks, which may be there on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat


class _Waiting:
    """A hook that is not run for the None which autograd has while the gradient is elsewhere."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook
        self.waits = False

    def __call__(self, grad: Tensor | None) -> Any:
        return None if grad is None and self.waits else self._hook(grad)


class LateHooks:
    """The hooks that wait, in the backward that runs, for a reduction to end."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def hold_back(self, shard: DTensor) -> None:
        """Have autograd not run the shard's hooks before there is a gradient.

        They are put into others in their places, so whoever registered them may take them away as ever.
        """
        hooks: dict[int, Any] = compat.tensor_hooks(shard) or {}
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _Waiting):
                hook = hooks[key] = _Waiting(hook)
            hook.waits = True
            self._waiting.append(hook)

    def release(self) -> None:
        """The backward is over."""
        for hook in self._waiting:
            hook.waits = False
        self._waiting.clear()
