"""One forward call of one unit: what its reads see, and the autograd nodes that lead back to it.

    inputs -> [_Inputs] -> forward -> outputs          backward reaches the outputs: enter_backward
    shard ----[_Read]----^ a read                      _Read's backward: the last one to run reduces, and leaves
                                                       _Inputs' backward: leave_backward, where _Read comes too early

Reading is an autograd function, so repeated calls and unused parameters are autograd's own business. Each parameter has
a node of its own, as it would without us: what splits a backward in two, as zero-bubble pipelines do, looks for them.
"""

from __future__ import annotations

import weakref
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
        self.forward_number = state.iteration.forward_number
        self.task: int | None = None  # the backward that reached the outputs
        # An autograd node at the inputs tells when backward is through with the unit.
        self.ends_at_inputs = False
        self.was_read = False
        # What reads see, by whether autograd was recording; autograd's nodes refer to the call, so not for longer than
        # a forward runs.
        self._tensors: dict[tuple[int, bool], Any] = {}
        # Weak: which calls await backward must not depend on when cycles are collected, or ranks differ.
        self._recording: weakref.ref[Recording] | None = None

    def read(self, fqn: str) -> Any:
        """The gathered parameter; None for one whose place the user gave to something else."""
        self.was_read = True
        fulls = self.gathered.wait()
        index = self.gathered.index.get(fqn)
        if index is None:
            return None
        shard = self.gathered.shards[index]
        # Parameters are constants to torch.func.
        recorded = shard.requires_grad and torch.is_grad_enabled() and not compat.in_functorch()
        if (index, recorded) not in self._tensors:
            full = self._recorded(index, shard) if recorded else fulls[index]
            self._tensors[index, recorded] = self.gathered.params[index].as_read(full)
        return self._tensors[index, recorded]

    def forget_reads(self) -> None:
        """Let go of the tensors that reads saw; whoever needs one holds it."""
        self._tensors.clear()
        self._recording = None  # what is recomputed for backward may never get gradients

    def _recorded(self, index: int, shard: DTensor) -> Tensor:
        recording = None if self._recording is None else self._recording()
        if recording is None:
            recording = Recording(self)
            self._recording = weakref.ref(recording)
        return _Read.apply(recording, index, _leaf(shard))


class Recording:
    """The parameters that a forward read while autograd recorded, and their gradients until all are there."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.read: set[int] = set()
        self._arrived: set[int] = set()
        self._grads: dict[int, Tensor] = {}
        self._delivered: set[int] = set()  # by autograd itself

    def arrive(self, index: int, grad: Tensor | None, leaf: Any) -> DTensor | None:
        """A gradient is there, or will not come; it goes back to autograd where somebody asked for it."""
        call, gathered = self.call, self.call.gathered
        state = call.state
        if grad is not None and grad.requires_grad:
            raise RuntimeError(
                f"{gathered.params[index].fqn}: its gradient was asked for with create_graph=True, and the eager path "
                "cannot differentiate its reduction. Ask for gradients of inputs alone, as a penalty does."
            )
        backward.clean_up_at_end(state)
        if not compat.in_compiled_autograd():  # which has no end
            state.iteration.incomplete.setdefault(self, compat.backward_task())
        self._arrived.add(index)
        result = None
        if backward.is_asked_for(gathered.shards[index], leaf):
            self._delivered.add(index)
            if grad is not None:
                result = backward.reduce_asked_for(state, gathered, index, grad)
        elif grad is not None:
            state.iteration.hooks.hold_back(gathered.shards[index])
            self._grads[index] = grad
        if self._arrived == self.read:
            with span("post_backward", state):
                self.complete()
        return result

    def complete(self) -> None:
        """No more gradients come: free, and reduce those that came."""
        call, state = self.call, self.call.state
        grads, self._grads = self._grads, {}
        delivered, self._delivered = self._delivered, set()
        self._arrived.clear()
        state.iteration.incomplete.pop(self, None)
        # Free before the reduction takes memory of its own; but what is left of this unit's backward may still read
        # a frozen parameter.
        if not call.ends_at_inputs:
            call.gathered.unalias(grads)
            backward.leave_backward(call)
        backward.reduce(state, call.gathered, grads, delivered)


def _leaf(shard: DTensor) -> Tensor:
    """What autograd is told that a gathered parameter comes from: the shard.

    A shard with post-accumulate hooks has a leaf in its place: autograd would run them although no gradient comes to
    it, and the reduction runs them when there is one.
    """
    return shard.detach().requires_grad_() if compat.has_post_accumulate_grad_hooks(shard) else shard


class _Read(torch.autograd.Function):
    """A shard to the full parameter, which is gathered already; backward hands the gradient in."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, index: int, shard: DTensor) -> Tensor:
        ctx.recording, ctx.index = recording, index
        ctx.set_materialize_grads(False)
        compat.take_gradients_as_produced(ctx)
        recording.read.add(index)
        return recording.call.gathered.wait()[index].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        leaf, _ = ctx.next_functions[-1]
        return None, None, ctx.recording.arrive(ctx.index, grad, leaf)


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


compat.leave_all_to_python(_Read.backward, _Inputs.backward)


def end_at_inputs(call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs of a forward, passed through a node that ends the unit's backward."""
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    call.ends_at_inputs = True
    passed = dict(zip(map(id, inputs), _Inputs.apply(call, *inputs)))
    return map_tensors((args, kwargs), lambda tensor: passed.get(id(tensor), tensor))
