"""Parameters that say themselves what travels: tensor subclasses with FSDP2's all-gather extension, such as float8's.

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors to gather, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=None) -> (full parameter, inner tensors); None with out=
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._comm import Caller, Comms
from ._param import ShardedParam
from .passes import ParamSpec
from .passes.collectives import all_gather_of, c10d

_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


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


class Extension:
    """One such parameter: its gathers, and what became of them."""

    def __init__(self, param: ShardedParam, shard: DTensor, spec: ParamSpec, mp_policy: Any) -> None:
        self._param, self._shard, self._spec, self._mp_policy = param, shard, spec, mp_policy
        self._in_flight: list[tuple[Tensor, torch.Size, Caller]] = []
        self._metadata: Any = None
        self._made: Tensor | None = None  # by the subclass
        self._full: Tensor | None = None
        self._freeable: list[Tensor] = []
        self._num_bytes: list[int] = []

    def launch(self) -> None:
        """Ask the subclass what to gather, and start gathering it."""
        local, mesh = self._shard._local_tensor, self._param.mesh
        before = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arity = len(inspect.signature(before).parameters)
        if arity not in (1, 5):
            raise TypeError(
                f"{self._param.fqn}: fsdp_pre_all_gather of {type(local).__name__} takes {arity} arguments. It takes "
                "the mesh, or the mesh, outer size, outer stride, module and mixed-precision policy."
            )
        arguments: list[Any] = [mesh.mesh]
        if arity == 5:
            owner = self._param.slots[0].module
            arguments += [self._shard.size(), self._shard.stride(), owner, self._mp_policy]
        inputs, self._metadata = before(*arguments)
        for tensor in map(self._padded, inputs):
            call = Caller(Comms())
            flat = tensor.contiguous().view(-1)
            if mesh.num_shards == 1:
                self._in_flight.append((flat, tensor.shape, call))
                continue
            launched = call(all_gather_of(mesh.backend), flat, mesh.num_shards, mesh.group)
            self._in_flight.append((launched, tensor.shape, call))

    def _padded(self, tensor: Tensor) -> Tensor:
        """What is gathered has the same rows on every rank; the subclass may leave the padding to us."""
        length = self._spec.local_length
        rows = self._spec.layout.chunk
        if tensor.ndim == 0 or length == rows or tensor.shape[0] == rows:
            return tensor
        if tensor.shape[0] != length:
            raise RuntimeError(
                f"{self._param.fqn}: fsdp_pre_all_gather of {type(self._shard._local_tensor).__name__} returned "
                f"{tensor.shape[0]} rows for a shard of {length}. Return {length}, or {rows} with padding."
            )
        return torch.cat([tensor, tensor.new_zeros(rows - length, *tensor.shape[1:])])

    def land(self) -> Tensor:
        """The full parameter that the subclass makes of what was gathered."""
        outputs = []
        for launched, size, call in self._in_flight:
            flat = launched if self._param.mesh.num_shards == 1 else call(c10d.wait_tensor.default, launched)
            outputs.append(flat.view(-1, *size[1:]))
        self._in_flight = []
        after = self._shard._local_tensor.fsdp_post_all_gather  # type: ignore[attr-defined]
        if self._full is None:
            self._full, inner = after(tuple(outputs), self._metadata, self._spec.dtype)
            self._freeable = [*inner]
            self._num_bytes = [tensor.untyped_storage().nbytes() for tensor in self._freeable]
            self._made = self._full
            if self._full.shape != self._spec.size:  # without the padding
                self._full = torch.as_strided(self._full, self._spec.size, self._full.stride())
        else:
            for tensor, num_bytes in zip(self._freeable, self._num_bytes):
                if tensor.untyped_storage().nbytes() != num_bytes:
                    tensor.untyped_storage().resize_(num_bytes)
            after(tuple(outputs), self._metadata, self._spec.dtype, out=self._made)
        assert self._full is not None
        return self._full

    def free(self) -> None:
        """Give the storages of the inner tensors back."""
        for tensor in self._freeable:
            tensor.untyped_storage().resize_(0)
