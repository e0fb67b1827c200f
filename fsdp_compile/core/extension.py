"""FSDP2's all-gather extension: tensor subclasses, such as float8's, that decide themselves what is gathered.

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=None) -> (full parameter, inner tensors); None with out=

This file has the protocol; the paths use it in ``graph/extension.py`` and ``eager/extension.py``. Graphs take the
tensors inside the subclass, and rebuild it:

    graph input                    in the graph
    (names, *tensors inside)       shard = Look.around(names, tensors) ... fsdp_pre_all_gather(shard)

A compiler that gets the subclass itself takes it apart by ``__tensor_flatten__`` and ``__tensor_unflatten__``, and
relies on more than subclasses guarantee: torchao's float8 subclass looks at the data of a scale while no tensor has
data, and forgets the scale. And while a shard keeps its attributes, a call does not flatten it again.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, subclasses
from ..passes import ParamSpec

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
class Look:
    """What it takes to rebuild a tensor of a subclass from the tensors inside it."""

    subclass: type
    context: Any = field(hash=False)  # that ``__tensor_flatten__`` returned
    size: torch.Size
    stride: tuple[int, ...]

    def around(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        """Rebuild the tensor of the subclass from ``tensors``."""
        subclass: Any = self.subclass
        made = subclass.__tensor_unflatten__(dict(zip(names, tensors)), self.context, self.size, self.stride)
        for name, tensor in zip(names, tensors):
            if getattr(made, name, None) is not tensor:  # the subclass forgot it
                setattr(made, name, tensor)
        return made


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


class Apart:
    """A shard taken apart. Each call looks at it again, since the user may put other tensors into it."""

    def __init__(self, local: Any) -> None:
        self._local = local
        self._attributes = _attributes_of(local)
        self._names, self.look = _flattened(local)
        self._look_now = self.look
        own = vars(local)
        # Graphs take the tensors from the shard's ``__dict__``, so they get those that are there at each call. If the
        # subclass keeps its tensors elsewhere, graphs get those that it has now.
        self.inside = own if set(self._names) <= own.keys() else {name: getattr(local, name) for name in self._names}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that are inside the shard now."""
        self._look_again()
        return self._names

    @property
    def has_changed(self) -> bool:
        """Whether the shard has changed in a way that ``look`` and ``inside`` do not follow."""
        self._look_again()
        if self._look_now != self.look:
            return True
        is_live = self.inside is vars(self._local)
        return not is_live and any(getattr(self._local, name) is not self.inside.get(name) for name in self._names)

    def _look_again(self) -> None:
        attributes = _attributes_of(self._local)
        if not _are_the_same(attributes, self._attributes):  # not earlier: flattening may wait for the device
            self._attributes = attributes
            self._names, self._look_now = _flattened(self._local)


def taken_apart(local: Any) -> Apart | None:
    """Take apart a local tensor with an extension; None for other tensors, and if a compiler cannot look inside it."""
    if not hasattr(local, "fsdp_pre_all_gather") or not subclasses.is_traceable(local):
        return None
    return Apart(local)


def _flattened(local: Any) -> tuple[tuple[str, ...], Look]:
    names, context = local.__tensor_flatten__()
    return tuple(names), Look(type(local), context, local.size(), local.stride())


def _attributes_of(local: Any) -> dict[str, Any]:
    """Return the attributes, with the class ``Tensor`` in the place of each tensor."""
    return {name: Tensor if isinstance(value, Tensor) else value for name, value in vars(local).items()}


def _are_the_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(value is others[name] for name, value in some.items())
