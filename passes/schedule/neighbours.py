"""With ``bucketing="neighbours"``, small units travel with their neighbours: every collective has a fixed cost.

    unit              1     2     3     4     5     6           each 0.8 MiB gathered, 8 MiB may travel together
    as they are       G1    G2    G3    G4    G5    G6
    neighbours        G1    G2 G3 G4 G5 G6 ...                  the first group is small: no compute hides it
    reductions        ...             R6 R5 R4 R3 R2    R1      and so is the last group

Later passes treat a group as one unit: its gathers are launched when the group before it begins to compute, and the
gathered parameters are alive for as long as any unit of the group needs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from ..wire.layout import NEIGHBOURS, bucket_limits
from ..wire.spec import ParamSpec
from .uses import UsedParam, by_unit

_SHARE_OF_ENDS = 8  # the group at the end that nothing hides may have an eighth of the limit


def with_neighbours(uses: Sequence[UsedParam], small_end: int) -> list[UsedParam]:
    """Return the uses in the order of their turns, each with the name of the group that its unit travels in.

    ``small_end`` is 0 if the first group is to be small, as for gathers: a unit has its turn when its first parameter
    is read. It is -1 if the last group is, as for reductions, which wait for a unit's last gradient: a root has its
    first one (of the head) when backward begins, and its last one (of the embedding) at the end.
    """
    if not any(one.spec.bucketing == NEIGHBOURS for one in uses):
        return [*uses]
    units = by_unit(uses)
    launched = max if small_end else min
    in_order = sorted(units, key=lambda unit: launched(one.turn for one in units[unit]))
    groups = neighbours_among({unit: [one.spec for one in units[unit]] for unit in in_order}, small_end)
    return [
        dataclasses.replace(
            one, unit=_called(group), spec=dataclasses.replace(one.spec, order=number * _MOST + one.spec.order)
        )
        for group in groups
        for number, unit in enumerate(group)
        for one in units[unit]
    ]


def neighbours_among(
    units: Mapping[str, Sequence[ParamSpec]], small_end: int, asking: Collection[str] = (NEIGHBOURS,)
) -> list[list[str]]:
    """Group units, given in the order of their turns, that travel together: all their parameters must ask for it."""
    groups: list[list[str]] = []
    room = 0
    for unit in [*units][::-1] if small_end else units:
        num_bytes = sum(spec.gather_bytes * spec.num_shards for spec in units[unit])
        limit = _limit(units[unit], asking)
        if groups and limit and num_bytes <= room:
            groups[-1].append(unit)
        else:
            room = limit if groups else limit // _SHARE_OF_ENDS
            groups.append([unit])
        room -= num_bytes
    return [group[::-1] for group in reversed(groups)] if small_end else groups


_MOST = 1 << 20  # more than a unit has parameters: those of one unit stay together in a bucket


def _limit(members: Sequence[ParamSpec], asking: Collection[str]) -> int:
    """Return how many bytes may travel together with these; 0 if one of them asks for another bucketing."""
    asked = all(spec.bucketing in asking for spec in members)
    return bucket_limits(members[0].backend, members[0].num_shards).neighbours_bytes if asked else 0


def _called(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} to {group[-1].rpartition(':')[2]}"
