"""Where compiled code sends a parameter's gradient: tensors that a marker takes beside the shard, or in its place.

    mode                 the marker takes beside the shard (an edge: in its place)
    reduce               its edge, which gives the shard its gradient
    hold                 a tensor of the full size: it gets the full gradient, which waits in ``held.pending`` (held.py)
    resume               its edge, and a ticket: when backward runs, the ticket's holder adds what is pending
    resume_over_shards   a ticket, and a tensor of the shard's size: what it gets waits in ``held.partials``

    forward      shards --_Edges--> edges, made once      graph(edges) -> output
    backward     output -> graph -> plain gradients of the edges -> _Edges' backward -> the shards'

AOTAutograd would take DTensors apart and put them together again on every step, in Python, for 14 microseconds a
parameter. An edge is the shard's local tensor with an autograd node that leads to the shard: hooks, ``autograd.grad``,
``backward(inputs=...)`` and freezing work through autograd, as in eager code. If gradients do not look like the local
tensor (another dtype, say), graphs take that as well, and the edge is made of a leaf: one zero, expanded to the
gradient's shape, without memory for it. Under compiled autograd, which cannot make DTensors of gradients, that leaf
takes the edge's place.

The edges of a unit have one node, since a node costs 4 microseconds. Autograd runs the hooks of all shards that a node
leads to, also of those that got no gradient. Our node keeps autograd from running these (core/grads.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, dynamo
from ..core import grads
from ..core.accumulation import Held
from ..core.grads import LateHooks
from ..core.param import ShardedParam
from ..core.spec import spec_key, spec_of
from ..core.unit import Unit
from . import held

Hook = Callable[[Tensor], None]


class Sink:
    """Where the gradient of one parameter goes."""

    def __init__(self, unit: Unit, param: ShardedParam) -> None:
        self.param = param
        self.watch = unit.watch
        self.arrives_as: held.Look | None = None  # size, dtype and device of the local gradient
        # Takes an edge's place under compiled autograd; and an edge that is not the local tensor is made of it.
        self.leaf: Tensor | None = None
        self.full: Tensor | None = None  # gets gradients that wait to be reduced
        self.partial: Tensor | None = None  # gets gradients that wait to be summed over replicas
        self.ticket: Tensor | None = None
        self.edge: Tensor | None = None
        self.edge_of: int | None = None  # the ``version`` of the parameter that the edge was made for
        self.takes: Literal["edge", "both"] = "both"  # what a graph takes of the parameter while it trains
        self.spec: Any = None  # what the markers say
        self._key: Any = None  # the ``spec_key`` of ``spec``

    def prepare(self, unit: Unit) -> None:
        """Make what a marker in the unit's mode needs; what is there already and still fits is kept."""
        mode, device = unit.mode_of(self.param), unit.mesh.device  # gradients that wait stay on the device
        key = spec_key(unit, self.param)
        if key != self._key:
            self.spec, self._key = spec_of(unit, self.param), key
            arrives_at = torch.device("cpu") if self.spec.device else device
            arrives_as = self.spec.local_size, self.spec.grad_dtype, arrives_at
            if arrives_as != self.arrives_as:
                self.arrives_as, self.leaf, self.edge_of = arrives_as, None, None
        spec, dtype = self.spec, self.spec.reduce_dtype
        if mode == "hold":
            self.full = held.holding(unit, self.param, self.full, (spec.size, dtype, device), is_partial=False)
        elif mode == "resume_over_shards":
            look = spec.local_size, dtype, device
            self.partial = held.holding(unit, self.param, self.partial, look, is_partial=True)
        if mode.startswith("resume") and self.ticket is None:
            self.ticket = held.ticket(unit, self.param)

    @property
    def can_train(self) -> bool:
        """Whether autograd supports gradients of the dtype."""
        return self.arrives_as is not None and held.has_gradients(self.arrives_as[1])

    def have_leaf(self) -> Tensor | None:
        """Return the leaf, or None for a dtype without gradients. It is made here, since few graphs ask for one."""
        if self.leaf is None and self.can_train:
            assert self.arrives_as is not None
            size, dtype, device = self.arrives_as
            with torch.inference_mode(False):
                self.leaf = torch.zeros((), dtype=dtype, device=device).expand(size).requires_grad_()
            self.leaf.register_post_accumulate_grad_hook(_giver(self.param))
        return self.leaf

    def have_edge(self, edge: Tensor | None) -> None:
        """Put an edge where compiled reads take it from."""
        if edge is not self.edge:
            self.full = self.partial = None  # they lead to the edge before
        self.edge, self.edge_of = edge, None if edge is None else self.param.version
        self.param.put_beside("edge", edge)

    def renew_nodes(self, unit: Unit) -> None:
        """Give the unit's edges another node: compiled autograd takes a node in one backward alone (2.11 to 2.15)."""
        node = self.node
        _make_edges(unit, [one.sink for one in unit.params if one.sink is not None and one.sink.node is node])

    def follow_data(self) -> None:
        """Give the edge the memory that the shard's local tensor has now, and have the eager path gather anew."""
        if self.edge is not None and self.takes == "edge":
            self.edge.data = self.param.local  # type: ignore[assignment]
        self.watch.note_data()

    @property
    def node(self) -> Any:
        """The autograd node that leads from the edge to the shard; other edges may share it."""
        return None if self.edge is None else self.edge.grad_fn

    @property
    def is_current(self) -> bool:
        """Whether the edge was made for the shard that the parameter has now."""
        return self.edge is not None and self.edge_of == self.param.version


