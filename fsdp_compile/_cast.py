"""The tensors in a module's inputs or outputs, whatever containers they come in: list, map, cast or move them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it cast to ``dtype``; containers keep their types."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(value, cast)


def move(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``fn`` of every tensor in its place; containers keep their types.

    Traced by Dynamo, so written with plain type tests.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(item, fn) for item in value])
    if isinstance(value, (list, tuple, set)):
        return type(value)([map_tensors(item, fn) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, fn)
    if isinstance(value, dict):
        mapped = {key: map_tensors(item, fn) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in order, through the same containers that ``map_tensors`` goes through."""
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


def _map_dataclass(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name)
        after = map_tensors(before, fn)
        if after is not before and field.init:
            changed[field.name] = after
    return dataclasses.replace(value, **changed) if changed else value
