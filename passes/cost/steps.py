"""The steps of one half of a training step, and what it takes if some of its periods are repeated.

    all_gather_into_tensor(x)     launch, its seconds and group; its buffer comes
    wait_tensor                   wait for the last launch but one
    mm                            compute; its result comes, what it read last goes
    view                          nothing: left out

A wait says how many launches ago its own launch was. So equal layers have equal steps, whatever is computed in between,
and a half with more of them has their steps as often. Only the wait at the end of backward, for gradients on their way
to the host, is for as many copies as there are.

    few          E | A A A A |B B B B | H         | is where a block begins
    repeated           = =     = =                a period, and the next one with the same steps
    with more    E | A A a a A A |B B b B B | H

Next to another block a period differs from those of its own: it launches what the other needs, or waits for what that
launched. So the period that is repeated is one which the next of its block repeats, and that waits for collectives like
those it launches. Where a block has none, nothing is told.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .replay import Compute, Event, Launch, Timeline, Wait, simulate

LAUNCH, WAIT, COMPUTE = "launch", "wait", "compute"
Bytes = tuple[int, ...]  # of each kind that is told apart
Blocks = Mapping[range, int]  # periods that follow one another, and how many more are like them
Turn = tuple[bool, int]  # whether it is behind all periods, what their backward computes in forward; which period
NO_MORE: Blocks = {}


class Unsettled(Exception):
    """In a block, no period is as the one before it."""


@dataclass(frozen=True)
class Step:
    """One node that takes time or memory."""

    what: str  # LAUNCH, WAIT or COMPUTE
    seconds: float
    more: Bytes  # that are alive when it begins than when the one before it did; less than 0 if fewer are
    group: str = ""  # of a launch, or of all launches that a wait is for
    slows: float = 0.0  # of a launch: share of its speed that computation loses meanwhile
    link: str = ""  # of a launch: which other groups may share
    back: int = 0  # of a wait: 1 where it waits for the last launch before it, 2 for the one before; 0: for a group


@dataclass(frozen=True)
class Half:
    """A forward or a backward."""

    held: Bytes  # when it begins: by the caller, and in backward by what more periods saved in forward
    steps: tuple[Step, ...]
    begins: tuple[tuple[int, Turn], ...] = ()  # of periods: the place of the first computation, and which period

    def added(self) -> Bytes:
        """Return how many bytes more are there at the end than at the begin."""
        added = (0,) * len(self.held)
        for step in self.steps:
            added = plus(added, step.more)
        return added


def plus(left: Bytes, right: Bytes, times: int = 1) -> Bytes:
    return tuple(one + times * other for one, other in zip(left, right))


def half_along(
    rows: Iterable[tuple[str, Sequence[Event]]], alive: Iterable[Bytes], turns: Mapping[str, Turn], held: Bytes
) -> Half:
    """Return a half by its nodes' names and events, and the bytes alive at each; ``turns`` has the nodes' periods."""
    steps: list[Step] = []
    begins: dict[Turn, int] = {}
    launched: dict[str, tuple[int, str]] = {}
    nothing = before = (0,) * len(held)
    for (name, events), now in zip(rows, alive, strict=True):
        more, before = plus(now, before, -1), now
        events = [one for one in events if not isinstance(one, Compute) or one.seconds > 0]
        if name in turns and (any(isinstance(one, Compute) for one in events) or (turns[name][0] and any(more))):
            begins.setdefault(turns[name], len(steps))
        for event in events or ([Compute(name, 0.0)] if any(more) else ()):
            steps.append(_step_of(event, more, launched))
            more = nothing
    return Half(held, tuple(steps), tuple(sorted((place, turn) for turn, place in begins.items())))


def _step_of(event: Event, more: Bytes, launched: dict[str, tuple[int, str]]) -> Step:
    """Return the step of an event; ``launched`` has the turn and the group of each launch, and gets its own."""
    if isinstance(event, Launch):
        launched[event.name] = len(launched), event.group
        return Step(LAUNCH, event.seconds, more, event.group, event.slows_compute, event.link)
    if isinstance(event, Wait):
        turn, group = launched[event.name]
        if event.others:
            assert {launched[name][1] for name in event.others} == {group}, "a wait is for copies in one lane"
            return Step(WAIT, 0.0, more, group)
        return Step(WAIT, 0.0, more, back=len(launched) - turn)
    return Step(COMPUTE, event.seconds, more)


def replay(half: Half) -> Timeline:
    """Replay a half: how long it takes, and how much of that is waiting."""
    events: list[Event] = []
    launched: list[int] = []
    for place, step in enumerate(half.steps):
        if step.what == WAIT:
            last, *others = [launched[-step.back]] if step.back else _of_group(half, launched, step.group)
            events.append(Wait(str(last), others=tuple(map(str, others))))
        elif step.what == LAUNCH:
            launched.append(place)
            events.append(Launch(str(place), step.seconds, step.group, slows_compute=step.slows, link=step.link))
        else:
            events.append(Compute(str(place), step.seconds))
    return simulate(events)


def _of_group(half: Half, launched: Iterable[int], group: str) -> list[int]:
    """Return the launches of a group, the last one first."""
    return [place for place in launched if half.steps[place].group == group][::-1]


def peak(half: Half) -> Bytes:
    """Return the bytes by kind when most are alive."""
    alive = half.held
    most, highest = sum(alive), alive
    for step in half.steps:
        alive = plus(alive, step.more)
        if sum(alive) > most:
            most, highest = sum(alive), alive
    return highest


def settled(half: Half, blocks: Blocks) -> dict[Turn, int]:
    """Return for each block a period that the next one repeats, and how many more there are."""
    same: dict[Turn, tuple[Step, ...]] = {}
    launched: list[Step] = []
    together = {step.group for step in half.steps if step.what == WAIT and not step.back}
    none = False, -1
    for (begin, turn), (end, _) in itertools.pairwise([(0, none), *half.begins, (len(half.steps), none)]):
        its, first, awaited = half.steps[begin:end], len(launched), []
        for step in its:
            launched += [step] if step.what == LAUNCH else []
            awaited += [launched[-step.back]] if step.back else []
        alone = (one for one in launched[first:] if one.group not in together)
        if _kinds(awaited) == _kinds(alone):  # else it cannot go on so, though the next one may do the same
            same[turn] = its
    found: dict[Turn, int] = {}
    for (turns, more), is_behind in itertools.product(blocks.items(), (False, True)):
        which = [turn for _, turn in half.begins if turn[0] == is_behind and turn[1] in turns]
        alike = [turn for turn, then in itertools.pairwise(which) if turn in same and same[turn] == same.get(then)]
        if alike:
            found[alike[-1]] = more
        elif which or not is_behind:
            raise Unsettled
    return found


def _kinds(launches: Iterable[Step]) -> list[tuple[str, float]]:
    return sorted((one.group, one.seconds) for one in launches)


def lengthened(
    halves: tuple[Half, Half], more: tuple[Mapping[Turn, int], Mapping[Turn, int]], held: Bytes
) -> tuple[Half, Half]:
    """Return forward and backward with so many more of each period, for which the caller holds ``held``."""
    forward, backward = map(_repeated, halves, more)
    saved = plus(forward.added(), halves[0].added(), -1)
    return (
        dataclasses.replace(forward, held=plus(forward.held, held)),
        dataclasses.replace(backward, held=plus(plus(backward.held, held), saved)),
    )


def _repeated(half: Half, more: Mapping[Turn, int]) -> Half:
    steps = [*half.steps]
    launched = [0, *itertools.accumulate(step.what == LAUNCH for step in steps)]
    inserts = [(begin, end, more[turn]) for (begin, turn), (end, _) in itertools.pairwise(half.begins) if turn in more]
    for begin, end, times in inserts:  # what was launched before a period, and is not awaited in it, is now longer ago
        farthest = max((step.back for step in half.steps[begin:end]), default=0)
        passed = times * (launched[end] - launched[begin])
        for place in range(end, len(steps)):
            if half.steps[place].back > max(farthest, launched[place] - launched[begin]):
                steps[place] = dataclasses.replace(steps[place], back=steps[place].back + passed)
    for begin, end, times in reversed(inserts):
        steps[end:end] = steps[begin:end] * times
    return dataclasses.replace(half, steps=tuple(steps), begins=())
