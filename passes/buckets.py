"""Choose which parameters of a unit travel together: a function of their specs, for graphs and the eager path.

    weight   1.0 MiB        one all-gather of its own
    bias     2.0 KiB   \\
    scale    2.0 KiB   /    one all-gather of both
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .layout import bucket_limits, split_into_buckets
from .spec import ParamSpec


def gather_buckets(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Return which parameters of one unit share an all-gather: indices into ``specs``, in packing order."""
    return _split(specs, gather_key, lambda spec: spec.gather_bytes)


def reduce_buckets(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Return which gradients of one unit share a reduction: indices into ``specs``, in packing order."""
    return _split(specs, reduce_key, lambda spec: spec.reduce_bytes)


def gather_key(spec: ParamSpec) -> tuple[object, ...]:
    """Return what the members of one all-gather must have in common."""
    return (spec.group, spec.num_shards, spec.dtype, spec.bucketing)


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
    buckets = []
    for indices in by_key.values():
        first = specs[indices[0]]
        sizes = [num_bytes(specs[index]) for index in indices]
        for chosen in split_into_buckets(sizes, first.bucketing, bucket_limits(first.backend)):
            buckets.append([indices[place] for place in chosen])
    return buckets
