"""DTensors and device meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.device_mesh as device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from .optimizers import count_steps_as_writes


def version_of(tensor: torch.Tensor) -> int:
    """Count the writes to a tensor, or to the one in a DTensor; 0 in inference mode (``_version``: 2.11 to 2.15)."""
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return 0 if inner.is_inference() else inner._version


def dtensor_like(param: DTensor, local: torch.Tensor) -> DTensor:
    """Make a DTensor with the mesh, placements and global shape of ``param``, without ``from_local``'s checks.

    ``DTensor.__new__(DTensor, local, spec, requires_grad=)``, ``_spec``: 2.11 to 2.15. It takes a tenth of
    ``from_local``'s time. ``__init__`` does nothing, inside wrappers that take longer than the rest, and is left out.
    """
    return DTensor.__new__(DTensor, local, param._spec, requires_grad=False)


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Make what ``from_local`` makes, in a third of the time (``DTensorSpec``, ``TensorMeta``: 2.11 to 2.15)."""
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def versions_of(tensor: Any) -> list[int]:
    """Count the writes to a tensor, and those to a DTensor's local tensor: neither count includes the other."""
    if not isinstance(tensor, DTensor):
        return [version_of(tensor)]
    count_steps_as_writes()
    return [0 if one.is_inference() else one._version for one in (tensor, local_tensor(tensor))]


def local_tensor(param: DTensor) -> torch.Tensor:
    """Return this rank's part of a parameter, without a gradient (``_local_tensor``: 2.11 to 2.15, in graphs too)."""
    return param._local_tensor


def on_cpu(sharded: DTensor, pin_memory: bool) -> DTensor:
    """Return the same DTensor with its local tensor on the CPU, whatever its mesh (``_local_tensor``: 2.11 to 2.15).

    It is a new one: the device of a DTensor is that of its local tensor when it was made, and ``grad`` must be there.
    """
    local = sharded._local_tensor
    if local.is_meta:
        return sharded
    local = local.cpu()
    return dtensor_like(sharded, local.pin_memory() if pin_memory and torch.accelerator.is_available() else local)


def pin(param: torch.Tensor) -> None:
    """Move a shard on the CPU to pinned memory, if it is in other memory (``_local_tensor``: 2.11 to 2.15)."""
    local = param._local_tensor if isinstance(param, DTensor) else None
    if local is not None and local.device.type == "cpu" and not local.is_pinned() and torch.accelerator.is_available():
        param._local_tensor = local.pin_memory()  # type: ignore[attr-defined]


def is_pinned(param: torch.Tensor) -> bool:
    """Whether a shard is in pinned memory (``_local_tensor``: 2.11 to 2.15)."""
    local = param._local_tensor if isinstance(param, DTensor) else param
    return local.device.type == "cpu" and local.is_pinned()


_DATA: Any = torch._C.TensorBase.data  # 2.11 to 2.15


def heed_data_writes(can_take: Callable[[DTensor, Any], bool], note: Callable[[DTensor], None]) -> None:
    """Make ``dtensor.data = other`` write the values of ``other`` into the DTensor, as it does for a plain tensor.

    torch 2.11 to 2.15 changes the shape and dtype that the DTensor shows, and leaves its local tensor as it was: the
    values are lost. torch has no hook that tells of the write, so we replace this one attribute of its class.
    ``can_take`` returns whether the values can be written, or raises. Where it returns False, torch does what it does
    without us. ``note`` is called after each write.
    """

    def write(self: DTensor, other: Any) -> None:
        if not can_take(self, other):
            _DATA.__set__(self, other)
            return
        other = other.detach()
        if other.placements != self.placements:
            other = other.redistribute(placements=self.placements)
        _DATA.__set__(self, other)
        self._local_tensor.data, self._spec = other._local_tensor, other._spec
        note(self)

    if "data" not in DTensor.__dict__:
        DTensor.data = property(_DATA.__get__, write)  # type: ignore[assignment, method-assign]


# Whether Dynamo makes a DeviceMesh an input of the graph (``_register_distributed_opaque_types``: 2.15, not 2.11).
MESH_IS_GRAPH_INPUT = hasattr(device_mesh, "_register_distributed_opaque_types")


# The placement that cuts what later mesh dimensions have cut on the same tensor dimension already: 2.11 to 2.15
StridedShard = _StridedShard


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join the dimensions of several slices of one mesh into a mesh (``DeviceMesh._concatenate``: 2.11 to 2.15)."""
    return DeviceMesh._concatenate(list(meshes))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one is a part of, or itself (``_get_root_mesh``: 2.11 to 2.15)."""
    return mesh._get_root_mesh()


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Join the named dimensions into one, with a new group, once a mesh (``DeviceMesh._flatten``: 2.11 to 2.15)."""
    return mesh[names]._flatten("_".join(names))
