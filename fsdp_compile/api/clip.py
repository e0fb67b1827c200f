"""The norm of all gradients as one vector, whatever meshes they are sharded over.

    gradients                     per mesh and the mesh dimensions that shard them       all
    DTensors, plain tensors  -->  sum of |g|^p here --all-reduce over those-->  added -->  ^(1/p)
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch_compat import optimizers
from ..core.parts import cut_dims, local_of
from .full_params import require_lasting_grads


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients of a model or of parameters, so that their norm is at most ``max_norm``; return the norm before.

    Unlike ``torch.nn.utils.clip_grad_norm_``, it takes parameters on several meshes, tensor parallel and unsharded
    ones together, and returns a plain tensor. Every rank calls it. The norm is over all ranks of the parameters' own
    meshes: each stage of a pipeline has its own norm.
    """
    params = _params_of(parameters)
    meshes = [param.device_mesh for param in params if isinstance(param, DTensor)]
    device = torch.device(meshes[0].device_type) if meshes else params[0].device if params else torch.device("cpu")
    return clip_grad_norm(params, max_norm, norm_type, device, error_if_nonfinite)


def _params_of(parameters: Any) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    try:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    except TypeError:
        params = [parameters]
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"clip_grad_norm_: {type(param).__name__} is no parameter. Pass the model, a parameter, or several, "
                "such as model.parameters()."
            )
    return params


def _positive(name: str, value: Any, limit: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"clip_grad_norm_: {name} is {value!r}. Pass a number.") from None
    if not (number >= 0 if limit == "from 0 on" else number > 0):
        raise ValueError(f"clip_grad_norm_: {name} is {number}. Pass a number {limit}.")
    return number


@torch.no_grad()
def clip_grad_norm(
    params: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; return the norm before, on ``device``.

    Every rank calls it. Norms are computed in fp32, or fp64 where parameters are; the result has the widest dtype of
    the gradients.
    """
    norm_type = _positive("norm_type", norm_type, "above 0, or inf")
    max_norm = _positive("max_norm", max_norm, "from 0 on")
    params = list(dict.fromkeys(params))
    require_lasting_grads(params)
    grads: list[Tensor] = []
    numbers: dict[Any, list[Tensor]] = {}  # what this rank has of gradients, by how they are cut
    for param in params:
        # By parameters, not gradients: every rank has the same parameters, whatever its backward reached.
        alike_cut = numbers.setdefault(_ways_cut(param), [])
        if param.grad is None:
            continue
        if isinstance(param.grad, DTensor) and any(one.is_partial() for one in param.grad.placements):
            param.grad = param.grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
        elif param.grad.is_sparse:
            param.grad = param.grad.coalesce()  # an index that is there twice counts with its sum
        grads.append(param.grad)
        alike_cut.append(param.grad.values() if param.grad.is_sparse else local_of(param.grad))
    wide = (torch.float64, torch.complex128)
    norm_dtype = torch.float64 if any(param.dtype in wide for param in params) else torch.float32
    zero = torch.zeros((), device=device, dtype=norm_dtype)
    total = zero.clone()
    for (mesh, dims), some in numbers.items():
        norms = [
            one.to(device, norm_dtype)
            for dtype, alike in _by_dtype(one for one in some if one.numel())
            for one in optimizers.foreach_norms(alike, norm_type, torch.promote_types(dtype, norm_dtype))
        ]
        here = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else zero
        if math.isinf(norm_type):
            # A maximum over ranks may drop a NaN: on gloo that depends on which rank has it.
            nan_and_norm = torch.stack([here.isnan().to(here.dtype), here.nan_to_num(nan=0.0, posinf=math.inf)])
            _all_reduce(nan_and_norm, mesh, dims, dist.ReduceOp.MAX)
            nowhere_nan = nan_and_norm[0] == 0
            total = torch.maximum(total, torch.where(nowhere_nan, nan_and_norm[1], math.nan))
        else:
            here = here**norm_type
            _all_reduce(here, mesh, dims, dist.ReduceOp.SUM)
            total += here
    if not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    if not grads:
        warnings.warn(
            "Called clip_grad_norm_() on a rank with no gradients -- returning the total norm in the default dtype "
            f"{total.dtype}. Call it after backward, before zero_grad.",
            stacklevel=4,
        )
        return total
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {total.item()}, and scales nothing. "
            "Look at the loss, or pass error_if_nonfinite=False."
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for dtype, alike in _by_dtype(map(local_of, grads)):
        optimizers.foreach_scale(alike, scale.to(alike[0].device, dtype))
    widest = functools.reduce(torch.promote_types, {grad.dtype for grad in grads})
    return total.to(widest.to_real())


def _by_dtype(tensors: Iterable[Tensor]) -> Iterable[tuple[torch.dtype, list[Tensor]]]:
    """Return the tensors of each dtype and device, for which a GPU has one kernel."""
    found: dict[Any, list[Tensor]] = {}
    for one in tensors:
        found.setdefault((one.dtype, one.device), []).append(one)
    return ((dtype, alike) for (dtype, _), alike in found.items())


def _ways_cut(param: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of a parameter, and the mesh dimensions over which it is sharded."""
    if not isinstance(param, DTensor):
        return None, ()
    return param.device_mesh, tuple(cut_dims(param.device_mesh, param.placements))


def _all_reduce(value: Tensor, mesh: Any, dims: tuple[int, ...], op: Any) -> None:
    for dim in dims:
        dist.all_reduce(value, op, group=mesh.get_group(dim))
