"""Tensors inside of tensors, and where their memory is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def addresses_in(*tensors: torch.Tensor) -> set[int]:
    """Where the memory of tensors begins, and of tensors inside them; nowhere for fake, meta and freed ones."""
    return {address for tensor in tensors for address in _addresses_in(tensor)}


def _addresses_in(tensor: torch.Tensor) -> set[int]:
    """A wrapper subclass has a storage whose ``data_ptr()`` raises, a sparse tensor has none (2.11 to 2.15)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [value for name in names if isinstance(value := getattr(tensor, name), torch.Tensor)]
    elif type(tensor) is torch.Tensor and tensor.layout is torch.sparse_coo:
        inner = [tensor._values()]
    elif type(tensor) is torch.Tensor and tensor.layout in _COMPRESSED:
        inner = [tensor.values()]
    else:
        try:
            return {tensor.untyped_storage().data_ptr()} - {0}
        except (RuntimeError, NotImplementedError):  # an opaque tensor, or a subclass that does not say what it wraps
            inner = [value for value in getattr(tensor, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
    return addresses_in(*inner)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_traceable(tensor: torch.Tensor) -> bool:
    """Whether a compiler sees through the subclass (``is_traceable_wrapper_subclass``: 2.11 to 2.15)."""
    return is_traceable_wrapper_subclass(tensor)


def map_inner(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """``fn`` of a tensor, or the same subclass around ``fn`` of each tensor inside it."""
    if not is_traceable_wrapper_subclass(tensor):
        return fn(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: map_inner(fn, getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
