"""Dynamo: what it traces, what it leaves to Python, what it has compiled."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

# torch._dynamo.eval_frame.OptimizedModule, what torch.compile(module) returns: 2.11 to 2.15
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule

try:  # what a class that Dynamo does not look into must inherit from
    from torch._custom_class_base import CustomClassBase as OpaqueBase  # 2.15
except ImportError:
    from torch._opaque_base import OpaqueBase as OpaqueBase  # 2.11

from ..passes._torch_compat import leave_all_to_python as leave_all_to_python


def compiles_with(compiled: Any) -> Callable[[Any], Any] | None:
    """Return what ``module.compile()`` compiled with, to compile another function with it; None if it is not known.

    ``_compiled_call_impl`` is a closure over the context that compiles, its free variable ``self``: 2.11 to 2.15.
    """
    function = getattr(compiled, "__func__", compiled)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    return cells["self"].cell_contents if hasattr(compiled, "_torchdynamo_orig_callable") and "self" in cells else None


def wrapper_compiles_with(wrapper: Any) -> Callable[[Any], Any] | None:
    """The same for what ``torch.compile(module)`` returned (``OptimizedModule.dynamo_ctx``: 2.11 to 2.15)."""
    return None if hasattr(wrapper.forward, "_torchdynamo_disable") else wrapper.dynamo_ctx


def register_opaque(cls: type, guard: Callable[[Any], list[Any]], constant_methods: tuple[str, ...]) -> None:
    """Have Dynamo compare ``guard(instance)`` at each call, and take results of methods as constants while it traces.

    ``_library.opaque_object``: ``register_opaque_type`` in 2.11, ``register_custom_class`` in 2.15.
    """
    from torch._library import opaque_object

    members = dict.fromkeys(constant_methods, opaque_object.MemberType.USE_REAL)
    if hasattr(opaque_object, "register_custom_class"):
        opaque_object.register_custom_class(cls, typ="symbolic", guard_fn=guard, members=members)
    else:
        opaque_object.register_opaque_type(cls, typ="reference", guard_fn=guard, members=members)


def mark_free_to_save(tensor: torch.Tensor) -> None:
    """Have a graph save ``tensor`` itself for backward, as it does parameters, and nothing that it makes of it.

    It does what ``torch._dynamo.mark_static_address(tensor, guard=False)`` does, in a tenth of the time: 2.11 to 2.15.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def hide_looks_at_grad() -> None:
    """Ignore the warning when Dynamo itself reads ``.grad`` of an edge, which is no leaf: warnings may be errors.

    Dynamo tries to hide torch's warning by ``warnings.showwarning``, which is not called for a warning that is an error
    (``safe_has_grad``, ``safe_grad``: 2.11 to 2.15). If the user reads it, torch warns as before.
    """
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning, r"torch\._(dynamo|subclasses)\.")


def changed_while_traced(value: object) -> bool:
    """Whether code that Dynamo is tracing has written to a dict, list or the like, which is itself unchanged so far.

    Inside ``torch.func.functional_call`` Dynamo does not count writes to the parameters of the module itself, so they
    are taken to be changed. ``SideEffects.id_to_variable``, ``is_modified`` and ``ignore_mutation_on_these_variables``:
    2.11 to 2.15.
    """
    output = output_being_traced()
    variable = None if output is None else output.side_effects.id_to_variable.get(id(value))
    if variable is None:
        return False
    effects = output.side_effects
    return effects.is_modified(variable) or variable in effects.ignore_mutation_on_these_variables


# Ops of torch.ops.higher_order whose body may run any number of times on a rank, or is compiled as a graph of its own;
# checkpointing is not among them. By name: "switch" is in 2.15 alone, the others in 2.11 to 2.15.
_BODIES_APART = {
    "cond", "switch", "while_loop", "while_loop_stack_output", "map_impl", "scan", "associative_scan", "flex_attention",
    "invoke_subgraph",
}  # fmt: skip


def output_being_traced() -> Any:
    """Return the graphs that Dynamo is writing; None if it traces none (``current_tx``, ``output``: 2.11 to 2.15)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:  # also where Dynamo runs the code to see what comes out, as it does with nn.LSTM
        return None


def is_tracing() -> bool:
    """Whether Dynamo made this call, while it traces the user's code."""
    return output_being_traced() is not None


