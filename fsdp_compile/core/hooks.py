"""Hooks on shards, in wrappers that skip them when autograd would run them without a gradient, or before it is there.

    autograd    grads of a unit's reads -> [_Read] -> None -> a shard's hooks, as autograd runs them: not now
    reduction   grads of a unit's reads -> bucket -> gradient of the shard -> its hooks -> shard.grad

    autograd    grads of a unit's edges -> [_Edges] -> None for those that a graph did not read -> hooks: not at all

So the collectives of a rank do not depend on its hooks, which may be there on one rank alone. And the edges of a unit
need one node, whichever of its parameters have hooks, and whenever these were registered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors


class _Waiting:
    """A tensor hook that is skipped when autograd passes None because the gradient went to the reduction."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook
        self.waits = False

    def __call__(self, grad: Tensor | None) -> Any:
        return None if grad is None and self.waits else self._hook(grad)

    def wait(self, shard: DTensor) -> None:
        self.waits = True

    def release(self) -> None:
        self.waits = False


class _WaitingBehind(_Waiting):
    """A post-accumulate hook that is skipped when no gradient was accumulated."""

    # The gradient from before, by a weak reference, and how often it had been written to.
    _before: weakref.ref[Tensor] | None
    _version: int

    def __call__(self, shard: Any) -> None:
        if not self.waits or self._was_added_to(shard):
            self._hook(shard)

    def _was_added_to(self, shard: Tensor) -> bool:
        grad, before = shard.grad, None if self._before is None else self._before()
        return grad is not None and (grad is not before or dtensors.version_of(grad) != self._version)

    def wait(self, shard: DTensor) -> None:
        self.waits, grad = True, shard.grad
        self._before = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else dtensors.version_of(grad)


class LateHooks:
    """The hooks that wait for a gradient in the backward that runs."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def hold_back(self, shard: DTensor) -> None:
        """Keep autograd from running the shard's tensor hooks before there is a gradient.

        A hook's wrapper takes its place under the same key, so the handle of the hook still removes it.
        """
        self._put_into(_Waiting, autograd.tensor_hooks(shard), shard)

    def hold_back_all(self, shard: DTensor) -> None:
        """The same for the shard's tensor hooks and its post-accumulate hooks."""
        self.hold_back(shard)
        self._put_into(_WaitingBehind, autograd.post_accumulate_grad_hooks(shard), shard)

    def _put_into(self, kind: type[_Waiting], hooks: dict[int, Any] | None, shard: DTensor) -> None:
        for key, hook in list((hooks or {}).items()):
            if not isinstance(hook, kind):
                hook = hooks[key] = kind(hook)  # type: ignore[index]
            hook.wait(shard)
            self._waiting.append(hook)

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    def release(self) -> None:
        """Let the hooks that were held back run again, once the backward is over."""
        for hook in self._waiting:
            hook.release()
        self._waiting.clear()
