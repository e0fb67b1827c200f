"""The spec of a parameter that a marker carries, and the library that all our ops are in."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .. import _torch_compat as compat
from .layout import ShardLayout

NAMESPACE = "fsdpc"
_USE = re.compile(r"(?:^|(?<=:))@\d+\.?|@\d+(?=[.,:]|$)")

library = torch.library.Library(NAMESPACE, "DEF")


def define_op(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> compat.OpOverload:
    """Define an op of ours, and return it; ``fake`` runs in place of the kernel in tracing, if the kernel cannot."""
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake or kernel)
    op: compat.OpOverload = getattr(torch.ops.fsdpc, name).default
    return op


def with_use(name: str, use: int) -> str:
    """Return the name of a parameter in one of its uses; the first one has the parameter's own name."""
    return name if use == 1 else f"{name}@{use}"


def without_use(name: str) -> str:
    """Return the name that a parameter or a unit has in all of its uses."""
    return _USE.sub("", name)


def with_part(name: str, part: int) -> str:
    """Return the name of a tensor that an extension sends for a parameter; part -1 is the parameter itself."""
    return name if part < 0 else f"{name}:{part}"


@dataclass(frozen=True)
class ParamSpec:
    """What a marker knows of its parameter.

    Every field is equal on every rank, except the groups' names, ``local_length``, ``inner_rank`` and the number of the
    ``device``; with tensor parallelism ``size`` is that of this rank's part.
    """

    fqn: str  # relative to the module that fully_shard was given
    unit: str  # class of that module: markers of one unit have it in common
    order: int  # place among the parameters of the group: the order in a bucket
    size: tuple[int, ...]
    dim: int
    num_shards: int
    # Length of this rank's shard along dim. The shard has it too, but AOTAutograd's cache (2.15) keys a DTensor by
    # its global shape alone, and served one rank the graph that another had compiled for a shard of another length.
    local_length: int
    group: str  # name of the process group that shards it; empty when none does
    backend: str  # of that group; picks constants, never behaviour
    dtype: torch.dtype  # gathered and computed in
    reduce_dtype: torch.dtype  # gradients travel in
    grad_dtype: torch.dtype  # gradient of the shard comes out in
    regather: bool  # gather again in backward instead of keeping the gathered parameter
    reduce_op: str  # "sum" or "avg" on the wire
    predivide: float  # gradient divisors before and after the wire
    postdivide: float
    reduction: str  # "reduce_scatter", or "all_to_all" and a sum, on the CPU in rank order
    bucketing: str  # "size", "neighbours", "group" or "none"
    replicate_group: str = ""  # name of the process group whose ranks hold the same shard; empty when none does
    num_replicas: int = 1
    # The slice that is kept from forward to backward, if any: one of how many, held by which group, and which one.
    inner_shards: int = 1
    inner_group: str = ""
    inner_rank: int = 0
    inner_offered: bool = False  # kept only where the plan of the step says so
    part: int = -1  # which of the tensors that an all-gather extension sends; -1 is the parameter itself
    use: int = 1  # which of its uses in one graph, each with a gather and a reduction of its own (calls.py)
    # For an offloaded shard, which is on the CPU and gets its gradient there: the device that it is copied to, gathered
    # and computed on, empty for other shards; and whether the gradient is to be in pinned memory.
    device: str = ""
    pinned: bool = False
    # Whether its modules only look rows of it up: backward needs their numbers, and gathers no table again.
    is_table: bool = False
    # Whether a launch may return what an earlier one gathered (kept.py), for settings that keep buckets until the next
    # forward: "kept" for what forward gathered and backward reads, "always" for what backward gathers, too.
    stays: str = ""
    # Id of the plan of the step, given or written by a pass: caches tell graphs of two plans apart by it.
    step: str = ""

    @cached_property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.size, self.dim, self.num_shards)

    @property
    def local_size(self) -> tuple[int, ...]:
        """Size of this rank's shard."""
        return (*self.size[: self.dim], self.local_length, *self.size[self.dim + 1 :])

    @property
    def gather_bytes(self) -> int:
        """Bytes that one rank contributes to the gather."""
        return self.layout.padded_numel * self.dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes that one rank receives from the reduction."""
        return self.layout.padded_numel * self.reduce_dtype.itemsize

    @property
    def num_reductions(self) -> int:
        """Collectives that its gradient takes: one over the ranks that shard it, one over the replicas."""
        return (self.num_shards > 1) + (self.num_replicas > 1)

    def on_device(self) -> ParamSpec:
        """Return the same spec for a tensor that is on the device already, and stays there."""
        return dataclasses.replace(self, device="", pinned=False)

    def over_shards(self) -> ParamSpec:
        """Return the spec of a sum over the ranks that shard the parameter, before that over its replicas."""
        spec, dtype = self.on_device(), self.reduce_dtype
        return dataclasses.replace(spec, num_replicas=1, replicate_group="", postdivide=1.0, grad_dtype=dtype)

    @cached_property
    def text(self) -> str:
        """The spec as a marker's argument: JSON of the fields that differ from their defaults."""
        said = {
            one.name: value
            for one in dataclasses.fields(ParamSpec)
            if (value := getattr(self, one.name)) != one.default
        }
        return json.dumps(said, default=_name_of_dtype)

    @staticmethod
    @functools.lru_cache(maxsize=1 << 16)
    def of(text: str) -> ParamSpec:
        """Return the spec in a marker's argument."""
        said = json.loads(text)
        dtypes = {name: getattr(torch, said[name]) for name in _DTYPES}
        return ParamSpec(**{**said, **dtypes, "size": tuple(said["size"])})


def _name_of_dtype(value: Any) -> str:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{value!r} is a {type(value).__name__}, and no field of a spec is one.")
    return str(value).removeprefix("torch.")


_DTYPES = [one.name for one in dataclasses.fields(ParamSpec) if one.type == "torch.dtype"]
