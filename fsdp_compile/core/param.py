"""One sharded parameter: from the full tensor that a module was built with to the DTensor that it holds."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch_compat import autograd, dtensors, subclasses
from ..passes.ir.markers import ParamSpec
from ..passes.wire.layout import ShardLayout
from .extension import Apart, Protocol, taken_apart
from .mesh import ShardMesh, placement_and_mesh
from .stored import ReadAs, read_as, stored_on


class Mark:
    """A sentinel: it equals nothing but itself."""


# The eager path returns this for a read whose parameter nobody gathered: a marker that runs at once gathers it.
BY_MARKER = Mark()

# The attribute of a module with its reads by name: (parameter, the unit that owns it, the unit that reads it).
READS = "_fsdp_compile_reads"

# Beyond ASCII, Python treats some different identifiers as the same one.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")

# An attribute of the parameters that a model was built with, by which a weight tied across fully_shard calls is found.
STAMP = "_fsdp_compile_sharded"


@functools.cache
def beside(name: str, what: str) -> str:
    """Return the name of the module attribute that holds ``what`` for its parameter ``name``.

    Each has its own attribute, since guards take time. It is an identifier, whatever the parameter is called, since
    generated code uses it. No two parameters share one.
    """
    if _PLAIN_NAME.fullmatch(name):
        return f"_fsdp_compile_{what}__{name}"
    return f"_fsdp_compile_{what}_of_hex__{name.encode(errors='surrogatepass').hex()}"


@dataclass(frozen=True)
class Slot:
    """One place in a module tree where a parameter is registered; tied parameters have several."""

    module: nn.Module
    name: str

    @property
    def param(self) -> Any:
        return dict.get(self.module._parameters, self.name)

    def register(self, param: nn.Parameter) -> None:
        dict.__setitem__(self.module._parameters, self.name, param)


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut, and what its shard is stored as."""

    layout: ShardLayout  # of the tensor itself, or of a DTensor's local tensor
    mesh: ShardMesh
    stored_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    read_as: ReadAs | None


@dataclass(frozen=True)
class ReadSpec(ParamSpec):
    """What a marker says of its parameter, and what else a read depends on."""

    read_as: ReadAs | None = None  # the DTensor that the read makes of the marker's result
    extension: Protocol | None = None  # of a parameter with an all-gather extension
    carries: tuple[str, ...] = ()  # names of the attributes that a read copies from the parameter


