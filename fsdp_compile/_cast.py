"""The tensors in a module's inputs or outputs, whatever containers they come in: list them, or cast them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it cast to ``dtype``; containers keep their types.

    Traced by Dynamo, so written with plain type tests.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[cast_floating(item, dtype) for item in value])
    if isinstance(value, (list, tuple, set)):
        return type(value)([cast_floating(item, dtype) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype)
    if isinstance(value, dict):
        return _cast_dict(value, dtype)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in order, through the same containers that ``cast_floating`` goes through."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        inner: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        inner = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return []
    return [tensor for item in inner for tensor in tensors_in(item)]


def _cast_dict(value: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    cast = {key: cast_floating(item, dtype) for key, item in value.items()}
    return cast if type(value) is dict else type(value)(cast)


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name)
        after = cast_floating(before, dtype)
        if after is not before and field.init:
            changed[field.name] = after
    return dataclasses.replace(value, **changed) if changed else value
