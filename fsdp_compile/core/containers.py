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
    """Return ``value`` with every floating-point tensor in it cast to ``dtype``; containers keep their types."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(value, cast)


def move(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device))  # blocks: the caller may refill a pinned buffer


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``fn`` of every tensor in its place; containers keep their types.

    A container in which ``fn`` replaces no tensor is returned as it is, since a module may write to it for its caller.
    A dataclass is copied field by field, and its ``__init__`` and ``__post_init__`` do not run again, unless it is a
    dict as well. Mappings that cannot be written to stay as they are. torch's pytrees know neither dataclasses nor
    UserDict nor subclasses of tuples. Dynamo traces this function, so it uses plain type tests.
    """
    return _mapped(value, fn)[0]


def _mapped(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, bool]:
    """Return the mapped value, and whether it is a new object; while Dynamo traces, it is if it has tensors in it."""
    if isinstance(value, torch.Tensor):
        tensor = fn(value)
        return tensor, torch.compiler.is_compiling() or tensor is not value
    if isinstance(value, PackedSequence):
        # ``batch_sizes`` stays on the CPU.
        changed = _changed({name: getattr(value, name) for name in ("data", "sorted_indices", "unsorted_indices")}, fn)
        return (value._replace(**changed), True) if changed else (value, False)
    if isinstance(value, (list, tuple, set, frozenset)):
        found = [_mapped(item, fn) for item in value]
        return (_like(value, [item for item, _ in found]), True) if any([new for _, new in found]) else (value, False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = _changed(_fields_of(value), fn)
        if not changed:
            return value, False
        # A dataclass that is a dict as well, such as an output of transformers, fills the dict when it is made.
        return dataclasses.replace(value, **changed) if isinstance(value, dict) else _with(value, changed), True
    if isinstance(value, UserDict):
        changed = _changed(value.data, fn)
        return (_with(value, {"data": {**value.data, **changed}}), True) if changed else (value, False)
    if isinstance(value, (dict, MutableMapping)):
        changed = _changed(value, fn)
        return (_mapping_like(value, changed), True) if changed else (value, False)
    return value, False


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value`` that ``map_tensors`` maps, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def _changed(values: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, Any]:
    """Return, by key, those of ``values`` that become another object, as mapped values."""
    found = {key: _mapped(item, fn) for key, item in values.items()}
    return {key: item for key, (item, new) in found.items() if new}


def _like(value: Any, items: list[Any]) -> Any:
    """Make a sequence or a set of ``items``, of the type of ``value``."""
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
    # A shallow copy of a mapping that is no dict may share the storage of its items with the original.
    kept = {id(item): item for item in value.values()}
    copied = copy.copy(value) if isinstance(value, dict) else copy.deepcopy(value, kept)
    for key, item in changed.items():
        copied[key] = item
    return copied


def _with(value: Any, attributes: dict[str, Any]) -> Any:
    """Copy an object, frozen or not, with new values for ``attributes``."""
    copied = object.__new__(type(value))
    slots = _fields_of(value) if dataclasses.is_dataclass(value) else {}
    for name, attribute in {**slots, **getattr(value, "__dict__", {}), **attributes}.items():
        object.__setattr__(copied, name, attribute)
    return copied
