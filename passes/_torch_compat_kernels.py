"""Every private torch name of Inductor's scheduler and code generation that the passes touch, likewise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.custom_graph_pass as custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode as BaseSchedulerNode  # 2.11 to 2.15
else:
    BaseSchedulerNode = Any  # to import it takes a second, which only those who compile should wait


# What a pass on kernels must be for Inductor to cache what it made: 2.15. In 2.11 a CustomGraphPass.
SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


def add_order_dependency(after: BaseSchedulerNode, before: BaseSchedulerNode) -> None:
    """Make Inductor's later passes keep ``after`` behind ``before``, without keeping a buffer alive.

    ``WeakDep(is_fake=True)`` and ``add_fake_dep``: 2.11 to 2.15; Inductor orders its own collectives with it. What is
    made of several has no ``add_fake_dep`` of its own, and its ``unmet_dependencies`` are asked.
    """
    from torch._inductor.dependencies import WeakDep

    source = next(iter(before.get_buffer_names()), None)
    target = next(iter(after.get_buffer_names()), None)
    if source is None or target is None:
        return
    dependency = WeakDep(source, mutating_buf=target, is_fake=True)
    if len(after.get_nodes()) > 1:
        after.unmet_dependencies.add(dependency)
    else:
        after.add_fake_dep(dependency)


@functools.cache
def _temporary_dependency() -> Any:
    """A class of dependencies for ordering alone, told from Inductor's own (``WeakDep.rename``: 2.11 to 2.15)."""
    from torch._inductor.dependencies import WeakDep

    class Temporary(WeakDep):
        def rename(self, renames: dict[str, str]) -> Temporary:
            renamed = super().rename(renames)
            return type(self)(renamed.name, renamed.mutating_buf, renamed.is_fake)

    return Temporary


def add_temporary_dependency(after: BaseSchedulerNode, before: BaseSchedulerNode) -> None:
    """As ``add_order_dependency``, until ``drop_temporary_dependencies``.

    It names no buffer of ``after`` as written: where that reads ``before`` as well, fusion would look for what is
    overwritten there, and find nothing.
    """
    source = next(iter(before.get_buffer_names()), None)
    if source is not None:
        after.add_fake_dep(_temporary_dependency()(source, mutating_buf=source, is_fake=True))


def drop_temporary_dependencies(snodes: list[BaseSchedulerNode]) -> None:
    """Forget them, in kernels and in what these were fused from (``unmet_dependencies``: 2.11 to 2.15)."""
    temporary = _temporary_dependency()
    for snode in snodes:
        for part in {snode, *snode.get_nodes()}:
            for dep in [one for one in part.unmet_dependencies if isinstance(one, temporary)]:
                part.unmet_dependencies.discard(dep)
            for dep in [one for one in part.read_writes.reads if isinstance(one, temporary)]:
                part.read_writes.reads.discard(dep)


def free_after_last_reader() -> None:
    """Have the graph that is being scheduled free each buffer at once, not keep it until a later one fits into it.

    Inductor keeps it where its own estimate of the peak, which counts parts of a concatenation twice, allows that.
    ``virtualized.V.graph.wrapper_code.memory_plan_reuse``, ``config.allow_buffer_reuse``: 2.11 to 2.15.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V

    wrapper: Any = V.graph.wrapper_code
    plan = wrapper.memory_plan_reuse

    def plan_without_reuse() -> None:
        with config.patch(allow_buffer_reuse=False):
            plan()

    wrapper.memory_plan_reuse = plan_without_reuse


@functools.cache
def lower_as_collective(op: torch._ops.OpOverload) -> None:
    """Let Inductor generate a call of ``op``, (input, size, name) -> new tensor, with the rules of its own collectives.

    ``lowering.register_lowering`` and ``add_layout_constraint`` with ``constrain_to_fx_strides``,
    ``ir._CollectiveKernel.create_out_of_place``, ``ir.TensorBox``: 2.11 to 2.15.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    def lowering(value: object, size: int, name: str) -> object:
        launched = ir._CollectiveKernel.create_out_of_place(op, value, size, name)  # type: ignore[arg-type]
        assert isinstance(launched, ir.IRNode)
        return ir.TensorBox.create(launched)

    add_layout_constraint(op, constrain_to_fx_strides)
    register_lowering(op)(lowering)


