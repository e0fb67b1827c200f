"""Every private torch name that the runtime half touches, with the versions it was seen in."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import shlex
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as custom_graph_pass
import torch.distributed.device_mesh as device_mesh
import torch.distributed.fsdp as torch_fsdp
from torch import nn

# torch._dynamo.eval_frame.OptimizedModule, what torch.compile(module) returns: 2.11 to 2.15
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

try:  # what a class that Dynamo does not look into must inherit from
    from torch._custom_class_base import CustomClassBase as OpaqueBase  # 2.15
except ImportError:
    from torch._opaque_base import OpaqueBase as OpaqueBase  # 2.11

from .passes import ScheduleInPlannedOrder
from .passes._torch_compat import CustomGraphPass
from .passes._torch_compat import group_ranks as group_ranks
from .passes._torch_compat import leave_all_to_python as leave_all_to_python


def backward_task() -> int | None:
    """Number of the backward that runs on this thread, None without one; a nested one has its own.

    ``_current_graph_task_id``: 2.11 to 2.15.
    """
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def restore_grad_dtype(param: torch.Tensor, grad_dtype: torch.dtype | None) -> None:
    """Ask for gradients of ``grad_dtype`` again, after ``param`` was replaced; None asks for them as they come."""
    if getattr(param, "grad_dtype", grad_dtype) == grad_dtype:
        return
    grad, param.grad = param.grad, None  # module.to() has converted it, and torch refuses one of another dtype
    param.grad_dtype = grad_dtype  # type: ignore[attr-defined]
    if grad is not None:
        param.grad = grad if grad_dtype is None else grad.to(grad_dtype)


def recompile_call(module: nn.Module) -> None:
    """Let ``module.compile()``, called before the module got its ``_call_impl``, compile that one.

    ``_compiled_call_impl`` is a closure of the context that compiles, as its free variable ``self``: 2.11 to 2.15.
    """
    compiled = module._compiled_call_impl
    if compiled is not None:
        cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or ()))
        module._compiled_call_impl = cells["self"].cell_contents(module._call_impl)


def in_functorch() -> bool:
    """Whether a transform of ``torch.func`` is running (``_C._functorch.peek_interpreter_stack``: 2.11 to 2.15)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_functorch() -> contextlib.AbstractContextManager[object]:
    """What runs inside is not transformed (``_C._DisableFuncTorch``: 2.11 to 2.15)."""
    return torch._C._DisableFuncTorch()


def profiler_runs() -> bool:
    """Whether somebody records ranges (``autograd.profiler._is_profiler_enabled``: 2.11 to 2.15)."""
    return torch.autograd.profiler._is_profiler_enabled


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running ends (``_execution_engine``: 2.11 to 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def accumulates(leaf: Any) -> bool:
    """Whether the backward that runs accumulates into the parameter whose ``AccumulateGrad`` node is ``leaf``.

    False as well under ``autograd.grad``, where asking raises for what is asked for: the gradient goes to the caller
    then. ``_will_engine_execute_node``: 2.11 to 2.15.
    """
    try:
        return bool(torch._C._will_engine_execute_node(leaf))  # type: ignore[attr-defined]
    except RuntimeError:
        return False


# Whether an autograd function can get gradients in the dtype that they were made in: ``set_output_grad_dtype``, 2.15.
# In 2.11 autograd casts them to the dtype of the output first.
GRADIENTS_COME_AS_PRODUCED = hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype")


def take_gradients_as_produced(ctx: Any) -> None:
    """Have the backward of an autograd function with one output get its gradient so, where it can be."""
    if GRADIENTS_COME_AS_PRODUCED:
        ctx.set_output_grad_dtype(None)


def quick_attributes() -> contextlib.AbstractContextManager[None]:
    """Where attributes of a DTensor are read as fast as a plain tensor's.

    Outside, torch looks at each read whether the class has a ``__torch_function__``, which DTensor's is none.
    ``_C.DisableTorchFunctionSubclass``: 2.11 to 2.15.
    """
    return torch._C.DisableTorchFunctionSubclass()


# Those on a parameter itself: tensor hooks and post-accumulate ones, empty or None without any (2.11 to 2.15).
hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def tensor_hooks(param: torch.Tensor) -> Any:
    """Those that see a gradient on its way, by key; empty or None without any (``_backward_hooks``: 2.11 to 2.15)."""
    return param._backward_hooks


def post_accumulate_grad_hooks(param: torch.Tensor) -> Any:
    """Those behind a gradient's arrival, by key, or None (``_post_accumulate_grad_hooks``: 2.11 to 2.15)."""
    return getattr(param, "_post_accumulate_grad_hooks", None)


def has_post_accumulate_grad_hooks(param: torch.Tensor) -> bool:
    return bool(post_accumulate_grad_hooks(param))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or the one in a DTensor, was written to; 0 in inference mode (``_version``: 2.11 to 2.15)."""
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return 0 if inner.is_inference() else inner._version


@contextlib.contextmanager
def without_post_accumulate_grad_hooks(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which what stands behind a gradient's arrival, an optimizer perhaps, does not run."""
    hooks = [getattr(param, "_post_accumulate_grad_hooks", None) or {} for param in params]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)


