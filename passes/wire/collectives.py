"""The collectives that a lowered marker launches, and how to recognise them in a graph.

    group's backend     gather
    gloo                fsdpc::all_gather_into_tensor
    any other           _c10d_functional::all_gather_into_tensor

torch's functional all-gather reaches gloo as a coalesced one, and two of those in flight corrupt the heap: a loop of
launches and waits dies within some thousand turns (torch 2.11 and 2.15). Overlap needs several in flight, so on gloo an
op of our own launches the plain all-gather, which is sound, into a new tensor. All else is the same: the work is
registered for that tensor, ``wait_tensor`` waits for it, and Inductor treats both ops alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch_compat as compat
from .._torch_compat import kernels as kernels_compat
from .spec import define_op

c10d = torch.ops._c10d_functional


def _gathered(input: Tensor, group_size: int, group_name: str) -> Tensor:
    del group_name
    return input.new_empty((group_size * input.shape[0], *input.shape[1:]))


def _all_gather_kernel(input: Tensor, group_size: int, group_name: str) -> Tensor:
    out = _gathered(input, group_size, group_name)
    compat.call_below_autograd(
        c10d.all_gather_into_tensor_out.default, input.contiguous(), group_size, group_name, out=out
    )
    return out


gloo_all_gather = define_op(
    "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor", _all_gather_kernel, _gathered
)

# The name of each launch; two ops with one name look the same to other ranks.
KIND_OF: dict[Any, str] = {
    gloo_all_gather: "all_gather",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
    c10d.all_reduce.default: "all_reduce",
}


def all_gather_of(backend: str) -> compat.OpOverload:
    """Return the all-gather to launch in a group of this backend."""
    return gloo_all_gather if backend == "gloo" else c10d.all_gather_into_tensor.default


def is_launch(node: fx.Node) -> bool:
    return node.target in KIND_OF


def let_inductor_see_collectives() -> None:
    """Tell Inductor that our gather is a collective: its input lives until the wait, and it is not fused or dropped."""
    kernels_compat.lower_as_collective(gloo_all_gather)
