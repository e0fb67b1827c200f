"""The Plan: what the passes will do to one graph, as data that is printed, edited, hashed across ranks, replayed.

Beside it stands why a plan keeps what it keeps: the memory budget, and the predicted time and memory of each candidate.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
class Candidate:
    """One choice of what to keep from forward to backward, and the predicted time and peak of a step with it."""

    name: str
    num_kept: int  # parameters
    peak_bytes: int
    seconds: float
    exposed_s: float  # part of ``seconds``: waiting for collectives
    num_recomputed: int = 0  # parameters whose products backward recomputes
    num_sliced: int = 0  # parameters of which a slice is kept
    num_offloaded: int = 0  # parameters whose activations are on the host until backward
    offloaded_bytes: int = 0  # of these activations
    copied_s: float = 0.0  # of the link, in both directions; what is not hidden is part of ``exposed_s``
    states_bytes: int = 0  # of the optimizer's states, on the host
    states_s: float = 0.0  # of the optimizer's step, for copies; no part of ``seconds``
    num_hosted: int = 0  # layers whose shards and gradients are on the host


@dataclass(frozen=True)
class Choice:
    """What was chosen within a budget. It explains a plan and is no part of it: ranks may predict other figures."""

    budget_bytes: int
    profile: str  # name of the hardware profile
    rank: int  # the one that decided, by its own batch
    chosen: Candidate
    lost: tuple[Candidate, ...]
    states_bytes: int = 0  # of all of the optimizer's states that the budget is for as well

    @property
    def is_met(self) -> bool:
        return self.chosen.peak_bytes <= self.budget_bytes

    @property
    def kept_states_bytes(self) -> int:
        """The bytes of the optimizer's states that stay on the device."""
        return self.states_bytes - self.chosen.states_bytes

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Choice:
        """Rebuild a choice from the fields that ``dataclasses.asdict`` returned."""
        lost = tuple(Candidate(**one) for one in fields["lost"])
        return cls(**{**fields, "chosen": Candidate(**fields["chosen"]), "lost": lost})

    def __str__(self) -> str:
        states = f" with {as_size(self.states_bytes)} of optimizer states" if self.states_bytes else ""
        budget = f"budget {as_size(self.budget_bytes)}{states}, predicted on {self.profile!r} by rank {self.rank}"
        rows = [("->", self.chosen), *(("  ", one) for one in self.lost)]
        width = max(len(one.name) for _, one in rows)

        def besides(one: Candidate) -> str:
            columns = ("num_sliced", "sliced"), ("num_recomputed", "computed again"), ("num_offloaded", "on the host")
            shown = [(name, what) for name, what in columns if any(getattr(row, name) for _, row in rows)]
            said = "".join(f"{getattr(one, name):>5} {what}  " for name, what in shown)
            copied = f"({as_size(one.offloaded_bytes)}, {one.copied_s * 1e3:.3f} ms of copies)  "
            return said + (copied if one.num_offloaded else "")

        def away(one: Candidate) -> str:
            what = [f"{as_size(one.states_bytes)} of states"] if self.states_bytes else []
            what += [f"shards of {one.num_hosted} layers"] if one.num_hosted else []
            return f", {' and '.join(what)} on the host for {one.states_s * 1e3:.3f} ms" if what else ""

        return "\n".join(
            [
                budget + ("" if self.is_met else ", which nothing fits into"),
                *(
                    f"  {mark} {one.name:<{width}}  {one.num_kept:>5} kept  {besides(one)}"
                    f"peak {as_size(one.peak_bytes):>10}  "
                    f"{one.seconds * 1e3:.3f} ms, {one.exposed_s * 1e3:.3f} of them waiting"
                    + away(one)
                    + ("" if one.peak_bytes <= self.budget_bytes else "  (over the budget)")
                    for mark, one in rows
                ),
            ]
        )


def as_size(num_bytes: float) -> str:
    """Format bytes for people: 800.0 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


@dataclass(frozen=True)
class Plan:
    """Decisions for one graph; a pure function of the markers' arguments and of what computes with them.

    The plan of a joint graph is the plan of the step: it has the plans of the two graphs that are cut from it. The plan
    of a whole step, which is not cut, has the launches of all its phases, one after another.
    """

    stage: str  # "joint", "forward", "backward", "inference" or "whole"
    again: tuple[str, ...] = ()  # joint, whole: those that backward gathers; joint: w@2 is gathered from slices of w
    keep: tuple[str, ...] = ()  # joint, whole: parameters that are gathered once, and saved for backward
    slices: tuple[str, ...] = ()  # joint: parameters that backward gathers from slices kept for a budget (slices.py)
    recompute: tuple[str, ...] = ()  # joint: matrices whose activations backward recomputes (activations.py)
    offload: tuple[str, ...] = ()  # joint: matrices whose saved activations are on the host until backward (away.py)
    gathers: tuple[Bucket, ...] = ()  # in the order of launch
    reduces: tuple[Bucket, ...] = ()
    order: tuple[tuple[str, int], ...] = ()  # of all launches: "gather" or "reduce", and the bucket's index
    lookahead: int = 1  # how many units ahead of its use a gather is launched
    forward: Plan | None = None
    backward: Plan | None = None
    choice: Choice | None = field(default=None, compare=False)  # joint: why, if a budget chose what is kept

    @property
    def params(self) -> tuple[str, ...]:
        """The parameters of a step: those that are kept, and those that forward or backward gathers."""
        graphs = [one for one in (self, self.forward, self.backward) if one is not None]
        gathered = [fqn for one in graphs for bucket in one.gathers for fqn in bucket.fqns]
        return tuple(dict.fromkeys((*self.keep, *gathered)))

    def buckets(self, kind: str) -> tuple[Bucket, ...]:
        """Return the buckets that are gathered, or those that are reduced."""
        return self.gathers if kind == "gather" else self.reduces

    def turn(self, kind: str, bucket: int) -> int:
        """Return the place of a bucket's launch among all launches of the graph."""
        return self.order.index((kind, bucket))

    @property
    def id(self) -> str:
        """Equal for equal plans, on every rank and in every process."""
        return hashlib.sha256(dataclasses.replace(self, choice=None).to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return json.dumps(self._fields(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return _from_fields(json.loads(text))

    def packed(self) -> str:
        """Return the whole plan in few letters, a tenth of its JSON, for the code of the graphs that follow it."""
        fields = json.dumps(self._fields(), separators=(",", ":"))
        return base64.b64encode(zlib.compress(fields.encode(), 9)).decode()

    def _fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self, dict_factory=_without_empty_choices)

    @classmethod
    def unpacked(cls, text: str) -> Plan:
        return cls.from_json(zlib.decompress(base64.b64decode(text)).decode())


def _without_empty_choices(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if (name, value) not in (("choice", None), ("offload", ()))}


def _from_fields(fields: dict[str, Any]) -> Plan:
    """Rebuild a plan from the fields of ``dataclasses.asdict``, in which JSON made lists of tuples."""
    for name in ("gathers", "reduces"):
        fields[name] = tuple(Bucket(**{**bucket, "fqns": tuple(bucket["fqns"])}) for bucket in fields[name])
    for name in ("again", "keep", "slices", "recompute", "offload"):
        fields[name] = tuple(fields.get(name, ()))
    fields["order"] = tuple((kind, bucket) for kind, bucket in fields["order"])
    for name in ("forward", "backward"):
        fields[name] = None if fields[name] is None else _from_fields(fields[name])
    if fields.get("choice") is not None:
        fields["choice"] = Choice.of(fields["choice"])
    return Plan(**fields)
