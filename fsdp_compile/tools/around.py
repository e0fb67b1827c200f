"""The eager path's collectives around units that are compiled by themselves or in parts. No graph has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.unit import Unit
from ..eager.running import running
from ..passes.schedule.buckets import gather_buckets, reduce_buckets
from .tables import format_bytes, format_unit, table


@dataclass(frozen=True)
class Around:
    """The collectives of one forward and one backward of a unit, if it trains and its gradients are reduced."""

    unit: str  # "layers.0 (Block)"
    num_params: int
    num_gathers: int  # in forward
    num_again: int  # in backward
    gathered_bytes: int  # one rank's part
    num_reductions: int
    reduced_bytes: int


def around(unit: Unit) -> Around:
    """Count the collectives that the eager path launches around the unit's graphs."""
    gathered = running(unit).current()
    specs = gathered.specs
    train = [spec for spec, shard in zip(specs, gathered.shards) if shard.requires_grad]
    sent = [spec for spec in specs if spec.num_shards > 1]
    reduced = [spec for spec in train if spec.num_shards > 1 or spec.num_replicas > 1]
    return Around(
        unit=format_unit(_labelled(unit)),
        num_params=len(specs),
        num_gathers=len(gather_buckets(sent)),
        num_again=len(gather_buckets([spec for spec in sent if not spec.is_table])) if unit.regather else 0,
        gathered_bytes=sum(spec.gather_bytes for spec in sent),
        num_reductions=len(reduce_buckets(reduced)),
        reduced_bytes=sum(spec.reduce_bytes for spec in reduced),
    )


def _labelled(unit: Unit) -> str:
    """Return the unit's name as plans write it: class and path."""
    return f"{unit.label}:{unit.path_of(unit.modules[0])}"


def table_of(units: Iterable[Around]) -> str:
    """Return a table with one line for all units that differ only in their names."""
    alike: dict[tuple[int, int, int, int, int, int], list[str]] = {}
    for one in units:
        sent = (one.num_gathers, one.gathered_bytes, one.num_again, one.num_reductions, one.reduced_bytes)
        alike.setdefault((one.num_params, *sent), []).append(one.unit)
    rows = [["unit", "params", "gathers", "bytes/rank", "in backward", "reductions", "bytes/rank"]]
    for (params, gathers, gathered, again, reductions, reduced), names in alike.items():
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        in_backward = "again" if again else "kept"
        cells = [str(gathers), format_bytes(gathered), in_backward, str(reductions), format_bytes(reduced)]
        rows.append([names[0] + more, str(params), *cells])
    lines = table(rows, right=(1, 2, 3, 5, 6))
    return "\n".join(["around graphs, by the eager path:", *[f"  {line}" for line in lines]])
