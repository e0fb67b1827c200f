"""What stands beside a shard in a marker of compiled code, and where the gradient goes by it.

    mode                 beside the shard, or, of an edge, in its place
    reduce               its edge, which gives the shard its gradient
    hold                 a leaf of the full size: it gets the full gradient, which waits in ``group.pending``
    resume               its edge, and a ticket: when backward runs, it adds what is pending
    resume_over_shards   a ticket, and a leaf of the shard's size: what it gets waits in ``group.partials``

Under compiled autograd, which cannot make DTensors of gradients, a leaf takes the edge's place, and its hook gives the
shard its gradient. A leaf is one zero seen everywhere, so it costs no memory.
Pending gradients are those of the eager path, and its end of a backward reduces what no compiled backward took.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._eager_backward import clean_up_at_end, reduce_now
from ._edge import make_edges, part_edges
from ._param import Mode, ReadSpec, ShardedParam
from ._reduction import accumulate
from ._watch import Watch
from .passes.markers import ticket_holders

if TYPE_CHECKING:
    from ._group import ParamGroup
    from ._state import UnitState

_numbers = itertools.count()


@dataclass(eq=False)
class Accumulator:
    """What a marker gets beside the shard."""

    param: ShardedParam
    mode: Mode
    watch: Watch  # of the parameter's unit
    leaf: Tensor | None = None
    ticket: Tensor | None = None
    # In the leaf's place, where backwards are not compiled, as long as the parameter is this shard, with this in it.
    edge: Tensor | None = None
    shard: nn.Parameter | None = None
    local: Tensor | None = None
    address: int | None = None

    def lead_to(self, group: ParamGroup, shard: nn.Parameter) -> None:
        """Have an edge of ``shard``; none where that is no shard."""
        param = self.param
        is_the_same = shard is self.shard and param.local is self.local and param.address == self.address
        if self.leaf is None or is_the_same:
            self.have_edge(self.edge)
            return
        part_edges(group)  # the one that was joined with others goes
        if isinstance(shard, DTensor) and shard.is_leaf:
            self.shard, self.local, self.address = shard, param.local, param.address
            make_edges([self])
        else:
            self.forget_edge()

    def have_edge(self, edge: Tensor | None) -> None:
        """Have an edge where compiled reads take it from."""
        self.edge = edge
        self.param.put_beside(f"{self.mode}_edge", edge)

    def forget_edge(self) -> None:
        """Let the shard go."""
        self.shard = self.local = None
        self.have_edge(None)


def delivers_in(mode: Mode) -> bool:
    """Whether shards get gradients."""
    return mode == "reduce" or mode == "resume"


def accumulator_for(state: UnitState, param: ShardedParam, spec: ReadSpec) -> Accumulator:
    """The parameter's accumulator for the mode of ``spec``; the same one as long as its shard looks the same."""
    size = spec.size if spec.mode == "hold" else spec.local_size
    delivers = delivers_in(spec.mode)
    dtype = spec.grad_dtype if delivers else spec.reduce_dtype
    # Where the gradient arrives: full ones, and partial sums, stay on the device.
    device = torch.device("cpu") if delivers and spec.device else state.group.mesh.device
    known = param.accumulators.get(spec.mode)
    if known is not None and (known.leaf is None or _looks_so(known.leaf, size, dtype, device)):
        if delivers:
            known.lead_to(state.group, param.shard)
        return known
    leaf = None
    if dtype.is_floating_point or dtype.is_complex:
        with torch.inference_mode(False):
            leaf = torch.zeros((), dtype=dtype, device=device).expand(size).requires_grad_()
        hook = _deliverer(param) if delivers else _holder(state, param.fqn, partial=spec.mode != "hold")
        leaf.register_post_accumulate_grad_hook(hook)
    ticket = _ticket_of(state, param) if spec.mode.startswith("resume") else None
    accumulator = Accumulator(param, spec.mode, state.group.watch, leaf, ticket)
    if delivers:
        accumulator.lead_to(state.group, param.shard)
    param.accumulators[spec.mode] = accumulator
    return accumulator


