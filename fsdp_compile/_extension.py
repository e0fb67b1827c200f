"""Parameters that say themselves what travels: tensor subclasses with FSDP2's all-gather extension, such as float8's.

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=None) -> (full parameter, inner tensors); None with out=

The protocol, for both paths, and the eager one; ``_traced_extension`` has the other.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._comm import Caller, Comms
from .passes import ParamSpec, lower

if TYPE_CHECKING:
    from ._param import ShardedParam

_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_ALL_ARGUMENTS = 5


def has_extension(param: ShardedParam, shard: DTensor) -> bool:
    """Whether the shard brings its own gather; raises when it brings half of one."""
    local = shard._local_tensor
    before, after = hasattr(local, "fsdp_pre_all_gather"), hasattr(local, "fsdp_post_all_gather")
    if before != after:
        there, missing = ("pre", "post") if before else ("post", "pre")
        raise RuntimeError(
            f"{param.fqn} is a {type(local).__name__} with fsdp_{there}_all_gather and without "
            f"fsdp_{missing}_all_gather. Define both, or neither."
        )
    release = getattr(local, _RELEASE, None)
    if release is None:
        return before
    if not before:
        raise RuntimeError(
            f"{param.fqn} is a {type(local).__name__} with {_RELEASE} and without fsdp_pre_all_gather and "
            "fsdp_post_all_gather. Define these too, or leave it out."
        )
    answer = release()
    if not isinstance(answer, bool):
        raise TypeError(f"{param.fqn}: {_RELEASE} of {type(local).__name__} returned {answer!r}, which is not a bool.")
    return before  # what was gathered is held no longer than fsdp_post_all_gather holds it, whatever the answer


@dataclass(frozen=True)
class Protocol:
    """What a parameter's extension is asked with; equal for equal parameters."""

    subclass: type
    mesh: DeviceMesh  # of the ranks that hold shards
    size: torch.Size
    stride: tuple[int, ...]
    mp_policy: Any
    owner: weakref.ref[nn.Module] | None  # only where the extension asks for it: blocks that differ in it differ

    def before(self, local: Tensor, spec: ParamSpec) -> tuple[list[Tensor], list[ParamSpec], Any]:
        """What this rank sends, how each of it travels, and what the extension wants to remember."""
        arguments: list[Any] = [self.mesh]
        if self.owner is not None:
            arguments += [self.size, self.stride, self.owner(), self.mp_policy]
        inputs, metadata = local.fsdp_pre_all_gather(*arguments)  # type: ignore[attr-defined]
        sent = [self._padded(tensor, spec).contiguous() for tensor in inputs]
        return sent, [_part_of(spec, index, tensor) for index, tensor in enumerate(sent)], metadata

    def _padded(self, tensor: Tensor, spec: ParamSpec) -> Tensor:
        """What is gathered has the same rows on every rank; the subclass may leave the padding to us."""
        length, rows = spec.local_length, spec.layout.chunk
        if tensor.ndim == 0:
            return tensor.view(1)
        if length == rows or tensor.shape[0] == rows:
            return tensor
        if tensor.shape[0] != length:
            raise RuntimeError(
                f"{spec.fqn}: fsdp_pre_all_gather of {self.subclass.__name__} returned {tensor.shape[0]} rows for a "
                f"shard of {length}. Return {length}, or {rows} with padding."
            )
        return torch.cat([tensor, tensor.new_zeros(rows - length, *tensor.shape[1:])])

    def after(self, local: Tensor, gathered: Sequence[Tensor], metadata: Any, spec: ParamSpec) -> tuple[Tensor, Any]:
        """The full parameter that the extension makes of what was gathered, and the tensors inside it."""
        made, inner = local.fsdp_post_all_gather(tuple(gathered), metadata, spec.dtype)  # type: ignore[attr-defined]
        return made, inner


def without_padding(made: Tensor, spec: ParamSpec) -> Tensor:
    return made if made.shape == spec.size else torch.as_strided(made, spec.size, made.stride())


def _part_of(spec: ParamSpec, index: int, tensor: Tensor) -> ParamSpec:
    rows, *rest = tensor.shape
    size = (rows * spec.num_shards, *rest)
    return dataclasses.replace(spec, part=index, size=size, dim=0, local_length=rows, dtype=tensor.dtype)


