"""Every private torch name that the passes touch, with the versions it was seen in."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass  # 2.11 to 2.15


def foreach_copy(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its place, cast to its dtype; one kernel on a GPU (``_foreach_copy_``: 2.11 to 2.15)."""
    torch._foreach_copy_(into, sources)


def may_alias(target: object) -> bool:
    """Whether an op's result may share storage with its first argument, by its schema (``_schema``: 2.11 to 2.15)."""
    if target in (operator.getitem, torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default):
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(returned.alias_info is not None for returned in schema.returns)


@functools.cache
def aliased_argument(target: object, result: int) -> tuple[str, bool] | None:
    """Return the argument that an op's result aliases, and whether the op writes to it; None if the result is new.

    The op's schema tells. ``_schema``, ``alias_info.before_set``, ``is_write``: 2.11 to 2.15.
    """
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.returns:
        return None
    one_list = len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType)
    if not one_list and result >= len(schema.returns):
        return None
    returned = schema.returns[0 if one_list else result].alias_info
    if returned is None:
        return None
    for argument in schema.arguments:
        # For a list of views, Tensor(a)[], the set is empty: they are views of the one argument that has alias info.
        if argument.alias_info is not None and (one_list or argument.alias_info.before_set & returned.before_set):
            return argument.name, argument.alias_info.is_write
    return None


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the inputs that an operator writes to (by ``_schema``, ``alias_info.is_write``: 2.11 to 2.15)."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = node.target._schema.arguments
    names = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    given = arguments_of(node)
    return [one for name in names if isinstance(one := given.get(name), torch.fx.Node)]


def allows_tf32() -> bool:
    """Whether float32 matmuls on GPUs may round to TF32, whichever of torch's two settings allows it.

    ``get_float32_matmul_precision`` knows only the older setting, and raises once a program has used the newer one
    (2.11 to 2.15).
    """
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def size_hint(size: int | torch.SymInt, default: int) -> int:
    """Return a size as a number: for a symbolic size the value seen in tracing, else ``default`` (2.11 to 2.15)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    return default if hint is None else int(hint)


def fake_mode_of(values: Iterable[object]) -> AbstractContextManager[object]:
    """Return the fake mode of the first fake tensor among an op's arguments (``torch._subclasses``: 2.11 to 2.15)."""
    for value in values:
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
        if isinstance(value, (list, tuple)):
            return fake_mode_of(value)
    raise AssertionError("a lowered op without a tensor argument")


def is_generated_code(frame: FrameType) -> bool:
    """Whether Inductor generated a frame's code (a ``call`` with ``AsyncCompile`` in its globals: 2.11 to 2.15)."""
    return frame.f_code.co_name == "call" and "AsyncCompile" in frame.f_globals


def leave_all_to_python(*functions: Callable[..., Any]) -> None:
    """Have Dynamo skip these functions, and what they call, when they run as frames of their own.

    In a backward inside compiled code, Dynamo looks at every frame that autograd runs. Unlike
    ``torch.compiler.disable`` this costs nothing per call, and a trace that goes through these functions, as compiled
    autograd's does through hooks, is not affected.
    ``_C._dynamo.eval_frame.set_code_exec_strategy``, ``_FrameExecStrategy``, ``_FrameAction``: 2.11 to 2.15.
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


# The type of operators, as the targets of a graph's nodes and as returned by torch.ops: 2.11 to 2.15
OpOverload = torch._ops.OpOverload


def has_tag(target: object, tag: torch.Tag) -> bool:
    """Whether a node's target is an operator that has this tag."""
    return isinstance(target, OpOverload) and tag in target.tags


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """Return an operator's arguments by name (``_schema``: 2.11 to 2.15)."""
    schema = node.target._schema  # type: ignore[union-attr]
    return {**dict(zip((argument.name for argument in schema.arguments), node.args)), **node.kwargs}


