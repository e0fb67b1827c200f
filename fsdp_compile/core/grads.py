"""The one place where a shard gets its gradient, from either path.

    eager reduction ---------------------+-> give_through_hooks -+
    compiled backward, by a unit's edges +-----------------------+-> give --> shard.grad, then post-accumulate hooks
    ... when is_asked_for(shard) -----------------------------------> autograd
    compiled autograd, in its graph --------------------------------> give_traced -> shard.grad

We run tensor hooks ourselves. If a hook keeps the gradient, autograd copies it into ``shard.grad``, and torch 2.11
makes that copy of an uneven shard by gathering it. If the hook is on one rank alone, no other rank joins that gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors


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
    """Return a local gradient on the shard's device; unless ``read_at_once``, a copy to pinned memory may run on."""
    if local.device == dtensors.local_tensor(shard).device:
        return local
    pinned = dtensors.is_pinned(shard)
    on_cpu = torch.empty_like(local, device="cpu", pin_memory=pinned)
    return on_cpu.copy_(local, non_blocking=pinned and not read_at_once)


def wait_for_offloaded() -> None:
    """Wait for the asynchronous copies to the CPU that ``give`` started."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


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
