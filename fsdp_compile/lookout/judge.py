"""Decide from what ranks say of themselves whether they have parted: data in, a text out.

    answers of all ranks  ->  the first place in a group where two of them issue different collectives  ->  parted
                          ->  somebody waits for one that waits for somebody else, or has left          ->  parted
                          ->  somebody waits for one that is busy with something else                   ->  slow
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .chain import Link, agree

ADVICE = (
    "Every rank must run the same units in the same order: where data decides, write the branch with torch.cond, or "
    "have every rank run both sides."
)


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

    doing: str  # "waits": for a collective of ours; "waits elsewhere"; "runs"; "has left"; "says nothing"
    where: str = ""  # the innermost line that is neither torch's nor ours
    groups: Mapping[str, Group] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether ranks have parted, and if so how; and the groups where they call the same parameters differently."""

    text: str = ""
    nameless: tuple[str, ...] = ()
    slow: str = ""  # which ranks are busy and keep another one waiting


def judge(answers: Mapping[int, Answer], waiting: int | None = None) -> Verdict:
    """Judge all ranks' answers; ``waiting`` is a rank that has waited for too long, if that is why they were asked."""
    nameless = []
    for group in sorted({group for answer in answers.values() for group in answer.groups}):
        members = {rank: answer.groups[group] for rank, answer in answers.items() if group in answer.groups}
        place, differ_in_form = _first_difference(members)
        if place is not None:
            return Verdict(_text(answers, group, members, place, "issue different collectives"))
        if differ_in_form:
            nameless.append(group)
    if waiting is None:
        return Verdict(nameless=tuple(nameless))
    involved = _awaited_by(waiting, answers)
    busy = sorted(rank for rank in involved if answers[rank].doing in ("runs", "says nothing"))
    if busy:
        group = _group_of(answers[waiting])
        return Verdict(nameless=tuple(nameless), slow=_slow(answers, waiting, group, busy))
    for group in sorted(answers[waiting].groups):
        members = {rank: answer.groups[group] for rank, answer in answers.items() if group in answer.groups}
        # Only of the ranks that are waited for: another rank may have gone on since ``waiting`` said that it waits.
        issued = {one.issued for rank, one in members.items() if rank in involved}
        if len(issued) > 1:
            place = min(issued)
            return Verdict(_text(answers, group, members, place, "wait for one another"), tuple(nameless))
    return Verdict(nameless=tuple(nameless))  # all are in the same place: the network is slow


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


def _awaited_by(waiting: int, answers: Mapping[int, Answer]) -> set[int]:
    """Return the rank that waits, and the ranks that it waits for, directly or through others."""
    involved, work = {waiting}, [waiting]
    while work:
        rank = work.pop()
        answer = answers[rank]
        if answer.doing == "waits elsewhere":
            awaited = set(answers)  # in a collective that we know nothing of
        elif answer.doing == "waits":
            awaited = {
                other
                for group, mine in answer.groups.items()
                for other in mine.ranks
                if group not in answers[other].groups or answers[other].groups[group].issued < mine.issued
            }
        else:
            awaited = set()
        work += awaited - involved
        involved |= awaited
    return involved


def _group_of(answer: Answer) -> str:
    return next(iter(sorted(answer.groups)), "")


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


def _slow(answers: Mapping[int, Answer], waiting: int, group: str, busy: list[int]) -> str:
    mine = answers[waiting].groups.get(group)
    return (
        f"rank {waiting}: {_line(answers[waiting], mine, mine.issued if mine else 0)}; it waits for "
        f"{_called(busy)}, {answers[busy[0]].doing}{_at(answers[busy[0]])}"
    )


def _line(answer: Answer, group: Group | None, place: int, at_most: int = 4) -> str:
    if group is None or place >= group.count:
        issued = "issues nothing more"
    else:
        start = place - group.first
        shown = [_link(link) for link in group.links[max(start, 0) : start + at_most]]
        more = group.count - place - len(shown)
        issued = f"{group.sources[max(start, 0)]}, {'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}"
    doing = answer.doing
    if doing == "waits" and group is not None and group.links:
        last = group.links[min(max(group.issued - group.first, 1), len(group.links)) - 1]
        doing = f"waits, the last that it launched being the {_link(last)}"
    return f"{issued} -- {doing}{_at(answer)}"


def _at(answer: Answer) -> str:
    return f" at {answer.where}" if answer.where else ""


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
