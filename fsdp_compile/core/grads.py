"""The one place where a shard gets its gradient, from either path, and where its hooks run.

    eager reduction ---------------------+-> give_through_hooks -+
    compiled backward, by a unit's edges +-----------------------+-> give --> shard.grad, then post-accumulate hooks
    ... when is_asked_for(shard) -----------------------------------> autograd
    compiled autograd, in its graph --------------------------------> give_traced -> shard.grad

We run tensor hooks ourselves. If a hook keeps the gradient, autograd copies it into ``shard.grad``, and torch 2.11
makes that copy of an uneven shard by gathering it. If the hook is on one rank alone, no other rank joins that gather.
Wrappers skip hooks when autograd would run them without a gradient, or before it is there:

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

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors
from ..passes.wire import streams


def is_asked_for(shard: DTensor, leaf: Any) -> bool:
    """Whether somebody asked autograd for the shard's gradient, and gets it in the place of ``shard.grad``."""
    return torch.is_grad_enabled() or not shard.is_leaf or not autograd.accumulates(leaf)


def give(shard: DTensor, local: Tensor) -> None:
    """Add a local gradient to the shard's, as autograd does for a leaf, and run the shard's post-accumulate hooks."""
    grad = shard.grad
    has_hooks = bool(autograd.post_accumulate_grad_hooks(shard))
    # The most frequent case is the fastest: it does what AccumulateGrad does, without operations on DTensors.
    if grad is None and not has_hooks and shard.device == local.device:
        shard.grad = dtensors.dtensor_like(shard, local)
        return
    with torch.no_grad():
        local = brought_to(shard, local, read_at_once=has_hooks or grad is not None)
        if grad is None:
            shard.grad = dtensors.dtensor_like(shard, local)
        elif isinstance(grad, DTensor) and grad.placements == shard.placements and _fits(shard, local):
            dtensors.local_tensor(grad).add_(local)
        else:
            shard.grad = grad + dtensors.dtensor_like(shard, local)
    for hook in list((autograd.post_accumulate_grad_hooks(shard) or {}).values()):
        hook(shard)


def give_traced(shard: DTensor, local: Tensor) -> None:
    """Like ``give``, but out of place and traceable by Dynamo; for a shard on its mesh's device without hooks."""
    grad: Any = DTensor.from_local(
        local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
    shard.grad = grad if shard.grad is None else shard.grad + grad


def brought_to(shard: DTensor, local: Tensor, read_at_once: bool) -> Tensor:
    """Return a local gradient on the shard's device; unless ``read_at_once``, a copy there may still run."""
    device = dtensors.local_tensor(shard).device
    if read_at_once and device.type == "cpu":
        streams.wait_on_cpu()
    return local.to(device)


def give_through_hooks(fqn: str, shard: DTensor, local: Tensor) -> None:
    """Run the shard's tensor hooks on its local gradient, on the shard's device, and give the shard the result."""
    give(shard, _through_hooks(fqn, shard, brought_to(shard, local, read_at_once=True)))


def _through_hooks(fqn: str, shard: DTensor, local: Tensor) -> Tensor:
    """Return the local gradient after the shard's tensor hooks, each of which may replace it."""
    grad = dtensors.dtensor_like(shard, local)
    with torch.no_grad():
        for hook in list((autograd.tensor_hooks(shard) or {}).values()):
            replaced = hook(grad)
            if replaced is None:
                continue
            if not isinstance(replaced, DTensor) or replaced.shape != shard.shape:
                raise TypeError(
                    f"{fqn}: a tensor hook made a {type(replaced).__name__} of its gradient, a DTensor of shape "
                    f"{tuple(shard.shape)}. Return a DTensor of that shape, or None to leave the gradient as it is."
                )
            grad = replaced
    if grad.placements != shard.placements:
        grad = grad.redistribute(placements=shard.placements)
    return dtensors.local_tensor(grad).clone()  # a hook may have kept the gradient


def _fits(shard: DTensor, local: Tensor) -> bool:
    """Whether the shard's gradient keeps its dtype when ``local`` is added to it."""
    dtype = shard.grad.dtype  # type: ignore[union-attr]
    if local.dtype == dtype or shard.grad_dtype is not None:
        return True
    return torch.promote_types(local.dtype, dtype) == dtype


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
