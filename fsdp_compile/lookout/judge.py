"""Decide from what ranks say of themselves whether they have parted: data in, a text out.

    answers of all ranks  ->  the first place in a group where two of them issue different collectives  ->  parted
                          ->  somebody is ahead of one that has left, or of one that is ahead of it     ->  parted
                          ->  somebody is ahead of one that has issued nothing for long                 ->  slow

A rank that is ahead of another one, in a group of both, waits for it or soon will. Ranks that issue the same are never
ahead of each other in a circle: one of them has issued all that the other one has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .chain import Link, agree

ADVICE = (
    "Every rank must run the same units in the same order: where data decides, write the branch with torch.cond, or "
    "have every rank run both sides."
)
HAS_LEFT, SAYS_NOTHING = "has left", "says nothing"


@dataclass(frozen=True)
class Group:
    """The last collectives that a rank issued in one process group."""

    ranks: tuple[int, ...]
    first: int  # number of the first collective in ``links``
    links: tuple[Link, ...]
    sources: tuple[str, ...]
    issued: int  # collectives that were handed to the group; more may be listed, of the graph that runs

    @property
    def count(self) -> int:
        return self.first + len(self.links)


@dataclass(frozen=True)
class Answer:
    """What one rank says when it is asked."""

    state: str = ""  # HAS_LEFT or SAYS_NOTHING
    idle_s: float = 0.0  # for so long it has issued nothing
    groups: Mapping[str, Group] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether ranks have parted, and if so how; and the groups where they call the same parameters differently."""

    text: str = ""
    nameless: tuple[str, ...] = ()
    slow: str = ""  # which ranks are busy and keep another one waiting


def judge(answers: Mapping[int, Answer], waiting: int | None = None, idle_s: float = 0.0) -> Verdict:
    """Judge all ranks' answers; if a rank was idle for ``idle_s``, and so they were asked, that one is ``waiting``."""
    nameless = []
    for group in sorted({group for answer in answers.values() for group in answer.groups}):
        members = _members(answers, group)
        place, differ_in_form = _first_difference(members)
        if place is not None:
            return Verdict(_text(answers, group, members, place, "issue different collectives"))
        if differ_in_form:
            nameless.append(group)
    if waiting is None:
        return Verdict(nameless=tuple(nameless))
    behind = {rank: _behind(rank, answers) if answer.idle_s >= idle_s else set() for rank, answer in answers.items()}
    involved = {waiting} | _awaited_by(waiting, behind)
    stuck = {rank for rank in involved if rank in _awaited_by(rank, behind) or answers[rank].state == HAS_LEFT}
    for group in sorted(answers[waiting].groups):
        members = _members(answers, group)
        # Only of the ranks that are waited for: another rank may have gone on since ``waiting`` said that it is idle.
        issued = {one.issued for rank, one in members.items() if rank in involved}
        if len(issued) > 1 and not stuck.isdisjoint(members):
            text = _text(answers, group, members, min(issued), "wait for one another")
            return Verdict(text, tuple(nameless))
    idle = [rank for rank in sorted(involved) if answers[rank].idle_s >= idle_s or answers[rank].state]
    busy = [rank for rank in idle if rank != waiting and not behind[rank]]
    return Verdict(nameless=tuple(nameless), slow=_slow(answers, waiting, busy) if busy else "")


def _members(answers: Mapping[int, Answer], group: str) -> dict[int, Group]:
    return {rank: answer.groups[group] for rank, answer in answers.items() if group in answer.groups}


def _first_difference(members: Mapping[int, Group]) -> tuple[int | None, bool]:
    """Return the number of the first collective in which two ranks differ; whether any before it differ in names."""
    first, end = max(one.first for one in members.values()), max(one.count for one in members.values())
    differ_in_form = False
    for place in range(first, end):
        links = {one.links[place - one.first] for one in members.values() if place < one.count}
        if len(links) > 1:
            some, *others = sorted(links, key=lambda link: not link.sure)
            if not all(agree(some, other) for other in others):
                return place, differ_in_form
            differ_in_form = True
    return None, differ_in_form


def _behind(rank: int, answers: Mapping[int, Answer]) -> set[int]:
    """Return the ranks that have issued less than this one in a group of both."""
    return {
        other
        for group, mine in answers[rank].groups.items()
        for other in mine.ranks
        if group not in answers[other].groups or answers[other].groups[group].issued < mine.issued
    }


def _awaited_by(rank: int, behind: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that a rank waits for, directly or through others; itself, if these form a circle."""
    found: set[int] = set()
    work = [rank]
    while work:
        awaited = behind[work.pop()]
        work += awaited - found
        found |= awaited
    return found


def _text(answers: Mapping[int, Answer], group: str, members: Mapping[int, Group], place: int, how: str) -> str:
    ranks = next(iter(members.values())).ranks
    lines = {rank: _line(answers[rank], members.get(rank), place) for rank in ranks if rank in answers}
    texts = [f"  {_called(some)}: {line}" for line, some in _by_line(lines)]
    return "\n".join(
        [
            f"Ranks {_listed(ranks)} {how} (process group {group}). They agree about the first {place}, then:",
            *texts,
            ADVICE,
        ]
    )


def _slow(answers: Mapping[int, Answer], waiting: int, busy: Collection[int]) -> str:
    group = next(name for name, one in sorted(answers[waiting].groups.items()) if not {*busy}.isdisjoint(one.ranks))
    mine = answers[waiting].groups[group]
    slowest = answers[next(iter(busy))]
    what = slowest.state or f"which has launched nothing for {slowest.idle_s:.0f} s"
    return f"rank {waiting}: {_line(answers[waiting], mine, mine.issued)}; it waits for {_called([*busy])}, {what}"


def _line(answer: Answer, group: Group | None, place: int, at_most: int = 4) -> str:
    if group is None or place >= group.count:
        issued = "issues nothing more"
    else:
        start = place - group.first
        shown = [_link(link) for link in group.links[max(start, 0) : start + at_most]]
        more = group.count - place - len(shown)
        issued = f"{group.sources[max(start, 0)]}, {'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}"
    if answer.state:
        return f"{issued} -- {answer.state}"
    if group is None or not group.links:
        return issued
    last = group.links[min(max(group.issued - group.first, 1), len(group.links)) - 1]
    return f"{issued} -- the last that it launched is the {_link(last)}"


def _link(link: Link) -> str:
    shown = ", ".join(link.names[:6]) + (", ..." if len(link.names) > 6 else "")
    kind, _, how = link.wire.partition(",")[0].partition(" ")
    return f"{kind} of {shown} ({how})"


def _by_line(lines: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for rank in sorted(lines):
        found.setdefault(lines[rank], []).append(rank)
    return list(found.items())


def _called(ranks: list[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {_listed(ranks)}"


def _listed(ranks: list[int] | tuple[int, ...]) -> str:
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} others"
    return ", ".join(map(str, ranks[:-1])) + (" and " if len(ranks) > 1 else "") + str(ranks[-1])
