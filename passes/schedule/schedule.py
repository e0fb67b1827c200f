"""The collectives of a step and their order: a function of the parameters that it uses, one after another.

    uses         w0 b0 | w1 b1 | w2 b2                   a unit each
    forward      G0    | G1    | G2                      each launched when the unit before it begins
    backward     G2 G1 | R2 G0 | R1 | R0                 gathered one unit ahead, reduced when the gradients are there

A unit is gathered as a whole where it, or a unit inside it, is first used. But in forward the outermost unit comes in
parts, each bucket where it is first used: the embedding at the begin, the head at the end. Backward gathers a unit as a
whole where it comes to it, a unit before those inside it. Nothing here knows a graph, a batch or a tensor: the planner
says which parameters a graph uses, and where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Protocol

from ..ir.plan import Bucket, Plan
from ..wire.spec import ParamSpec, without_use
from .buckets import gather_buckets, reduce_buckets
from .neighbours import with_neighbours
from .uses import Turn, UsedParam, by_unit, outermost, units_around

# The order of what is launched at one place; ``_BEHIND`` are gathers that wait for a reduction.
_GATHERS, _REDUCTIONS, _BEHIND = 0, 1, 2


class SentParam(Protocol):
    """A parameter in a bucket."""

    @property
    def spec(self) -> ParamSpec: ...
    @property
    def fqn(self) -> str: ...


def launches(
    stage: str,
    gathers: Sequence[UsedParam],
    reduces: Sequence[UsedParam],
    *,
    backwards: bool = False,
    phase: int = 0,
    kept: Mapping[str, int] | None = None,
    lookahead: int = 1,
) -> Plan:
    """Return the plan of a graph, or of a phase: what is launched for these uses, in one order.

    ``kept`` says where backward has the first gradient of each unit that it finds gathered.
    """
    gathered, reduced = _placed_gathers(gathers, backwards), _placed_reductions(reduces)
    away = {one.unit for one in gathers}
    found = sorted(place for unit, place in (kept or {}).items() if unit not in away)
    return Plan(
        stage=stage,
        gathers=tuple(dataclasses.replace(bucket, phase=phase) for _, bucket in gathered),
        reduces=tuple(dataclasses.replace(bucket, phase=phase) for _, bucket in reduced),
        order=_order(gathered, reduced, found, lookahead),
        lookahead=lookahead,
    )


def _placed_gathers(uses: Sequence[UsedParam], backwards: bool) -> list[tuple[int, Bucket]]:
    """Return the gathers in the order of launch, each with the place that it is for."""
    units = by_unit(with_neighbours(uses, small_end=0))
    around = units_around(units)
    first = {unit: min(one.turn for one in members) for unit, members in units.items()}
    begins = dict(first)  # of each unit, with the units inside it
    for unit, outer in around.items():
        begins.update((one, min(begins[one], first[unit])) for one in outer)
    come_in_parts = set() if backwards else outermost(around)
    placed = []
    for unit, members in units.items():
        for number, indices in enumerate(gather_buckets([one.spec for one in members])):
            chosen = [members[index] for index in indices]
            turn = min(one.turn for one in chosen) if unit in come_in_parts else begins[unit]
            bucket = bucket_of("gather", unit, chosen)
            placed.append((turn, len(around[unit]), -number if backwards else number, bucket))
    return [(place, bucket) for (place, _), *_, bucket in sorted(placed, key=lambda one: one[:3])]


def _placed_reductions(uses: Sequence[UsedParam]) -> list[tuple[int, Bucket]]:
    """Return the reductions in the order of launch, each with the place where its gradients are there.

    A unit's buckets have their own order, so a reduction waits for those before it.
    """
    placed = []
    for unit, members in by_unit(with_neighbours(uses, small_end=-1)).items():
        ready: Turn = (0, ())
        for indices in reduce_buckets([one.spec for one in members]):
            chosen = [members[index] for index in indices]
            ready = max(ready, *(one.turn for one in chosen))
            placed.append((ready, bucket_of("reduce", unit, chosen)))
    return [(place, bucket) for (place, _), bucket in sorted(placed, key=itemgetter(0))]


def _order(
    gathers: Sequence[tuple[int, Bucket]], reduces: Sequence[tuple[int, Bucket]], found: Sequence[int], lookahead: int
) -> tuple[tuple[str, int], ...]:
    """Return every launch in one order: a unit's gathers where the unit before it begins, reductions when ready.

    On the eager path, all uses of a unit have one memory: a use is gathered when the use before it is reduced, or, if
    no other unit comes between the two, where it begins itself. No gather is launched before one that is used earlier.
    ``found`` says where units begin that are gathered already.
    """
    reduced = {bucket.unit: place for place, bucket in reduces}  # the last of each unit's
    begins: list[int] = []  # of each unit in turn: where it is first read
    freed: dict[str, int] = {}  # of each unit, in whatever use: where its memory is free again
    events: list[tuple[int, int, str, int]] = []
    before, launched = "", (-1, _GATHERS)
    for index, (place, bucket) in enumerate(gathers):
        unit = without_use(bucket.unit)
        if bucket.unit != before:
            earlier = sorted([*begins, *(found_at for found_at in found[1:] if found_at < place)])
            if begins or len(earlier) >= lookahead:  # else with the graph begins what it reads first
                launched = max(launched, (earlier[max(0, len(earlier) - lookahead)], _GATHERS))
            if unit == without_use(before):
                launched = max(launched, (place, _GATHERS))
            if unit in freed and freed[unit] < place:  # else it computes both uses before it reduces one
                launched = max(launched, (freed[unit], _BEHIND))
            begins.append(place)
            before = bucket.unit
            if bucket.unit in reduced:
                freed[unit] = reduced[bucket.unit]
        events.append((*launched, "gather", index))
    events += [(place, _REDUCTIONS, "reduce", index) for index, (place, _) in enumerate(reduces)]
    return tuple((kind, index) for _, _, kind, index in sorted(events))


def bucket_of(kind: str, unit: str, members: Sequence[SentParam]) -> Bucket:
    """Return what travels in one all-gather, or in one reduction."""
    specs = [one.spec for one in members]
    first, is_gather = specs[0], kind == "gather"
    return Bucket(
        unit=unit,
        fqns=tuple(one.fqn for one in members),
        dtype=str(first.dtype if is_gather else first.reduce_dtype).removeprefix("torch."),
        num_bytes=sum(spec.gather_bytes if is_gather else spec.reduce_bytes for spec in specs),
        num_ranks=first.num_shards,
        num_replicas=1 if is_gather else first.num_replicas,
    )
