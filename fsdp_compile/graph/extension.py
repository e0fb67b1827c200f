"""All-gather extensions in a graph: what the subclass computes is traced, and what it sends is gathered by markers.

    eager                               graph
    sent, data = pre(shard)             ... ops of pre
    full = post(gathered(sent), data)   g0, g1 = unshard(sent0, part=0), unshard(sent1, part=1)
                                        ... ops of post
                                        full = made_of_parts(...)
    autograd                            shard.grad = reduce_grad(full.grad), as for any parameter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import subclasses
from ..core.extension import without_padding
from ..core.param import ReadSpec
from ..core.shared import shared
from ..passes.ir import markers


@shared
def extended_gather(spec: ReadSpec) -> Callable[..., Any]:
    """Return the ``unshard`` of a parameter with an extension; Dynamo leaves it to AOTAutograd to trace inside."""

    def gather(shard: Any, leaf: Tensor | None, ticket: Tensor | None, then: str) -> Any:
        names, tensors = (shard[0], shard[1:]) if isinstance(shard, tuple) else (None, (shard,))
        return _Gather.apply(leaf, ticket, then, spec, names, *tensors)

    return torch.compiler.allow_in_graph(gather)


class _Gather(torch.autograd.Function):
    """Make the full parameter of a shard by its subclass; backward is that of the ``unshard`` marker."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Any, ticket: Any, then: str, spec: ReadSpec, names: tuple[str, ...] | None, *tensors: Any
    ) -> Any:
        ctx.then, ctx.reduction, ctx.has_leaf = then, markers.backward_spec(spec, then), leaf is not None
        ctx.num_tensors = len(tensors)
        ctx.set_materialize_grads(False)
        if ticket is not None:
            ctx.save_for_backward(ticket)
        protocol = spec.extension
        assert protocol is not None
        if names is None:
            (shard,) = tensors
        else:
            assert protocol.look is not None
            shard = protocol.look.around(names, tensors)
        sent, parts, metadata = protocol.before(shard, spec)
        gathered = [markers.unshard(tensor, spec=part.text) for tensor, part in zip(sent, parts)]
        made, _ = protocol.after(shard, gathered, metadata, spec)
        return subclasses.map_inner(markers.made_of_parts, without_padding(made, spec))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        nothing = [None] * (5 + ctx.num_tensors)
        if grad is None:
            return tuple(nothing)
        ticket = ctx.saved_tensors[0] if ctx.saved_tensors else None
        for_shard, for_leaf = markers.gradients(grad, ctx.reduction, ctx.then, ctx.has_leaf, ticket)
        return for_leaf, *nothing[2:], for_shard  # a shard in several pieces has a leaf, or is frozen
