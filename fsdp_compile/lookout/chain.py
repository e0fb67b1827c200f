"""The sequence of collectives in one process group, as hashes that ranks can compare at any place of it.

    collectives    0   1   2   3   4   ...
    hash           h0  h1  h2  h3  h4  h5       h(n+1) = h(n) * B + collective n,  modulo a prime

A graph with thirty collectives is one step: its own polynomial is computed once. Two hashes run side by side: ``wire``,
of what the backend sees, where any difference is fatal; and ``named``, of the parameters that are sent.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

_PRIME = (1 << 61) - 1
_BASE = 1_000_003
_KEPT = 1 << 14  # at least so many of the last steps are kept


@dataclass(frozen=True)
class Link:
    """One collective: what the backend sees of it, and which parameters it carries."""

    wire: str
    names: tuple[str, ...]
    sure: bool = True  # else the names are those of the first graph that was compiled of all that look alike
    # The places of the parameters in the model, where they are known. Ranks that ignore different modules have other
    # names for the same parameters, and the same places.
    places: tuple[str, ...] = ()

    @property
    def whose(self) -> tuple[str, ...]:
        """The places of the parameters where they are known, else their names: ranks compare these."""
        return self.places or self.names


@dataclass(frozen=True)
class Hash:
    """The hashes of the first ``count`` collectives of a group."""

    count: int = 0
    wire: int = 0
    named: int = 0

    @classmethod
    def of(cls, links: Iterable[Link]) -> Hash:
        """Return the hash of these collectives alone."""
        found = cls()
        for link in links:
            found = found.then(cls(1, _number(link.wire), _number(repr(link.whose if link.sure else ()))))
        return found

    def then(self, more: Hash) -> Hash:
        """Return the hash of what this one covers, followed by what ``more`` covers."""
        power = pow(_BASE, more.count, _PRIME)
        wire, named = self.wire * power + more.wire, self.named * power + more.named
        return Hash(self.count + more.count, wire % _PRIME, named % _PRIME)


@dataclass(frozen=True)
class Piece:
    """Collectives that one source, such as a graph, issues one after the other."""

    links: tuple[Link, ...]
    source: str

    @functools.cached_property
    def hash(self) -> Hash:
        return Hash.of(self.links)


@dataclass(frozen=True)
class Step:
    """A piece, and where in the chain it was issued."""

    before: Hash
    piece: Piece
    sequence: int | None  # collectives that the group had been given before, by anyone; None if all are issued


class Chain:
    """What this rank issued in one group: all of it as a hash, the last of it step by step."""

    def __init__(self) -> None:
        self.now = Hash()
        self.steps: list[Step] = []
        self._pieces: dict[Piece, Piece] = {}  # one object for all steps that issue the same

    def append(self, piece: Piece, sequence: int | None = None) -> None:
        piece = self._pieces.setdefault(piece, piece)
        self.steps.append(Step(self.now, piece, sequence))
        self.now = self.now.then(piece.hash)
        if len(self.steps) > 2 * _KEPT:
            del self.steps[:_KEPT]
            self._pieces = {step.piece: step.piece for step in self.steps}

    def at(self, count: int) -> Hash | None:
        """Return the hash of the first ``count`` collectives; None if that is too long ago, or still to come."""
        if count == self.now.count:
            return self.now
        if count > self.now.count or not self.steps or count < self.steps[0].before.count:
            return None
        step = self.steps[bisect_right(self.steps, count, key=lambda step: step.before.count) - 1]
        return step.before.then(Hash.of(step.piece.links[: count - step.before.count]))

    def since(self, count: int, at_most: int) -> tuple[int, list[tuple[Link, str]]]:
        """Return the collectives from number ``count`` on, each with its source, and the number of the first kept."""
        first = max(count, self.steps[0].before.count if self.steps else self.now.count, self.now.count - at_most)
        found = []
        for step in self.steps:
            skipped = max(0, first - step.before.count)
            found += [(link, step.piece.source) for link in step.piece.links[skipped:]]
        return first, found

    def issued(self, sequence: int | None) -> int:
        """Return how many of ``now.count`` the group was handed, which was given ``sequence`` collectives by now."""
        if not self.steps:
            return self.now.count
        last = self.steps[-1]
        if last.sequence is None or sequence is None:
            return self.now.count
        return last.before.count + max(0, min(sequence - last.sequence, len(last.piece.links)))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % _PRIME


def agree(one: Link, other: Link) -> bool:
    """Whether two ranks may have issued the same collective: names count only if both ranks are sure of theirs."""
    return one.wire == other.wire and (one.whose == other.whose or not (one.sure and other.sure))
