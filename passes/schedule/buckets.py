"""Choose which parameters of a unit travel together: a function of their specs, for graphs and the eager path.

    scale    2.0 KiB   \\
    bias     2.0 KiB   /    first: one all-gather of both
    up       1.0 MiB        then large parameters, each alone, as they were registered
    down     1.0 MiB

A unit's buckets stand in one order. Forward gathers them from the first to the last, backward gathers them again and
reduces their gradients from the last to the first. So each path knows the order of a unit's collectives without knowing
what the unit computes: small parameters are norms and biases, of which a block's forward needs one at once, and of
which its backward has the last gradient at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..wire.layout import GROUP, bucket_limits, split_into_buckets
from ..wire.spec import ParamSpec


def gather_buckets(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Return one unit's all-gathers in the order of forward, each as the places in ``specs`` of its members."""
    return _split(specs, gather_key, lambda spec: spec.gather_bytes)


def reduce_buckets(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Return one unit's reductions in the order of backward, each as the places in ``specs`` of its members."""
    return _split(specs, reduce_key, lambda spec: spec.reduce_bytes)[::-1]


def gather_key(spec: ParamSpec) -> tuple[object, ...]:
    """Return what the members of one all-gather must have in common.

    The weights of embeddings are gathered apart: forward reads them first and a head last, and backward reads the head
    alone. In one bucket, backward would have both.
    """
    return (spec.group, spec.num_shards, spec.dtype, spec.bucketing, spec.is_table and spec.bucketing != GROUP)


def reduce_key(spec: ParamSpec) -> tuple[object, ...]:
    divisors = (spec.reduce_op, spec.predivide, spec.postdivide, spec.reduction)
    ranks = (spec.group, spec.num_shards, spec.replicate_group, spec.num_replicas)
    # An offloaded bucket is copied to the CPU as one tensor, so its gradients share a dtype.
    copied = (spec.device, spec.grad_dtype) if spec.device else ()
    return (*ranks, spec.reduce_dtype, *divisors, spec.bucketing, *copied)


def _split(
    specs: Sequence[ParamSpec],
    key: Callable[[ParamSpec], tuple[object, ...]],
    num_bytes: Callable[[ParamSpec], int],
) -> list[list[int]]:
    by_key: dict[tuple[object, ...], list[int]] = {}
    # Sorted by place in the group and not by use, so that forward, backward and the eager path pack the same bytes.
    for index in sorted(range(len(specs)), key=lambda index: specs[index].order):
        by_key.setdefault(key(specs[index]), []).append(index)
    small: list[list[int]] = []
    large: list[list[int]] = []
    for indices in by_key.values():
        first = specs[indices[0]]
        limits = bucket_limits(first.backend, first.num_shards)
        sizes = [num_bytes(specs[index]) * first.num_shards for index in indices]
        for chosen in split_into_buckets(sizes, first.bucketing, limits):
            is_large = len(chosen) == 1 and sizes[chosen[0]] > limits.small_bytes
            (large if is_large else small).append([indices[place] for place in chosen])
    return small + sorted(large, key=lambda bucket: specs[bucket[0]].order)