def follow_mode(unit: Unit, only: Sequence[ShardedParam] | None = None) -> None:
    """Prepare the unit's sinks, or those of ``only`` these parameters, for its mode: compiled code takes them next."""
    for param in unit.params if only is None else only:
        if param.sink is None:
            param.sink = Sink(unit, param)
        param.sink.prepare(unit)
        param.put_beside("sink", param.sink)


dynamo.leave_all_to_python(follow_mode)


def forget_edges(unit: Unit, params: Sequence[ShardedParam]) -> None:
    """Release the shards of ``params``: until ``arrange_edges`` nothing of ours holds them.

    An autograd node holds the shards of all edges that it made. So the unit's other shards get new edges here, with one
    node for each module, and the next module that is visited can release its own.
    """
    sinks: list[Sink] = [param.sink for param in params if param.sink is not None and param.sink.edge is not None]
    nodes = {sink.node for sink in sinks}
    if sum(len(node.shards) for node in nodes) > len(sinks):
        others: dict[nn.Module, list[Sink]] = {}
        for param in unit.params:
            if param.sink not in sinks and param.sink.node in nodes:
                others.setdefault(param.slots[0].module, []).append(param.sink)
        for some in others.values():
            _make_edges(unit, some, is_part=True)
    for sink in sinks:
        sink.have_edge(None)


def arrange_edges(unit: Unit, only: Sequence[ShardedParam] | None = None) -> None:
    """Give the edges of the shards that train one autograd node, and each of the others a node of its own.

    With ``only``, these parameters alone are looked at. Their edges share a node until the next backward that passes
    through it has ended; then the unit has one node again.
    """
    together: list[Sink] = []
    for param in unit.params if only is None else only:
        sink: Sink = param.sink
        if not sink.can_train or not (isinstance(param.shard, DTensor) and param.shard.is_leaf):
            sink.have_edge(None)
            sink.prepare(unit)
        elif only is not None and sink.is_current:
            sink.have_edge(sink.edge)  # a slot that was added may lack it
        elif param.shard.requires_grad and not param.shard.is_inference():
            together.append(sink)
        else:
            _have_node(unit, [sink])
    _have_node(unit, together, is_part=only is not None)


def _have_node(unit: Unit, sinks: Sequence[Sink], is_part: bool = False) -> None:
    """Give these sinks edges that lead from one node to their shards, and to no others."""
    if not sinks:
        return
    nodes = {sink.node if sink.is_current else None for sink in sinks}
    node = next(iter(nodes))
    if len(nodes) > 1 or node is None or len(node.shards) != len(sinks):
        _make_edges(unit, sinks, is_part)
        return
    for sink in sinks:
        sink.have_edge(sink.edge)  # a slot that was added may lack it


def _make_edges(unit: Unit, sinks: Sequence[Sink], is_part: bool = False) -> None:
    """Make new edges for the shards of these sinks, frozen or not, with one autograd node.

    ``is_part`` says that the unit has other nodes, and that the end of the next backward joins them.

    The node keeps the shards' ``AccumulateGrad`` alive, so ``swap_tensors`` refuses the shards while an edge lives.
    """
    shards: Any = [sink.param.shard for sink in sinks]
    frozen = [shard for shard in shards if not shard.requires_grad]
    try:
        for shard in frozen:  # a user may unfreeze it later: AccumulateGrad looks when it runs
            shard.requires_grad_(True)
        with torch.enable_grad(), torch.inference_mode(False):
            edges = _Edges.apply([(sink.param.fqn, _look_of(sink)) for sink in sinks], *shards)
    finally:
        for shard in frozen:
            shard.requires_grad_(False)
    node = edges[0].grad_fn
    node.unit = weakref.ref(unit)
    node.leaves = [leaf for leaf, _ in node.next_functions]
    node.leaf_of = dict(zip(map(id, shards), node.leaves))  # the node holds the shards, so ids are theirs
    node.is_part = is_part
    for sink, edge in zip(sinks, edges, strict=True):
        sink.have_edge(edge)
        sink.prepare(unit)


