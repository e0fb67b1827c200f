"""Chooses the Plan of a graph from its markers: what stays gathered, what travels together, and in which order.

    graph, as Inductor left it           plan
    b1 = unshard(...)                    gathers  #0  w0 b0      read first
    b0, w0 = unshard(...), ...                    #1  w1 b1
    y  = addmm(b0, x, t(w0))
    w1 = unshard(...)
    z  = addmm(b1, y, t(w1))

Where a marker stands says nothing: Inductor moves what has no place of its own, in inference graphs before our passes
see them. What computes with a parameter has its place, and so has what computes its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from .keep import CASTS, VIEWS
from .layout import bucket_limits, split_into_buckets
from .plan import Bucket, Plan
from .provenance import Marker, find_reduces, find_unshards
from .spec import ParamSpec


def plan_joint(graph: fx.Graph) -> Plan:
    """Keep or regather each parameter of a joint graph, as its group was told."""
    unshards = find_unshards(graph)
    return Plan(
        stage="joint",
        regather=tuple(marker.fqn for marker in unshards if marker.spec.regather),
        keep=tuple(marker.fqn for marker in unshards if not marker.spec.regather),
    )


def plan_graph(graph: fx.Graph, stage: str) -> Plan:
    """Buckets of a forward, backward or inference graph."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    return Plan(
        stage=stage,
        # A gather is launched for its first member, a reduction once its last member's gradient is there.
        gathers=_named_buckets(
            find_unshards(graph),
            gather_buckets,
            lambda spec: (spec.dtype, spec.gather_bytes),
            num_replicas=lambda spec: 1,
            launched_at=lambda members: min((_first_read(one.node, place), *_tie(one)) for one in members),
        ),
        reduces=_named_buckets(
            find_reduces(graph),
            reduce_buckets,
            lambda spec: (spec.reduce_dtype, spec.reduce_bytes),
            num_replicas=lambda spec: spec.num_replicas,
            launched_at=lambda members: max((_computed(one.shard, place), *_tie(one)) for one in members),
        ),
    )


def gather_buckets(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Which parameters of one unit share an all-gather: indices into ``specs``, in packing order."""
    return _split(specs, _gather_key, lambda spec: spec.gather_bytes)


def reduce_buckets(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Which gradients of one unit share a reduction: indices into ``specs``, in packing order."""
    return _split(specs, _reduce_key, lambda spec: spec.reduce_bytes)


def _gather_key(spec: ParamSpec) -> tuple[object, ...]:
    """What the members of one all-gather must have in common."""
    return (spec.group, spec.num_shards, spec.dtype, spec.bucketing)


def _reduce_key(spec: ParamSpec) -> tuple[object, ...]:
    divisors = (spec.reduce_op, spec.predivide, spec.postdivide, spec.reduction)
    ranks = (spec.group, spec.num_shards, spec.replicate_group, spec.num_replicas)
    # A bucket that goes to the CPU goes there as one tensor.
    copied = (spec.device, spec.grad_dtype) if spec.device else ()
    return (*ranks, spec.reduce_dtype, *divisors, spec.bucketing, *copied)


def _split(
    specs: Sequence[ParamSpec],
    key: Callable[[ParamSpec], tuple[object, ...]],
    num_bytes: Callable[[ParamSpec], int],
) -> list[list[int]]:
    by_key: dict[tuple[object, ...], list[int]] = {}
    # By place in the group and not by use, so that forward, backward and the eager path pack the same bytes.
    for index in sorted(range(len(specs)), key=lambda index: specs[index].order):
        by_key.setdefault(key(specs[index]), []).append(index)
    buckets = []
    for indices in by_key.values():
        first = specs[indices[0]]
        sizes = [num_bytes(specs[index]) for index in indices]
        for chosen in split_into_buckets(sizes, first.bucketing, bucket_limits(first.backend)):
            buckets.append([indices[place] for place in chosen])
    return buckets


def _named_buckets(
    found: Sequence[Marker],
    split: Callable[[Sequence[ParamSpec]], list[list[int]]],
    on_the_wire: Callable[[ParamSpec], tuple[torch.dtype, int]],
    num_replicas: Callable[[ParamSpec], int],
    launched_at: Callable[[Iterable[Marker]], tuple[int, int, str]],
) -> tuple[Bucket, ...]:
    units: dict[str, list[Marker]] = {}
    for marker in found:
        units.setdefault(marker.unit, []).append(marker)
    buckets: list[tuple[tuple[int, int, str], Bucket]] = []
    for unit, members in units.items():
        for indices in split([marker.spec for marker in members]):
            chosen = [members[index] for index in indices]
            wire = [on_the_wire(marker.spec) for marker in chosen]
            bucket = Bucket(
                unit=unit,
                fqns=tuple(marker.fqn for marker in chosen),
                dtype=str(wire[0][0]).removeprefix("torch."),
                num_bytes=sum(num_bytes for _, num_bytes in wire),
                num_ranks=chosen[0].spec.num_shards,
                num_replicas=num_replicas(chosen[0].spec),
            )
            buckets.append((launched_at(chosen), bucket))
    return tuple(bucket for _, bucket in sorted(buckets, key=lambda placed: placed[0]))


def _first_read(gathered: fx.Node, place: dict[fx.Node, int]) -> int:
    """Where a graph first computes with a parameter, looking through views and casts; its end when it never does."""
    first, work = len(place), [gathered]
    while work:
        for user in work.pop().users:
            if user.target in VIEWS or user.target in CASTS:
                work.append(user)
            else:
                first = min(first, place[user])
    return first


def _computed(grad: fx.Node, place: dict[fx.Node, int]) -> int:
    """Where a graph has computed a gradient but for views and casts, which may stand anywhere behind that."""
    while (grad.target in VIEWS or grad.target in CASTS) and isinstance(grad.args[0], fx.Node):
        grad = grad.args[0]
    return place[grad]


def _tie(marker: Marker) -> tuple[int, str]:
    """The order of what one node reads, or computes."""
    return marker.spec.order, marker.fqn
