"""Prepare a region before it is sharded: materialize meta tensors, send values from rank 0, cast buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import autograd
from ..api.exchange import send_values
from .region import BUFFERS, PARAMS, Ignored, region_of, region_tensors


def fill_meta(module: nn.Module, ignored: Ignored, device: torch.device, init_fn: Any) -> None:
    """Give meta tensors memory and values, by ``init_fn`` or by each module's ``reset_parameters``."""
    if not any(tensor.is_meta for _, _, _, tensor in region_tensors(module, ignored, PARAMS, BUFFERS)):
        return
    if init_fn is not None and not callable(init_fn):
        raise ValueError(
            f"Expected param_init_fn to be callable but got {type(init_fn).__name__}. Pass a function of a module."
        )
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for _, one, name, param in region_tensors(module, ignored, PARAMS):
        places.setdefault(param, []).append((one, name))
    for one, path in {one: path for path, one in region_of(module, ignored.modules)}.items():
        _materialize_one(one, path, device, init_fn)
    for (first, name), *others in places.values():  # to_empty separates tied weights
        for one, other in others:
            one._parameters[other] = first._parameters[name]


def require_ties_inside(root: nn.Module, chosen: Collection[nn.Module]) -> None:
    """Raise where a meta parameter is in the regions of several wrappers: each would materialize one of its own."""
    places: dict[Tensor, dict[nn.Module, str]] = {}

    def visit(module: nn.Module, path: str, region: nn.Module) -> None:
        region = module if module in chosen else region
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                places.setdefault(param, {}).setdefault(region, f"{path}{name}")
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}{name}.", region)

    visit(root, "", root)
    for some in places.values():
        if len(some) > 1:
            raise ValueError(
                f"{' and '.join(some.values())} are one parameter on the meta device, and auto_wrap_policy puts them "
                "into different wrappers, where they would become two. Leave the smaller module out of the policy."
            )


def _materialize_one(
    module: nn.Module, path: str, device: torch.device, init_fn: Callable[[nn.Module], Any] | None
) -> None:
    if init_fn is not None:
        init_fn(module)
        return
    if not any(True for _ in module.parameters(recurse=False)) and not any(True for _ in module.buffers(recurse=False)):
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise AttributeError(
            "Unable to call `reset_parameters()` for module on meta device: "
            f"{path or '(root)'} ({type(module).__name__}) has none. Add that method, or pass param_init_fn."
        )
    with torch.no_grad():
        module.to_empty(device=device, recurse=False)
        reset()


def send_from_first(module: nn.Module, ignored: Ignored, mesh: DeviceMesh) -> None:
    """Broadcast the parameters and buffers of rank 0 to all ranks of the mesh, in place."""
    for tensor in dict.fromkeys(tensor for _, _, _, tensor in region_tensors(module, ignored, PARAMS, BUFFERS)):
        for dim in range(mesh.ndim):  # over replicas first, so that the first rank of each row has it
            send_values(tensor, 0, mesh.get_group(dim))


def cast_region_buffers(module: nn.Module, ignored: Ignored, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Cast the region's floating-point buffers; return their former dtypes by path, in which they are saved."""
    had = {}
    for path, one, name, buffer in list(region_tensors(module, ignored, BUFFERS)):
        if buffer.is_floating_point() and buffer.dtype != dtype:
            had[path] = buffer.dtype
            one._buffers[name] = buffer.to(dtype)
    return had


def restore_buffers(module: nn.Module, ignored: Ignored, dtypes: dict[str, torch.dtype]) -> None:
    """Cast the region's buffers back to the dtypes that they had, given by path."""
    for path, one, name, buffer in list(region_tensors(module, ignored, BUFFERS)):
        one._buffers[name] = buffer.to(dtypes.get(path, buffer.dtype))


def ask_for_gradients_in(module: nn.Module, ignored: Ignored, dtype: torch.dtype) -> None:
    """Make ``dtype`` the ``grad_dtype`` of the region's parameters, and so of the shards made from them."""
    for _, _, _, param in region_tensors(module, ignored, PARAMS):
        if param.is_floating_point():
            autograd.restore_grad_dtype(param, dtype)
