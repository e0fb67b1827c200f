"""One guard for all parameters of a unit: whether what a graph took for granted of them still holds.

    traced read      unit's Watch --takes(fqn)--> what the graph takes of a parameter
    each call        Watch.seen() == what it was when the graph was traced, else Dynamo looks for another graph

A DTensor that Dynamo sees costs 5 microseconds a call in guards, most of it its spec compared in Python. Behind a watch
it sees none, and the graph takes the shard's edge from beside it, which is its local tensor as autograd sees it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import _torch_compat as compat
from ._captures import refuse_traced

if TYPE_CHECKING:
    from ._group import ParamGroup
    from ._param import ShardedParam, Slot, Taken


class Watch(compat.OpaqueBase):  # type: ignore[misc]
    """What a unit's compiled reads ask before they take anything of a shard; Dynamo asks it again at each call."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)  # Dynamo keeps watches

    def seen(self) -> list[Any]:
        """What ``takes`` says of each place where a parameter is registered, and what is inside which shards.

        Each call asks, so edges join here.
        """
        group = self._group()
        if group is None:
            return []
        with compat.quick_attributes():
            hooked = [any(compat.hooks_of(param.shard)) for param in group.params]
            if not group.has_joined_edges or hooked != [param.is_hooked for param in group.params]:
                from ._edge import join_edges  # which uses what uses this

                join_edges(group)
            inside = []
            for param in group.params:
                if param.apart is not None:
                    param.look_inside()
                    inside.append(param.apart.names)
            return [_taken(param, slot) for param in group.params for slot in param.slots] + inside

    def begin_in_front(self) -> bool:
        """Gather in front of a branch or a loop, as the eager path does; whether the read stands inside one.

        A rank that does not take the branch would not gather, and the ranks that do would wait for it.
        """
        return compat.begin_in_front()

    def end_in_front(self) -> None:
        compat.end_in_front()

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return self  # Dynamo of torch 2.11 keeps a copy

    def takes(self, fqn: str) -> Taken:
        """What graphs take of a parameter; None where the user put something else in its place, or into it."""
        group = self._group()
        assert group is not None
        param = next(param for param in group.params if param.fqn == fqn)
        refuse_traced(fqn, group.mode_of(param))
        if compat.traces_backward():
            return None  # gradients must reach leaves of the graph: the DTensor itself, and not its edge
        places = [(param, slot) for param in group.params if param.fqn == fqn for slot in param.slots]
        for param, _ in places:
            param.look_inside()
        if any(compat.changed_while_traced(slot.module._parameters) for _, slot in places):
            return None  # by torch.func.functional_call inside what is compiled
        states = [_taken(param, slot) for param, slot in places]
        if None in states:
            return None
        for param, _ in places:
            if states[0] != "local" and not param.is_traced:
                param.is_traced, group.has_joined_edges = True, False
        return states[0]


def _taken(param: ShardedParam, slot: Slot) -> Taken:
    registered = slot.module._parameters.get(slot.name)
    local = param.local
    if registered is not param.shard or local is None:
        return None
    if registered._local_tensor is not local:  # type: ignore[attr-defined]
        return None
    if param.apart is not None and param.apart.has_changed:
        return None
    if param.address is not None and param.address != local.data_ptr():
        return None
    return param.takes if registered.requires_grad else "local"


compat.register_opaque(Watch, guard=Watch.seen, constant_methods=("takes", "begin_in_front", "end_in_front"))
