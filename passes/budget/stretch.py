"""Predict a step of many layers from one with few: what happens in some of its periods happens so many times more.

    few          E | A A A A |B B B B | H         time and bytes at each node; | is where a block begins
    repeated           = =     = =                the same events, and as many bytes more at each
    with more    E | A A a a A A |B B b B B | H   the events are replayed; each leaves its bytes behind

Next to another block a period differs from those of its own: it launches what the other needs, or waits for what that
launched. So the period that is repeated is one which the next of its block repeats, and that awaits collectives like
those it launches. Nothing is told of a block without any.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..cost.replay import Compute, Event, Launch, Wait, bare, simulate
from ..wire.streams import TO_DEVICE, TO_HOST
from .periods import Periods
from .trial import Figures, Half, Trial

Begins = Sequence[tuple[int, int]]  # the place where a period begins, and which period
Blocks = Mapping[range, int]  # periods that follow one another, and how many more are like them


class Unsettled(Exception):
    """In a block, no period is as the one before it."""


@dataclass(frozen=True)
class Replayed:
    """The seconds of one half of a step, where its periods begin, and how often each is repeated."""

    begins: Begins
    more: Mapping[int, int]
    seconds: float
    exposed_s: float
    copied_s: float  # of copies to the host and back, each alone


def begins_of(
    order: Sequence[tuple[int, fx.Node]], turns: Mapping[str, int], events: Mapping[fx.Node, Event]
) -> Begins:
    """Return the place of each period's first computation, in order."""
    found: dict[int, int] = {}
    for place, node in order:
        if node.name in turns and isinstance(event := events.get(node), Compute) and event.seconds > 0:
            found.setdefault(turns[node.name], place)
    return sorted((place, turn) for turn, place in found.items())


def replayed(placed: Sequence[tuple[int, Event]], begins: Begins, alive: Sequence[int], blocks: Blocks) -> Replayed:
    """Replay the events of one half, each with its place, and more of some period in each block."""
    more = _settled(placed, begins, alive, blocks)
    try:
        timeline = simulate(_repeated(placed, begins, more))
    except ValueError as error:  # something waits over a whole block
        raise Unsettled from error
    copies = [one.launch for one in timeline.flights.values() if one.launch.group in (TO_HOST, TO_DEVICE)]
    return Replayed(begins, more, timeline.total_s, timeline.exposed_s, sum(one.seconds for one in copies))


def _repeated(placed: Sequence[tuple[int, Event]], begins: Begins, more: Mapping[int, int]) -> list[Event]:
    """Return the events with more of each period; a wait is for the launch as many launches ago as before."""
    backs: list[list[int]] = []
    turn_of: dict[str, int] = {}
    for _, event in placed:
        awaited = (event.name, *event.others) if isinstance(event, Wait) else ()
        backs.append([len(turn_of) - turn_of[name] for name in awaited])
        if isinstance(event, Launch):
            turn_of[event.name] = len(turn_of)
    places = [place for place, _ in placed]
    which = [*range(len(placed))]
    for (begin, turn), (end, _) in reversed([*itertools.pairwise(begins)]):
        first, last = bisect_left(places, begin), bisect_left(places, end)
        which[last:last] = [*range(first, last)] * more.get(turn, 0)
    events: list[Event] = []
    launched: list[str] = []
    for number, at in enumerate(which):
        event, name = placed[at][1], str(number)
        if isinstance(event, Wait):
            name, *others = (launched[-back] for back in backs[at])
            events.append(Wait(name, others=tuple(others)))
        else:
            events.append(dataclasses.replace(bare(event), name=name))
        if isinstance(event, Launch):
            launched.append(name)
    return events


def _settled(
    placed: Sequence[tuple[int, Event]], begins: Begins, alive: Sequence[int], blocks: Blocks
) -> dict[int, int]:
    """Return a period of each block that the next one repeats, and how many more there are."""
    places = [place for place, _ in placed]
    launched = {event.name: (place, event) for place, event in placed if isinstance(event, Launch)}
    shapes: dict[int, object] = {}
    for (begin, turn), (end, _) in itertools.pairwise([*begins, (len(alive), -1)]):
        inside = placed[bisect_left(places, begin) : bisect_left(places, end)]
        waits = [(event.name, *event.others) for _, event in inside if isinstance(event, Wait)]
        awaited = [launched[name][1] for name in itertools.chain(*waits)]
        of_its_own = [event for _, event in inside if isinstance(event, Launch)]
        events = [
            (at - begin, at - launched[event.name][0] if isinstance(event, Wait) else event.seconds)
            for at, event in inside
        ]
        if _kinds(awaited) == _kinds(of_its_own):  # else it cannot go on so, though the next period may do the same
            shapes[turn] = [one - alive[begin] for one in alive[begin:end]], events
    found: dict[int, int] = {}
    for turns, more in blocks.items():
        its = [turn for _, turn in begins if turn in turns]
        same = [turn for turn, then in itertools.pairwise(its) if turn in shapes and shapes[turn] == shapes.get(then)]
        if not same:
            raise Unsettled
        found[same[-1]] = more
    return found


def _kinds(launches: Iterable[Launch]) -> list[tuple[str, float]]:
    return sorted((one.group, one.seconds) for one in launches)


def stretched(alive: Sequence[int], half: Replayed, before: int = 0) -> tuple[int, int]:
    """Return the most that is alive with so many more of each period, and what these leave behind.

    ``before`` is alive from the beginning on, for them.
    """
    places = [0, *(place for place, _ in half.begins), len(alive)]
    highest, extra = max(alive[: places[1]], default=0) + before, before
    for (begin, turn), end in zip(half.begins, places[2:]):
        most = max(alive[begin:end], default=0)
        left = half.more[turn] * (alive[end] - alive[begin]) if turn in half.more else 0
        highest = max(highest, most + extra, most + extra + left)
        extra += left
    return highest, extra


def figures_of(trial: Trial, periods: Periods, blocks: Blocks) -> Figures:
    """Return the figures of a trial of few periods, with so many more in each block."""
    if not blocks:
        return Figures.of(trial)
    before, then = halves_of(trial, periods, blocks)
    forward_bytes, carried_bytes = stretched(trial.weight.forward, before)
    backward_bytes, _ = stretched(trial.weight.backward, then, carried_bytes)
    held_bytes = trial.weight.held_bytes + sum(blocks.values()) * periods.held_bytes
    stays = trial.weight.stays.items()
    held_bytes += sum(num_bytes * before.more.get(periods.forward.get(name, -1), 0) for name, num_bytes in stays)
    return dataclasses.replace(
        Figures.of(trial),
        peak_bytes=held_bytes + max(forward_bytes, trial.weight.returned_bytes + backward_bytes),
        seconds=before.seconds + then.seconds,
        exposed_s=before.exposed_s + then.exposed_s,
        copied_s=before.copied_s + then.copied_s,
    )


def halves_of(trial: Trial, periods: Periods, blocks: Blocks) -> tuple[Replayed, Replayed]:
    """Return the seconds of its forward and of its backward."""
    return (
        _of_half(trial.forward, periods.forward, trial.weight.forward, blocks),
        _of_half(trial.backward, periods.backward, trial.weight.backward, blocks),
    )


def _of_half(half: Half, turns: Mapping[str, int], alive: Sequence[int], blocks: Blocks) -> Replayed:
    calls = [(place, node) for place, node in enumerate(half.graph.nodes) if node.op == "call_function"]
    events = {node: event for (_, node), event in zip(calls, half.events)}
    return replayed([(place, events[node]) for place, node in calls], begins_of(calls, turns, events), alive, blocks)