def _looks_so(leaf: Tensor, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return (tuple(leaf.shape), leaf.dtype, leaf.device) == (size, dtype, device)


def _deliverer(param: ShardedParam) -> Callable[[Tensor], None]:
    owner = weakref.ref(param)  # the parameter holds the leaf that holds this

    @torch.compiler.assume_constant_result
    def is_watched() -> bool:
        param = owner()
        if param is None:
            return False
        # ``from_local`` would bring an offloaded gradient to the mesh's device.
        offloaded = param.shard.device.type != param.mesh.device.type
        return offloaded or compat.has_post_accumulate_grad_hooks(param.shard)

    @torch.compiler.disable(reason=f"the hooks of {param.fqn} run when it has its gradient")
    def give(grad: Tensor) -> None:
        param = owner()
        if param is not None:
            accumulate(cast(DTensor, param.shard), grad)

    def deliver(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        if not torch.compiler.is_dynamo_compiling() or is_watched():
            give(grad)
            return
        # What Dynamo can trace, out of place.
        shard: Any = owner().shard  # type: ignore[union-attr]
        wrapped = DTensor.from_local(
            grad, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )
        shard.grad = wrapped if shard.grad is None else shard.grad + wrapped

    compat.leave_all_to_python(deliver)
    return deliver


def _holder(state: UnitState, fqn: str, partial: bool) -> Callable[[Tensor], None]:
    unit = weakref.ref(state)

    @torch.compiler.disable(reason=f"the gradient of {fqn} is held back")
    def hold(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        owner = unit()
        if owner is None or grad is None:
            return
        waiting = owner.group.partials if partial else owner.group.pending
        with torch.no_grad():
            if fqn in waiting:
                waiting[fqn].add_(grad)
            else:
                waiting[fqn] = grad.contiguous()
        if compat.in_compiled_autograd():
            reduce_now(owner)
        else:
            clean_up_at_end(owner)

    return hold


def _ticket_of(state: UnitState, param: ShardedParam) -> Tensor:
    for accumulator in param.accumulators.values():
        if accumulator.ticket is not None:
            return accumulator.ticket
    number = next(_numbers)
    unit, fqn = weakref.ref(state), param.fqn

    def take(grad: Tensor) -> Tensor:
        owner = unit()
        return grad.clone() if owner is None else _with_pending(owner, fqn, grad)

    ticket_holders[number] = take
    weakref.finalize(state, ticket_holders.pop, number, None)
    return torch.tensor(number, device="cpu")  # read in backward, where a copy from a GPU would wait


def _with_pending(state: UnitState, fqn: str, grad: Tensor) -> Tensor:
    group = state.group
    clean_up_at_end(state)
    if not group.sync:
        # The forward thought that this backward would synchronize. It does, which is right and costs a reduction; but
        # who changes his mind in between does so again.
        if not group.decides_in_backward:
            group.decides_in_backward = True
            if not compat.in_compiled_autograd():
                compat.at_end_of_backward(functools.partial(follow_mode, state))
        return grad.clone(memory_format=torch.contiguous_format)
    state.reduced_in = compat.backward_task()
    held = group.pending.pop(fqn, None)
    if held is None:
        return grad.clone(memory_format=torch.contiguous_format)
    return held.add_(grad)


def follow_mode(state: UnitState) -> None:
    """Have reads of the unit's parameters make the markers that its flags ask for."""
    from ._classes import refresh_mode  # which generates code that uses this module

    refresh_mode(state)


compat.leave_all_to_python(follow_mode)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards in this context add gradients up and send nothing; the first one after it reduces the sum.

    with no_sync(model):
        for batch in batches[:-1]:
            model(batch).sum().backward()
    model(batches[-1]).sum().backward()
    """
    from ._state import states_in

    states = states_in(model)
    if not states:
        raise ValueError(f"no_sync got a {type(model).__name__} without sharded modules. Call fully_shard first.")
    before = [(state, state.group.sync) for state in states]
    try:
        for state, _ in before:
            set_sync(state, False)
        yield
    finally:
        for state, sync in before:
            set_sync(state, sync)


def set_sync(state: UnitState, sync: bool) -> None:
    """Reduce gradients in backward, or hold them back."""
    state.group.sync = sync
    state.group.has_accumulated |= not sync
    follow_mode(state)


def set_all_reduce(state: UnitState, all_reduce: bool) -> None:
    """Sum gradients over the replicas in backward, or hold back what is summed over the shards alone."""
    state.group.all_reduce = all_reduce
    state.group.has_accumulated_over_shards |= not all_reduce
    follow_mode(state)
