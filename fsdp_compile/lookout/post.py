"""How ranks tell one another where they are: keys in the store of the world, each written by one rank.

    at/RANK             what it issued in each group, as hashes; every half a second
    left/RANK           its last answer: it ended, or destroyed its process group
    ask/K               a rank has a doubt, and everybody is to say more; who asks first decides
    answer/K/RANK       what each says
    verdict/K           what the one that asked makes of it: everybody believes it, so all raise or none
    heard/K             counts those who have read it
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from .chain import Hash, Link
from .judge import Answer, Group, Verdict


@dataclass(frozen=True)
class At:
    """Where a rank is in each group."""

    hashes: Mapping[str, Hash] = field(default_factory=dict)
    issued: Mapping[str, int] = field(default_factory=dict)  # a graph that runs has not issued all that its hash covers
    left: bool = False


@dataclass(frozen=True)
class Question:
    """What one rank asks all."""

    asks: int  # the rank that asks
    since: Mapping[str, int] = field(default_factory=dict)  # by group: from which collective on to answer
    # A rank that has been at the same place for less than this may be about to go on.
    idle_s: float = 0.0


class Post:
    """One rank's access to the keys of one world."""

    def __init__(self, store: Store, world: int, rank: int) -> None:
        self._store = store
        self._prefix = f"fsdp_compile/lookout/{world}/"
        self._rank = rank

    def write_at(self, at: At) -> None:
        self._set(f"at/{self._rank}", dataclasses.asdict(at))

    def read_at(self, rank: int) -> At:
        found = self._get(f"at/{rank}")
        if found is None:
            return At()
        return At({name: Hash(**one) for name, one in found["hashes"].items()}, found["issued"], found["left"])

    def leave(self, answer: Answer) -> None:
        self._set(f"left/{self._rank}", _packed(answer))
        self._store.add(f"{self._prefix}gone", 1)

    def gone(self) -> int:
        """How many ranks have left."""
        return self._store.add(f"{self._prefix}gone", 0)

    def ask(self, number: int, question: Question) -> bool:
        """Ask, and return whether this rank was the first to do so."""
        mine = json.dumps(dataclasses.asdict(question))
        return self._store.compare_set(f"{self._prefix}ask/{number}", "", mine).decode() == mine

    def asked(self, number: int) -> Question | None:
        """Return what some rank wants to know of all; None if nobody asked."""
        found = self._get(f"ask/{number}")
        return None if found is None else Question(**found)

    def write_answer(self, number: int, answer: Answer) -> None:
        self._set(f"answer/{number}/{self._rank}", _packed(answer))

    def read_answer(self, number: int, rank: int) -> Answer | None:
        """Return what a rank answered, or said when it left."""
        found = self._get(f"answer/{number}/{rank}") or self._get(f"left/{rank}")
        return None if found is None else _unpacked(found)

    def write_verdict(self, number: int, verdict: Verdict) -> None:
        self._set(f"verdict/{number}", dataclasses.asdict(verdict))

    def read_verdict(self, number: int) -> Verdict | None:
        found = self._get(f"verdict/{number}")
        return None if found is None else Verdict(found["text"], tuple(found["nameless"]), found["slow"])

    def heard(self, number: int, more: int = 0) -> int:
        """Add ``more`` to the number of ranks that have read the verdict, and return it."""
        return self._store.add(f"{self._prefix}heard/{number}", more)

    def _set(self, key: str, what: Any) -> None:
        self._store.set(self._prefix + key, json.dumps(what))

    def _get(self, key: str) -> Any:
        key = self._prefix + key
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _packed(answer: Answer) -> dict[str, Any]:
    """Return data for JSON that has each distinct collective once: of the thousands in a second, few are distinct."""
    groups = {}
    for name, group in answer.groups.items():
        table: dict[tuple[Link, str], int] = {}
        rows = [table.setdefault(one, len(table)) for one in zip(group.links, group.sources)]
        distinct = [[link.wire, link.names, link.sure, link.places, source] for link, source in table]
        groups[name] = [group.ranks, group.first, distinct, rows, group.issued]
    return {"state": answer.state, "idle_s": answer.idle_s, "groups": groups}


def _unpacked(data: dict[str, Any]) -> Answer:
    groups = {}
    for name, (ranks, first, distinct, rows, issued) in data["groups"].items():
        links = [Link(wire, tuple(names), sure, tuple(places)) for wire, names, sure, places, _ in distinct]
        sources = [source for *_, source in distinct]
        at_rows = tuple(links[row] for row in rows), tuple(sources[row] for row in rows)
        groups[name] = Group(tuple(ranks), first, *at_rows, issued)
    return Answer(data["state"], data["idle_s"], groups)