def rename(node: torch.fx.Node, name: str) -> None:
    """Give a node this name, or, if another one has it, one like it (``Node._rename``: 2.11 to 2.15)."""
    node._rename(name)


def root_of(graph: torch.fx.Graph) -> torch.fx.Node:
    """Return a graph's root, the node before the first one (``Graph._root``: 2.11 to 2.15)."""
    return graph._root


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """Return the process group called ``name`` (``_resolve_process_group``: 2.11 to 2.15)."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_ranks(name: str) -> tuple[int, ...]:
    """Return the global ranks of the process group called ``name``."""
    return tuple(torch.distributed.get_process_group_ranks(process_group(name)))


def counter_of(name: str) -> Callable[[], int]:
    """Return a function that counts the collectives that anybody issued in the process group called ``name``.

    The function does not keep the group alive. ``ProcessGroup._get_sequence_number_for_group``: 2.11 to 2.15. For
    backends without such a number it always returns 0.
    """
    group = weakref.ref(process_group(name))

    def count() -> int:
        there = group()
        return 0 if there is None else int(there._get_sequence_number_for_group())  # type: ignore[attr-defined]

    try:
        count()
    except RuntimeError:
        return lambda: 0
    return count


def call_below_autograd(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator that makes new tensors without its autograd formula.

    The formulas of torch's functional collectives are Python, and take longer than small collectives themselves (2.15;
    ``_AutoDispatchBelowAutograd``: 2.11 to 2.15).
    """
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


def gather_at_once(outs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], name: str) -> bool:
    """Start the all-gather of each shard into its own tensor, in one launch; return whether the backend can do that.

    ``ProcessGroup.allgather_into_tensor_coalesced``: 2.11 to 2.15.
    """
    group = _that_starts_many(name, outs[0].device)
    if group is not None:
        _register(outs, group.allgather_into_tensor_coalesced([*outs], [*shards]))
    return group is not None


def reduce_at_once(outs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], op: str, name: str) -> bool:
    """Start the reduce-scatter of each gradient likewise; ``op`` is "sum" or "avg".

    ``ProcessGroup.reduce_scatter_tensor_coalesced``: 2.11 to 2.15.
    """
    group = _that_starts_many(name, outs[0].device)
    if group is not None:
        options = torch.distributed.ReduceScatterOptions()
        options.reduceOp = getattr(torch.distributed.ReduceOp, op.upper())
        _register(outs, group.reduce_scatter_tensor_coalesced([*outs], [*grads], options))
    return group is not None


def _that_starts_many(name: str, device: torch.device) -> torch.distributed.ProcessGroup | None:
    """Return the group called ``name``; None unless it is NCCL's: gloo has the methods, and corrupts the heap.

    ``_get_backend``: 2.11 to 2.15.
    """
    group: Any = process_group(name)
    return group if group._get_backend(device).name() == "nccl" else None


def _register(outs: Sequence[torch.Tensor], work: torch.distributed.Work) -> None:
    """Have ``wait_tensor`` of any of these wait for the work (``_register_work``, by storage: 2.11 to 2.15)."""
    for out in {out.untyped_storage().data_ptr(): out for out in outs}.values():
        torch._C._distributed_c10d._register_work(out, work)


def default_store() -> torch.distributed.Store | None:
    """Return the rendezvous store of the default process group, or None without one.

    ``distributed_c10d._get_default_store``: 2.11 to 2.15.
    """
    if not torch.distributed.is_initialized():
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def sort_topologically(graph: torch.fx.Graph) -> None:
    """Put definitions before uses again (``_inductor.pattern_matcher.stable_topological_sort``: 2.11 to 2.15)."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def cut(joint: torch.fx.Graph, root: object, num_results: int) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """Cut a joint graph into forward and backward as AOTAutograd's partitioner does; ``joint`` is unusable afterwards.

    ``root`` has its constants. Nobody runs the modules that the partitioner makes on its way, so they get no code.
    ``partitioners.min_cut_rematerialization_partition``; ``fx._lazy_graph_module._use_lazy_graph_module`` and
    ``_make_graph_module``: 2.11 to 2.15.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx import _lazy_graph_module

    with _lazy_graph_module._use_lazy_graph_module(True):
        module = _lazy_graph_module._make_graph_module(root or {}, joint)
        forward, backward = min_cut_rematerialization_partition(module, (), num_fwd_outputs=num_results)
    return forward.graph, backward.graph


