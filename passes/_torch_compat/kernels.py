"""Every private torch name of Inductor's scheduler and code generation that the passes touch, with its versions."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch


@functools.cache
def lower_as_dependency(op: torch._ops.OpOverload) -> None:
    """Have Inductor lower ``op(node, before)`` to a dependency: ``node`` runs after ``before``, and no code is added.

    No buffer lives longer because of it. torch's ``control_deps`` does the same for a node that it wraps, but also has
    that node's inputs written to memory. ``virtualized.V.graph.additional_buffer_deps``, ``operations``,
    ``current_node``: 2.11 to 2.15.
    """
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    def lowering(node: Any, before: Any) -> None:
        before.realize()
        node.realize()
        given: Any = V.graph.current_node.args[0]
        source = given.args[0] if given.target is operator.getitem else given
        # The last operations are the node's own: its kernel, copies made for it, and what a scatter writes into.
        for operation in itertools.takewhile(lambda one: source in one.get_origins(), reversed(V.graph.operations)):
            V.graph.additional_buffer_deps[operation.get_operation_name()].add(before.get_name())

    register_lowering(op, type_promotion_kind=None)(lowering)


def _lower(op: torch._ops.OpOverload, lowering: Callable[..., Any]) -> None:
    """Have Inductor lower ``op`` by ``lowering``, with its inputs in the strides and dtypes that the graph has.

    ``lowering.register_lowering``, and ``add_layout_constraint`` with ``constrain_to_fx_strides``: 2.11 to 2.15.
    """
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    add_layout_constraint(op, constrain_to_fx_strides)
    register_lowering(op, type_promotion_kind=None)(lowering)


@functools.cache
def lower_as_collective(op: torch._ops.OpOverload, may_outlive: bool = False) -> None:
    """Have Inductor generate a call of ``op(input, ...)`` -> new tensor, by the rules of its own collectives.

    ``may_outlive`` says that others may hold the result: the graph drops it after its last use, but neither writes into
    it nor uses its memory for something else. Inductor treats a tensor so that may be a view of another one; the name
    of that other one is ours alone, so that nothing depends on it.
    ``ir._CollectiveKernel.create_out_of_place``, ``get_inputs_that_alias_output``, ``ir.TensorBox``: 2.11 to 2.15.
    """
    from torch._inductor import ir

    class Shared(ir._CollectiveKernel):
        def get_inputs_that_alias_output(self) -> Sequence[str]:
            return [f"{self.get_name()}, as others hold it"]

    kernel = Shared if may_outlive else ir._CollectiveKernel

    def lowering(value: object, *settings: object) -> object:
        launched = kernel.create_out_of_place(op, value, *settings)  # type: ignore[arg-type]
        assert isinstance(launched, ir.IRNode)
        return ir.TensorBox.create(launched)

    _lower(op, lowering)


@functools.cache
def lower_as_wait(op: torch._ops.OpOverload) -> None:
    """Have Inductor generate a call of ``op(launched)``, which returns its input, by the rules of ``wait_tensor``.

    All that the launch sent counts as read by the wait, so it is neither freed nor overwritten before. Inductor's own
    wait reads only the first tensor. ``ir._WaitKernel.create_wait``, ``get_volatile_reads``, ``_CollectiveKernel``:
    2.11 to 2.15.
    """
    from torch._inductor import ir

    class Wait(ir._WaitKernel):
        def get_volatile_reads(self) -> Sequence[Any]:
            (launched,) = self.inputs
            if isinstance(launched, ir._CollectiveKernel):
                return launched.inputs
            return super().get_volatile_reads()

    def lowering(launched: Any) -> Any:
        Wait.create_wait(op, launched)
        return launched

    _lower(op, lowering)


@functools.cache
def lower_as_read_on(op: torch._ops.OpOverload) -> None:
    """Have Inductor generate a call of ``op(input, ...)``, and no more use of the input's memory, once that is freed.

    ``virtualized.V.graph.never_reuse_but_free_buffers``: 2.15. 2.11 has ``never_reuse_buffers``, which are not freed
    before the graph ends. ``lowering.fallback_handler``: 2.11 to 2.15.
    """
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    call = fallback_handler(op, add_to_fallback_set=False)

    def lowering(read: Any, *settings: object, **more: object) -> Any:
        read.realize()
        kept = getattr(V.graph, "never_reuse_but_free_buffers", V.graph.never_reuse_buffers)
        kept.add(read.get_name())
        return call(read, *settings, **more)

    _lower(op, lowering)


def leave_to_others(places: Collection[int]) -> None:
    """Keep Inductor from using the memory of these inputs of the backward that it compiles for something else.

    They are dropped after their last use (``TracingContext``, ``fw_metadata.bw_donated_idxs``: 2.11 to 2.15).
    """
    context = torch._guards.TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is not None and known.bw_donated_idxs:
        known.bw_donated_idxs = [place for place in known.bw_donated_idxs if place not in places]


def may_reuse_saved() -> bool:
    """Whether Inductor may use the memory of what forward saved for something else in backward.

    Its cache of graphs does not ask (``_functorch.config.donated_buffer``: 2.11 to 2.15).
    """
    from torch._functorch import config

    return bool(config.donated_buffer)


def num_returned() -> int:
    """Return how many of its outputs the forward that is compiled returns to its caller; all others are saved.

    ``TracingContext``, ``fw_metadata.num_forward``: 2.11 to 2.15.
    """
    context = torch._guards.TracingContext.try_get()
    return 0 if context is None or context.fw_metadata is None else int(context.fw_metadata.num_forward)


def may_be_in_place(node: torch.fx.Node) -> bool:
    """Whether Inductor may make an op write into one of its inputs, if no later node reads that input.

    ``fx_passes.reinplace`` does so for ``inplaceable_ops``, ``inplaceable_foreach_ops``, Triton kernels of users, ops
    that were functionalized, and scatters into views: 2.11 to 2.15.
    """
    from torch._inductor.fx_passes import reinplace

    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.OperatorBase)
    is_scatter = "scatter" in node.target._schema.name
    return is_scatter or node.target in reinplace.inplaceable_ops or node.target in reinplace.inplaceable_foreach_ops


@functools.cache
def lower_as_call(op: torch._ops.OpOverload, called: torch._ops.OpOverload, **settings: Any) -> None:
    """Have Inductor generate a call of ``called`` for each ``op`` (``lowering.fallback_handler``: 2.11 to 2.15)."""
    from torch._inductor.lowering import fallback_handler

    call = fallback_handler(called, add_to_fallback_set=False)
    _lower(op, lambda *args: call(*args, **settings))


@functools.cache
def lower_as_written(op: torch._ops.OpOverload) -> None:
    """Have Inductor write the tensor that ``op`` takes and returns to memory (``TensorBox.realize``: 2.11 to 2.15)."""
    from torch._inductor.lowering import register_lowering

    def lowering(result: Any) -> Any:
        result.realize()
        return result

    register_lowering(op, type_promotion_kind=None)(lowering)


def cache_folder() -> Path | None:
    """Return the folder where Inductor caches what it compiled, or None if its caches are off.

    ``runtime.cache_dir_utils.cache_dir``, ``config.fx_graph_cache``, ``force_disable_caches``: 2.11 to 2.15.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return None if config.force_disable_caches or not config.fx_graph_cache else Path(cache_dir())
