"""Decide from what ranks say of themselves whether they have parted: data in, a text out.

    what all ranks say  ->  the first place in a group where two of them issue different collectives  ->  parted
                        ->  somebody is ahead of one that has left, or of one that is ahead of it     ->  parted
                        ->  somebody is ahead of one that has issued nothing for long                 ->  slow

A rank that is ahead of another one, in a group of both, waits for it or soon will. A rank in a meeting waits for those
that have not come to it. Ranks that issue the same are never ahead of each other in a circle: one of them has issued
all that the other one has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..passes.wire.ledger import Meeting
from .chain import ChainLink, GroupProgress, agree

ADVICE = (
    "Every rank must run the same units in the same order, with the same calls of configure: where data decides, write "
    "the branch with torch.cond, or have every rank run both sides."
)
HAS_LEFT, SAYS_NOTHING = "has left", "says nothing"
HAS_DIED, IS_LOST = "ended without a word", "cannot be asked, since the store is gone"
NEVER_HEARD = "was never heard of: it has launched nothing, as before its first graph is compiled, or ended when it did"
_SILENT = HAS_DIED, IS_LOST, NEVER_HEARD
_AT_MOST = 4  # collectives of a rank that a text lists
_ON_DEATH = "Gloo ends a process to which another rank sends more than it expects: see what it wrote."


@dataclass(frozen=True)
class Said:
    """What one rank says of itself."""

    groups: Mapping[str, GroupProgress] = field(default_factory=dict)
    idle_s: float = 0.0  # for so long it has issued nothing
    state: str = ""  # one of the five above
    answers: int = -1  # the last question that it answers
    meeting: Meeting | None = None  # in which it waits for others
    met: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)  # its last ones, by key

    def lacks_in(self, meeting: Meeting) -> bool:
        """Return whether the other ranks of a meeting still wait for this one."""
        return self.meeting != meeting and self.met.get(meeting.key, (-1,)) < meeting.number


@dataclass(frozen=True)
class Judgement:
    """Whether ranks have parted, and if so how; and the groups where they call the same parameters differently."""

    text: str = ""
    nameless: tuple[str, ...] = ()
    slow: str = ""  # which ranks are busy and keep another one waiting


def judge(said: Mapping[int, Said], waiting: int | None = None, idle_s: float = 0.0) -> Judgement:
    """Judge what all ranks say; if a rank asked since it waits, that one is ``waiting``, and others if idle so long."""
    nameless = []
    ranks_of = {group: progress.ranks for one in said.values() for group, progress in one.groups.items()}
    for group in sorted(ranks_of):
        place, differ_in_form = _first_difference(_members(said, group))
        if place is not None:
            return Judgement(_text(said, ranks_of[group], "issue different collectives", group, place))
        if differ_in_form:
            nameless.append(group)
    if waiting is None:
        return Judgement(nameless=tuple(nameless))
    waits = {rank for rank, one in said.items() if rank == waiting or one.idle_s >= idle_s}
    behind = {rank: _behind(rank, said) if rank in waits else set() for rank in said}
    involved = {waiting} | _awaited_by(waiting, behind)
    ended = {rank for rank in involved if said[rank].state not in ("", SAYS_NOTHING)}
    stuck = ended | {rank for rank in involved if rank in _awaited_by(rank, behind)}
    how = "do not go on together" if ended else "wait for one another"
    for group, ranks in sorted(ranks_of.items(), key=lambda one: (waiting not in one[1], one)):
        # Only of the ranks that are waited for: another rank may have gone on since ``waiting`` said that it is idle.
        issued = {_issued(said[rank], group) for rank in involved.intersection(ranks)}
        if len(issued) > 1 and not stuck.isdisjoint(ranks):
            place = max(min(issued), max(issued) - _AT_MOST) if ended & _silent(said) else min(issued)
            return Judgement(_text(said, ranks, how, group, place), tuple(nameless))
    if stuck:
        return Judgement(_text(said, sorted(involved), how), tuple(nameless))
    idle = [rank for rank in sorted(involved - {waiting}) if rank in waits or said[rank].state]
    busy = [rank for rank in idle if not behind[rank]]
    return Judgement(nameless=tuple(nameless), slow=_slow(said, waiting, busy) if busy else "")


def _silent(said: Mapping[int, Said]) -> set[int]:
    """Return the ranks of which nobody knows what they issued in the end."""
    return {rank for rank, one in said.items() if one.state in _SILENT}


def _members(said: Mapping[int, Said], group: str) -> dict[int, GroupProgress]:
    return {rank: one.groups[group] for rank, one in said.items() if group in one.groups}


def _first_difference(members: Mapping[int, GroupProgress]) -> tuple[int | None, bool]:
    """Return the number of the first collective in which two ranks differ; whether any before it differ in names."""
    shown = [one for one in members.values() if one.links]
    differ_in_form = False
    for place in range(max((one.first for one in shown), default=0), max((one.count for one in shown), default=0)):
        links = {link.numbers: link for one in shown if place < one.count for link in (one.links[place - one.first],)}
        if len(links) > 1:
            some, *others = sorted(links.values(), key=lambda link: not link.sure)
            if not all(agree(some, other) for other in others):
                return place, differ_in_form
            differ_in_form = True
    return None, differ_in_form


def _issued(one: Said, group: str) -> int:
    return one.groups[group].issued if group in one.groups else 0


def _behind(rank: int, said: Mapping[int, Said]) -> set[int]:
    """Return the ranks that have issued less than this one in a group of both, or have not come to its meeting."""
    groups = said[rank].groups.items()
    late = {other for name, mine in groups for other in mine.ranks if _issued(said[other], name) < mine.issued}
    meeting = said[rank].meeting
    return late if meeting is None else late | {other for other in meeting.ranks if said[other].lacks_in(meeting)}


def _awaited_by(rank: int, behind: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that a rank waits for, directly or through others; itself, if these form a circle."""
    found: set[int] = set()
    work = [rank]
    while work:
        awaited = behind[work.pop()]
        work += awaited - found
        found |= awaited
    return found


