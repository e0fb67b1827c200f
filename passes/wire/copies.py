"""Copies between the host, where offloaded shards and activations live, and the device that computes.

    to_device         a shard, on the current stream, in front of its gather; from pinned memory it does
                      not block the CPU
    to_host           a reduced bucket, as soon as it has arrived, beside the current stream; the device's memory is
                      free from then on
    wait_for_copies   once, at the end of a graph, for the copies that ``to_host`` did not wait for
    launch_to_host, launch_to_device    an activation, beside the current stream, until ``wait_tensor``

They are ops of our own because Inductor's ``DeviceCopy`` pins whatever it copies to the CPU, asked or not, and 2.15
waits after every such copy. They cannot be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from .._torch_compat import kernels as kernels_compat
from . import streams
from .collectives import is_launch
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


def _launch_to_host_fake(activation: Tensor) -> Tensor:
    return torch.empty_like(activation, device="cpu")


def _launch_to_host_kernel(activation: Tensor) -> Tensor:
    on_host = streams.accelerator.on_host(activation, pinned=activation.device.type != "cpu")
    launch_over(on_host, activation)
    return on_host


def launch_over(written: Tensor, read: Tensor) -> None:
    """Start to copy a tensor of the device into one of the host, beside other work; ``streams.join`` waits for it."""
    with streams.Aside(streams.accelerator.beside(streams.TO_HOST, read.device)) as copy:
        written.copy_(read, non_blocking=True)
    streams.launched(written, copy, read=read)


def _launch_to_device_kernel(kept: Tensor, device: str) -> Tensor:
    # Memory of the current stream, which frees it: of the other stream's, nothing else would ever use it.
    here = torch.empty_strided(kept.size(), kept.stride(), dtype=kept.dtype, device=device)
    with streams.Aside(streams.accelerator.beside(streams.TO_DEVICE, here.device)) as copy:
        here.copy_(kept, non_blocking=True)
    streams.launched(here, copy)
    return here


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
launch_to_host = define_op(
    "launch_to_host(Tensor activation) -> Tensor", _launch_to_host_kernel, _launch_to_host_fake, _TAGS
)
launch_to_device = define_op(
    "launch_to_device(Tensor kept, str device) -> Tensor", _launch_to_device_kernel, _to_device_fake, _TAGS
)
TAKE_FROM_HOST = {to_device, launch_to_device}  # ops whose inputs are there; ``lower`` adds its own


def is_copy(node: fx.Node) -> bool:
    """Whether a node launches the copy of an activation, which ``wait_tensor`` waits for."""
    return node.target in (launch_to_host, launch_to_device)


def is_awaited(node: fx.Node) -> bool:
    """Whether a node starts a collective or a copy, which goes on beside compute until ``wait_tensor`` waits for it."""
    return is_launch(node) or is_copy(node)


def is_on_host(node: fx.Node) -> bool:
    """Whether a node's value is in the host's memory for a while, also if the host itself computes."""
    if node.op == "placeholder":
        return any(user.target in TAKE_FROM_HOST for user in node.users)
    return node.target in (to_host, launch_to_host)


def let_inductor_see_copies() -> None:
    """Tell Inductor that copies go on when their ops have returned."""
    kernels_compat.lower_as_read_on(to_host)
    kernels_compat.lower_as_collective(launch_to_host)
    kernels_compat.lower_as_collective(launch_to_device)
