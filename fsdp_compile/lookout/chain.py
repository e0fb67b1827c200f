"""The sequence of collectives in one process group, with hashes that ranks can compare at any place of it.

    collectives    0   1   2   3   4   ...
    hash           h0  h1  h2  h3  h4  h5       h(n+1) of h(n) and collective n

Two hashes run side by side: ``wire``, of what the backend sees, where any difference is fatal; and ``named``, of the
parameters that are sent.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_PRIME = (1 << 61) - 1
_BASE = 1_000_003
KEPT = 1 << 14  # at least so many of the last collectives are kept


@dataclass(frozen=True)
class ChainLink:
    """One collective: what the backend sees of it, and which parameters it carries."""

    wire: str
    names: tuple[str, ...]
    sure: bool = True  # else the names are those of the first graph that was compiled of all that look alike
    # The places of the parameters in the model, where they are known. Ranks that ignore different modules have other
    # names for the same parameters, and the same places.
    places: tuple[str, ...] = ()
    source: str = field(default="eager", compare=False)

    @property
    def whose(self) -> tuple[str, ...]:
        """The places of the parameters where they are known, else their names: ranks compare these."""
        return self.places or self.names

    @functools.cached_property
    def numbers(self) -> tuple[int, int]:
        return _number(self.wire), _number(repr(self.whose if self.sure else ()))


Hash = tuple[int, int]  # ``wire`` and ``named``, of the first collectives of a group
NOTHING: Hash = (0, 0)


@dataclass(frozen=True)
class GroupProgress:
    """Where a rank is in one process group."""

    ranks: tuple[int, ...]
    count: int
    hash: Hash  # of these
    issued: int  # collectives that were handed to the group; ``count`` has all of the graph that runs
    links: tuple[ChainLink, ...] = ()  # the last of them, if somebody asked

    @property
    def first(self) -> int:
        """The number of the first collective in ``links``."""
        return self.count - len(self.links)


class Chain:
    """What this rank issued in one group: the last of it, and the hash in front of each collective."""

    def __init__(self, ranks: tuple[int, ...] = (), sequence: Callable[[], int] = lambda: 0) -> None:
        self.ranks = ranks
        self.first = 0  # the number of the first collective that is kept
        self.links: list[ChainLink] = []
        self._hashes = [NOTHING]  # the last one is that behind all links
        self._sequence = sequence  # how many collectives the group was given by now, by anyone
        self._graph: tuple[int, int] | None = None  # where the last graph began, and the sequence then

    @property
    def count(self) -> int:
        return self.first + len(self.links)

    def append(self, links: Sequence[ChainLink], sequence: int | None = None) -> None:
        """Add what is issued: by now, or by a graph that began when the group had been given ``sequence``."""
        self._graph = None if sequence is None else (self.count, sequence)
        wire, named = self._hashes[-1]
        for link in links:
            of_wire, of_names = link.numbers
            wire, named = (wire * _BASE + of_wire) % _PRIME, (named * _BASE + of_names) % _PRIME
            self._hashes.append((wire, named))
        self.links += links
        if len(self.links) > 2 * KEPT:
            del self.links[:KEPT], self._hashes[:KEPT]
            self.first += KEPT

    def at(self, count: int) -> Hash | None:
        """Return the hash of the first ``count`` collectives; None if that is too long ago, or still to come."""
        return self._hashes[count - self.first] if self.first <= count <= self.count else None

    def issued(self) -> int:
        """Return how many of ``count`` the group was handed by now."""
        if self._graph is None:
            return self.count
        began, sequence = self._graph
        return min(began + max(0, self._sequence() - sequence), self.count)

    def place(self, issued: int, num_links: int) -> GroupProgress:
        """Return where this rank is in the group, with so many of the last collectives."""
        links = tuple(self.links[max(0, len(self.links) - num_links) :])
        return GroupProgress(self.ranks, self.count, self._hashes[-1], issued, links)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % _PRIME


def agree(one: ChainLink, other: ChainLink) -> bool:
    """Whether two ranks may have issued the same collective: names count only if both ranks are sure of theirs."""
    return one.wire == other.wire and (one.whose == other.whose or not (one.sure and other.sure))