def _text(said: Mapping[int, Said], ranks: Sequence[int], how: str, group: str = "", place: int = 0) -> str:
    """Say what each rank does: the collectives that it issues in a group from ``place`` on, or what it waits for."""
    members = _members(said, group)
    is_known = _silent(said).isdisjoint(ranks)
    by_line: dict[str, list[int]] = {}
    for rank in ranks:
        by_line.setdefault(_line(said[rank], members.get(rank), place), []).append(rank)
    agreed = f"They agree about the first {place}, then" if is_known else f"After {place} collectives"
    return "\n".join(
        [
            f"Ranks {_listed(ranks)} {how}" + (f" (process group {group}). {agreed}:" if group else ":"),
            *(f"  {_called(some)}: {line}" for line, some in by_line.items()),
            *([] if is_known else [_ON_DEATH]),
            ADVICE,
        ]
    )


def _slow(said: Mapping[int, Said], waiting: int, busy: Collection[int]) -> str:
    groups = (one for _, one in sorted(said[waiting].groups.items()) if not {*busy}.isdisjoint(one.ranks))
    mine = None if said[waiting].meeting else next(groups)
    slowest = said[next(iter(busy))]
    what = slowest.state or f"which has launched nothing for {slowest.idle_s:.0f} s"
    line = _line(said[waiting], mine, mine.issued if mine else 0)
    return f"rank {waiting}: {line}; it waits for {_called([*busy])}, {what}"


def _line(one: Said, group: GroupProgress | None, place: int) -> str:
    issued, last = "" if one.state in _SILENT else "issues nothing more", ""
    if group is not None and group.links:
        start = max(place - group.first, 0)
        shown = group.links[start : start + _AT_MOST]
        more = group.count - place - len(shown)
        if shown:
            issued = f"{shown[0].source}, {'; '.join(map(_link, shown))}{f'; and {more} more' if more > 0 else ''}"
        last = f"the last that it launched is the {_link(group.links[max(group.issued - group.first, 1) - 1])}"
    if one.meeting is not None:
        issued = f"waits for {one.meeting.what}"
    return " -- ".join(filter(None, [issued, one.state or last]))


def _link(link: ChainLink) -> str:
    shown = ", ".join(link.names[:6]) + (", ..." if len(link.names) > 6 else "")
    kind, _, how = link.wire.partition(",")[0].partition(" ")
    return f"{kind} of {shown} ({how})"


def _called(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} others"
    return ", ".join(map(str, ranks[:-1])) + (" and " if len(ranks) > 1 else "") + str(ranks[-1])