def protocol_of(param: ShardedParam, shard: Any, mp_policy: Any) -> Protocol:
    """How to speak to the extension that a shard has; raises where it does not listen."""
    local = shard._local_tensor
    arity = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
    if arity not in (1, _ALL_ARGUMENTS):
        raise TypeError(
            f"{param.fqn}: fsdp_pre_all_gather of {type(local).__name__} takes {arity} arguments. It takes the mesh, "
            "or the mesh, outer size, outer stride, module and mixed-precision policy."
        )
    owner = weakref.ref(param.slots[0].module) if arity == _ALL_ARGUMENTS else None
    return Protocol(type(local), param.mesh.over_shards, shard.size(), tuple(shard.stride()), mp_policy, owner)


def traced_protocol(param: ShardedParam, shard: Any, mp_policy: Any) -> Protocol | None:
    """How a graph speaks to the shard's extension; None where it cannot, and where there is none."""
    if why_not_traced(param, shard) is not None or not any(_halves(shard)):
        return None
    return protocol_of(param, shard, mp_policy)


def why_not_traced(
    param: ShardedParam, shard: Any, slices: bool = False, computes_elsewhere: bool = False
) -> str | None:
    """What of the shard's extension cannot be part of a graph; None where all can, and where there is none."""
    halves = _halves(shard)
    if not any(halves):
        return None
    if computes_elsewhere:  # the marker copies what the extension sends, and the extension would run on the CPU
        return f"CPUOffloadPolicy with the all-gather extension of {param.fqn}"
    if all(halves) and compat.is_traceable(shard._local_tensor) and not slices:
        return None
    return f"the all-gather extension of {param.fqn}"


def _halves(shard: Any) -> list[bool]:
    local = getattr(shard, "_local_tensor", None)
    return [hasattr(local, f"fsdp_{half}_all_gather") for half in ("pre", "post")]


class Extension:
    """One such parameter on the eager path: its gathers, and what became of them."""

    def __init__(
        self, param: ShardedParam, shard: DTensor, spec: ParamSpec, mp_policy: Any, device: torch.device
    ) -> None:
        self._param, self._shard, self._spec, self._device = param, shard, spec, device
        self._protocol = protocol_of(param, shard, mp_policy)
        self._in_flight: list[tuple[Any, ParamSpec, Caller]] = []
        self._metadata: Any = None
        self._made: Tensor | None = None  # by the subclass
        self._full: Tensor | None = None
        self._freeable: list[Tensor] = []
        self._num_bytes: list[int] = []

    def launch(self) -> None:
        """Ask the subclass what to gather, and start gathering it."""
        local = self._shard._local_tensor
        if local.device != self._device:  # an offloaded shard: what is sent must be where the process group is
            local = local.to(self._device, non_blocking=True)
        sent, specs, self._metadata = self._protocol.before(local, self._spec)
        for tensor, spec in zip(sent, specs):
            call = Caller(Comms())
            self._in_flight.append((lower.launch_gather(call, [tensor], [spec]), spec, call))

    def land(self) -> Tensor:
        """The full parameter that the subclass makes of what was gathered."""
        outputs = [lower.finish_gather(call, launched, [spec])[0] for launched, spec, call in self._in_flight]
        self._in_flight = []
        local = self._shard._local_tensor
        if self._full is None:
            self._made, inner = self._protocol.after(local, outputs, self._metadata, self._spec)
            self._freeable = [*inner]
            self._num_bytes = [tensor.untyped_storage().nbytes() for tensor in self._freeable]
            self._full = without_padding(self._made, self._spec)
        else:
            for tensor, num_bytes in zip(self._freeable, self._num_bytes):
                if tensor.untyped_storage().nbytes() != num_bytes:
                    tensor.untyped_storage().resize_(num_bytes)
            again = local.fsdp_post_all_gather  # type: ignore[attr-defined]
            again(tuple(outputs), self._metadata, self._spec.dtype, out=self._made)
        return self._full

    def free(self) -> None:
        """Give the storages of the inner tensors back."""
        for tensor in self._freeable:
            tensor.untyped_storage().resize_(0)
