"""One graph's part of an inspection: its collectives and what the passes did, as data and as plain-text tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch_compat as compat
from ..passes import GraphRecord, Plan
from ..passes.collectives import is_launch
from ..passes.copies import to_device, to_host
from ..passes.insert import ROLE
from ..passes.provenance import Marker, find_reduces, find_unshards

_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_NAMES_WIDTH = 44


@dataclass(frozen=True)
class Collective:
    """One launch in a graph."""

    node: fx.Node
    kind: str
    unit: str  # "layers.0 (Block)"
    fqns: tuple[str, ...]
    dtype: str
    num_bytes: int  # one rank's part
    bucket_bytes: int  # all ranks' parts, padding included; of an all_reduce over replicas, one of the equal parts
    host_bytes: int = 0  # of offloaded shards: copied from the CPU for a gather, or to it after the last reduction


def collectives_of(graph: fx.Graph, plan: Plan) -> list[Collective]:
    """Our collectives in the order of launch."""
    copied: dict[tuple[str, int], int] = {}
    for node in graph.nodes:
        if node.target in (to_device, to_host):
            bucket_of = node.meta[ROLE].kind, node.meta[ROLE].bucket
            copied[bucket_of] = copied.get(bucket_of, 0) + num_bytes_of(node.meta["val"])
    found = []
    for node in graph.nodes:
        role = node.meta.get(ROLE)
        if role is None or not is_launch(node):
            continue
        buckets = plan.gathers if role.kind == "gather" else plan.reduces
        bucket = buckets[role.bucket]
        operator = str(node.target.__name__).partition(".")[0]
        whole = node if role.kind == "gather" else node.args[0]
        is_last = role.kind == "gather" or bucket.num_replicas == 1 or operator == "all_reduce"
        found.append(
            Collective(
                node=node,
                kind=_KINDS.get(operator, operator),
                unit=format_unit(bucket.unit),
                fqns=bucket.fqns,
                dtype=bucket.dtype,
                num_bytes=bucket.num_bytes,
                bucket_bytes=num_bytes_of(whole.meta["val"]),
                host_bytes=copied.get((role.kind, role.bucket), 0) if is_last else 0,
            )
        )
    return found


class GraphReport:
    """What was recorded of one graph."""

    def __init__(self, record: GraphRecord, number: int) -> None:
        self.record = record
        self.number = number

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.launches)} collectives>"

    @property
    def stage(self) -> str:
        """joint, forward, backward or inference."""
        return self.record.stage

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def name(self) -> str:
        return f"{self.number:02d}_{self.stage}"

    @property
    def launches(self) -> list[Collective]:
        """Our collectives, in the order of launch; none in a joint graph, which still has markers."""
        return collectives_of(self.record.snapshots[-1], self.plan)

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's parts in all collectives."""
        return sum(launch.num_bytes for launch in self.launches)

    def collectives(self) -> str:
        """The collectives, one a line, in the order of launch: kind, parameters, dtype, bytes of the whole bucket."""
        rows = [
            [one.kind, " ".join(one.fqns), format_dtype(one.dtype), format_bytes(one.bucket_bytes)]
            for one in self.launches
        ]
        return "\n".join(table(rows))

    def code(self, step: int = -1) -> str:
        """Runnable source: 0 is the graph as it reached the passes, n after the n-th pass, -1 after the last."""
        from .graph_code import runnable_code

        return runnable_code(self.record, range(len(self.record.snapshots))[step])

    def steps(self) -> list[str]:
        """What ``code`` can be asked for, by name."""
        return ["captured", *[one.name for one in self.record.passes]]

    def __str__(self) -> str:
        record = self.record
        passes = ", ".join(f"{one.name} {one.count} ({one.seconds * 1e3:.1f} ms)" for one in record.passes)
        markers = f"{plural(record.num_unshards, 'unshard')} and {plural(record.num_reduces, 'reduce_grad')}"
        if self.stage == "joint":
            plan = self.plan
            became = f"{len(plan.regather)} gathered again where backward needs them, {len(plan.keep)} kept"
            rows = self._joint_rows()
        else:
            became = f"{plural(len(self.launches), 'collective')}, {format_bytes(self.num_bytes)} a rank"
            rows = self._launch_rows()
        lines = [f"{self.name}: {markers} -> {became}", *[f"  {row}" for row in rows], f"  passes: {passes}"]
        return "\n".join(lines)

    def _launch_rows(self) -> list[str]:
        if not self.launches:
            return ["(no collective: one rank holds every shard)"]
        header = ["#", "collective", "unit", "params", "names", "dtype", "bytes/rank", "bucket"]
        rows = [
            [
                str(place),
                one.kind,
                one.unit,
                str(len(one.fqns)),
                shorten(one.fqns, one.unit),
                format_dtype(one.dtype),
                format_bytes(one.num_bytes),
                format_bytes(one.bucket_bytes),
            ]
            for place, one in enumerate(self.launches)
        ]
        if any(one.host_bytes for one in self.launches):
            header.append("host")
            for row, one in zip(rows, self.launches):
                row.append(format_bytes(one.host_bytes))
        return table([header, *rows], right=(0, 3, 6, 7, 8))

    def _joint_rows(self) -> list[str]:
        graph = self.record.snapshots[-1]
        reduced = {marker.fqn for marker in find_reduces(graph)}
        kept = set(self.plan.keep)
        units: dict[tuple[str, str], list[Marker]] = {}
        for marker in find_unshards(graph):
            units.setdefault((marker.unit, "keep" if marker.fqn in kept else "regather"), []).append(marker)
        rows = []
        for (unit, policy), markers in units.items():
            fqns = [marker.fqn for marker in markers]
            size = sum(num_bytes_of(marker.node.meta["val"]) for marker in markers)
            num_reduced = sum(fqn in reduced for fqn in fqns)
            unit = format_unit(unit)
            rows.append([unit, str(len(fqns)), shorten(fqns, unit), policy, str(num_reduced), format_bytes(size)])
        header = ["unit", "params", "names", "in backward", "reduced", "gathered"]
        return table([header, *rows], right=(1, 4, 5))


def num_bytes_of(value: Any) -> int:
    assert isinstance(value, torch.Tensor)
    return math.prod(map(compat.size_hint, value.shape)) * value.dtype.itemsize


def table(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines with aligned columns, those in ``right`` to the right."""
    rows = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def on_one_line(text: str) -> str:
    """What names may hold that would end a line, or a file, is spelled out."""
    return text if text.isprintable() else repr(text)[1:-1]


def shorten(fqns: Sequence[str], unit: str) -> str:
    """As many names as fit, without the unit's own path."""
    prefix = unit.partition(" ")[0] + "."
    names = [fqn.removeprefix(prefix) for fqn in fqns]
    shown = names[:1]
    for name in names[1:]:
        if len(" ".join([*shown, name])) > _NAMES_WIDTH - len(" +999"):
            break
        shown.append(name)
    hidden = len(names) - len(shown)
    return " ".join(shown) + (f" +{hidden}" if hidden else "")


def format_unit(unit: str) -> str:
    """ "Block:layers.0" of a plan as "layers.0 (Block)"; the root, which has no path, as "(Model)"."""
    name, _, path = unit.partition(":")
    return f"{path} ({name})" if path else f"({name})"


def format_dtype(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def format_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for suffix in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{num_bytes} B" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    return f"{size:.1f} GiB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