def num_writes_traced(tensor: torch.Tensor) -> int:
    """Return at least how often the code that Dynamo is tracing has written to a tensor, an input of its graph.

    ``FakeTensorConverter._get_memo``, ``OutputGraph.tracers``, ``meta["example_value"]``: 2.11 to 2.15. Versions do not
    count ``_foreach`` ops on a DTensor, so ops whose names say that they write are counted, too.
    """
    output = output_being_traced()
    fake = None if output is None else output.fake_mode.fake_tensor_converter._get_memo(tensor)
    if fake is None:
        return 0
    inputs = output.tracers[0].graph.find_nodes(op="placeholder")
    users = [user for node in inputs if node.meta.get("example_value") is fake for user in node.users]
    return int(fake._version) + sum(_writes(user) for user in users)


def _writes(node: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def traces_with_grad() -> bool:
    """Whether grad was enabled where what is traced began (``TracingContext.global_context``: 2.11 to 2.15)."""
    context = torch._guards.TracingContext.try_get()
    state = {} if context is None else context.global_context.global_state
    return bool(state["grad_enabled"][1]) if "grad_enabled" in state else torch.is_grad_enabled()


# Graphs of Dynamo's that take tensors which are free to save, by the context that Dynamo hands on to AOTAutograd.
_taking: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_free_to_save() -> None:
    """Note that the graph being traced takes such tensors (``_guards.TracingContext.try_get``: 2.11 to 2.15)."""
    context, output = torch._guards.TracingContext.try_get(), output_being_traced()
    if context is not None and output is not None:
        _taking[context] = weakref.ref(output)


def inputs_free_to_save(joint: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return such tensors among the inputs of a joint graph, which begin with the inputs of Dynamo's graph.

    Those are the inputs of ``OutputGraph.graph``, and the mark is in ``meta["tensor_dict"]``: 2.11 to 2.15.
    """
    context = torch._guards.TracingContext.try_get()
    output = _taking[context]() if context in _taking else None
    if output is None:
        return []
    taken = output.graph.find_nodes(op="placeholder")
    inputs = joint.find_nodes(op="placeholder")
    marked = [node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") for node in taken]
    return [given for given, mark in zip(inputs, marked) if mark == "unguarded"]


def _tracers_apart() -> list[Any]:
    """Return the tracer of the graph around the outermost op of ``_BODIES_APART``, then those inside; else nothing.

    ``OutputGraph.tracers``, the innermost last, and ``SubgraphTracer.source_target``, the op: 2.11 to 2.15.
    """
    output = output_being_traced()
    for index, inner in enumerate([] if output is None else output.tracers[1:]):
        op = inner.source_target
        if isinstance(op, torch._ops.HigherOrderOperator) and op.name() in _BODIES_APART:
            return output.tracers[index:]
    return []


def is_in_body_apart() -> bool:
    """Whether Dynamo is in the body of such an op."""
    return bool(_tracers_apart())


def begin_in_front() -> None:
    """Have Dynamo write what it traces next in front of the op whose body it is in."""
    trace_region_anew()
    output_being_traced().tracers.append(_tracers_apart()[0])


def trace_region_anew() -> None:
    """Have Dynamo trace each ``nested_compile_region`` anew, since each may read other parameters.

    Dynamo does so if a source that it traced has been written to (``traced_sources``, ``mutated_sources``: 2.15, not
    2.11).
    """
    tracers, output = _tracers_apart(), output_being_traced()
    if tracers and hasattr(output.side_effects, "mutated_sources"):
        from torch._dynamo.source import LocalSource

        written = LocalSource("fsdp_compile reads in front")
        output.side_effects.mutated_sources.add(written)
        for inner in tracers[1:]:
            inner.traced_sources.add(written)


def in_compiled_region() -> bool:
    """Whether Dynamo stands in a ``nested_compile_region`` (``higher_order.invoke_subgraph``: 2.11 to 2.15)."""
    return any(inner.source_target is torch.ops.higher_order.invoke_subgraph for inner in _tracers_apart()[1:])


def end_in_front() -> None:
    output_being_traced().tracers.pop()


def traces_export() -> bool:
    """Whether what Dynamo traces is for ``torch.export`` (``OutputGraph.export``: 2.11 to 2.15)."""
    output = output_being_traced()
    return output is not None and bool(output.export)


@torch.compiler.assume_constant_result
def traces_backward() -> bool:
    """Whether a ``backward()`` in compiled code is traced into its forward's graph, whose leaves get the gradients.

    ``_dynamo.config.trace_autograd_ops``: 2.11 to 2.15; 2.11 asserts that leaves are no DTensors. It is asked while
    tracing, and not guarded.
    """
    return bool(torch._dynamo.config.trace_autograd_ops)


def leave_to_python(function: Any) -> None:
    """Have Dynamo pass over frames of ``function``, but not what it calls (``eval_frame.skip_code``: 2.11 to 2.15)."""
    torch._dynamo.eval_frame.skip_code(function.__code__)


def is_at_work() -> bool:
    """Whether Dynamo compiles frames that begin now (``get_eval_frame_callback``: 2.11 to 2.15)."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def forward_is_compiled(module: nn.Module) -> bool:
    """Whether the user compiled the module's ``forward``: ``module.forward = torch.compile(module.forward)``.

    ``_torchdynamo_orig_callable``: 2.11 to 2.15.
    """
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable") and not hasattr(
        module.__dict__["forward"], "_torchdynamo_disable"
    )


leave_to_python(is_at_work)
leave_to_python(forward_is_compiled)


def is_compiled(module: nn.Module) -> bool:
    """Whether the user compiled the module, in any of three ways (``_compiled_call_impl``: 2.11 to 2.15)."""
    called = module.__dict__.get("_compiled_call_impl")
    return called is not None or isinstance(module, OptimizedModule) or forward_is_compiled(module)


def forget_compiled(classes: set[type]) -> int:
    """Drop what Dynamo compiled for frames that read an instance of one of ``classes``; return how many frames.

    A compiled frame guards on the identity of the classes of the modules that it read, and its guards print it. Dynamo
    drops all entries of a frame together. It also forgets that it gave up on the classes' own frames, be it for an
    error that the user made. ``convert_frame.input_codes``, ``_debug_get_cache_entry_list``, ``guard_manager`` of an
    entry, ``reset_code``: 2.11 to 2.15.
    """
    from torch._dynamo import convert_frame

    eval_frame = torch._C._dynamo.eval_frame
    guards = [f", {id(cls)})" for cls in classes]
    num_frames = 0
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is None:
            continue
        entries = [str(entry.guard_manager) for entry in eval_frame._debug_get_cache_entry_list(code)]
        if any(guard in entry for entry in entries for guard in guards):
            eval_frame.reset_code(code)
            num_frames += 1
    for function in {member for cls in classes for member in vars(cls).values() if isinstance(member, FunctionType)}:
        eval_frame.reset_code(function.__code__)
    return num_frames


@contextlib.contextmanager
def graph_breaks(observe: Callable[[Any, str], None]) -> Iterator[None]:
    """Call ``observe(user's stack, Dynamo's text)`` for every graph break inside the block.

    ``InstructionTranslatorBase.log_graph_break(code_options, reason, exc)`` and the exception's ``real_stack`` and
    ``msg``: 2.11 to 2.15.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    original = InstructionTranslatorBase.log_graph_break

    def log_graph_break(self: Any, code_options: Any, reason: str, exc: Any) -> None:
        stack = getattr(exc, "real_stack", None)
        if stack is None:
            stack = torch._guards.TracingContext.extract_stack()
        observe(stack, getattr(exc, "msg", None) or str(exc))
        original(self, code_options, reason, exc)

    InstructionTranslatorBase.log_graph_break = log_graph_break  # type: ignore[method-assign]
    try:
        yield
    finally:
        InstructionTranslatorBase.log_graph_break = original  # type: ignore[method-assign]


def num_dynamo_graphs() -> int:
    """Count the graphs that Dynamo has captured in this process (``_dynamo.utils.counters``: 2.11 to 2.15)."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def num_graph_breaks() -> int:
    """Count the graph breaks in this process, likewise."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def behind_compile(module: nn.Module) -> nn.Module:
    """Return the module inside what ``torch.compile`` returned, else ``module`` (``_orig_mod``: 2.11 to 2.15)."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_tracing_to_a_file() -> bool:
    """Whether TORCH_TRACE is on.

    ``torch._logging._internal.trace_log`` has a handler with a ``root_dir`` then (2.11 to 2.15).
    """
    from torch._logging._internal import trace_log

    return any(getattr(handler, "root_dir", None) for handler in trace_log.handlers)


def trace_artifact(name: str, encoding: str, text: str) -> None:
    """Put a text into torch's trace, beside what the frame that is being compiled left there (2.11 to 2.15).

    ``encoding`` is "json" or "string". ``torch._logging.trace_structured``.
    """
    from torch._logging import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text
    )
