"""Compare the launches of a graph with those on other ranks before it first runs, so that a difference raises.

The first rank to get there publishes its launches in the store; the others compare theirs with them. No rank waits: one
rank alone may be recompiling, and a collective here would hang it. A graph from a cache has its text as well.
"""

from __future__ import annotations

import hashlib
import re
from typing import ClassVar

from .. import _torch_compat as compat
from ..wire.ledger import GraphText
from .worlds import World, current_world


class Agreement:
    """The graphs of this rank so far, and the check that the other ranks launch the same.

    The same parameters may be gathered in several graphs, of another model or with other options: the k-th distinct one
    of this rank is compared with the k-th of the others. A graph that launches what an earlier one launches, as after a
    recompilation, does not count. A rank that ran a model eagerly has lost count, and compares no graph of the model.
    """

    # The parameters of each model that this rank ran eagerly, with the world in which it did.
    _ran_eagerly: ClassVar[set[tuple[World, frozenset[str]]]] = set()

    def __init__(self) -> None:
        self._known: dict[tuple[World, str], list[str]] = {}

    @classmethod
    def note_eager(cls, names: frozenset[str]) -> None:
        """Note that this rank runs a model with these parameters eagerly, while others may compile it."""
        world = current_world()
        if world is not None:
            cls._ran_eagerly.add((world, names))

    def check(self, text: GraphText) -> None:
        """Publish a graph's launches, or raise when another rank of its groups published different ones in their place.

        Each group compares for itself: with replicas no two ranks are in the same set of groups.
        """
        world = current_world()
        if world is None:
            return
        # Which rank launches what in parts, or in which bucket, is compared and so not in the key.
        names = sorted({re.split("[:@]", name)[0] for launch in text.launches for name in launch.names})
        if any(of is world and eager.issuperset(names) for of, eager in self._ran_eagerly):
            return
        ours = _launched(text)
        for ranks in sorted({compat.group_ranks(group) for group in text.groups}):
            if len(ranks) == 1:
                continue
            graph = hashlib.sha256(repr((text.stage, names, ranks)).encode()).hexdigest()[:16]
            known = self._known.setdefault((world, graph), [])
            if ours in known:
                continue
            published = world.put_first(f"graph/{graph}/{len(known) + 1}", ours)
            if published != ours:
                raise RuntimeError(_difference(text.stage, ours.splitlines(), published.splitlines()))
            known.append(ours)


def _launched(text: GraphText) -> str:
    """Return what ranks must agree on, a line for each launch; names of groups differ between ranks."""
    return "\n".join(
        f"{one.kind} of {', '.join(one.names)}: {one.num_bytes} bytes of {one.dtype} a rank, "
        f"{len(compat.group_ranks(one.group))} ranks"
        for one in text.launches
    )


def _difference(stage: str, ours: list[str], theirs: list[str]) -> str:
    here, there = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    apart = f"only here {here}, only there {there}" if here or there else "the same ones in another order"
    return (
        f"this rank launches other collectives than the rank that ran it first, in one {stage} graph: {apart}. Call "
        "fully_shard and configure with the same arguments on every rank, and run the same versions of torch and "
        "fsdp_compile."
    )
