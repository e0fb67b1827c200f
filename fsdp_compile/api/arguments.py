"""Functions that check the arguments of fully_shard and replicate. A wrong argument raises an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from .._torch_compat import fsdp2
from ..core.unit import original_class, unit_of


def modules_in(module: Any, api: str) -> tuple[Any, ...]:
    """Return the modules given to ``fully_shard`` or ``replicate``; raise for one that cannot be a unit."""
    given: tuple[Any, ...] = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not given:
        raise ValueError(f"{api}([]) has nothing to work on. Pass a module, or a list of at least one.")
    for one in given:
        _validate_module(one, api)
    return given


def _validate_module(module: Any, api: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{api} takes a module or a list of modules, but got {type(module).__name__}.")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and original_class(module).forward is nn.Module.forward:
        raise ValueError(
            f"{api} does not support containers that do not implement forward, and got a {type(module).__name__}. "
            "Apply it to its members, or pass list(module) to make them one unit."
        )
    if "replicate" in fsdp2.composed_by(module):
        raise ValueError(
            f"{api}: torch.distributed._composable.replicate was applied to this {original_class(module).__name__}, "
            "and takes care of its gradients. Apply one of the two."
        )
    if unit_of(module) is not None:
        name = original_class(module).__name__
        if api == "replicate" and fsdp2.replicate_state(module) is None:
            raise RuntimeError(
                f"Cannot apply `replicate()` on a Module already managed by `fully_shard`, this {name}. Apply one of "
                "the two."
            )
        raise AssertionError(  # FSDP2's type
            "Each distinct composable distributed API can only be applied to a module once, and this "
            f"{name} is sharded or replicated already. Apply fully_shard or replicate once to each module."
        )


def fqns_in(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each parameter of a unit's modules as its FQN in the unit, its module, and its name in that module."""
    for number, root in enumerate(modules):
        # Members of a list have no common path: their place in it tells them apart.
        member = f"[{number}]." if len(modules) > 1 else ""
        for path, module in root.named_modules():
            for name in module._parameters:
                fqn = (f"{path}.{name}" if path else name).replace("_orig_mod.", "")
                # Markers refuse half of a surrogate pair.
                yield member + fqn.encode(errors="backslashreplace").decode(), module, name


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
