"""Shards with an all-gather extension as graph inputs: the tensors inside the subclass, and how to rebuild it.

    graph input                    in the graph
    (names, *tensors inside)       shard = Look.around(names, tensors) ... fsdp_pre_all_gather(shard)

A compiler that gets the subclass itself takes it apart by ``__tensor_flatten__`` and ``__tensor_unflatten__``, and
relies on more than subclasses guarantee: torchao's float8 subclass looks at the data of a scale while no tensor has
data, and forgets the scale. And while a shard keeps its attributes, a call does not flatten it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import subclasses


@dataclass(frozen=True)
class Look:
    """What it takes to rebuild a tensor of a subclass from the tensors inside it."""

    subclass: type
    context: Any = field(hash=False)  # that ``__tensor_flatten__`` returned
    size: torch.Size
    stride: tuple[int, ...]

    def around(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        """Rebuild the tensor of the subclass from ``tensors``."""
        subclass: Any = self.subclass
        made = subclass.__tensor_unflatten__(dict(zip(names, tensors)), self.context, self.size, self.stride)
        for name, tensor in zip(names, tensors):
            if getattr(made, name, None) is not tensor:  # the subclass forgot it
                setattr(made, name, tensor)
        return made


class Apart:
    """A shard taken apart. Each call looks at it again, since the user may put other tensors into it."""

    def __init__(self, local: Any) -> None:
        self._local = local
        self._attributes = _attributes_of(local)
        self._names, self.look = _flattened(local)
        self._look_now = self.look
        own = vars(local)
        # Graphs take the tensors from the shard's ``__dict__``, so they get those that are there at each call. If the
        # subclass keeps its tensors elsewhere, graphs get those that it has now.
        self.inside = own if set(self._names) <= own.keys() else {name: getattr(local, name) for name in self._names}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that are inside the shard now."""
        self._look_again()
        return self._names

    @property
    def has_changed(self) -> bool:
        """Whether the shard has changed in a way that ``look`` and ``inside`` do not follow."""
        self._look_again()
        if self._look_now != self.look:
            return True
        is_live = self.inside is vars(self._local)
        return not is_live and any(getattr(self._local, name) is not self.inside.get(name) for name in self._names)

    def _look_again(self) -> None:
        attributes = _attributes_of(self._local)
        if not _are_the_same(attributes, self._attributes):  # not earlier: flattening may wait for the device
            self._attributes = attributes
            self._names, self._look_now = _flattened(self._local)


def taken_apart(local: Any) -> Apart | None:
    """Take apart a local tensor with an extension; None for other tensors, and if a compiler cannot look inside it."""
    if not hasattr(local, "fsdp_pre_all_gather") or not subclasses.is_traceable(local):
        return None
    return Apart(local)


def _flattened(local: Any) -> tuple[tuple[str, ...], Look]:
    names, context = local.__tensor_flatten__()
    return tuple(names), Look(type(local), context, local.size(), local.stride())


def _attributes_of(local: Any) -> dict[str, Any]:
    """Return the attributes, with the class ``Tensor`` in the place of each tensor."""
    return {name: Tensor if isinstance(value, Tensor) else value for name, value in vars(local).items()}


def _are_the_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(value is others[name] for name, value in some.items())