@dataclass(eq=False)
class ShardedParam:
    """A parameter, where it is registered, and how it is cut."""

    fqn: str  # relative to the module given to fully_shard
    order: int  # place in its unit
    slots: list[Slot]
    layout: ShardLayout
    mesh: ShardMesh
    shard: nn.Parameter = field(repr=False)
    local: Tensor | None = field(init=False, repr=False)  # the shard's local tensor, which graphs take
    address: int | None = field(init=False, repr=False)  # of the data of a plain local tensor
    apart: Apart | None = field(init=False, repr=False)  # a local tensor with an extension: graphs take what is inside
    # The dtype of gradients that the user asked for; None for what autograd produces, "own" for the parameter's.
    grad_dtype: torch.dtype | Literal["own"] | None = "own"
    dtensor: ReadAs | None = None  # the DTensor that it was before fully_shard
    # Attributes that the user gave the parameter before fully_shard: modules look for them on what they read.
    carried: dict[str, Any] = field(default_factory=dict, repr=False)
    version: int = field(default=0, init=False)  # counts changes of the shard, or of the tensor in it
    is_stored_as_read: bool = field(init=False)
    is_full: bool = field(default=False, init=False)  # full_params has registered a full parameter in the shard's place
    # What the user put in the shard's place outside of a forward, if it cannot be the shard: the next forward raises.
    refused: nn.Parameter | None = field(default=None, init=False, repr=False)
    sink: Any = field(default=None, init=False, repr=False)  # graph.sink.Sink: where compiled code sends its gradient

    def __post_init__(self) -> None:
        stored, was = cast(DTensor, self.shard), self.dtensor
        stored_as = None if was is None else (stored.device_mesh, stored.placements)
        self.is_stored_as_read = was is not None and stored_as == (was.mesh, was.placements)
        self._look_at(self.shard)
        dtensors.heed_data_writes(_can_take, _note_data)

    @property
    def is_table(self) -> bool:
        """Whether modules only look rows of it up, so that their backward needs the rows' numbers and not the table."""
        return all(isinstance(slot.module, (nn.Embedding, nn.EmbeddingBag)) for slot in self.slots)

    def install(self) -> None:
        """Register the shard in the place of the full parameter, and stamp the full parameter as sharded."""
        setattr(self.param, STAMP, self)
        for slot in self.slots:
            slot.register(self.shard)

    def tie(self) -> None:
        """Register one shard in all slots, after ``load_state_dict(assign=True)`` put a different one into each."""
        sharded = [slot for slot in self.slots if self.is_cut(slot.param)]
        new = next((slot.param for slot in sharded if slot.param is not self.shard), None)
        if new is not None and not self.is_full:
            for slot in sharded:
                slot.register(new)

    def is_cut(self, put: Any) -> bool:
        """Whether a registered tensor is a shard, and not the result of a read, which may be a DTensor as well."""
        if self.dtensor is None or not isinstance(put, DTensor):
            return isinstance(put, DTensor)
        if self.is_stored_as_read:  # as with replicas alone, on the mesh that the parameter was on before
            return put.is_leaf
        return (put.device_mesh, put.placements) != (self.dtensor.mesh, self.dtensor.placements)

    def follow(self, shard: nn.Parameter) -> None:
        """Make ``shard`` the parameter's shard; it may be the same one with another tensor in it."""
        self._look_at(shard)
        self.put_beside("local", self.local if self.apart is None else self.apart.inside)
        if self.carried:
            self.put_beside("carried", self.carried)

    def _look_at(self, shard: nn.Parameter) -> None:
        local = dtensors.local_tensor(shard) if isinstance(shard, DTensor) else None
        address = local.data_ptr() if type(local) is Tensor else None
        is_known = self.version and shard is self.shard and local is self.local and address == self.address
        self.version += not is_known
        self.shard, self.local, self.address, self.apart = shard, local, address, taken_apart(local)
        _OF_SHARDS[id(shard)] = self

    @property
    def has_other_data(self) -> bool:
        """Whether the shard has another tensor in it, or other memory, than when it was last looked at."""
        shard: Any = self.shard
        if self.local is None or dtensors.local_tensor(shard) is not self.local:
            return True
        if self.apart is not None and self.apart.has_changed:
            return True
        return self.address is not None and self.address != self.local.data_ptr()

    def follow_data(self) -> None:
        """Follow ``shard.data = other``, after which the same local tensor has other memory."""
        self.address = None if self.local is None else self.local.data_ptr()
        if self.sink is not None:
            self.sink.follow_data()

    def require_shard(self) -> None:
        """Raise if the user has put a tensor in the shard's place that cannot be used as the shard."""
        put, shard = self.refused, self.shard
        if put is not None and not self.is_full and any(slot.param is put for slot in self.slots):
            raise RuntimeError(
                f"{self.fqn}: Cannot writeback when the parameter shape changes. It is {_described(shard)}, and "
                f"{_described(put)} was put in its place, which each rank would train alone. Put nn.Parameter("
                "distribute_tensor(full, param.device_mesh, param.placements)) there, or write into the parameter "
                "inside full_params or summon_full_params."
            )

    def put_beside(self, what: str, tensor: Any) -> None:
        """Put a tensor, or those inside it, where compiled reads take it from: in the modules' own dicts.

        While such a dict does not change, Dynamo checks no guard on the tensors in it, as with a module's parameters.
        """
        for slot in self.slots:
            slot.module.__dict__[beside(slot.name, what)] = tensor

    @property
    def param(self) -> Any:
        """What is registered now: the shard, or what the user put there since."""
        return self.slots[0].param

    def keep_grad_dtype(self) -> None:
        """Set the ``grad_dtype`` that the user asked for on the shard, which may be another tensor by now."""
        if self.grad_dtype != "own":
            autograd.restore_grad_dtype(self.shard, self.grad_dtype)

    def as_read(self, gathered: Tensor) -> Any:
        """Return what a read gives: the gathered tensor, as a DTensor if the parameter was one before fully_shard."""
        full: Any = self.carry(gathered if self.dtensor is None else self.dtensor.wrap(gathered))
        full._is_param = True  # isinstance(full, nn.Parameter) is true, and it is no leaf
        return full

    def carry(self, full: Any) -> Any:
        """Give a full parameter the attributes that the user's parameter had."""
        for name, value in self.carried.items():
            setattr(full, name, value)
        return full


# Parameters by the id of their shard: weak references to the shard would keep nn.Module.to from swapping it.
_OF_SHARDS: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def _of_shard(shard: Any) -> ShardedParam | None:
    param = _OF_SHARDS.get(id(shard))
    return None if param is None or param.shard is not shard else param


def _note_data(written: DTensor) -> None:
    param = _of_shard(written)
    if param is not None:
        param.follow_data()


def _can_take(written: DTensor, other: Any) -> bool:
    """Whether ``written.data = other`` can write the values of ``other`` into ``written``.

    If it cannot, raise for a shard or its gradient. Other DTensors in the process are left to torch.
    """
    param = _of_shard(written)
    if not isinstance(other, DTensor) or other.device_mesh != written.device_mesh:
        how = "distribute_tensor(full, param.device_mesh, param.placements)"
        why = f"Set it to a DTensor on the same mesh: {how} makes one of a full tensor."
    elif other.shape != written.shape:
        why = "Cannot writeback when the parameter shape changes: set it to a DTensor of its own shape."
    elif {type(dtensors.local_tensor(one)) for one in (written, other)} != {Tensor}:
        why = "What is inside them is no plain tensor. Put a new nn.Parameter in its place."
    elif param is not None and (other.dtype, other.device) != (written.dtype, written.device):
        why = "Cast or move the model with model.to(...), which tells all that know the shard."
    else:
        return True
    of_grads = (f"{one.fqn}.grad" for one in _OF_SHARDS.values() if one.shard.grad is written)
    name = next(of_grads, None) if param is None else param.fqn
    if name is None:
        return False
    raise RuntimeError(f"{name} is {_described(written)}, and its .data was set to {_described(other)}. {why}")


