"""Whether what the streams of an accelerator do is in order, found out on a CPU.

    history = History()
    with watched(history, model):        the model's device is said to have streams; everything runs at once
        train(model)
    history.unordered                    {"to_device writes what current reads", ...}

``StandIn`` takes the place of passes/wire/streams.py's object, so it learns of each event, wait, record and allocation.
A dispatch mode sees each operator with the memory that it reads and writes. Each stream has a vector clock: the last
operator of each other stream that it surely runs behind. A collective runs on a stream of its group, as NCCL's do, which
holds what it was given until somebody waits. The CPU is one more stream: all work is queued behind what it did before,
and it is behind a stream only after it has waited. What the allocator freed is given to the next tensor that is made on
the stream on which it was allocated: whatever used it must be before that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch_compat import dtensors
from fsdp_compile.api.classes import refresh
from fsdp_compile.core.unit import Unit, units_in
from fsdp_compile.passes.wire import copies, streams
from fsdp_compile.passes.wire.collectives import KIND_OF, all_gather_members_out, c10d, wait, wait_tensor
from fsdp_compile.passes.wire.copies import to_device

Clock = dict[str, int]

_LAUNCHES = {*KIND_OF, all_gather_members_out, c10d.all_gather_into_tensor_out.default}
# Ops of graphs that use streams themselves: what their kernels do is looked at.
_KERNELS: dict[Any, Callable[..., Any]] = {
    copies.launch_to_host: copies._launch_to_host_kernel,
    copies.launch_to_device: copies._launch_to_device_kernel,
    wait_tensor: wait,
}
_MAKES_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
CPU = "the CPU"


@dataclass(frozen=True)
class Stream:
    name: str

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


@dataclass
class Memory:
    """What uses one piece of memory, each as (stream, its clock there, "reads" or "writes")."""

    home: str  # the stream on which it was allocated; CPU for memory of the host
    uses: list[tuple[str, int, str]] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class History:
    """What was done so far, and which pairs were not in order."""

    def __init__(self, skips: Callable[..., bool] = lambda *what: False) -> None:
        self.unordered: set[str] = set()
        self.clocks: dict[str, Clock] = {}
        self.memory: dict[int, Memory] = {}  # by the address of the storage object
        self._freed: list[Memory] = []
        self._in_flight: dict[int, tuple[Clock, list[Any]]] = {}
        self.current = Stream("current")
        self.skips = skips  # faults: whether a wait, or the like, is left out

    def clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})

    def join(self, stream: str, event: Clock) -> None:
        clock = self.clock(stream)
        clock.update({name: max(tick, clock.get(name, 0)) for name, tick in event.items()})

    def run(self, stream: str, reads: list[int], writes: list[int]) -> None:
        """One operator on a stream, or on the CPU."""
        clock = self.clock(stream)
        if stream != CPU:
            self.join(stream, self.clock(CPU))
        clock[stream] = clock.get(stream, 0) + 1
        for key, how in [*((one, "reads") for one in reads), *((one, "writes") for one in writes)]:
            uses = self.memory[key].uses
            for other, tick, earlier in uses:
                if clock.get(other, 0) < tick and "writes" in (how, earlier):
                    self.unordered.add(f"{_said(stream)} {how} what {_said(other)} {earlier}")
            uses.append((stream, clock[stream], how))

    def allocate(self, key: int, home: str) -> None:
        self.memory[key] = Memory(home)
        if home == CPU:
            return
        self.join(home, self.clock(CPU))
        for memory in [one for one in self._freed if one.home == home]:
            self._freed.remove(memory)
            for stream, tick, how in memory.uses:
                if self.clock(home).get(stream, 0) < tick:
                    self.unordered.add(f"{_said(home)} is given what {_said(stream)} {how}")

    def free(self, key: int) -> None:
        """Free memory. The allocator keeps it until streams for which it was recorded have done what they have now."""
        if (memory := self.memory.pop(key, None)) is not None:
            kept = [self.clock(stream) for stream in memory.recorded]
            memory.uses = [one for one in memory.uses if all(clock.get(one[0], 0) < one[1] for clock in kept)]
            self._freed.append(memory)

    def launch(self, group: str, reads: list[int], writes: list[int], held: list[Any]) -> None:
        stream = f"group {group}"
        self.join(stream, self.clock(self.current.name))
        self.run(stream, reads, writes)
        for key in writes:
            self._in_flight[key] = dict(self.clock(stream)), held

    def wait_for_launch(self, key: int) -> None:
        if key in self._in_flight:
            event, held = self._in_flight.pop(key)
            held.clear()
            if not self.skips("wait for a collective"):
                self.join(self.current.name, event)


def _said(stream: str) -> str:
    return "a collective" if stream.startswith("group ") else stream


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Watch(TorchDispatchMode):
    """Tells the history of each operator."""

    def __init__(self, history: History, on_host: set[int]) -> None:
        super().__init__()
        self.history, self.on_host = history, on_host
        self.makes_host_memory = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does to its local tensor comes here
        if func in _KERNELS:
            with self:
                return _KERNELS[func](*args, **(kwargs or {}))
        history = self.history
        given = {_key(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in given.values():
            self._meet(one, CPU if _key(one) in self.on_host else history.current.name)
        out = func(*args, **(kwargs or {}))
        if func is c10d.wait_tensor.default:
            history.wait_for_launch(_key(args[0]))
            return out
        made = {_key(one): one for one in tree_leaves(out) if isinstance(one, Tensor) and _key(one) not in given}
        writes = [
            _key(tensor)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(args[index] if index < len(args) else (kwargs or {}).get(argument.name))
            if isinstance(tensor, Tensor)
        ]
        homes = {history.memory[key].home == CPU for key in given}
        at_host = self.makes_host_memory or (homes == {True} and func is not to_device)
        for one in made.values():
            self._meet(one, CPU if at_host else history.current.name)
        reads = [key for key in given if key not in writes]
        if func in _LAUNCHES:
            group = next(one for one in reversed(args) if isinstance(one, str))
            history.launch(group, reads, [*writes, *made], [*given.values()])
        elif (made or writes) and func._overloadpacket.__name__ not in _MAKES_NOTHING:
            copies = func is to_device or func is torch.ops.aten.copy_.default
            assert len(homes) < 2 or copies, f"{func} mixes tensors of two devices"
            history.run(CPU if at_host else history.current.name, reads, [*writes, *made])
        return out

    def _meet(self, tensor: Tensor, home: str) -> None:
        key = _key(tensor)
        if key not in self.history.memory and tensor.untyped_storage().nbytes():
            self.history.allocate(key, home)
            weakref.finalize(tensor.untyped_storage(), self.history.free, key)


class StandIn(streams.Accelerator):
    """Streams that only have names."""

    def __init__(self, history: History, watch: _Watch) -> None:
        super().__init__()
        self.history, self.watch = history, watch

    def current(self, device: torch.device) -> Stream:
        return self.history.current

    def beside(self, name: str, device: torch.device) -> Stream:
        return self._beside.setdefault((name, device), Stream(name))

    @contextmanager
    def run_on(self, stream: Stream) -> Iterator[None]:
        before, self.history.current = self.history.current, stream
        try:
            yield
        finally:
            self.history.current = before

    def mark(self, stream: Stream) -> tuple[Stream, Clock]:
        return stream, dict(self.history.clock(stream.name))

    def wait(self, stream: Stream, event: tuple[Stream, Clock]) -> None:
        if not self.history.skips("wait", stream.name, event[0].name):
            self.history.join(stream.name, event[1])

    def synchronize(self, stream: Stream) -> None:
        if not self.history.skips("synchronize", stream.name):
            self.history.join(CPU, self.history.clock(stream.name))

    def record(self, tensor: Tensor, stream: Stream) -> None:
        if not self.history.skips("record", stream.name):
            self.history.memory[_key(tensor)].recorded.add(stream.name)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        self.history.free(storage._cdata)
        super().resize(storage, num_bytes)
        if num_bytes:
            self.history.allocate(storage._cdata, self.history.current.name)

    def on_host(self, like: Tensor, pinned: bool) -> Tensor:
        self.watch.makes_host_memory = True
        try:
            return super().on_host(like, pinned=False)
        finally:
            self.watch.makes_host_memory = False


@contextmanager
def watched(history: History, model: nn.Module) -> Iterator[StandIn]:
    """Watch what runs; shards of units with an offload policy are in the host's memory, and all else is not."""
    shards = {_key(dtensors.local_tensor(param.shard)) for unit in units_in(model) if unit.offload for param in unit.params}
    watch = _Watch(history, shards)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Unit, "computes_elsewhere", property(lambda unit: unit.offload)))
        stack.enter_context(patch.object(dtensors, "is_pinned", lambda shard: True))
        stand_in = StandIn(history, watch)
        stack.enter_context(patch.object(streams, "accelerator", stand_in))
        for unit in units_in(model):
            refresh(unit)
        stack.enter_context(watch)
        yield stand_in
