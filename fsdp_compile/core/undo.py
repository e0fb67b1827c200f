"""Remember the state of objects and restore it, so that a call that raised, or a trial, leaves no trace.

    before = Before(objects)       remembers classes, attributes, and what is in the containers among these
    ...                            anything
    before.put_back()              restores all of it, in the same objects and the same containers
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_CONTAINERS = (dict, list, set)


class Before:
    """The state of objects when this is made, one level deep."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._classes: list[tuple[Any, type]] = []
        self._contents: list[tuple[Any, Any]] = []  # a container, and a copy of it
        for thing in {id(thing): thing for thing in things}.values():
            self._classes.append((thing, type(thing)))
            attributes = vars(thing)
            containers = [value for value in attributes.values() if isinstance(value, _CONTAINERS)]
            for one in (attributes, *containers):
                self._contents.append((one, copy.copy(one) if one else ()))  # most are empty

    def put_back(self) -> None:
        for thing, kind in self._classes:
            if type(thing) is not kind:
                object.__setattr__(thing, "__class__", kind)
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)


@contextmanager
def all_or_nothing(things: Iterable[Any]) -> Iterator[None]:
    """A block that changes ``things``; if it raises, their state from before is restored."""
    before = Before(things)
    try:
        yield
    except BaseException:
        before.put_back()
        raise
