"""c10d: process groups by name, groups of our own, their memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from ..passes._torch_compat import group_ranks as group_ranks


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """Return the process group called ``name`` (``_resolve_process_group``: 2.11 to 2.15)."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def twin_group(name: str) -> str:
    """Return the name of a second group with the ranks of group ``name``, made once; its members call this together."""
    group = process_group(name)
    ranks, backend = torch.distributed.get_process_group_ranks(group), torch.distributed.get_backend(group)
    return str(group_for("reductions", ranks, backend).group_name)


def group_for(purpose: str, ranks: Sequence[int], backend: str | None = None) -> torch.distributed.ProcessGroup:
    """Return a process group of our own for one purpose, made once; its ranks call this together, others need not.

    It is found again in c10d by its description. So a world that was set up anew has its own, and no group that was
    destroyed is held. ``_world.pg_map``, ``group_desc``: 2.11 to 2.15.
    """
    described = f"fsdp_compile: {purpose} of the ranks {list(ranks)} on {backend or 'the default'}"
    for known in torch.distributed.distributed_c10d._world.pg_map:
        if known.group_desc == described:
            return known
    made = torch.distributed.new_group(
        list(ranks), backend=backend, use_local_synchronization=True, group_desc=described
    )
    assert isinstance(made, torch.distributed.ProcessGroup)
    return made


Allocator = Callable[[list[int], torch.dtype, torch.device], torch.Tensor]


def group_allocator(name: str, device: torch.device) -> Allocator:
    """Return a function that allocates memory of a process group's backend.

    ``ProcessGroup._get_backend``, ``supports_tensor_alloc``, ``allocate_tensor``: 2.11 to 2.15.
    """
    backend = process_group(name)._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise RuntimeError(f"The {backend.name()} backend has no allocator for {device}: leave the setting off.")

    def allocate(size: list[int], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=where).view(size)

    return allocate


def symmetric_allocator(name: str, device: torch.device, backend: str) -> Allocator:
    """Return a function that allocates a group's symmetric memory (``distributed._symmetric_memory``: 2.11 to 2.15)."""
    if device.type != "cuda":
        raise RuntimeError(f"Symmetric memory needs GPUs, but the parameters are gathered on {device}.")
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend(backend)  # type: ignore[arg-type]

    def allocate(size: list[int], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        tensor = symmetric.empty(math.prod(size), dtype=dtype, device=where)
        symmetric.rendezvous(tensor, name)  # type: ignore[arg-type]
        return tensor.view(size)

    return allocate


# Source code for a script that runs a graph with collectives by itself: process groups under the names in GROUPS that
# pretend to have their recorded size. FakeStore, the "fake" backend, _register_process_group: 2.11 to 2.15.
FAKE_GROUPS_SOURCE = """\
def start_fake_groups():
    \"\"\"Groups of the recorded names and sizes whose collectives return at once, without communicating.\"\"\"
    from torch.distributed.distributed_c10d import _register_process_group, _resolve_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(GROUPS.values(), default=1))
    for name, size in GROUPS.items():
        try:
            _resolve_process_group(name)
        except (RuntimeError, LookupError, ValueError):
            _register_process_group(name, dist.new_group(list(range(size))))
"""


_PRETENDED: list[str] = []  # backends of the pretended worlds, the innermost last


def backend_of(group: torch.distributed.ProcessGroup, device_type: str) -> str:
    """Return the backend that serves ``device_type`` in ``group``; "cpu:gloo,cuda:nccl" names one for each."""
    if _PRETENDED:
        return _PRETENDED[-1]
    for entry in torch.distributed.get_backend_config(group).split(","):
        kind, _, name = entry.partition(":")
        if name and kind == device_type:
            return name
    return str(torch.distributed.get_backend(group))


@contextlib.contextmanager
def pretended_world(num_ranks: int, backend: str = "fake") -> Iterator[None]:
    """Make this process rank 0 of ``num_ranks`` ranks, the others missing: collectives return at once and move nothing.

    Its groups pass for groups of ``backend``, so that plans have the reductions, gathers and buckets of that backend.
    ``torch.testing._internal.distributed.fake_pg.FakeStore``, which also makes the backend "fake" known: 2.11 to 2.15.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    _PRETENDED.append(backend)
    try:
        yield
    finally:
        _PRETENDED.pop()
        torch.distributed.destroy_process_group()
