"""The tensors in a module's inputs or outputs, whatever containers they come in: list, map, cast or move them."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it cast to ``dtype``; containers keep their types."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(value, cast)


def move(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``fn`` of every tensor in its place; containers keep their types, and are not made anew.

    That is: no ``__init__`` and no ``__post_init__`` of theirs runs again, and one without tensors comes back as it
    is. Mappings that cannot be written to stay as they are. torch's pytrees know neither dataclasses nor
    UserDict nor subclasses of tuples. Traced by Dynamo, so written with plain type tests.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=fn(value.data))  # the other tensors say where its rows are
    if isinstance(value, (list, tuple, set, frozenset)):
        return _like(value, [map_tensors(item, fn) for item in value]) if tensors_in(value) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _fields_of(value)
        changed = _changed(fields, fn)
        if not changed:
            return value
        # One that is a dict as well, as outputs of transformers are, fills itself when it is made.
        return dataclasses.replace(value, **changed) if isinstance(value, dict) else _with(value, changed)
    if isinstance(value, UserDict):
        changed = _changed(value.data, fn)
        return _with(value, {"data": {**value.data, **changed}}) if changed else value
    if isinstance(value, (dict, MutableMapping)):
        changed = _changed(value, fn)
        return _mapping_like(value, changed) if changed else value
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in order, through the same containers that ``map_tensors`` goes through."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, (list, tuple, set, frozenset)):
        inner: list[Any] = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = list(_fields_of(value).values())
    elif isinstance(value, (dict, MutableMapping)):
        inner = list(value.values())
    else:
        return []
    return [tensor for item in inner for tensor in tensors_in(item)]


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def _changed(values: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, Any]:
    """What has tensors in it, mapped. Dynamo does not compare the identities of tuples."""
    return {key: map_tensors(item, fn) for key, item in values.items() if tensors_in(item)}


def _like(value: Any, items: list[Any]) -> Any:
    """A sequence or a set of the type of ``value``."""
    if hasattr(value, "_fields"):
        return type(value)._make(items)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(items)
    if hasattr(value, "n_sequence_fields"):  # of torch.return_types
        return type(value)(items)
    if isinstance(value, tuple):
        made = tuple.__new__(type(value), items)
        for name, attribute in getattr(value, "__dict__", {}).items():
            setattr(made, name, attribute)
        return made
    copied = copy.copy(value)
    copied.clear()
    (copied.extend if isinstance(value, list) else copied.update)(items)
    return copied


def _mapping_like(value: Any, changed: dict[Any, Any]) -> Any:
    if type(value) in (dict, OrderedDict):
        return type(value)({**value, **changed})
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, {**value, **changed})
    # A shallow copy of what is no dict may keep its items where the original does.
    kept = {id(item): item for item in value.values()}
    copied = copy.copy(value) if isinstance(value, dict) else copy.deepcopy(value, kept)
    for key, item in changed.items():
        copied[key] = item
    return copied


def _with(value: Any, attributes: dict[str, Any]) -> Any:
    """A copy of an object that has other ``attributes``; frozen ones too."""
    copied = object.__new__(type(value))
    slots = _fields_of(value) if dataclasses.is_dataclass(value) else {}
    for name, attribute in {**slots, **getattr(value, "__dict__", {}), **attributes}.items():
        object.__setattr__(copied, name, attribute)
    return copied