def may_be_in_place(node: torch.fx.Node) -> bool:
    """Whether Inductor may have an op write into an input that nobody reads behind it.

    ``fx_passes.reinplace``: ``inplaceable_ops``, ``inplaceable_foreach_ops``, Triton kernels of users, ops that were
    functionalized, and what it makes of scatters into views: 2.11 to 2.15.
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
    """Have Inductor generate a call of ``called`` where the graph has ``op``, whose inputs it writes as they lie there.

    ``lowering.register_lowering``, ``fallback_handler``, ``add_layout_constraint``: 2.11 to 2.15.
    """
    from torch._inductor.lowering import (
        add_layout_constraint,
        constrain_to_fx_strides,
        fallback_handler,
        register_lowering,
    )

    call = fallback_handler(called, add_to_fallback_set=False)
    add_layout_constraint(op, constrain_to_fx_strides)
    register_lowering(op, type_promotion_kind=None)(lambda *args: call(*args, **settings))


@functools.cache
def lower_as_written(op: torch._ops.OpOverload) -> None:
    """Let Inductor write what ``op``, tensor -> the same tensor, is given (``TensorBox.realize``: 2.11 to 2.15)."""
    from torch._inductor.lowering import register_lowering

    def lowering(result: Any) -> Any:
        result.realize()
        return result

    register_lowering(op, type_promotion_kind=None)(lowering)


def is_collective(snode: BaseSchedulerNode) -> bool:
    """Whether a kernel launches a collective (``ir._CollectiveKernel``, ``ir._WaitKernel``: 2.11 to 2.15)."""
    from torch._inductor import ir

    kernels = [part.node for part in snode.get_nodes()]
    return any(isinstance(one, ir._CollectiveKernel) and not isinstance(one, ir._WaitKernel) for one in kernels)


def is_wait(snode: BaseSchedulerNode) -> bool:
    """Whether a kernel waits for a collective (``ir._WaitKernel``: 2.11 to 2.15)."""
    from torch._inductor import ir

    return any(isinstance(part.node, ir._WaitKernel) for part in snode.get_nodes())


def is_heavy(snode: BaseSchedulerNode) -> bool:
    """Whether a kernel is a product, a convolution, an attention, an operator that Inductor generates no loops for.

    ``is_extern``, ``is_template``: 2.11 to 2.15.
    """
    return snode.is_extern() or snode.is_template()


def is_loop_on_cpu(snode: BaseSchedulerNode) -> bool:
    """Whether Inductor makes a loop for the CPU of a kernel, or nothing (``get_device``: 2.11 to 2.15)."""
    device = snode.get_device()
    return not is_heavy(snode) and device is not None and device.type == "cpu"


def dependencies_added(snodes: list[BaseSchedulerNode]) -> None:
    """Tell Inductor what kernels, in topological order, depend on since it looked: its fusion asks for that.

    ``ancestors``, ``get_operation_names``: 2.11 to 2.15.
    """
    producer = {name: snode for snode in snodes for name in snode.get_buffer_names()}
    for snode in snodes:
        for made in {producer[dep.name] for dep in snode.unmet_dependencies if dep.name in producer} - {snode}:
            snode.ancestors |= made.get_operation_names() | made.ancestors


def cache_folder() -> Path | None:
    """Where Inductor keeps what it compiled, unless it is told not to.

    ``runtime.cache_dir_utils.cache_dir``, ``config.fx_graph_cache``, ``force_disable_caches``: 2.11 to 2.15.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return None if config.force_disable_caches or not config.fx_graph_cache else Path(cache_dir())


def is_deterministic() -> bool:
    """Whether Inductor leaves its scheduler passes out, whatever their switch says (2.11 to 2.15)."""
    from torch._inductor import config

    return bool(config.deterministic)


# Turned on by us: as good as True, and not what a user writes.
_FOR_OUR_GRAPH = 1.0


def switch_scheduler_passes(on: bool) -> None:
    """Have Inductor call the scheduler passes for the graph that this thread compiles; off, where we turned it on.

    ``config.reorder_for_compute_comm_overlap``: 2.11 to 2.15, in 2.15 one of each thread.
    """
    from torch._inductor import config

    switch: object = config.reorder_for_compute_comm_overlap
    if on and not switch:
        config.reorder_for_compute_comm_overlap = _FOR_OUR_GRAPH  # type: ignore[assignment]
    elif not on and switch is not True and switch == _FOR_OUR_GRAPH:
        config.reorder_for_compute_comm_overlap = False


def scheduler_passes() -> list[object]:
    """What Inductor would call while the switch is on (2.11 to 2.15)."""
    from torch._inductor import config

    return list(config.reorder_for_compute_comm_overlap_passes)


def pre_fusion_pass() -> object:
    """What Inductor calls on kernels before it fuses them, ``_pre_fusion_custom_pass`` (2.11 to 2.15)."""
    from torch._inductor import config

    return config._pre_fusion_custom_pass
