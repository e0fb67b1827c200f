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
from ._inner import Look
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
    return before


def releases_what_arrived(shard: DTensor) -> bool:
    """Whether the extension has no use for what was gathered once it made the parameter of it."""
    release = getattr(shard._local_tensor, _RELEASE, None)
    return release is not None and release()


@dataclass(frozen=True)
class Protocol:
    """What a parameter's extension is asked with; equal for equal parameters."""

    subclass: type
    mesh: DeviceMesh  # of the ranks that hold shards
    size: torch.Size
    stride: tuple[int, ...]
    mp_policy: Any
    owner: weakref.ref[nn.Module] | None  # only where the extension asks for it: blocks that differ in it differ
    look: Look | None  # of the shard, where a graph puts it together

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
        dim = _dim_of(tensor, spec)
        if length == rows or tensor.shape[dim] == rows:
            return tensor
        if tensor.shape[dim] != length:
            raise RuntimeError(
                f"{spec.fqn}: fsdp_pre_all_gather of {self.subclass.__name__} returned {tensor.shape[dim]} rows for a "
                f"shard of {length}. Return {length}, or {rows} with padding."
            )
        missing = [*tensor.shape]
        missing[dim] = rows - length
        return torch.cat([tensor, tensor.new_zeros(missing)], dim)

    def after(self, local: Tensor, gathered: Sequence[Tensor], metadata: Any, spec: ParamSpec) -> tuple[Tensor, Any]:
        """The full parameter that the extension makes of what was gathered, and the tensors inside it."""
        arrived = tuple(_cut_padding(tensor, spec) for tensor in gathered)
        made, inner = local.fsdp_post_all_gather(arrived, metadata, spec.dtype)  # type: ignore[attr-defined]
        return made, inner

    def again(
        self, local: Tensor, gathered: Sequence[Tensor], metadata: Any, spec: ParamSpec, out: Tensor, inner: Any
    ) -> None:
        """The same into what was made before, where ``gathered`` lies where it lay then."""
        arrived = tuple(_cut_padding(tensor, spec) for tensor in gathered)
        with compat.no_new_versions([out, *inner, *gathered]):  # the values are those that autograd saved
            local.fsdp_post_all_gather(arrived, metadata, spec.dtype, out=out)  # type: ignore[attr-defined]


def without_padding(made: Tensor, spec: ParamSpec) -> Tensor:
    return made if made.shape == spec.size else torch.as_strided(made, spec.size, made.stride())


def _dim_of(sent: Tensor, spec: ParamSpec) -> int:
    """Along which what ranks send is joined: as the shards are, where it looks like them."""
    return spec.dim if sent.ndim == len(spec.size) else 0


def _part_of(spec: ParamSpec, index: int, tensor: Tensor) -> ParamSpec:
    dim, size = _dim_of(tensor, spec), [*tensor.shape]
    rows = size[dim]
    size[dim] *= spec.num_shards
    return dataclasses.replace(spec, part=index, size=tuple(size), dim=dim, local_length=rows, dtype=tensor.dtype)


