"""One forward call of one unit: what its reads see, and the autograd nodes that lead back to it.

    inputs -> [_Inputs] -> forward -> outputs          backward reaches the outputs: enter_backward
    shards ---[_Gather]--^ reads                       _Gather's backward: reduce, and leave_backward
                                                       _Inputs' backward: leave_backward, where _Gather comes too early

Gathering is an autograd function, so repeated calls and unused parameters are autograd's own business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _eager_backward as backward
from . import _torch_compat as compat
from ._cast import map_tensors, tensors_in
from ._gathered import Gathered
from ._trace import span

if TYPE_CHECKING:
    from ._state import UnitState


class Call:
    """One forward call of one unit: what its reads see, and where its backward is."""

    def __init__(self, state: UnitState, gathered: Gathered) -> None:
        self.state = state
        self.gathered = gathered
        self.place = 0  # among the calls that await backward
        self.task: int | None = None  # the backward that reached the outputs
        # An autograd node at the inputs tells when backward is through with the unit.
        self.ends_at_inputs = False
        self.was_read = False
        # What reads see, by whether autograd was recording; autograd's nodes refer to the call, so not for longer than
        # a forward runs.
        self._tensors: dict[bool, list[Any]] = {}

    def read(self, fqn: str) -> Any:
        """The gathered parameter; None for one whose place the user gave to something else."""
        self.was_read = True
        fulls = self.gathered.wait()
        index = self.gathered.index.get(fqn)
        if index is None:
            return None
        recording = torch.is_grad_enabled() and any(shard.requires_grad for shard in self.gathered.shards)
        recording &= not compat.in_functorch()  # parameters are constants to torch.func
        if recording not in self._tensors:
            tensors = self._recorded(fulls) if recording else fulls
            self._tensors[recording] = [
                param.as_read(tensor) for param, tensor in zip(self.gathered.params, tensors)
            ]
        return self._tensors[recording][index]

    def forget_reads(self) -> None:
        """Let go of the tensors that reads saw; whoever needs one holds it."""
        self._tensors.clear()

    def _recorded(self, fulls: list[Tensor]) -> list[Tensor]:
        """The gathered parameters with the reduction as their autograd rule; frozen ones take no part."""
        trainable = [index for index, shard in enumerate(self.gathered.shards) if shard.requires_grad]
        tensors = list(fulls)
        leaves = [_leaf(self.gathered.shards[index]) for index in trainable]
        outputs = _Gather.apply(self, trainable, *leaves)
        for index, tensor in zip(trainable, outputs):
            tensors[index] = tensor
        return tensors


def _leaf(shard: DTensor) -> Tensor:
    """What autograd is told that a gathered parameter comes from: the shard.

    A shard with post-accumulate hooks has a leaf in its place: autograd would run them although no gradient comes to
    it, and the reduction runs them when there is one.
    """
    return shard.detach().requires_grad_() if compat.has_post_accumulate_grad_hooks(shard) else shard


class _Gather(torch.autograd.Function):
    """Shards to full parameters, which are gathered already; backward reduces."""

    @staticmethod
    def forward(ctx: Any, call: Call, trainable: list[int], *shards: DTensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.trainable = call, trainable
        ctx.set_materialize_grads(False)
        fulls = call.gathered.wait()
        return tuple(fulls[index].detach() for index in trainable)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: Call = ctx.call
        if any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError(
                f"{call.state.name}: gradients of its parameters were asked for with create_graph=True, and the eager "
                "path cannot differentiate their reduction. Ask for gradients of inputs alone, as a penalty does."
            )
        present = {index: grad for index, grad in zip(ctx.trainable, grads) if grad is not None}
        leaves = [following for following, _ in ctx.next_functions[-len(ctx.trainable) :]]
        watched = any(
            backward.is_watched(call.gathered.shards[index], leaf) for index, leaf in zip(ctx.trainable, leaves)
        )
        with span("post_backward", call.state):
            backward.clean_up_at_end(call.state)
            # Free before the reduction takes memory of its own; but what is left of this unit's backward may still read
            # a frozen parameter.
            if not call.ends_at_inputs:
                call.gathered.unalias(present)
                backward.leave_backward(call)
            reduced = backward.reduce(call.state, call.gathered, present, watched)
        return (None, None, *[reduced.get(index) for index in ctx.trainable])


class _Inputs(torch.autograd.Function):
    """The inputs of a unit, as they are; backward through them is the end of the unit's backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        backward.leave_backward(ctx.call)
        return (None, *grads)


def end_at_inputs(call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs of a forward, passed through a node that ends the unit's backward."""
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    call.ends_at_inputs = True
    passed = dict(zip(map(id, inputs), _Inputs.apply(call, *inputs)))
    return map_tensors((args, kwargs), lambda tensor: passed.get(id(tensor), tensor))