def run_post_accumulate_grad_hooks(param: torch.Tensor) -> None:
    """Run what ``register_post_accumulate_grad_hook`` put there (``_post_accumulate_grad_hooks``: 2.11 to 2.15)."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def addresses_in(*tensors: torch.Tensor) -> set[int]:
    """Where the memory of tensors begins, and of tensors inside them; nowhere for fake, meta and freed ones."""
    return {address for tensor in tensors for address in _addresses_in(tensor)}


def _addresses_in(tensor: torch.Tensor) -> set[int]:
    """A wrapper subclass has a storage whose ``data_ptr()`` raises, a sparse tensor has none (2.11 to 2.15)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [value for name in names if isinstance(value := getattr(tensor, name), torch.Tensor)]
    elif type(tensor) is torch.Tensor and tensor.layout is torch.sparse_coo:
        inner = [tensor._values()]
    elif type(tensor) is torch.Tensor and tensor.layout in _COMPRESSED:
        inner = [tensor.values()]
    else:
        try:
            return {tensor.untyped_storage().data_ptr()} - {0}
        except (RuntimeError, NotImplementedError):  # an opaque tensor, or a subclass that does not say what it wraps
            inner = [value for value in getattr(tensor, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
    return addresses_in(*inner)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@contextlib.contextmanager
def no_new_versions(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Writes inside do not count for autograd (``autograd._unsafe_preserve_version_counter``: 2.11 to 2.15)."""
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with torch.autograd._unsafe_preserve_version_counter(counted):
        yield


def is_traceable(tensor: torch.Tensor) -> bool:
    """Whether a compiler sees through the subclass (``is_traceable_wrapper_subclass``: 2.11 to 2.15)."""
    return is_traceable_wrapper_subclass(tensor)


def map_inner(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """``fn`` of a tensor, or the same subclass around ``fn`` of each tensor inside it."""
    if not is_traceable_wrapper_subclass(tensor):
        return fn(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: map_inner(fn, getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def dtensor_like(param: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the mesh, placements and global shape of ``param``, without ``from_local``'s checks.

    ``DTensor.__new__(DTensor, local, spec, requires_grad=)``, ``_spec``: 2.11 to 2.15. A tenth of
    ``from_local``'s time; its ``__init__`` does nothing, behind wrappers that take longer than the rest.
    """
    return DTensor.__new__(DTensor, local, param._spec, requires_grad=False)


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


def changed_while_traced(value: object) -> bool:
    """Whether code that Dynamo is tracing has written to a dict, list or the like: the object itself is as it was.

    ``InstructionTranslator.current_tx``, ``SideEffects.id_to_variable`` and ``is_modified``: 2.11 to 2.15.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        side_effects = InstructionTranslator.current_tx().output.side_effects
    except AttributeError:  # Dynamo runs the code to see what comes out, as it does with nn.LSTM
        return False
    variable = side_effects.id_to_variable.get(id(value))
    return variable is not None and side_effects.is_modified(variable)


# Ops of torch.ops.higher_order whose body may run any number of times on a rank, or is compiled as a graph of its own;
# checkpointing is not among them. By name: "switch" is in 2.15 alone, the others in 2.11 to 2.15.
_BODIES_APART = {
    "cond", "switch", "while_loop", "while_loop_stack_output", "map_impl", "scan", "associative_scan", "flex_attention",
    "invoke_subgraph",
}  # fmt: skip


def _dynamo_output() -> Any:
    """The graphs that Dynamo is writing; None when it traces nothing (``current_tx``, ``output``: 2.11 to 2.15)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def _tracers_apart() -> list[Any]:
    """What writes the graph around the outermost op whose body stands apart, then those inside; empty without one.

    ``OutputGraph.tracers``, the innermost last, and ``SubgraphTracer.source_target``, the op: 2.11 to 2.15.
    """
    output = _dynamo_output()
    for index, inner in enumerate([] if output is None else output.tracers[1:]):
        op = inner.source_target
        if isinstance(op, torch._ops.HigherOrderOperator) and op.name() in _BODIES_APART:
            return output.tracers[index:]
    return []


def begin_in_front() -> bool:
    """Have Dynamo write what it traces next in front of the op in whose body it stands; whether there is one.

    Regions that are compiled once must each be traced, for another of them reads something else. Dynamo does so where
    a source that it traced has been written to (``traced_sources``, ``mutated_sources``: 2.15, not 2.11).
    """
    tracers = _tracers_apart()
    if not tracers:
        return False
    output = _dynamo_output()
    if hasattr(output.side_effects, "mutated_sources"):
        from torch._dynamo.source import LocalSource

        written = LocalSource("fsdp_compile reads in front")
        output.side_effects.mutated_sources.add(written)
        for inner in tracers[1:]:
            inner.traced_sources.add(written)
    output.tracers.append(tracers[0])
    return True


def in_compiled_region() -> bool:
    """Whether Dynamo stands in a ``nested_compile_region`` (``higher_order.invoke_subgraph``: 2.11 to 2.15)."""
    return any(inner.source_target is torch.ops.higher_order.invoke_subgraph for inner in _tracers_apart()[1:])


def end_in_front() -> None:
    _dynamo_output().tracers.pop()


def traces_export() -> bool:
    """Whether what Dynamo traces is for ``torch.export`` (``OutputGraph.export``: 2.11 to 2.15)."""
    output = _dynamo_output()
    return output is not None and bool(output.export)


def freezes_parameters() -> bool:
    """Whether Dynamo and Inductor make constants of parameters (``_inductor.config.freezing``: 2.11 to 2.15)."""
    return bool(inductor_config.freezing) and not torch.is_grad_enabled()


@torch.compiler.assume_constant_result
def traces_backward() -> bool:
    """Whether a ``backward()`` in compiled code is traced into its forward's graph, whose leaves get the gradients.

    ``_dynamo.config.trace_autograd_ops``: 2.11 to 2.15; 2.11 asserts that leaves are no DTensors. Asked while tracing,
    and not guarded.
    """
    return bool(torch._dynamo.config.trace_autograd_ops)


def local_tensor(param: DTensor) -> torch.Tensor:
    """This rank's part of a parameter, without a gradient (``_local_tensor``: 2.11 to 2.15, in graphs too)."""
    return param._local_tensor


def on_cpu(sharded: DTensor, pin_memory: bool) -> DTensor:
    """The same DTensor with its local tensor on the CPU, whatever its mesh (``_local_tensor``: 2.11 to 2.15).

    A new one, for a DTensor says that it is where its local tensor was when it was made, and ``grad`` must be there.
    """
    local = sharded._local_tensor
    if local.is_meta:
        return sharded
    local = local.cpu()
    pinned = pin_memory and torch.accelerator.is_available()
    return dtensor_like(sharded, local.pin_memory() if pinned else local)


def is_pinned(param: torch.Tensor) -> bool:
    """Whether a shard is in pinned memory (``_local_tensor``: 2.11 to 2.15)."""
    local = param._local_tensor if isinstance(param, DTensor) else param
    return local.device.type == "cpu" and local.is_pinned()


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group called ``name`` (``_resolve_process_group``: 2.11 to 2.15)."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# As they were when this package was imported: by the time they are used, the name may be ours (adopt).
TORCH_FULLY_SHARD: Any = torch_fsdp.fully_shard
TORCH_REPLICATE: Any = torch_replicate  # of _composable.replicate_with_fsdp: 2.11 to 2.15
TORCH_REGISTER_FORWARD_METHOD: Any = torch_fsdp.register_fsdp_forward_method
TORCH_SHARE_COMM_CTX: Any = torch_fsdp.share_comm_ctx
TORCH_FSDP_MODULE: type = torch_fsdp.FSDPModule
UNSHARD_HANDLE: type = torch_fsdp.UnshardHandle
# Seen in 2.15, not in 2.11.
GRADIENT_REDUCTION_HANDLE: type = getattr(torch_fsdp, "GradientReductionHandle", object)


def register_fsdp2_state(module: nn.Module, view: object) -> None:
    """Put ``view`` where ``torch.distributed.fsdp.fully_shard.state(module)`` looks, and have torch know it as sharded.

    ``_composable.contract``: ``STATE_KEY``, a dict in the module by undecorated function, and ``REGISTRY_KEY``, one by
    the function's name, where composable DDP sees what it leaves alone: 2.11 to 2.15.
    """
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[TORCH_FULLY_SHARD.__wrapped__] = view
    if TORCH_REPLICATE.__wrapped__ in states:  # the copy of a replicated one
        states[TORCH_REPLICATE.__wrapped__] = view
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def fsdp2_state(module: nn.Module) -> Any:
    """What ``torch.distributed.fsdp.fully_shard.state(module)`` returns; None for modules that are no unit."""
    return module.__dict__.get(STATE_KEY, {}).get(TORCH_FULLY_SHARD.__wrapped__)


def register_replicate_state(module: nn.Module) -> None:
    """Put what ``register_fsdp2_state`` put there where FSDP2's ``replicate.state(module)`` looks, too."""
    module.__dict__[STATE_KEY][TORCH_REPLICATE.__wrapped__] = fsdp2_state(module)


def replicate_state(module: nn.Module) -> Any:
    """What FSDP2's ``replicate.state(module)`` returns; None for modules that are not replicated."""
    return module.__dict__.get(STATE_KEY, {}).get(TORCH_REPLICATE.__wrapped__)


def composed_by(module: nn.Module) -> frozenset[str]:
    """Names of torch's functions (``fully_shard``, ``replicate``) that were applied to the module itself."""
    return frozenset(module.__dict__.get(REGISTRY_KEY, {}))


def twin_group(name: str) -> str:
    """A second process group of the ranks of the one called ``name``, made once; its members call this together."""
    group = process_group(name)
    ranks, backend = torch.distributed.get_process_group_ranks(group), torch.distributed.get_backend(group)
    return str(group_for("reductions", ranks, backend).group_name)


def group_for(purpose: str, ranks: Sequence[int], backend: str | None = None) -> torch.distributed.ProcessGroup:
    """A process group of our own for one purpose, made once; its ranks call this together, others need not.

    c10d finds it again by its description, so that a world that was set up anew has its own, and none is held that
    was destroyed. ``_world.pg_map``, ``group_desc``: 2.11 to 2.15.
    """
    described = f"fsdp_compile: {purpose} of the ranks {list(ranks)} on {backend or 'the default'}"
    for known in torch.distributed.distributed_c10d._world.pg_map:
        if known.group_desc == described:
            return known
    made = torch.distributed.new_group(
        list(ranks), backend=backend, use_local_synchronization=True, group_desc=described
    )
    assert isinstance(made, torch.distributed.ProcessGroup)
    return made


Allocator = Callable[[list[int], torch.dtype, torch.device], torch.Tensor]


def group_allocator(name: str, device: torch.device) -> Allocator:
    """Allocates from the memory of a process group's backend.

    ``ProcessGroup._get_backend``, ``supports_tensor_alloc``, ``allocate_tensor``: 2.11 to 2.15.
    """
    backend = process_group(name)._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise RuntimeError(f"The {backend.name()} backend has no allocator for {device}: leave the setting off.")

    def allocate(size: list[int], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=where).view(size)

    return allocate


def symmetric_allocator(name: str, device: torch.device, backend: str) -> Allocator:
    """Allocates symmetric memory and makes it known to the group (``distributed._symmetric_memory``: 2.11 to 2.15)."""
    if device.type != "cuda":
        raise RuntimeError(f"Symmetric memory needs GPUs, but the parameters are gathered on {device}.")
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend(backend)  # type: ignore[arg-type]

    def allocate(size: list[int], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        tensor = symmetric.empty(math.prod(size), dtype=dtype, device=where)
        symmetric.rendezvous(tensor, name)  # type: ignore[arg-type]
        return tensor.view(size)

    return allocate


def leave_to_python(function: Any) -> None:
    """Have Dynamo pass over frames of ``function``, but not what it calls (``eval_frame.skip_code``: 2.11 to 2.15)."""
    torch._dynamo.eval_frame.skip_code(function.__code__)


def reads_are_compiled(module: nn.Module) -> bool:
    """Whether what ``module``'s forward reads will, for all that is known, be read by compiled code.

    True where Dynamo is at work around an eager frame (it compiles the frames inside), and where the user compiled the
    forward itself. ``get_eval_frame_callback``, ``_torchdynamo_orig_callable``: 2.11 to 2.15.
    """
    if callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):
        return True
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable") and not hasattr(
        module.__dict__["forward"], "_torchdynamo_disable"
    )


leave_to_python(reads_are_compiled)

def in_compiled_autograd() -> bool:
    """Whether a backward that compiled autograd compiled is running; callbacks for its end would never run.

    ``_dynamo.compiled_autograd.in_compiled_autograd_region``: 2.11 to 2.15.
    """
    from torch._dynamo import compiled_autograd

    return compiled_autograd.in_compiled_autograd_region


@torch.compiler.assume_constant_result
def uses_compiled_autograd() -> bool:
    """Whether backwards inside compiled functions are compiled too.

    ``_dynamo.config.compiled_autograd``: 2.11 to 2.15. Asked while tracing, and not guarded: what is traced for it
    trains without it as well.
    """
    return bool(torch._dynamo.config.compiled_autograd)


def get_post_grad_pass() -> Any:
    """What Inductor calls before its post-grad passes (2.11: one pass; 2.15: one, or a list)."""
    return inductor_config.post_grad_custom_pre_pass


def set_post_grad_pass(value: Any) -> None:
    _set_in_all_threads(inductor_config, "post_grad_custom_pre_pass", value)


# Passes that want to be told whether the graph is for inference: 2.15. A composed pass must be one of them to be told.
InferenceAwareGraphPass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


def call_graph_pass(one_pass: Any, graph: torch.fx.Graph, is_inference: bool) -> None:
    """Call a user's pass as Inductor would."""
    if InferenceAwareGraphPass is not CustomGraphPass and isinstance(one_pass, InferenceAwareGraphPass):
        one_pass(graph, is_inference)
    else:
        one_pass(graph)


def get_joint_pass() -> Any:
    """What AOTAutograd calls on a joint graph, ``(module, inputs) -> module`` (2.11 to 2.15).

    Not in any cache key; the hash of our source is, through the post-grad pass.
    """
    return functorch_config.joint_custom_pass


def set_joint_pass(value: Any) -> None:
    _set_in_all_threads(functorch_config, "joint_custom_pass", value)


def get_scheduler_passes() -> list[Any]:
    """The scheduler passes in force; none unless the user turned their switch on, or they are ours (2.11 to 2.15)."""
    passes = list(inductor_config.reorder_for_compute_comm_overlap_passes)
    in_force = inductor_config.reorder_for_compute_comm_overlap
    return passes if in_force or any(isinstance(one, ScheduleInPlannedOrder) for one in passes) else []


def set_scheduler_passes(passes: list[Any]) -> None:
    """Have these when the switch is on. It changes how Inductor lowers any graph, so we turn it for ours alone."""
    _set_in_all_threads(inductor_config, "reorder_for_compute_comm_overlap_passes", passes)


def _set_in_all_threads(config: Any, name: str, value: Any) -> None:
    """Set a setting here, and make it what other threads find.

    In 2.15 a setting is a ContextVar: what one thread sets, another does not see, and backward is compiled on the
    thread where autograd runs it first (on CUDA, autograd's own). There, the default counts. ``_config``: 2.11 to 2.15.
    """
    setattr(config, name, value)
    entry = config._config[name]
    if hasattr(entry.user_override, "get"):
        entry.default = value


class _SwitchesOff:
    """Some switches of one of torch's settings modules; uses may overlap, on one thread or several, in any order.

    In 2.15 a setting is a ContextVar: what a thread sets, it finds alone, and who set nothing finds the default. So the
    default goes off with the first use and comes back with the last, and so it is with what each thread set. In 2.11
    all threads find the same. ``_config``, ``_make_closure_patcher``: 2.11 to 2.15.
    """

    def __init__(self, config: Any, *names: str) -> None:
        self._config, self._names = config, names
        self._lock = threading.Lock()
        self._num_uses: dict[int, int] = {}  # by thread
        self._undo: dict[int, Callable[[], None]] = {}
        self._defaults: list[Any] = []

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Off inside."""
        entries = [self._config._config[name] for name in self._names]
        by_thread = [entry for entry in entries if hasattr(entry.user_override, "get")]
        thread = threading.get_ident() if by_thread else 0
        with self._lock:
            if not self._num_uses:
                self._defaults = [entry.default for entry in by_thread]
            if thread not in self._num_uses:
                self._undo[thread] = self._config._make_closure_patcher(**dict.fromkeys(self._names, False))()
            self._num_uses[thread] = self._num_uses.get(thread, 0) + 1
            for entry in by_thread:
                entry.default = False
        try:
            yield
        finally:
            with self._lock:
                self._num_uses[thread] -= 1
                if not self._num_uses[thread]:
                    del self._num_uses[thread]
                    self._undo.pop(thread)()
                if not self._num_uses:
                    for entry, default in zip(by_thread, self._defaults, strict=True):
                        entry.default = default


_graph_caches = _SwitchesOff(inductor_config, "fx_graph_cache", "fx_graph_remote_cache")
_autograd_caches = _SwitchesOff(functorch_config, "enable_autograd_cache", "enable_remote_autograd_cache")


def get_grad_dtype(param: torch.Tensor) -> torch.dtype | None:
    """The dtype that ``param`` asks its gradients to have; None: as autograd produces them (``Tensor.grad_dtype``)."""
    return getattr(param, "grad_dtype", param.dtype)


def forget_compiled(classes: set[type]) -> int:
    """Drop what Dynamo compiled for frames that read an instance of one of ``classes``; how many frames that were.

    A compiled frame guards on the identity of the classes of the modules that it read, and its guards print it. Dynamo
    drops a frame's entries all together. ``convert_frame.input_codes``, ``_debug_get_cache_entry_list``,
    ``guard_manager`` of an entry, ``reset_code``: 2.11 to 2.15.
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


@contextlib.contextmanager
def no_compile_caches() -> Iterator[None]:
    """Compile graphs even where a cache holds them; compiled kernels are still found in theirs (2.11 to 2.15)."""
    with _graph_caches.off(), _autograd_caches.off():
        yield


def num_dynamo_graphs() -> int:
    """Graphs that Dynamo has captured in this process (``_dynamo.utils.counters``: 2.11 to 2.15)."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a number: of a symbolic one the value seen when it was compiled, 2 if there was none (2.11 to 2.15)."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


@dataclass
class _MeshDims:
    """Which named dimensions of a whole mesh are data parallel: sharded over, or replicated over."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs a dimension to shard over, or one to replicate over.")


# Whether Dynamo makes a DeviceMesh an input of the graph (``_register_distributed_opaque_types``: 2.15, not 2.11).
MESH_IS_GRAPH_INPUT = hasattr(device_mesh, "_register_distributed_opaque_types")

# The placement that cuts what later mesh dimensions have cut on the same tensor dimension already: 2.11 to 2.15
StridedShard = _StridedShard

# torch.distributed.fsdp has it since some version after 2.11; seen in 2.15.
DataParallelMeshDims: Any = getattr(torch_fsdp, "DataParallelMeshDims", _MeshDims)


class PlacementResult(NamedTuple):
    """What torch's ShardPlacementResult says."""

    placement: Any
    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None
    mesh_dims: Any
    whole_mesh: DeviceMesh | None


def placement_result(returned: Any) -> PlacementResult | None:
    """``ShardPlacementResult`` of ``fsdp._fully_shard._fsdp_common``, seen in 2.15, by its attributes; else None."""
    info = getattr(returned, "mesh_info", None)
    if info is None:
        return None
    return PlacementResult(
        returned.placement,
        info.mesh,
        getattr(info, "shard_mesh_dim", None),
        getattr(info, "replicate_mesh_dim", None),
        getattr(info, "dp_mesh_dims", None),
        getattr(info, "spmd_mesh", None),
    )


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh of the dimensions of several slices of the same mesh (``DeviceMesh._concatenate``: 2.11 to 2.15)."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The named dimensions as one, in a new process group, made once a mesh (``DeviceMesh._flatten``: 2.11 to 2.15)."""
    return mesh[names]._flatten("_".join(names))


def missing_compiler(device_type: str) -> str | None:
    """What Inductor would miss when it makes kernels for this device, in words; None if it has all.

    For the CPU it looks for ``torch._inductor.config.cpp.cxx`` (CXX, or g++) and runs it, with Python's headers:
    cpp_builder.get_cpp_compiler and exc.InvalidCxxCompiler, 2.11 to 2.15. For CUDA, Triton wants CC, gcc or clang.
    """
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            tried = ", ".join(str(one) for one in inductor_config.cpp.cxx if one is not None)
            return f"a C++ compiler, and {tried} does not run (CXX=... names another one)"
    else:
        named = os.environ.get("CC")
        if not any(map(shutil.which, ("gcc", "clang") if named is None else shlex.split(named)[:1])):
            return f"a C compiler, and {named or 'gcc'} was not found (CC=... names another one)"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return None if headers.exists() else f"Python's headers, and there is no {headers}"


# Source code for a script that runs a graph with collectives by itself: process groups under the names in GROUPS that
# pretend to have their recorded size. FakeStore, the "fake" backend, _register_process_group: 2.11 to 2.15.
FAKE_GROUPS_SOURCE = """\
def start_fake_groups():
    \"\"\"Groups of the recorded names and sizes whose collectives return at once, without communicating.\"\"\"
    from torch.distributed.distributed_c10d import _register_process_group, _resolve_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(GROUPS.values(), default=1))
    for name, size in GROUPS.items():
        try:
            _resolve_process_group(name)
        except (RuntimeError, LookupError, ValueError):
            _register_process_group(name, dist.new_group(list(range(size))))
"""
