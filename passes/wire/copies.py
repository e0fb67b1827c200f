"""Copies between the CPU, where offloaded shards live, and the device that computes.

    to_device         a shard, on the current stream, in front of its gather; from pinned memory it does
                      not block the CPU
    to_host           a reduced bucket, as soon as it has arrived, beside the current stream; the device's memory is
                      free from then on
    wait_for_copies   once, at the end of a graph, for the copies that ``to_host`` did not wait for

They are ops of our own because Inductor's ``DeviceCopy`` pins whatever it copies to the CPU, asked or not, and 2.15
waits after every such copy. They cannot be part of a CUDA graph.
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


def copy_to_host(reduced: Tensor, pinned: bool, wait: bool = True) -> Tensor:
    """Copy a reduced bucket to the CPU; without ``wait``, ``wait_on_cpu`` waits for it."""
    if wait:
        return streams.accelerator.on_host(reduced, pinned).copy_(reduced)
    with streams.Aside(streams.accelerator.beside(streams.TO_HOST, reduced.device)) as copy:
        on_host = streams.accelerator.on_host(reduced, pinned).copy_(reduced, non_blocking=pinned)
    copy.keep(reduced)
    return on_host


def _wait_for_copies_fake(copies: Sequence[Tensor], device: str) -> None:
    return None


def _wait_for_copies_kernel(copies: Sequence[Tensor], device: str) -> None:
    streams.wait_on_cpu()


_TAGS = (torch.Tag.cudagraph_unsafe,)
to_device = define_op("to_device(Tensor shard, str device) -> Tensor", _to_device_kernel, _to_device_fake, _TAGS)
to_host = define_op(
    "to_host(Tensor reduced, bool pinned, bool wait=True) -> Tensor", copy_to_host, _to_host_fake, _TAGS
)
# The schema says that it writes to the copies: that keeps it in the graph, and after them.
wait_for_copies = define_op(
    "wait_for_copies(Tensor(a!)[] copies, str device) -> ()", _wait_for_copies_kernel, _wait_for_copies_fake, _TAGS
)
