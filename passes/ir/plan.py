"""The Plan: what the passes will do to one graph, as data that is printed, edited, hashed across ranks, replayed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .choice import Choice


@dataclass(frozen=True)
class Bucket:
    """Parameters whose shards, or gradients, travel together."""

    unit: str
    fqns: tuple[str, ...]
    dtype: str  # on the wire
    num_bytes: int  # that one rank contributes (gather) or receives (reduction)
    num_ranks: int = 2  # how many ranks shard the bucket; one rank needs no collective
    num_replicas: int = 1  # copies of each shard, whose gradients a second collective sums
    phase: int = 0  # in a graph that has several: forward, backward, the forward of another batch, ...


def num_launches(bucket: Bucket) -> int:
    """Return how many collectives the bucket takes: one among the ranks that shard it, one among the replicas."""
    return (bucket.num_ranks > 1) + (bucket.num_replicas > 1)


def named(fqns: Sequence[str]) -> str:
    """Return the first name, and how many others there are."""
    return fqns[0] + (f" +{len(fqns) - 1}" if len(fqns) > 1 else "")


@dataclass(frozen=True)
class Plan:
    """Decisions for one graph; a pure function of the markers' arguments and of what computes with them.

    The plan of a joint graph is the plan of the step: it has the plans of the two graphs that are cut from it. The plan
    of a whole step, which is not cut, has the launches of all its phases, one after another.
    """

    stage: str  # "joint", "forward", "backward", "inference" or "whole"
    regather: tuple[str, ...] = ()  # joint, whole: parameters that are not kept after forward
    again: tuple[str, ...] = ()  # joint, whole: those that backward gathers; joint: w@2 is gathered from slices of w
    keep: tuple[str, ...] = ()  # joint, whole: parameters that are gathered once, and saved for backward
    slices: tuple[str, ...] = ()  # joint: parameters that backward gathers from slices kept for a budget (slices.py)
    recompute: tuple[str, ...] = ()  # joint: matrices whose activations backward recomputes (activations.py)
    gathers: tuple[Bucket, ...] = ()  # in the order of launch
    reduces: tuple[Bucket, ...] = ()
    order: tuple[tuple[str, int], ...] = ()  # of all launches: "gather" or "reduce", and the bucket's index
    lookahead: int = 1  # how many units ahead of its use a gather is launched
    forward: Plan | None = None
    backward: Plan | None = None
    choice: Choice | None = field(default=None, compare=False)  # joint: why, if a budget chose what is kept

    def turn(self, kind: str, bucket: int) -> int:
        """Return the place of a bucket's launch among all launches of the graph."""
        return self.order.index((kind, bucket))

    @property
    def id(self) -> str:
        """Equal for equal plans, on every rank and in every process."""
        return hashlib.sha256(dataclasses.replace(self, choice=None).to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return json.dumps(_without_empty_choices(dataclasses.asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return _from_fields(json.loads(text))

    def packed(self) -> str:
        """Return the whole plan in few letters, a tenth of its JSON, for the code of the graphs that follow it."""
        fields = json.dumps(_without_empty_choices(dataclasses.asdict(self)), separators=(",", ":"))
        return base64.b64encode(zlib.compress(fields.encode(), 9)).decode()

    @classmethod
    def unpacked(cls, text: str) -> Plan:
        return cls.from_json(zlib.decompress(base64.b64decode(text)).decode())


def _without_empty_choices(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["choice"] is None:
        del fields["choice"]
    for name in ("forward", "backward"):
        if fields[name] is not None:
            _without_empty_choices(fields[name])
    return fields


def _from_fields(fields: dict[str, Any]) -> Plan:
    """Rebuild a plan from the fields of ``dataclasses.asdict``, in which JSON made lists of tuples."""
    for name in ("gathers", "reduces"):
        fields[name] = tuple(Bucket(**{**bucket, "fqns": tuple(bucket["fqns"])}) for bucket in fields[name])
    for name in ("regather", "again", "keep", "slices", "recompute"):
        fields[name] = tuple(fields.get(name, ()))
    fields["order"] = tuple((kind, bucket) for kind, bucket in fields["order"])
    for name in ("forward", "backward"):
        fields[name] = None if fields[name] is None else _from_fields(fields[name])
    if fields.get("choice") is not None:
        fields["choice"] = Choice.of(fields["choice"])
    return Plan(**fields)
