"""Copies between the CPU, where offloaded shards live, and the device that computes.

    to_device         a shard, in front of its gather; from pinned memory it does not block the CPU
    to_host           a reduced bucket, as soon as it has arrived; the device's memory is free from then on
    wait_for_copies   once, at the end of a graph, for the copies that ``to_host`` did not wait for

In a graph all of them run on the current stream, so nothing else needs to wait; Inductor's code would write over what
another stream still reads. They are ops of our own because Inductor's ``DeviceCopy`` pins whatever it copies to the
CPU, asked or not, and 2.15 waits after every such copy. They cannot be part of a CUDA graph.

The eager path copies on streams of its own (streams.py). ``to_host_aside`` takes the place of ``to_host``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import streams
from .spec import define_op


def _to_device_fake(shard: Tensor, device: str) -> Tensor:
    return torch.empty_like(shard, device=device)


def _to_device_kernel(shard: Tensor, device: str) -> Tensor:
    return shard.to(device, non_blocking=True, copy=True)


def _to_host_fake(reduced: Tensor, pinned: bool, wait: bool = True) -> Tensor:
    return torch.empty_like(reduced, device="cpu")


def _to_host_kernel(reduced: Tensor, pinned: bool, wait: bool = True) -> Tensor:
    return streams.accelerator.on_host(reduced, pinned).copy_(reduced, non_blocking=pinned and not wait)


def to_host_aside(reduced: Tensor, pinned: bool) -> Tensor:
    """Copy a reduced bucket beside the current stream; ``wait_on_cpu`` waits for it."""
    stream = streams.accelerator.beside(streams.TO_HOST, reduced.device)
    with streams.Aside(stream):
        on_host = _to_host_kernel(reduced, pinned, wait=False)
    if stream is not None:
        streams.accelerator.record(reduced, stream)  # it is freed now
    return on_host


def _wait_for_copies_fake(copies: Sequence[Tensor], device: str) -> None:
    return None


def _wait_for_copies_kernel(copies: Sequence[Tensor], device: str) -> None:
    stream = streams.accelerator.current(torch.device(device))
    if stream is not None:
        streams.accelerator.synchronize(stream)


_TAGS = (torch.Tag.cudagraph_unsafe,)
to_device = define_op("to_device(Tensor shard, str device) -> Tensor", _to_device_kernel, _to_device_fake, _TAGS)
to_host = define_op(
    "to_host(Tensor reduced, bool pinned, bool wait=True) -> Tensor", _to_host_kernel, _to_host_fake, _TAGS
)
# The schema says that it writes to the copies: that keeps it in the graph, and after them.
wait_for_copies = define_op(
    "wait_for_copies(Tensor(a!)[] copies, str device) -> ()", _wait_for_copies_kernel, _wait_for_copies_fake, _TAGS
)
