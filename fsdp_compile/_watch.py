"""One guard for all parameters of a unit: whether what a graph took for granted of them still holds.

    traced read      unit's Watch --trains(fqn)--> True: trains    False: frozen    None: no longer the shard we know
    each call        Watch.seen() == what it was when the graph was traced, else Dynamo looks for another graph

A DTensor that Dynamo sees costs 5 microseconds a call in guards, most of it its spec compared in Python. Behind a watch
it sees none, and the graph takes the shard's local tensor from beside it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import _torch_compat as compat

if TYPE_CHECKING:
    from ._group import ParamGroup
    from ._param import ShardedParam, Slot


class Watch(compat.OpaqueBase):  # type: ignore[misc]
    """What a unit's compiled reads ask before they take a shard's local tensor; Dynamo asks it again at each call."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)  # Dynamo keeps watches

    def seen(self) -> list[bool | None]:
        """What ``trains`` says of each place where a parameter is registered."""
        group = self._group()
        return [] if group is None else [_trains(param, slot) for param in group.params for slot in param.slots]

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return self  # Dynamo of torch 2.11 keeps a copy

    def trains(self, fqn: str) -> bool | None:
        """Whether a parameter gets gradients; None where the user put something else in its place, or into it."""
        group = self._group()
        assert group is not None
        places = [(param, slot) for param in group.params if param.fqn == fqn for slot in param.slots]
        if any(compat.changed_while_traced(slot.module._parameters) for _, slot in places):
            return None  # by torch.func.functional_call inside what is compiled
        states = [_trains(param, slot) for param, slot in places]
        return None if None in states else states[0]


def _trains(param: ShardedParam, slot: Slot) -> bool | None:
    registered = slot.module._parameters.get(slot.name)
    if registered is not param.shard or param.local is None:
        return None
    return registered.requires_grad if registered._local_tensor is param.local else None  # type: ignore[attr-defined]


compat.register_opaque(Watch, guard=Watch.seen, constant_methods=("trains",))
