"""FSDP2's all-gather extension: tensor subclasses, such as float8's, that decide themselves what is gathered.

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=None) -> (full parameter, inner tensors); None with out=

This file has the protocol; the paths use it in ``graph/extension.py`` and ``eager/extension.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, subclasses
from ..passes import ParamSpec
from .inner import Look

_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
ALL_ARGUMENTS = 5


def has_extension(fqn: str, shard: DTensor) -> bool:
    """Whether the shard has an all-gather extension; raise if it has half of one."""
    local = dtensors.local_tensor(shard)
    before, after = hasattr(local, "fsdp_pre_all_gather"), hasattr(local, "fsdp_post_all_gather")
    if before != after:
        there, missing = ("pre", "post") if before else ("post", "pre")
        raise AssertionError(  # FSDP2's type, as below
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{fqn} is a {type(local).__name__} with fsdp_{there}_all_gather alone. Define fsdp_{missing}_all_gather."
        )
    release = getattr(local, _RELEASE, None)
    if release is None:
        return before
    if not before:
        raise AssertionError(
            f"{_RELEASE} requires fsdp_pre_all_gather and fsdp_post_all_gather to be defined, and {fqn} is a "
            f"{type(local).__name__} without. Define these too, or leave it out."
        )
    answer = release()
    if not isinstance(answer, bool):
        raise AssertionError(f"{_RELEASE} must return a bool, got {answer!r} from {fqn}, a {type(local).__name__}.")
    return before


def releases_what_arrived(shard: DTensor) -> bool:
    """Whether what was gathered can be freed once the extension has made the parameter of it."""
    release = getattr(dtensors.local_tensor(shard), _RELEASE, None)
    return release is not None and release()


@dataclass(frozen=True)
class Protocol:
    """What a parameter's extension is called with; equal for equal parameters."""

    subclass: type
    mesh: DeviceMesh  # of the ranks that hold shards
    size: torch.Size
    stride: tuple[int, ...]
    mp_policy: Any
    owner: weakref.ref[nn.Module] | None  # only if the extension takes the module: it makes equal blocks unequal
    look: Look | None  # of the shard, if a graph rebuilds that

    def before(self, local: Tensor, spec: ParamSpec) -> tuple[list[Tensor], list[ParamSpec], Any]:
        """Return the tensors that this rank sends, the spec of each, and the extension's metadata."""
        arguments: list[Any] = [self.mesh]
        if self.owner is not None:
            arguments += [self.size, self.stride, self.owner(), self.mp_policy]
        inputs, metadata = local.fsdp_pre_all_gather(*arguments)  # type: ignore[attr-defined]
        sent = [self._padded(tensor, spec).contiguous() for tensor in inputs]
        return sent, [_part_of(spec, index, tensor) for index, tensor in enumerate(sent)], metadata

    def _padded(self, tensor: Tensor, spec: ParamSpec) -> Tensor:
        """Pad a tensor to the number of rows that every rank sends, if the subclass has not done so itself."""
        length, rows = spec.local_length, spec.layout.chunk
        if tensor.ndim == 0:
            return tensor.view(1)
        dim = _dim_of(tensor, spec)
        if length == rows or tensor.shape[dim] == rows:
            return tensor
        if tensor.shape[dim] != length:
            raise AssertionError(
                f"{spec.fqn} is unevenly sharded, where fsdp_pre_all_gather must return all-gather inputs with the "
                f"padded sharded size, {rows} rows, or this shard's {length}, but {self.subclass.__name__}'s returned "
                f"{tensor.shape[dim]}. Return either."
            )
        missing = [*tensor.shape]
        missing[dim] = rows - length
        return torch.cat([tensor, tensor.new_zeros(missing)], dim)

    def after(self, local: Tensor, gathered: Sequence[Tensor], metadata: Any, spec: ParamSpec) -> tuple[Tensor, Any]:
        """Return the full parameter that the extension makes of what was gathered, and the tensors inside it."""
        arrived = tuple(_cut_padding(tensor, spec) for tensor in gathered)
        made, inner = local.fsdp_post_all_gather(arrived, metadata, spec.dtype)  # type: ignore[attr-defined]
        return made, inner

    def again(
        self, local: Tensor, gathered: Sequence[Tensor], metadata: Any, spec: ParamSpec, out: Tensor, inner: Any
    ) -> None:
        """Make the parameter again in ``out``, which ``after`` returned; ``gathered`` is in the same memory as then."""
        arrived = tuple(_cut_padding(tensor, spec) for tensor in gathered)
        with autograd.no_new_versions([out, *inner, *gathered]):  # autograd saved the same values
            local.fsdp_post_all_gather(arrived, metadata, spec.dtype, out=out)  # type: ignore[attr-defined]


def without_padding(made: Tensor, spec: ParamSpec) -> Tensor:
    return made if made.shape == spec.size else torch.as_strided(made, spec.size, made.stride())


def _dim_of(sent: Tensor, spec: ParamSpec) -> int:
    """Return the dimension on which ranks' tensors are joined: the shards', if they have as many dimensions; else 0."""
    return spec.dim if sent.ndim == len(spec.size) else 0


def _part_of(spec: ParamSpec, index: int, tensor: Tensor) -> ParamSpec:
    dim, size = _dim_of(tensor, spec), [*tensor.shape]
    rows = size[dim]
    size[dim] *= spec.num_shards
    return dataclasses.replace(spec, part=index, size=tuple(size), dim=dim, local_length=rows, dtype=tensor.dtype)


def _cut_padding(gathered: Tensor, spec: ParamSpec) -> Tensor:
    """Cut the padding off a gathered tensor that has the rows of the padded shards."""
    dim = _dim_of(gathered, spec)
    if gathered.shape[dim] != spec.layout.chunk * spec.num_shards or spec.layout.even:
        return gathered
    return gathered.narrow(dim, 0, spec.size[spec.dim])


def arity_of(fqn: str, local: Any) -> int:
    """Return how many arguments ``fsdp_pre_all_gather`` takes; raise unless these are 1 or 5."""
    arity = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
    if arity not in (1, ALL_ARGUMENTS):
        raise AssertionError(
            f"Invalid fsdp_pre_all_gather: that of {fqn}, a {type(local).__name__}, takes {arity} arguments. Have it "
            "take the mesh, or the mesh, outer size, outer stride, module and mixed-precision policy."
        )
    return arity


def why_not_traced(fqn: str, shard: Any, slices: bool = False, computes_elsewhere: bool = False) -> str | None:
    """Name what of the shard's extension cannot be part of a graph; None if all of it can, and without an extension."""
    halves = halves_of(shard)
    if not any(halves):
        return None
    if computes_elsewhere:  # the marker copies what the extension sends, and the extension would run on the CPU
        return f"CPUOffloadPolicy with the all-gather extension of {fqn}"
    if all(halves) and subclasses.is_traceable(dtensors.local_tensor(shard)) and not slices:
        return None
    return f"the all-gather extension of {fqn}"


def halves_of(shard: Any) -> list[bool]:
    """Whether the shard has each of the two functions of an extension, first pre and then post."""
    local = dtensors.local_tensor(shard) if isinstance(shard, DTensor) else None
    return [hasattr(local, f"fsdp_{half}_all_gather") for half in ("pre", "post")]
