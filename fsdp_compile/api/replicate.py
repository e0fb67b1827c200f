"""Data parallelism without sharding: every rank holds every parameter, and gradients are averaged.

    fully_shard   shard -> all_gather -> compute, gradient -> reduce_scatter -> shard's gradient
    replicate     parameter -----------> compute, gradient -> all_reduce -----> parameter's gradient

It is the same machinery with one shard: the same graphs, buckets, casts and methods.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .._torch_compat import fsdp2
from ..core.mesh import replicate_mesh
from .arguments import ignored_in, require_kinds
from .fully_shard import ModuleT, make_unit, modules_in


def replicate(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> ModuleT:
    """Average the gradients of ``module`` over the ranks of ``mesh``, all of which hold all parameters; return it.

    It does what ``DistributedDataParallel`` does, and ``torch.compile`` traces it. Parameters become ``Replicate()``
    DTensors. They are taken to be equal on every rank already: nothing is broadcast.
    """
    given = modules_in(module, "replicate")
    require_kinds("replicate", mesh, mp_policy, offload_policy)
    ignored = ignored_in("replicate", ignored_params)
    target = replicate_mesh(mesh, dp_mesh_dims)
    unit = make_unit(given, target, False, None, mp_policy, offload_policy, ignored)
    for one in unit.modules:
        fsdp2.register_replicate_state(one)
    return module


replicate.state = fsdp2.replicate_state  # type: ignore[attr-defined]  # as torch's has it
