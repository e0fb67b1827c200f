"""Communication hooks: a function of the user that reduces gradients in the place of the built-in reduction.

    hook                                       becomes
    torch's default hooks                      nothing: they do what is done anyway
    torch's fp16_compress, bf16_compress       reduce_dtype: in graphs as well
    any other                                  a custom reduction; the unit then runs eagerly

A sharded unit calls ``hook(state, gradients, shards)``. ``gradients`` are the flat gradients of all ranks' shards, end
to end, and the hook fills ``shards`` with the mean of this rank's part. A unit with NO_SHARD calls
``hook(state, gradients)``, and the hook leaves the mean in ``gradients``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_compat import fsdp1
from ..api.classes import refresh
from ..core.unit import Unit


class HookedReduction:
    """A custom reduction by FSDP2's protocol that calls a hook of FSDP1's."""

    def __init__(self, state: Any, hook: Callable[..., Any]) -> None:
        self.state = state
        self.hook = hook

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: Tensor, input: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        self.hook(self.state, input, output)

    def reduce_all(self, grads: Tensor) -> Tensor:
        """Return the mean of gradients over ranks that hold all of them."""
        reduced = grads.clone()  # the bucket may be an alias of a tensor that autograd holds
        self.hook(self.state, reduced)
        return reduced


def hook_reductions(unit: Unit, group: dist.ProcessGroup, state: Any, hook: Callable[..., Any]) -> None:
    """Let ``hook`` reduce the gradients of ``unit`` over ``group``."""
    its_group = getattr(state, "process_group", None)
    is_ours = its_group is not None and dist.get_process_group_ranks(its_group) == dist.get_process_group_ranks(group)
    dtype = fsdp1.dtype_of_hook(hook) if is_ours else None
    if dtype is not None:
        if isinstance(dtype, torch.dtype):
            unit.mp_policy = dataclasses.replace(unit.mp_policy, reduce_dtype=dtype)
    else:
        reduction = HookedReduction(state, hook)
        if unit.mesh.group:
            unit.settings.comms.reduce_scatter = reduction
        else:
            unit.settings.comms.all_reduce = reduction.reduce_all
        unit.settings.divide_factor = 1.0  # the hook divides
    refresh(unit)
