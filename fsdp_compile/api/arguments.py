"""Checks the arguments of fully_shard and replicate besides modules: a wrong one raises an error that names it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy


def require_kinds(api: str, mesh: Any, mp_policy: Any, offload_policy: Any, placement_fn: Any = None) -> None:
    """Raise for an argument of the wrong type."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{api}: mesh is a {type(mesh).__name__}. Pass a DeviceMesh, as init_device_mesh makes one.")
    if not hasattr(mp_policy, "param_dtype"):
        raise TypeError(
            f"{api}: mp_policy is {mp_policy!r}. Pass a MixedPrecisionPolicy(param_dtype=...), or leave it out."
        )
    require_dtypes(f"{api}: mp_policy", mp_policy, ("param_dtype", "reduce_dtype", "output_dtype"))
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"{api}: offload_policy is {offload_policy!r}. Pass a CPUOffloadPolicy(), or leave it out.")
    if placement_fn is not None and not callable(placement_fn):
        raise TypeError(
            f"{api}: shard_placement_fn is {placement_fn!r}. Pass a function that returns a Shard, or None, for a "
            "parameter."
        )


def require_dtypes(where: str, policy: Any, names: tuple[str, ...]) -> None:
    """Raise if a setting of a mixed-precision policy, one of ``names``, is neither a dtype nor None."""
    for name in names:
        dtype = getattr(policy, name, None)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{where} has {name}={dtype!r}. Pass a torch.dtype, such as torch.bfloat16, or None.")


def ignored_in(api: str, ignored_params: Any) -> set[nn.Parameter]:
    """Return the set of parameters that are not to be sharded."""
    if ignored_params is None:
        return set()
    if isinstance(ignored_params, (Tensor, str, nn.Module)) or not isinstance(ignored_params, Iterable):
        raise TypeError(
            f"{api}: ignored_params is a {type(ignored_params).__name__}. Pass a set of parameters, such as "
            "set(module.parameters())."
        )
    ignored = set(ignored_params)
    for one in ignored:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{api}: ignored_params holds {one if isinstance(one, str) else type(one).__name__!r}, which is no "
                "parameter. Pass the parameters themselves, not names or modules."
            )
    return ignored