def _described(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    placed = f" with placements {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} and {tensor.dtype} on {tensor.device}{placed}"


def cut_of(fqn: str, full: nn.Parameter, mesh: ShardMesh, placement_fn: Callable[..., Any] | None) -> Cut:
    """Return how ``full`` will be cut; raise if it cannot be cut so."""
    placement, its_mesh = (None, mesh) if placement_fn is None else placement_and_mesh(fqn, placement_fn(full), mesh)
    dim = _shard_dim(fqn, full, placement)
    local_size = tuple(full.to_local().shape) if isinstance(full, DTensor) else tuple(full.shape)
    layout = ShardLayout(local_size, dim, its_mesh.num_shards)
    _validate(fqn, full, layout)
    stored_mesh, placements = stored_on(fqn, full, dim, its_mesh)
    return Cut(layout, its_mesh, stored_mesh, placements, read_as(full, its_mesh))


def _part_of(whole: Tensor, layout: ShardLayout, start: int, stop: int) -> Tensor:
    """Copy a part of ``whole``.

    A tensor of a subclass with an extension is copied as FSDP2 copies it: torchao's NF4 cannot be narrowed, and
    quantizes again when it is cloned.
    """
    if hasattr(whole, "fsdp_pre_all_gather") and stop > start:
        part = whole.split(layout.chunk, layout.dim)[start // layout.chunk]
        copied = whole.new_zeros(part.size())
        if type(copied) is type(part) is type(whole):
            copied.copy_(part)
            return copied
    return whole.narrow(layout.dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def shard_param(
    fqn: str, order: int, slots: list[Slot], cut: Cut, device: torch.device, offload_policy: OffloadPolicy
) -> ShardedParam:
    """Cut this rank's shard, on ``device``, of the full parameter in the slots; ``install`` registers it there."""
    full = slots[0].param
    layout = cut.layout
    start, stop = layout.span(cut.mesh.rank)
    with torch.no_grad():
        whole = full.to_local() if isinstance(full, DTensor) else full.detach()
        local = _part_of(whole, layout, start, stop)
        if not local.is_meta and local.device != device:
            local = local.to(device)
        dtensor = dtensors.dtensor_of(local, cut.stored_mesh, cut.placements, full.shape, full.stride())
        if isinstance(offload_policy, CPUOffloadPolicy):
            dtensor = dtensors.on_cpu(dtensor, offload_policy.pin_memory)
    shard = nn.Parameter(dtensor, requires_grad=full.requires_grad)
    asked = full.grad_dtype
    grad_dtype: torch.dtype | Literal["own"] | None = "own" if asked == full.dtype else asked
    sharded = ShardedParam(fqn, order, slots, layout, cut.mesh, shard, grad_dtype, cut.read_as, _carried_by(full))
    sharded.keep_grad_dtype()
    return sharded


def _carried_by(full: nn.Parameter) -> dict[str, Any]:
    """Return the public attributes of a parameter, which modules read, as bitsandbytes reads ``quant_state``.

    A subclass that wraps other tensors has none: it is built from its attributes, and what is gathered has its own.
    """
    if not subclasses.has_own_memory(full):
        return {}
    return {name: value for name, value in vars(full).items() if name.isidentifier() and not name.startswith("_")}


def _shard_dim(fqn: str, full: nn.Parameter, placement: Any) -> int:
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(
            f"Invalid shard_placement_fn result: {placement!r} for {fqn}. Return Shard(dim), None for the default "
            "Shard(0), or a ShardPlacementResult."
        )
    dim = placement.dim + full.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < full.ndim:
        dims = "only dim 0" if full.ndim == 1 else f"dims 0 to {full.ndim - 1}"
        raise AssertionError(  # FSDP2's type
            f"Shard dim {placement.dim} is invalid for {full.ndim}D tensor: {fqn} has shape {tuple(full.shape)}, with "
            f"{dims}. Have shard_placement_fn return Shard(0), or None for the default, for such parameters."
        )
    return dim


def _validate(fqn: str, full: nn.Parameter, layout: ShardLayout) -> None:
    if not (full.is_contiguous() and (not isinstance(full, DTensor) or full.to_local().is_contiguous())):
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters: {fqn} has shape {tuple(full.shape)} and stride "
            f"{tuple(full.stride())}. Assign nn.Parameter(param.contiguous()) before fully_shard."
        )
    if layout.dim != 0 and not layout.even:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {layout.dim}: {fqn} has shape {layout.size} (world size: "
            f"{layout.num_shards}). Return Shard(0) for it, where shards may be uneven, or pad the parameter."
        )
