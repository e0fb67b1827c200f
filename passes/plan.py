"""The Plan: what the passes will do to one graph, as data. Printed, edited, hashed across ranks, replayed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

STAGES = ("joint", "forward", "backward", "inference")


@dataclass(frozen=True)
class Bucket:
    """Parameters whose shards, or gradients, travel together."""

    unit: str
    fqns: tuple[str, ...]
    dtype: str  # on the wire
    num_bytes: int  # that one rank contributes (gather) or receives (reduction)
    num_ranks: int = 2  # that shard the bucket; one rank needs no collective
    num_replicas: int = 1  # copies of each shard, whose gradients a second collective sums


def num_launches(bucket: Bucket) -> int:
    """Collectives that the bucket takes: one among the ranks that shard it, one among the replicas."""
    return (bucket.num_ranks > 1) + (bucket.num_replicas > 1)


@dataclass(frozen=True)
class Plan:
    """Decisions for one graph; a pure function of the markers' arguments."""

    stage: str
    regather: tuple[str, ...] = ()  # joint: gathered again in backward
    keep: tuple[str, ...] = ()  # joint: gathered once, saved for backward
    gathers: tuple[Bucket, ...] = ()  # in the order of launch
    reduces: tuple[Bucket, ...] = ()
    lookahead: int = 1  # how many units ahead of its use a gather is launched

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        fields = json.loads(text)
        for name in ("gathers", "reduces"):
            fields[name] = tuple(Bucket(**{**bucket, "fqns": tuple(bucket["fqns"])}) for bucket in fields[name])
        for name in ("regather", "keep"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
