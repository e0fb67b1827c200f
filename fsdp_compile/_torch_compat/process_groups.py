"""c10d: process groups by name, groups of our own, their memory."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ..passes._torch_compat import group_ranks as group_ranks
from ..passes._torch_compat import process_group as process_group


def twin_group(name: str) -> str:
    """Return the name of a second group with the ranks of group ``name``, made once; its members call this together."""
    group = process_group(name)
    ranks, backend = torch.distributed.get_process_group_ranks(group), torch.distributed.get_backend(group)
    return str(group_for("reductions", ranks, backend).group_name)


def group_for(purpose: str, ranks: Sequence[int], backend: str | None = None) -> torch.distributed.ProcessGroup:
    """Return a process group of our own for one purpose, made once; its ranks call this together, others need not.

    It is found again in c10d by its description. So a world that was set up anew has its own, and no group that was
    destroyed is held. Its name is made of the description as well. The name that torch makes up depends on how many
    groups a rank is in (2.11), or has made (2.15). So its ranks could have different names for it, and a group that all
    ranks of the world make later would have another name on the ranks that made this one.
    ``_world.pg_map``, ``group_desc``: 2.11 to 2.15.
    """
    c10d = torch.distributed.distributed_c10d
    described = f"fsdp_compile: {purpose} of the ranks {list(ranks)} on {backend or 'the default'}"
    for known in c10d._world.pg_map:
        if known.group_desc == described:
            return known
    _let_groups_be_named()
    named = _name.set(hashlib.sha256(described.encode()).hexdigest())
    try:
        made = c10d.new_group(
            list(ranks), world_timeout(), backend=backend, use_local_synchronization=True, group_desc=described
        )
    finally:
        _name.reset(named)
    assert isinstance(made, torch.distributed.ProcessGroup)
    return made


def world_timeout() -> datetime.timedelta | None:
    """Return how long the group of all ranks lets a rank wait for another one; None where its backend has no limit.

    ``ProcessGroup._get_backend``, ``Backend.options``, ``_timeout``: 2.11 to 2.15.
    """
    group: Any = torch.distributed.group.WORLD
    for device_type in ("cpu", "cuda", "xpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            found: datetime.timedelta = group._get_backend(torch.device(device_type)).options._timeout
            return found
    return None


_name: ContextVar[str] = ContextVar("the name of the group that is made", default="")


@functools.cache
def _let_groups_be_named() -> None:
    """Have c10d ask ``_name`` before it makes up the name of a group (``_process_group_name``: 2.11 to 2.15)."""
    c10d: Any = torch.distributed.distributed_c10d
    made_up = c10d._process_group_name

    def name(ranks: Any, use_hashed_name: bool) -> Any:
        return _name.get() or made_up(ranks, use_hashed_name)

    c10d._process_group_name = name


def abort_all() -> None:
    """Abort all process groups of this process, so that threads that wait in one raise; gloo's wait on.

    ``_world.pg_map``, ``ProcessGroup.abort``: 2.11 to 2.15. Gloo ignores ``abort`` and ``shutdown``.
    """
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            group.abort()


def how_waits_end() -> str:
    """Return a sentence for the log: when a rank raises after ``abort_all``."""
    said = "This rank raises this at its next collective, or when its wait ends."
    group = torch.distributed.group.WORLD
    if group is None or backend_of(group, "cpu") != "gloo":
        return said
    timeout = world_timeout()
    assert timeout is not None
    return (
        f"{said} A wait in gloo cannot be ended: it, and this process, may go on until another rank's process ends, or "
        f"for {timeout.total_seconds():.0f} s, the group's timeout. init_process_group(timeout=...) sets that."
    )


class Pool:
    """Memory for what collectives write to, in place of the caching allocator's; the pool reuses what was freed."""

    def __init__(
        self,
        use: Callable[[], contextlib.AbstractContextManager[object]],
        introduce: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self.use = use  # what is allocated within comes from the pool, tensors and storages that are resized
        self._introduce = introduce  # a tensor to the other ranks, which do it at the same time
        self._known: set[tuple[int, int]] = set()  # addresses and sizes of tensors that the other ranks know

    def register(self, tensor: torch.Tensor) -> None:
        """Make a tensor's memory known to the other ranks if they do not know it yet."""
        place = tensor.data_ptr(), tensor.nbytes
        if self._introduce is not None and place not in self._known:
            self._introduce(tensor)
            self._known.add(place)


# One for all units that gather in a group, so that what one unit freed serves the next.
_POOLS: weakref.WeakKeyDictionary[torch.distributed.ProcessGroup, dict[str, Pool]] = weakref.WeakKeyDictionary()


def group_pool(name: str, device: torch.device) -> Pool:
    """Return the memory of a process group's backend; the ranks of the group call this together.

    ``ProcessGroup._get_backend``, ``supports_tensor_alloc``, ``mem_allocator``, ``register_mem_pool``: 2.11 to 2.15.
    """
    group = process_group(name)
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise RuntimeError(f"The {backend.name()} backend has no allocator for {device}: leave the setting off.")

    def make() -> Pool:
        module = torch.get_device_module(device)
        memory = module.MemPool(backend.mem_allocator)
        _connect(group, device)
        backend.register_mem_pool(memory)  # type: ignore[attr-defined]  # and all that the pool allocates later
        return Pool(lambda: module.use_mem_pool(memory, device))

    return _known_pool(group, "group", make)


def symmetric_pool(name: str, device: torch.device, backend: str) -> Pool:
    """Return a group's symmetric memory; its ranks call this, and gather into new memory, together.

    ``distributed._symmetric_memory.set_backend``, ``get_mem_pool``, ``rendezvous``: 2.11 to 2.15.
    """
    if device.type != "cuda":
        raise RuntimeError(f"Symmetric memory needs GPUs, but the parameters are gathered on {device}.")
    import torch.distributed._symmetric_memory as symmetric

    group = process_group(name)

    def make() -> Pool:
        symmetric.set_backend(backend)  # type: ignore[arg-type]
        _connect(group, device)
        memory: Any = symmetric.get_mem_pool(device)
        # By its name: a pool that held its group would keep it in _POOLS for ever.
        return Pool(
            lambda: torch.cuda.use_mem_pool(memory, device),
            lambda tensor: symmetric.rendezvous(tensor, name),  # type: ignore[arg-type]
        )

    return _known_pool(group, backend, make)


def _connect(group: torch.distributed.ProcessGroup, device: torch.device) -> None:
    """Run a first collective: NCCL connects ranks in that, and cannot register memory before."""
    torch.distributed.all_reduce(torch.zeros(1, device=device), group=group)


def _known_pool(group: torch.distributed.ProcessGroup, kind: str, make: Callable[[], Pool]) -> Pool:
    pools = _POOLS.setdefault(group, {})
    if kind not in pools:
        pools[kind] = make()
    return pools[kind]


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


def takes_cpu(group: torch.distributed.ProcessGroup | None) -> bool:
    """Whether a group, by default that of all ranks, communicates tensors on the CPU."""
    return backend_of(group or torch.distributed.group.WORLD, "cpu") != "nccl"  # type: ignore[arg-type]


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
