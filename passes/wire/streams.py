"""The streams of an accelerator. No other module asks torch for streams, events, or memory that two streams share.

    current      the model computes, collectives are launched and waited for, graphs run
    TO_DEVICE    shards of offloaded units are copied, and their gathers launched behind that; activations come back
    TO_HOST      reduced gradients of offloaded units are copied, and activations that backward will need
    both         what an optimizer updates is copied (optim/on_host.py)
    a user's     an all-reduce hook runs

    current      | layer 1                      | join | layer 2
    TO_DEVICE      | copy layer 2 | launch its gather

Three rules keep in order what two streams use.

    1. Work on another stream begins behind what the current one has queued (``Aside``). So it finds complete values,
       and it may write to memory that was freed: the current stream has queued the last use of that.
    2. Who uses the result waits for it: the current stream by ``join``, the CPU by ``wait_on_cpu``.
    3. Memory that may be freed before that is recorded (``Accelerator.record``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

TO_DEVICE, TO_HOST = "to_device", "to_host"


class Accelerator:
    """What is asked of torch. Streams and events are torch's; a device that has none, as the CPU, has the stream None.

    A test puts another object in the place of this one, and finds what the streams do not do in order.
    """

    def __init__(self) -> None:
        self._beside: dict[tuple[str, torch.device], Any] = {}

    def current(self, device: torch.device) -> Any:
        """Return the stream on which work for this device is queued now."""
        if device.type == "cpu" or not torch.accelerator.is_available():
            return None
        known = torch.accelerator.current_accelerator()
        return torch.accelerator.current_stream(device) if known is not None and known.type == device.type else None

    def beside(self, name: str, device: torch.device) -> Any:
        """Return our stream of this name."""
        if self.current(device) is None:
            return None
        key = name, device
        if key not in self._beside:
            self._beside[key] = torch.Stream(device)
        return self._beside[key]

    def all_of(self, name: str) -> list[Any]:
        """Return our streams of this name, of all devices that copied something on one."""
        return [stream for (known, _), stream in self._beside.items() if known == name]

    def run_on(self, stream: Any) -> AbstractContextManager[Any]:
        running: AbstractContextManager[Any] = stream
        return running

    def mark(self, stream: Any) -> Any:
        """Return an event behind what the stream has queued."""
        event = torch.Event(stream.device)  # a user's stream would return one of a class that not every stream takes
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Have what the stream will be given wait for an event."""
        event.wait(stream)

    def synchronize(self, stream: Any) -> None:
        """Have the CPU wait for what the stream has queued."""
        stream.synchronize()

    def record(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a tensor from other use, when it is freed, until the stream has done what is queued."""
        if tensor.device.type != "cpu":  # pinned memory has a record of the copies that use it
            tensor.record_stream(stream)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Free a storage, or allocate it again on the current stream."""
        storage.resize_(num_bytes)

    def on_host(self, like: Tensor, pinned: bool) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=pinned)


accelerator = Accelerator()


class Aside:
    """Work on another stream, as a context. On the stream None, or the current one, it is work like any other."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._context: AbstractContextManager[Any] | None = None
        self._end: Any = None

    def __enter__(self) -> Aside:
        here = None if self.stream is None else accelerator.current(self.stream.device)
        if self.stream != here:
            accelerator.wait(self.stream, accelerator.mark(here))
            self._context = accelerator.run_on(self.stream)
            self._context.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*raised)
            self._end = accelerator.mark(self.stream)

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that is freed before anything waits for the work, which reads it."""
        if self._end is not None:
            accelerator.record(tensor, self.stream)

    def join(self) -> None:
        """Have the current stream wait for the work."""
        if self._end is not None:
            accelerator.wait(accelerator.current(self.stream.device), self._end)


# Launches that may be waited for on another stream, by the address of what they write: their stream, the work there
# that they belong to, and what that reads.
_launches: dict[int, tuple[Any, Aside | None, Tensor | None]] = {}


def launched(written: Tensor, work: Aside | None = None, read: Tensor | None = None) -> None:
    """Note on which stream something was launched into this tensor: on the current one, or on that of ``work``.

    ``read`` is not freed before somebody waits.
    """
    stream = accelerator.current(written.device) if work is None else work.stream
    if stream is not None and written.numel():  # all that is empty has one address
        _launches[written.data_ptr()] = stream, work, read


def join(written: Tensor) -> None:
    """Have the current stream use a tensor that was launched on another one: after that, and until it is freed."""
    nothing = None, None, None
    stream, work, _ = _launches.pop(written.data_ptr(), nothing) if _launches else nothing
    if work is not None:
        work.join()
    if stream is not None and stream != (here := accelerator.current(stream.device)):
        accelerator.record(written, here)


def wait_on_cpu() -> None:
    """Have the CPU wait for all copies to it."""
    for stream in accelerator.all_of(TO_HOST):
        accelerator.synchronize(stream)
