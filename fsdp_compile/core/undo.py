"""Remember the state of objects and restore it, so that a call that raised, or a trial, leaves no trace.

    before = Before(objects)       remembers classes, attributes, and what is in the containers among these
    ...                            anything
    before.put_back()              restores all of it, in the same objects and the same containers
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_CONTAINERS = (dict, list, set)


@dataclass(frozen=True)
class _Look:
    """The remembered state of one object."""

    thing: Any
    kind: type
    attributes: dict[str, Any]
    contents: list[tuple[Any, Any]]  # a container, and a copy of it

    @classmethod
    def of(cls, thing: Any) -> _Look:
        containers = [value for value in vars(thing).values() if isinstance(value, _CONTAINERS)]
        copies = [(one, copy.copy(one) if one else ()) for one in containers]  # most are empty
        return cls(thing, type(thing), dict(vars(thing)), copies)

    def put_back(self) -> None:
        if type(self.thing) is not self.kind:
            object.__setattr__(self.thing, "__class__", self.kind)
        _fill(vars(self.thing), self.attributes)
        for container, content in self.contents:
            _fill(container, content)


class Before:
    """The state of objects when this is made, one level deep."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._looks = [_Look.of(thing) for thing in {id(thing): thing for thing in things}.values()]

    def put_back(self) -> None:
        for look in self._looks:
            look.put_back()


class AllOrNothing:
    """A block that changes ``things``; if it raises, their state from before is restored."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._before = Before(things)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *unused: types.TracebackType | object) -> None:
        if kind is not None:
            self._before.put_back()


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
        return
    container.clear()
    container.update(content)
