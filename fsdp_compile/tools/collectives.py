"""The collectives that a graph launches, as data."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch_compat import inductor
from ..passes import Plan
from ..passes.ir.meta import ROLE
from ..passes.wire.collectives import KIND_OF, is_launch
from ..passes.wire.copies import to_device, to_host
from ..passes.wire.lower import gather_offloaded
from ..passes.wire.packing import copied, pack
from .tables import format_unit

aten = torch.ops.aten

_MOVES = (pack, copied, aten.constant_pad_nd.default, aten.clone.default)


@dataclass(frozen=True)
class Collective:
    """One launch in a graph."""

    node: fx.Node
    kind: str
    unit: str  # "layers.0 (Block)"
    fqns: tuple[str, ...]
    dtype: str
    num_bytes: int  # one rank's part
    bucket_bytes: int  # all ranks' parts, padding included; for an all_reduce over replicas, one replica's part
    host_bytes: int = 0  # offloaded shards: copied from the CPU for a gather, or to it after the last reduction
    copied_bytes: int = 0  # written by this rank to pack, pad and cut; 0 for a parameter that is sent from its shard


def collectives_of(graph: fx.Graph, plan: Plan) -> list[Collective]:
    """Return our collectives, not the model's own, in the order of launch."""
    to_or_from_host: Counter[tuple[str, int]] = Counter()
    copied: Counter[tuple[str, int]] = Counter()
    for node in graph.nodes:
        role = node.meta.get(ROLE)
        if role is not None and node.target in (to_device, to_host, gather_offloaded):
            for source in node.all_input_nodes:
                to_or_from_host[role.kind, role.bucket] += num_bytes_of(source.meta["val"])
        elif role is not None and _only_moves(node):
            copied[role.kind, role.bucket] += num_bytes_of(node.meta["val"])
    found = []
    for node in graph.nodes:
        role = node.meta.get(ROLE)
        if role is None or not is_launch(node):
            continue
        bucket = plan.buckets(role.kind)[role.bucket]
        whole = [node] if role.kind == "gather" else node.all_input_nodes
        kind = KIND_OF[node.target]
        is_last = role.kind == "gather" or bucket.num_replicas == 1 or kind == "all_reduce"
        found.append(
            Collective(
                node=node,
                kind=kind,
                unit=format_unit(bucket.unit),
                fqns=bucket.fqns,
                dtype=bucket.dtype,
                num_bytes=bucket.num_bytes,
                bucket_bytes=sum(num_bytes_of(one.meta["val"]) for one in whole),
                host_bytes=to_or_from_host[role.kind, role.bucket] if is_last else 0,
                copied_bytes=copied[role.kind, role.bucket] if is_last else 0,
            )
        )
    return found


def _only_moves(node: fx.Node) -> bool:
    """Whether a node only copies what it reads to other memory."""
    if node.target is aten.reshape.default:
        source: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
        return node.meta["val"].untyped_storage() is not source.untyped_storage()
    return node.target in _MOVES


def num_bytes_of(value: Any) -> int:
    assert isinstance(value, torch.Tensor)
    return math.prod(map(inductor.size_when_compiled, value.shape)) * value.dtype.itemsize
