"""A cache that returns one object for equal arguments, for as long as somebody uses that object.

``functools.cache`` would keep the object, and what it was made of, for good: a user's class, a mesh, a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Made = TypeVar("Made")


def shared(make: Callable[..., Made]) -> Callable[..., Made]:
    """Wrap ``make``: for equal arguments it returns the same object, as long as that is alive."""
    made: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

    @functools.wraps(make)
    def get(*arguments: Any) -> Made:
        known = made.get(arguments)
        if known is None:
            known = made[arguments] = make(*arguments)
        return known

    get.forget = made.clear  # type: ignore[attr-defined]
    return get
