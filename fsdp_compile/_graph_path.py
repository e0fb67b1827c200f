"""What a traced read of a parameter does, and how the passes get into the compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._accumulate import Accumulator, delivers_in
from ._param import Mode, ReadSpec, beside
from ._stored import wrapper
from ._torch_compat import uses_compiled_autograd
from ._traced_extension import extended_gather
from .passes import PassManager, ScheduleInPlannedOrder, source_hash
from .passes._torch_compat import CustomGraphPass

manager = PassManager()


def traced_read(param: Any, accumulator: Accumulator, mode: Mode, **spec: Any) -> Any:
    """The parameter as a value: an unshard marker on the local shard.

    ``param`` is what is registered, or, where that is the shard that the unit watches: what the graph takes, its local
    tensor, and its edge. What is no shard is handed back as it is: a full tensor that ``torch.func.functional_call`` or
    the user put in the parameter's place, or None.
    """
    if not isinstance(param, (DTensor, tuple)):
        return param
    return torch.ops.fsdpc.unshard(*_shard_and_backward(param, accumulator, mode), **spec)


def traced_extended_read(param: Any, accumulator: Accumulator, mode: Mode, gather: Callable[..., Any]) -> Any:
    """The same for a parameter that says itself what travels."""
    if not isinstance(param, (DTensor, tuple)):
        return param
    return gather(*_shard_and_backward(param, accumulator, mode))


def _shard_and_backward(param: Any, accumulator: Accumulator, mode: Mode) -> tuple[Any, Any, Any, str]:
    """A marker's first arguments."""
    if isinstance(param, tuple):
        takes, shard, edge = param
    else:
        takes, shard = "both" if param.requires_grad else "local", compat.local_tensor(param)
        edge = accumulator.edge if param is accumulator.shard and not compat.traces_backward() else None
    if takes == "local":
        return shard, None, None, "reduce"
    if not delivers_in(mode) or uses_compiled_autograd():
        leaf = accumulator.leaf
    elif edge is not None:
        shard, leaf = (edge, None) if takes == "edge" else (shard, edge)
    else:  # one in its place, as torch.func.functional_call has it, or without an edge: AOTAutograd handles the DTensor
        registered: Any = accumulator.param.shard if isinstance(param, tuple) else param
        shard, leaf = registered.to_local(), None
    ticket = accumulator.ticket if mode == "resume" or mode == "resume_over_shards" else None
    then = "hold" if mode == "hold" else "over_shards" if mode == "resume_over_shards" else "reduce"
    return shard, leaf, ticket, then


def traced_dtensor_read(
    param: Any,
    accumulator: Accumulator,
    mode: Mode,
    gather: Callable[..., Any] | None,
    wrap: Callable[..., DTensor],
    mesh: DeviceMesh | None,
    **spec: Any,
) -> Any:
    """The same for a parameter that was a DTensor before fully_shard, and is one to its readers."""
    if not isinstance(param, (DTensor, tuple)):
        return param
    if gather is None:
        full = traced_read(param, accumulator, mode, **spec)
    else:
        full = traced_extended_read(param, accumulator, mode, gather)
    return wrap(full) if mesh is None else wrap(full, mesh)


def read_by_marker(param: Any, accumulator: Accumulator, spec: ReadSpec) -> Any:
    """The gathered parameter, by a marker that runs now."""
    if spec.extension is not None:
        return traced_extended_read(param, accumulator, spec.mode, extended_gather(spec))
    return traced_read(param, accumulator, spec.mode, **spec.kwargs())


def install_passes() -> None:
    """Put our passes into Inductor's and AOTAutograd's settings, beside what the user has there.

    Called by the first ``fully_shard``. Call it again after setting ``post_grad_custom_pre_pass``, or another of these
    settings, yourself: the pass that was set last replaces the others.
    """
    theirs = compat.get_post_grad_pass()
    if not _has_ours(theirs):
        compat.set_post_grad_pass(manager if theirs is None else ComposedPass(_as_tuple(theirs), manager))
    joint = compat.get_joint_pass()
    if not isinstance(joint, JointPass):
        compat.set_joint_pass(JointPass(joint))
    scheduler_passes = compat.get_scheduler_passes()
    if not any(isinstance(one_pass, ScheduleInPlannedOrder) for one_pass in scheduler_passes):
        compat.set_scheduler_passes([*scheduler_passes, ScheduleInPlannedOrder(source_hash())])


