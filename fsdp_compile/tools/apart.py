"""Explain why two buckets of a graph were not merged, from the specs of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..passes import Bucket, ParamSpec
from ..passes.schedule.buckets import gather_key, reduce_key
from ..passes.schedule.neighbours import groups_of
from ..passes.wire.layout import NEIGHBOURS, BucketLimits, bucket_limits
from .tables import format_bytes, format_dtype

_TOGETHER = {
    "gather": ("group", "num_shards", "dtype", "bucketing"),
    "reduce": (
        "group", "num_shards", "replicate_group", "num_replicas", "reduce_dtype", "reduce_op", "predivide",
        "postdivide", "reduction", "bucketing", "device", "grad_dtype",
    ),
}  # fmt: skip
_CALLED = {
    "group": "process group", "num_shards": "number of shards", "replicate_group": "group of replicas",
    "num_replicas": "number of replicas", "dtype": "dtype on the wire", "reduce_dtype": "dtype on the wire",
    "reduce_op": "operator", "predivide": "divisor", "postdivide": "divisor", "device": "place",
    "grad_dtype": "dtype of the gradients",
}  # fmt: skip


def why_apart(kind: str, buckets: Sequence[Bucket], place: int, specs: Mapping[str, ParamSpec]) -> str:
    """Return why the bucket at ``place`` is not merged with the next one to be launched; empty for the last one.

    ``kind`` is "gather" or "reduce".
    """
    if place + 1 >= len(buckets):
        return ""
    one, other = buckets[place : place + 2]
    if one.phase != other.phase:
        return "the next is of another phase of the step"
    if one.unit != other.unit:
        does = "be whole" if kind == "gather" else "wait"
        allowed = ", which bucketing='neighbours' allows" if _could_be_neighbours(kind, buckets, place, specs) else ""
        return f"the next is of another unit: together one would {does} a unit longer{allowed}"
    if not all(bucket.fqns[0] in specs for bucket in (one, other)):
        return ""
    a, b = specs[one.fqns[0]], specs[other.fqns[0]]
    key = gather_key if kind == "gather" else reduce_key
    if key(a) != key(b):
        name = next(name for name in _TOGETHER[kind] if getattr(a, name) != getattr(b, name))
        values = (getattr(a, name), getattr(b, name))
        said = [format_dtype(value) if "dtype" in name else repr(value) for value in values]
        return f"the next has another {_CALLED.get(name, name)}: {said[1]}, not {said[0]}"
    if one.num_ranks != other.num_ranks:  # one of them is gathered from slices, and specs do not describe those
        return f"the next has another process group: {other.num_ranks} ranks, not {one.num_ranks}"
    if a.bucketing == "none":
        return "bucketing='none': each parameter has a collective of its own"
    limits = bucket_limits(a.backend, a.num_shards)
    for bucket in (one, other):
        if _travels_alone(bucket, limits):
            size, small = format_bytes(_bytes_of_all(bucket)), format_bytes(limits.small_bytes)
            return f"{bucket.fqns[0]} has {size}, and what has more than {small} travels alone"
    return f"together they would have more than {format_bytes(limits.bucket_bytes)}"


def _travels_alone(bucket: Bucket, limits: BucketLimits) -> bool:
    return len(bucket.fqns) == 1 and _bytes_of_all(bucket) > limits.small_bytes


def _bytes_of_all(bucket: Bucket) -> int:
    return bucket.num_bytes * bucket.num_ranks


def _could_be_neighbours(
    kind: str, buckets: Sequence[Bucket], place: int, specs: Mapping[str, ParamSpec]
) -> bool:
    """Whether bucketing='neighbours' would merge the bucket at ``place`` with the next one, which another unit has."""
    if not all(fqn in specs for bucket in buckets for fqn in bucket.fqns):
        return False
    one, other = buckets[place : place + 2]
    key = gather_key if kind == "gather" else reduce_key
    first = specs[one.fqns[0]]
    if one.num_ranks != other.num_ranks or key(first) != key(specs[other.fqns[0]]):
        return False  # they would not be merged within one unit either
    if any(_travels_alone(bucket, bucket_limits(first.backend, first.num_shards)) for bucket in (one, other)):
        return False
    units: dict[str, list[ParamSpec]] = {}
    for bucket in buckets:
        if bucket.phase == one.phase:
            # A reduction waits for the last gradient of its unit, so the unit's last bucket tells its place.
            members = units.pop(bucket.unit, []) if kind == "reduce" else units.get(bucket.unit, [])
            units[bucket.unit] = [*members, *(specs[fqn] for fqn in bucket.fqns)]
    if any(spec.bucketing != "size" for spec in (*units[one.unit], *units[other.unit])):
        return False
    groups = groups_of(units, small_end=-1 if kind == "reduce" else 0, asking=("size", NEIGHBOURS))
    return any({one.unit, other.unit} <= {*group} for group in groups)
