"""Tensors inside of modules and of tensors, and where their memory is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable  # 2.11 to 2.15


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of this module alone that its state dict has.

    ``_non_persistent_buffers_set``: 2.11 to 2.15.
    """
    return {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}


def addresses_in(*tensors: torch.Tensor) -> set[int]:
    """Return where the memory of tensors, or of those inside them, begins; nothing for fake, meta and freed ones."""
    return {one.untyped_storage().data_ptr() for one in plain_tensors_in(*tensors)} - {0}


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one storage; that of a wrapper subclass is its own (``_cdata``: 2.11 to 2.15)."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def plain_tensors_in(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors, or those inside them, that have memory of their own; fake ones have none."""
    return [plain for tensor in tensors for plain in _plain_tensors_in(tensor)]


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor, be it of a subclass, has memory of its own and is not one around other tensors."""
    inside = plain_tensors_in(tensor)
    return len(inside) == 1 and inside[0] is tensor


def _plain_tensors_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A wrapper subclass has a storage whose ``data_ptr()`` raises, a sparse tensor has none (2.11 to 2.15)."""
    if is_traceable(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [value for name in names if isinstance(value := getattr(tensor, name), torch.Tensor)]
    elif type(tensor) is torch.Tensor and tensor.layout is torch.sparse_coo:
        inner = [tensor._values()]
    elif type(tensor) is torch.Tensor and tensor.layout in _COMPRESSED:
        inner = [tensor.values()]
    else:
        try:
            tensor.untyped_storage().data_ptr()
            return [tensor]
        except (RuntimeError, NotImplementedError):  # an opaque tensor, or a subclass that does not say what it wraps
            inner = [value for value in getattr(tensor, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
    return plain_tensors_in(*inner)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def map_inner(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return ``fn`` of a tensor, or the same subclass around ``fn`` of each tensor inside it."""
    if not is_traceable(tensor):
        return fn(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: map_inner(fn, getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
