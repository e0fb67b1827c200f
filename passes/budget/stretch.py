"""Predict a step of many layers from one with few: what happens in some of its periods happens so many times more.

    few          E | A   A  |B   B | H         time and bytes at each node; | is where a period begins
    with more    E | A A A A|B B B | H         A: 2 more. Each adds the seconds of A and the bytes that A leaves behind
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..cost.replay import Compute, Event, Launch, Wait, simulate
from ..wire.streams import TO_DEVICE, TO_HOST
from .periods import Periods
from .trial import Figures, Half, Trial

Begins = Sequence[tuple[int, int]]  # the place where a period begins, and which period


@dataclass(frozen=True)
class Replayed:
    """The seconds of one half of a step, and where its periods begin."""

    begins: Begins
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


def replayed(placed: Sequence[tuple[int, Event]], begins: Begins, more: Mapping[int, int]) -> Replayed:
    """Replay the events of one half, each with its place, and so many more of each period."""
    timeline = simulate(event for _, event in placed)
    places, begin_s = [place for place, _ in placed], [point.at_s for point in timeline.memory]
    seconds, times = timeline.total_s, [1] * len(placed)
    for (begin, turn), (end, _) in itertools.pairwise(begins):
        if turn in more:
            first, last = bisect_left(places, begin), bisect_left(places, end)
            seconds += more[turn] * (begin_s[last] - begin_s[first])
            times[first:last] = [1 + more[turn]] * (last - first)
    exposed_s = copied_s = 0.0
    for number, (_, event) in zip(times, placed):
        if isinstance(event, Wait):
            exposed_s += number * timeline.flights[event.name].exposed_s
        elif isinstance(event, Launch) and event.group in (TO_HOST, TO_DEVICE):
            copied_s += number * event.seconds
    return Replayed(begins, seconds, exposed_s, copied_s)


def stretched(alive: Sequence[int], begins: Begins, more: Mapping[int, int], before: int = 0) -> tuple[int, int]:
    """Return the most that is alive with so many more of each period, and what these leave behind.

    ``before`` is alive from the beginning on, for them.
    """
    places = [0, *(place for place, _ in begins), len(alive)]
    highest, extra = max(alive[: places[1]], default=0) + before, before
    for (begin, turn), end in zip(begins, places[2:]):
        most = max(alive[begin:end], default=0)
        left = more.get(turn, 0) * (alive[end] - alive[begin]) if turn in more else 0
        highest = max(highest, most + extra, most + extra + left)
        extra += left
    return highest, extra


def figures_of(trial: Trial, periods: Periods, more: Mapping[int, int]) -> Figures:
    """Return the figures of a trial of few periods, with so many more of each."""
    if not more:
        return Figures.of(trial)
    before, then = halves_of(trial, periods, more)
    forward_bytes, carried_bytes = stretched(trial.weight.forward, before.begins, more)
    backward_bytes, _ = stretched(trial.weight.backward, then.begins, more, carried_bytes)
    held_bytes = trial.weight.held_bytes + sum(more.values()) * periods.held_bytes
    return dataclasses.replace(
        Figures.of(trial),
        peak_bytes=held_bytes + max(forward_bytes, trial.weight.returned_bytes + backward_bytes),
        seconds=before.seconds + then.seconds,
        exposed_s=before.exposed_s + then.exposed_s,
        copied_s=before.copied_s + then.copied_s,
    )


def halves_of(trial: Trial, periods: Periods, more: Mapping[int, int]) -> tuple[Replayed, Replayed]:
    """Return the seconds of its forward and of its backward."""
    return _of_half(trial.forward, periods.forward, more), _of_half(trial.backward, periods.backward, more)


def _of_half(half: Half, turns: Mapping[str, int], more: Mapping[int, int]) -> Replayed:
    calls = [(place, node) for place, node in enumerate(half.graph.nodes) if node.op == "call_function"]
    events = {node: event for (_, node), event in zip(calls, half.events)}
    return replayed([(place, events[node]) for place, node in calls], begins_of(calls, turns, events), more)