def _look_of(sink: Sink) -> Tensor:
    """Return what an edge is made of: the local tensor if gradients look like it, else the leaf."""
    local, arrives_as = sink.param.local, sink.arrives_as
    assert local is not None and arrives_as is not None
    is_like = type(local) is Tensor and local.dtype == arrives_as[1] and not local.is_inference()
    sink.takes = "edge" if is_like else "both"
    look = local if is_like else sink.have_leaf()
    assert look is not None
    return look


class _Edges(torch.autograd.Function):
    """Make the edges of sharded parameters; backward gives the edges' plain gradients to the shards.

    It saves no tensors, so backward may run any number of times.
    """

    @staticmethod
    def forward(ctx: Any, looks: list[tuple[str, Tensor]], *shards: DTensor) -> tuple[Tensor, ...]:
        ctx.fqns = [fqn for fqn, _ in looks]
        ctx.shards = shards
        ctx.set_materialize_grads(False)
        return tuple(like.detach() for _, like in looks)

    @staticmethod
    def backward(ctx: Any, *local_grads: Tensor | None) -> tuple[DTensor | None, ...]:
        through_autograd: list[DTensor | None] = [None]  # for the argument ``looks``
        late, in_one_graph = LateHooks(), autograd.in_compiled_autograd()
        unit = ctx.unit()
        if ctx.is_part and unit is not None and not in_one_graph:
            _join_at_end(unit)
        waited = Held() if unit is None else unit.accumulation.held
        for_hooks: list[tuple[str, DTensor, Tensor]] = []
        reduced = False
        with autograd.quick_attributes():
            for fqn, shard, leaf, grad in zip(ctx.fqns, ctx.shards, ctx.leaves, local_grads, strict=True):
                through_autograd.append(None)
                if grad is None:
                    if any(autograd.hooks_of(shard)):
                        late.hold_back_all(shard)
                    continue
                if not shard.requires_grad:
                    continue
                hooks, hooks_behind = autograd.hooks_of(shard)
                is_asked_for = grads.is_asked_for(shard, leaf)
                reduced |= not is_asked_for
                if is_asked_for or (in_one_graph if hooks else hooks_behind):
                    through_autograd[-1] = dtensors.dtensor_like(shard, grad)
                elif hooks:
                    for_hooks.append((fqn, shard, grad))
                else:
                    grads.give(shard, grad)
                if not (is_asked_for or hooks):
                    waited.note_arrival(fqn)
        if reduced:
            _note_reduced(unit)
        for fqn, shard, grad in for_hooks:
            grads.give_through_hooks(fqn, shard, grad)
            waited.note_arrival(fqn)
            late.hold_back_all(shard)
        if late.are_waiting and not in_one_graph:
            autograd.at_end_of_backward(late.release)
        return tuple(through_autograd)


dynamo.leave_all_to_python(_Edges.backward)


def _join_at_end(unit: Unit) -> None:
    """When the backward that runs ends, give the unit's edges one node again; a second call has no effect."""
    task = autograd.backward_task()
    if unit.watch.joins_in != task:
        unit.watch.joins_in = task
        autograd.at_end_of_backward(functools.partial(arrange_edges, unit))


# --- leaves -----------------------------------------------------------------------------------------------------


def _giver(param: ShardedParam) -> Hook:
    owner = weakref.ref(param)  # the parameter holds the leaf that holds this

    @torch.compiler.assume_constant_result
    def is_watched() -> bool:
        param = owner()
        if param is None:
            return False
        # ``from_local`` would bring an offloaded gradient to the mesh's device.
        offloaded = param.shard.device.type != param.mesh.device.type
        return offloaded or bool(autograd.post_accumulate_grad_hooks(param.shard))

    @torch.compiler.disable(reason=f"the hooks of {param.fqn} run when it has its gradient")
    def give(local: Tensor) -> None:
        param = owner()
        if param is not None:
            grads.give(param.shard, local)  # type: ignore[arg-type]

    def take(leaf: Tensor) -> None:
        local, leaf.grad = leaf.grad, None
        if local is None:
            return
        if not torch.compiler.is_dynamo_compiling() or is_watched():
            give(local)
        else:
            grads.give_traced(owner().shard, local)  # type: ignore[union-attr, arg-type]

    dynamo.leave_all_to_python(take)
    return take


def _note_reduced(unit: Unit | None) -> None:
    """Note that a graph reduced gradients of the unit, and follow settings that changed since its forward."""
    if unit is None or not autograd.backward_has_an_end():
        return
    if not unit.keeps:
        unit.keeper.free()
    accumulation = unit.accumulation
    if accumulation.has_left_over:  # held back since, by the backward of an earlier forward
        unit.ends.at_end(unit)
    elif not accumulation.sync and not accumulation.decides_in_backward:
        # Forward expected this backward to synchronize. It did, which is right and costs a reduction; but a user who
        # turns sync off between forward and backward will do so again.
        accumulation.decides_in_backward = True
        autograd.at_end_of_backward(functools.partial(follow_mode, unit))
