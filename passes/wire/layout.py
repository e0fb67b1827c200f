"""How a parameter lies in its shard and in a bucket: pure arithmetic, used by the graph path and the eager path.

    full parameter, 5 rows, 2 ranks, sharded on dim 0          a bucket of two parameters, as it travels

        row 0 \\                                                rank 0:  [ a's chunk | b's chunk ]
        row 1  > rank 0: chunk of 3 rows                       rank 1:  [ a's chunk | b's chunk ]
        row 2 /
        row 3 \\  rank 1: 2 rows, and on the wire              every rank contributes the same number of
        row 4 /           1 row of padding                     elements: chunk sizes, not local sizes

The chunks are those of ``torch.chunk``, so a shard is what DTensor's ``Shard(dim)`` says it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ShardLayout:
    """The part of a tensor of ``size`` that each of ``num_shards`` ranks holds when the tensor is cut on ``dim``."""

    size: tuple[int, ...]
    dim: int
    num_shards: int

    @cached_property
    def chunk(self) -> int:
        """Length along ``dim`` of every rank's part on the wire, padding included."""
        return -(-self.size[self.dim] // self.num_shards)

    @cached_property
    def padded_size(self) -> tuple[int, ...]:
        """Size of one rank's part on the wire."""
        return (*self.size[: self.dim], self.chunk, *self.size[self.dim + 1 :])

    @cached_property
    def padded_numel(self) -> int:
        return math.prod(self.padded_size)

    @cached_property
    def even(self) -> bool:
        return self.size[self.dim] == self.chunk * self.num_shards

    @property
    def is_everywhere(self) -> bool:
        """Whether every rank holds a part that is not empty."""
        return self.size[self.dim] > self.chunk * (self.num_shards - 1)

    def span(self, rank: int) -> tuple[int, int]:
        """Return the first and last-plus-one index along ``dim`` that ``rank`` holds; equal when it holds nothing."""
        length = self.size[self.dim]
        return min(rank * self.chunk, length), min((rank + 1) * self.chunk, length)

    def local_size(self, rank: int) -> tuple[int, ...]:
        start, stop = self.span(rank)
        return (*self.size[: self.dim], stop - start, *self.size[self.dim + 1 :])


@dataclass(frozen=True)
class BucketLimits:
    """When merging pays: parameters of at most ``small_bytes`` merge, up to ``bucket_bytes`` a bucket.

    Merging saves the latency of a collective. If a bucket is packed, merging costs a copy out of the bucket of each
    gathered parameter, and a copy into it of each gradient: of all ranks' parts, so the limits count these.
    """

    small_bytes: int
    bucket_bytes: int
    neighbours_bytes: int  # of units that travel together: they are gathered together, and held together


# Constants and not measurements, so that every rank, every recompilation and both paths agree: (small_bytes, and for
# each rank that takes part, bucket_bytes in small_bytes, neighbours_bytes).
# gloo packs buckets, so small is what is copied in the time that merging saves: about 0.1 ms a rank against 5 GB/s of
# copies (two of them), both measured on loopback.
# nccl copies nothing, and what merging saves is a launch: about 16 us, and 2.4 us more for each rank that the ring goes
# through (passes/cost/profiles.py), in which 1 MiB arrives. A much larger parameter is sent alone: it is there earlier,
# and can be freed by itself.
_LIMITS = {"gloo": (0, 256 << 10, 16, 8 << 20), "nccl": (256 << 20, 4 << 20, 4, 32 << 20)}


def bucket_limits(backend: str, num_shards: int) -> BucketLimits:
    """Return the size rule for groups of ``num_shards`` ranks; unknown backends are taken to be like NCCL."""
    at_least, of_rank, num_small, neighbours_bytes = _LIMITS.get(backend, _LIMITS["nccl"])
    small_bytes = at_least + of_rank * num_shards
    return BucketLimits(small_bytes, num_small * small_bytes, neighbours_bytes)


# Backends that do not start several collectives in one launch. On the others each member of a bucket has a collective
# of its own: a parameter arrives in one piece, a gradient is sent from where it was computed, and nothing is copied.
_PACK = {"gloo"}
_ALIGNED_BYTES = 128  # where members begin, so that kernels can read them as they read memory of their own


def sends_members(backend: str) -> bool:
    """Whether a bucket's members travel side by side in one launch, or packed into one tensor."""
    return backend not in _PACK


def places_of_members(lengths: Sequence[int], itemsize: int) -> list[int]:
    """Return where each member begins, and the end of the last one, in elements; the members have these lengths."""
    unit = max(_ALIGNED_BYTES // itemsize, 1)
    places = [0]
    for length in lengths:
        places.append(places[-1] + -(-length // unit) * unit)
    return places


GROUP, NEIGHBOURS = "group", "neighbours"
BUCKETINGS = ("size", NEIGHBOURS, GROUP, "none")


def split_into_buckets(sizes: Sequence[int], bucketing: str, limits: BucketLimits) -> list[list[int]]:
    """Cut one group's members, given each one's bytes in all ranks' parts, into buckets of member indices.

    Members keep their order inside a bucket, and buckets stand in the order of their first member:

        size    large members travel alone, small ones share a bucket until it is full; ``neighbours`` likewise
        group   everything in one bucket, as FSDP2 has it
        none    one collective for each parameter
    """
    if bucketing == GROUP:
        return [list(range(len(sizes)))] if sizes else []
    if bucketing == "none":
        return [[index] for index in range(len(sizes))]
    assert bucketing in ("size", NEIGHBOURS), bucketing
    buckets: list[list[int]] = []
    open_bucket: list[int] | None = None
    open_bytes = 0
    for index, num_bytes in enumerate(sizes):
        if num_bytes > limits.small_bytes:
            buckets.append([index])
            continue
        if open_bucket is None or open_bytes + num_bytes > limits.bucket_bytes:
            open_bucket, open_bytes = [], 0
            buckets.append(open_bucket)
        open_bucket.append(index)
        open_bytes += num_bytes
    return buckets


def reduction_of(backend: str) -> str:
    """Return how gradients are reduced unless the user says otherwise.

    gloo builds reduce_scatter out of all_reduce and moves every byte twice: on 2 ranks and 33.5 MB, 67 MB on the wire
    against 34 for all_to_all. The pieces of that are then summed; on the CPU, where gloo is at home, in rank order.
    """
    return "all_to_all" if backend == "gloo" else "reduce_scatter"
