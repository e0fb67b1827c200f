"""Copies between the CPU, where offloaded shards live, and the device that computes.

    to_device         a shard, in front of its gather; from pinned memory it does not block the CPU
    to_host           a reduced bucket, as soon as it has arrived; the device's memory is free from then on
    wait_for_copies   once, at the end of a graph, for the copies that ``to_host`` did not wait for

All of them run on the current stream, so nothing else needs to wait, and no memory is reused too early. They are ops of
our own because Inductor's ``DeviceCopy`` pins whatever it copies to the CPU, asked or not, and 2.15 waits after every
such copy. They cannot be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .spec import define_op


def _to_device_fake(shard: Tensor, device: str) -> Tensor:
    return torch.empty_like(shard, device=device)


def _to_device_kernel(shard: Tensor, device: str) -> Tensor:
    return shard.to(device, non_blocking=True, copy=True)


def _to_host_fake(reduced: Tensor, pinned: bool, wait: bool = True) -> Tensor:
    return torch.empty_like(reduced, device="cpu")


def _to_host_kernel(reduced: Tensor, pinned: bool, wait: bool = True) -> Tensor:
    on_host = torch.empty_like(reduced, device="cpu", pin_memory=pinned)
    return on_host.copy_(reduced, non_blocking=pinned and not wait)


def _wait_for_copies_fake(copies: Sequence[Tensor], device: str) -> None:
    return None


def _wait_for_copies_kernel(copies: Sequence[Tensor], device: str) -> None:
    where = torch.device(device)
    if where.type != "cpu":
        torch.accelerator.current_stream(where).synchronize()


_TAGS = (torch.Tag.cudagraph_unsafe,)
to_device = define_op("to_device(Tensor shard, str device) -> Tensor", _to_device_kernel, _to_device_fake, _TAGS)
to_host = define_op(
    "to_host(Tensor reduced, bool pinned, bool wait=True) -> Tensor", _to_host_kernel, _to_host_fake, _TAGS
)
# The schema says that it writes to the copies: that keeps it in the graph, and after them.
wait_for_copies = define_op(
    "wait_for_copies(Tensor(a!)[] copies, str device) -> ()", _wait_for_copies_kernel, _wait_for_copies_fake, _TAGS
)