class ComposedPass(compat.InferenceAwareGraphPass):  # type: ignore[misc]
    """The user's passes, then ours."""

    def __init__(self, theirs: tuple[Any, ...], ours: PassManager) -> None:
        self.theirs = theirs
        self.ours = ours

    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        for one_pass in self.theirs:
            compat.call_graph_pass(one_pass, graph, is_inference)
        self.ours(graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> ComposedPass:
        return self  # as the manager: Inductor copies the defaults of its settings

    def uuid(self) -> Any:
        """None, "do not cache", as soon as one of the user's passes has no uuid."""
        uuids = [one_pass.uuid() if isinstance(one_pass, CustomGraphPass) else None for one_pass in self.theirs]
        return None if None in uuids else (*uuids, self.ours.uuid())


class JointPass:
    """The user's joint pass, if there is one, then ours."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        if self.theirs is not None:
            module = self.theirs(module, inputs)
        return manager.joint(module, inputs)


def _has_ours(configured: Any) -> bool:
    return any(one_pass is manager or isinstance(one_pass, ComposedPass) for one_pass in _as_tuple(configured))


def _as_tuple(configured: Any) -> tuple[Any, ...]:
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, (list, tuple)) else (configured,)


GETTER = """
def make(gather, wrap, mesh):
    def read(self):
        traced = torch.compiler.is_dynamo_compiling()
        takes = {accumulator}.watch.takes({fqn!r}) if traced else None
        if takes is not None:
            param = takes, {local}, {edge}
        else:
            param = self._parameters.get({name!r}, MISSING)
            if param is MISSING:
                raise AttributeError({name!r})
        if traced:
            in_front = {accumulator}.watch.begin_in_front()
            full = {read}(param, {accumulator}, {mode!r}, {arguments})
            if in_front:
                {accumulator}.watch.end_in_front()
            return full
        return eager_read(self, {name!r}, param)
    return read
"""


class _Missing:
    """No such parameter: it was deleted after sharding."""


MISSING = _Missing()


@functools.cache
def getter(name: str, spec: ReadSpec) -> property:
    """A property that reads parameter ``name``; its marker's arguments are constants of its code.

    Constants need no guards, which matters: a guard on each of fifteen arguments of each of three hundred parameters
    is paid on every step. The price is that a class is generated for each combination of arguments.
    """
    from ._eager_path import eager_read

    arguments = ", ".join(f"{key}={value!r}" for key, value in spec.kwargs().items())
    places = {"accumulator": f"self.{beside(name, spec.mode)}", "local": f"self.{beside(name, 'local')}"}
    places["edge"] = f"self.{beside(name, spec.mode + '_edge')}" if delivers_in(spec.mode) else "None"
    namespace: dict[str, Any] = {}
    globals_of_this_module = globals() | {"eager_read": eager_read}
    # From a closure: Dynamo looks for globals in this module, by name.
    read, gather, wrap, mesh = "traced_read", None, None, None
    if spec.extension is not None:
        read, gather, arguments = "traced_extended_read", extended_gather(spec), "gather"
    if spec.read_as is not None:
        marked = "" if spec.extension is not None else f", {arguments}"
        read, wrap, arguments = "traced_dtensor_read", wrapper(spec.read_as), f"gather, wrap, mesh{marked}"
        mesh = spec.read_as.mesh if compat.MESH_IS_GRAPH_INPUT else None
    code = GETTER.format(name=name, fqn=spec.fqn, mode=spec.mode, read=read, arguments=arguments, **places)
    exec(code, globals_of_this_module, namespace)

    def refuse(self: Any, value: Any) -> None:
        # nn.Module registers parameters by itself: only something else comes here, in place of one that was deleted.
        raise RuntimeError(
            f"{spec.fqn} is sharded: it cannot become a {type(value).__name__} after fully_shard. Apply weight_norm, "
            "spectral_norm, pruning and the like before fully_shard."
        )

    return property(namespace["make"](gather, wrap, mesh), refuse)