def _cut_padding(gathered: Tensor, spec: ParamSpec) -> Tensor:
    """What has the rows of the padded shards, without the padding."""
    dim = _dim_of(gathered, spec)
    if gathered.shape[dim] != spec.layout.chunk * spec.num_shards or spec.layout.even:
        return gathered
    return gathered.narrow(dim, 0, spec.size[spec.dim])


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
    look = None if param.apart is None else param.apart.look
    return Protocol(type(local), param.mesh.over_shards, shard.size(), tuple(shard.stride()), mp_policy, owner, look)


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
    """One such parameter on the eager path: its gathers, and what became of them.

        ask       the subclass says what to send
        launch    it is sent; what is gathered lands in the storages of the first gather
        land      first:  full, inner = post(gathered)
                  later:  post(gathered, out=full), which may rely on where ``gathered`` lies
        free      the storages of what was gathered, and of the inner tensors, shrink to nothing
    """

    def __init__(
        self, param: ShardedParam, shard: DTensor, spec: ParamSpec, mp_policy: Any, device: torch.device
    ) -> None:
        self._param, self._shard, self._spec, self._device = param, shard, spec, device
        self._protocol = protocol_of(param, shard, mp_policy)
        self._releases = releases_what_arrived(shard)
        self._sent: list[tuple[Tensor, ParamSpec]] = []
        self._in_flight: list[tuple[Any, ParamSpec, Caller]] = []
        self._metadata: Any = None
        self._kept: list[Tensor] = []  # what was gathered, as it travels
        self._inner: list[Tensor] = []
        self._full: Tensor | None = None
        self._num_bytes: list[tuple[Tensor, int]] = []

    def ask(self) -> None:
        """Have the subclass say what to send."""
        local = self._shard._local_tensor
        if local.device != self._device:  # an offloaded shard: what is sent must be where the process group is
            local = local.to(self._device, non_blocking=True)
        sent, specs, self._metadata = self._protocol.before(local, self._spec)
        self._sent = list(zip(sent, specs))

    def launch(self) -> None:
        """Start gathering it."""
        sent, self._sent = self._sent, []
        specs = [spec for _, spec in sent]
        if [(one.shape, one.dtype) for one in self._kept] != [(torch.Size(one.size), one.dtype) for one in specs]:
            self.forget()
        self._grow()
        for index, (tensor, spec) in enumerate(sent):
            lands_there = self._kept and spec.dim == 0 and spec.num_shards > 1
            call = Caller(Comms(), self._kept[index].data if lands_there else None)
            self._in_flight.append((lower.launch_gather(call, [tensor], [spec]), spec, call))

    def land(self) -> Tensor:
        """The full parameter that the subclass makes of what was gathered."""
        arrived = [lower.finish_gather(call, launched, [spec])[0] for launched, spec, call in self._in_flight]
        self._in_flight = []
        local, is_first = self._shard._local_tensor, not self._kept
        if is_first:
            # With one rank what arrives is what was sent, which may be the shard itself.
            self._kept = [one.clone() for one in arrived] if self._spec.num_shards == 1 else arrived
            self._num_bytes = _num_bytes_of(self._kept)
        for kept, tensor in zip(self._kept, arrived):
            if tensor.untyped_storage().data_ptr() != kept.untyped_storage().data_ptr():
                kept.data.copy_(tensor)
        if self._full is None:
            made, inner = self._protocol.after(local, self._kept, self._metadata, self._spec)
            self._inner, self._full = [*inner], without_padding(made, self._spec)
        else:
            self._protocol.again(local, self._kept, self._metadata, self._spec, self._full, self._inner)
        self._num_bytes = _num_bytes_of([*self._kept, *self._inner])
        if self._releases:
            _shrink(self._kept)
        return self._full

    def drop(self) -> None:
        """Wait for what is in flight, and have nothing of it."""
        in_flight, self._in_flight, self._sent = self._in_flight, [], []
        for launched, spec, call in in_flight:
            lower.finish_gather(call, launched, [spec])

    def free(self) -> None:
        """Give the storages back."""
        _shrink([*self._kept, *self._inner])

    def forget(self) -> None:
        """Leave the storages to who still has them; the next gather is a first one."""
        self._kept, self._inner, self._full, self._num_bytes = [], [], None, []

    def addresses(self) -> set[int]:
        """Where the storages of the full parameter are; a subclass has none but those of its inner tensors."""
        tensors = [one for one in (self._full, *self._kept, *self._inner) if one is not None]
        return compat.addresses_in(*tensors)

    def _grow(self) -> None:
        for tensor, num_bytes in self._num_bytes:
            if tensor.untyped_storage().nbytes() != num_bytes:
                tensor.untyped_storage().resize_(num_bytes)


def _num_bytes_of(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    return [(one, one.untyped_storage().nbytes()) for one in tensors]


def _shrink(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