def partitioner_has_a_budget(graph: torch.fx.Graph) -> bool:
    """Whether the user has the partitioner recompute activations until they fit a budget.

    ``_functorch.config.activation_memory_budget`` and ``meta["memory_budget"]``: 2.11 to 2.15;
    ``torch.fx.traceback._get_memory_budget_annotation``: 2.15.
    """
    from torch._functorch import config

    annotation = getattr(torch.fx.traceback, "_get_memory_budget_annotation", lambda node: None)
    return bool(config.activation_memory_budget != 1.0) or any(
        node.meta.get("memory_budget") is not None or annotation(node) is not None for node in graph.nodes
    )


def partitioner_settings() -> dict[str, object]:
    """Return AOTAutograd's settings that are plain values; its partitioner follows them.

    ``_functorch.config.save_config_portable``: 2.11 to 2.15. Not ``get_hash``, which changes after a compilation.
    """
    from torch._functorch import config

    settings: dict[str, object] = config.save_config_portable()
    return {name: said for name, said in sorted(settings.items()) if isinstance(said, (bool, int, float, str))}


def has_custom_partitioner() -> bool:
    """Whether the user set another partitioner than min-cut (``custom_partitioner_fn``: 2.11 to 2.15)."""
    from torch._inductor import config

    return config.custom_partitioner_fn is not None


def written_inputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the inputs of a joint graph that its forward writes to, in the graph or in AOTAutograd's code after it.

    ``InputMutationAOTOutput.mutated_input``: 2.11 to 2.15.
    """
    copy = torch.ops.aten.copy_.default
    return _inputs_of_results(graph, "mutated_input") | {
        node
        for node in graph.find_nodes(op="placeholder")
        if any(user.target is copy and user.args[0] is node for user in node.users)
    }


def inputs_with_gradients(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the inputs of a joint graph whose gradients it returns (``GradAOTOutput.grad_of``: 2.11 to 2.15)."""
    return _inputs_of_results(graph, "grad_of")


def _inputs_of_results(graph: torch.fx.Graph, relation: str) -> set[torch.fx.Node]:
    """Return the inputs of a joint graph that its results belong to.

    AOTAutograd describes each result. The attribute ``relation`` of such a description is the description of an input.
    ``meta["desc"]`` of inputs and of the output: 2.11 to 2.15.
    """
    described = {getattr(result, relation, None) for result in graph.output_node().meta.get("desc") or ()} - {None}
    return {node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in described}


def is_of_backward(node: torch.fx.Node) -> bool:
    """Whether a node of a joint graph was traced as part of backward (``meta["partitioner_tag"]``: 2.11 to 2.15)."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def keep_in_backward(node: torch.fx.Node) -> None:
    """Have the partitioner compute a node in backward, whatever its inputs are.

    ``meta["partitioner_tag"]``: 2.11 to 2.15.
    """
    node.meta["partitioner_tag"] = "must_be_in_backward"


def is_of_traced_backward(node: torch.fx.Node) -> bool:
    """Whether a node comes from a backward that Dynamo traced into its forward's graph (``autograd_backward``: 2.15).

    In a backward graph that the partitioner cut, it is True of all nodes.
    """
    return bool(node.meta.get("autograd_backward"))


def backward_call_of(node: torch.fx.Node) -> str | None:
    """Return the name of the traced ``backward()`` that a node comes from, or None (``meta["from_node"]``: 2.15)."""
    origins = node.meta.get("from_node")
    return str(origins[0].name) if origins and is_of_traced_backward(node) else None
