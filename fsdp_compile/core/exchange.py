"""Ranks tell one another how they run a model, before its first collective, by keys in their store; once a model.

    rank 0, compiled     compiling    ...    text/forward = "gather norms, gather 0, ..."      what its graph launches
    rank 1, eagerly      asked += 1   ...    reads that, and follows it                        ended += 1

    all ranks, eagerly   asked += 1   ...    asked - ended == all of them: released            and nobody asks again

A rank that runs a model eagerly for the first time, and has no graph of it, asks. It waits until all ranks ask or one
of them has said what it launches: for no longer than its first all-gather would wait for the same ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import Counter
from typing import Any

import torch.distributed as dist

from .._torch_compat import process_groups
from ..passes import _torch_compat as passes_compat
from ..passes.agree import Agreement
from ..passes.worlds import World, world_of
from .unit import Unit

PATIENCE_S = 120.0  # how long to wait if no rank has said that it compiles
COMPILING_S = 3600.0  # how long to wait if one has

_logger = logging.getLogger(__name__)
_numbers = Counter[str]()  # how many models look alike, by topic
_world: World | None = None  # the world in which these were counted


class Others:
    """What this rank knows of how the other ranks run one model, and how it asks for more."""

    def __init__(self, store: Any, topic: str, num_ranks: int) -> None:
        self._store, self._prefix, self._num_ranks = store, f"fsdp_compile/exchange/{topic}/", num_ranks
        self._known: dict[str, str] = {}  # texts by the kind of forward
        self._said: set[str] = set()
        self.is_decided = num_ranks == 1  # if so, there is nobody to follow, and this rank never asks again
        self.has_asked = False

    def asks_for(self, kind: str) -> bool:
        return not self.is_decided and kind not in self._known

    def text(self, kind: str) -> str:
        """Return what ranks that compile such a forward launch in it, asking if need be; empty if none compiles it."""
        if self.is_decided:
            return ""
        if kind not in self._known:
            try:
                self._known[kind] = self._ask(kind)
            except (RuntimeError, NotImplementedError):  # the store is gone, or cannot do this
                self.is_decided, self._known[kind] = True, ""
        return self._known[kind]

    def say(self, what: str, text: str = "yes") -> None:
        """Tell the other ranks, which use what was said first."""
        if self.is_decided or what in self._said:
            return
        self._said.add(what)
        with contextlib.suppress(RuntimeError, NotImplementedError):
            if not self._has(what):  # a graph's text may be long
                self._store.compare_set(self._prefix + what, "", text)

    def tell(self, kind: str, text: str) -> None:
        """Tell the other ranks what this rank launches in such a forward."""
        self.say("compiled")
        self.say(f"text/{kind}", text)

    def refuse(self) -> None:
        """Tell the other ranks that this rank compiles the model in a way that nobody can follow."""
        self.say("refused")

    def _ask(self, kind: str) -> str:
        self.has_asked = True
        mine = self._store.add(f"{self._prefix}asked", 1)
        try:
            return self._hear(kind, mine)
        finally:
            self._store.add(f"{self._prefix}ended", 1)

    def _hear(self, kind: str, mine: int) -> str:
        began, pause_s, said_so = time.monotonic(), 0.001, False
        while True:
            if self._has(f"text/{kind}"):
                Agreement.lost_count_in = world_of(self._store)
                return str(self._store.get(f"{self._prefix}text/{kind}").decode())
            if self._has("refused") or self._has("given up"):
                self.is_decided = True
                return ""
            if self._is_released(mine):
                return ""
            waited_s = time.monotonic() - began
            if waited_s > 10 and not said_so:
                said_so = True
                _logger.warning("waiting to hear how other ranks run the model that this one runs eagerly")
            if waited_s > (COMPILING_S if self._has("compiling") else PATIENCE_S):
                _logger.warning("after %.0f s this rank runs eagerly, whatever the others do", waited_s)
                self.say("given up")
                self.is_decided = True
                return ""
            time.sleep(pause_s)  # in Python, so that an interruption gets through
            pause_s = min(2 * pause_s, 0.1)

    def _is_released(self, mine: int) -> bool:
        """Whether, since this rank asked, all ranks were asking at one time: then none of them runs compiled.

        They may ask for different kinds of forward. If no rank has compiled the model, nobody asks again; otherwise
        the next kind may be compiled.
        """
        # The number of ranks that ended is read last, so the difference can only be too small.
        asked = self._store.add(f"{self._prefix}asked", 0)
        if asked - self._store.add(f"{self._prefix}ended", 0) == self._num_ranks:
            some_compile = self._has("compiled")
            self._store.set(f"{self._prefix}released", f"{asked} {int(some_compile)}")
        if not self._has("released"):
            return False
        last, some_compile = self._store.get(f"{self._prefix}released").decode().split()
        if int(last) < mine:
            return False
        self.is_decided = some_compile == "0"
        return True

    def _has(self, what: str) -> bool:
        return bool(self._store.check([self._prefix + what]))


def others_of(root: Unit) -> Others:
    """Return the ``Others`` of the model whose outermost unit is ``root``."""
    if root.others is None:
        root.others = _others_of(root)
    known: Others = root.others
    return known


def say_compiling(unit: Unit) -> None:
    """Tell the other ranks that a graph of the unit is being traced: that may take minutes."""
    others_of(unit.root).say("compiling")


def _others_of(root: Unit) -> Others:
    global _world
    store = passes_compat.default_store()
    params = [param for unit in root.inside() for param in unit.params]
    groups = {process_groups.group_ranks(one.mesh.group) for one in params if one.mesh.num_shards > 1}
    # Without gathers, ranks need not run forward together. With several groups, it is not clear which ranks do.
    if store is None or len(groups) != 1 or "fake" in dist.get_backend_config():
        return Others(None, "", 1)
    if world_of(store) != _world:
        _world = world_of(store)
        _numbers.clear()
    (ranks,) = groups
    # By sizes: where ranks ignore different modules, the same parameters have different names.
    known_by = [ranks, root.label, [one.layout.size for one in params]]
    topic = hashlib.sha256(repr(known_by).encode()).hexdigest()[:16]
    _numbers[topic] += 1
    return Others(store, f"{_world.number}/{topic}/{_numbers[topic]}", len(ranks))
