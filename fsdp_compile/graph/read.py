"""What a traced read of a parameter does, and the property that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensors, dynamo
from .._torch_compat.autograd import uses_compiled_autograd
from ..core.accumulation import Mode
from ..core.param import BY_MARKER as BY_MARKER  # for the generated code
from ..core.param import Mark, ReadSpec, beside
from ..core.stored import wrapper
from .extension import extended_gather
from .sink import Sink


def traced_read(param: Any, sink: Sink, mode: Mode, **spec: Any) -> Any:
    """The parameter as a value: an unshard marker on the local shard.

    ``param`` is what is registered, or, where that is the shard that the unit watches: what the graph takes, its local
    tensor, and its edge. What is no shard is handed back as it is: a full tensor that ``torch.func.functional_call`` or
    the user put in the parameter's place, or None.
    """
    if not isinstance(param, (DTensor, tuple)):
        # What full_params put there is computed with as the inputs are.
        return param.to(spec["dtype"]) if isinstance(param, torch.Tensor) and sink.param.is_full else param
    return torch.ops.fsdpc.unshard(*_shard_and_backward(param, sink, mode), **spec)


def traced_extended_read(param: Any, sink: Sink, mode: Mode, gather: Callable[..., Any]) -> Any:
    """The same for a parameter that says itself what travels."""
    if not isinstance(param, (DTensor, tuple)):
        return param
    return gather(*_shard_and_backward(param, sink, mode))


def _shard_and_backward(param: Any, sink: Sink, mode: Mode) -> tuple[Any, Any, Any, str]:
    """A marker's first arguments."""
    if isinstance(param, tuple):
        takes, shard, edge = param
    else:
        takes, shard = "both" if param.requires_grad else "local", dtensors.local_tensor(param)
        edge = sink.edge if param is sink.param.shard and not dynamo.traces_backward() else None
    if takes == "local":
        return shard, None, None, "reduce"
    if takes == "registered":
        written: Any = sink.param.shard
        return written.to_local(), None, None, "reduce"
    ticket = sink.ticket if mode == "resume" or mode == "resume_over_shards" else None
    if mode == "hold":
        return shard, sink.full, ticket, "hold"
    if mode == "resume_over_shards":
        return shard, sink.partial, ticket, "over_shards"
    if uses_compiled_autograd():
        return shard, sink.leaf, ticket, "reduce"
    if edge is not None:
        return (edge, None, ticket, "reduce") if takes == "edge" else (shard, edge, ticket, "reduce")
    # One in its place, as torch.func.functional_call has it, or without an edge: AOTAutograd handles the DTensor.
    registered: Any = sink.param.shard if isinstance(param, tuple) else param
    return registered.to_local(), None, ticket, "reduce"


def traced_dtensor_read(
    param: Any,
    sink: Sink,
    mode: Mode,
    gather: Callable[..., Any] | None,
    wrap: Callable[..., DTensor],
    mesh: DeviceMesh | None,
    **spec: Any,
) -> Any:
    """The same for a parameter that was a DTensor before fully_shard, and is one to its readers."""
    if not isinstance(param, (DTensor, tuple)):
        return param
    if gather is not None:
        full = traced_extended_read(param, sink, mode, gather)
    else:
        full = traced_read(param, sink, mode, **spec)
    return wrap(full) if mesh is None else wrap(full, mesh)


# ``eager_read`` is the eager path's: (module, name, what is registered) -> what a read gives, or BY_MARKER. So is
# ``eager_write``: (module, name, value) -> whether it took the value.
GETTER = """
def make(eager_read, gather, wrap, mesh):
    def read(self):
        traced = torch.compiler.is_dynamo_compiling()
        takes = {sink}.watch.takes({fqn!r}) if traced else None
        if takes == "full":
            return {full}
        if takes is not None:
            param = takes, {local}, {edge}
        else:
            param = self._parameters.get({name!r}, MISSING)
            if param is MISSING:
                raise AttributeError({name!r})
        if not traced:
            full = eager_read(self, {name!r}, param)
            if full is not BY_MARKER:
                return full
        mode = {sink}.watch.mode({fqn!r})
        in_front = traced and {sink}.watch.begin_in_front()
        full = {read}(param, {sink}, mode, {arguments})
        if in_front:
            {sink}.watch.end_in_front()
        return full
    return read
"""


MISSING = Mark()  # no such parameter: it was deleted after sharding


def getter(
    name: str, spec: ReadSpec, eager_read: Callable[..., Any], eager_write: Callable[..., bool]
) -> property:
    """A property that reads parameter ``name``; its marker's arguments are constants of its code.

    Constants need no guards, which matters: a guard on each of fifteen arguments of each of three hundred parameters
    is paid on every step. The price is that a class is generated for each combination of arguments.
    """
    arguments = ", ".join(f"{key}={value!r}" for key, value in spec.kwargs().items())
    places = {what: f"self.{beside(name, what)}" for what in ("sink", "local", "edge")}
    # From a closure: Dynamo looks for globals in this module, by name.
    read, gather, wrap, mesh = "traced_read", None, None, None
    if spec.extension is not None:
        read, gather, arguments = "traced_extended_read", extended_gather(spec), "gather"
        if spec.extension.look is not None:
            places["local"] = "taken_apart({local}, {sink}.watch.names({fqn!r}))".format(**places, fqn=spec.fqn)
    if spec.read_as is not None:
        marked = "" if spec.extension is not None else f", {arguments}"
        read, wrap, arguments = "traced_dtensor_read", wrapper(spec.read_as), f"gather, wrap, mesh{marked}"
        mesh = spec.read_as.mesh if dtensors.MESH_IS_GRAPH_INPUT else None
    places["full"] = "self.{}".format(beside(name, "full"))
    if spec.read_as is not None:
        places["full"] = "wrap({})".format(places["full"] + ("" if mesh is None else ", mesh"))
    code = GETTER.format(name=name, fqn=spec.fqn, read=read, arguments=arguments, **places)
    namespace: dict[str, Any] = {}
    exec(code, globals(), namespace)

    def write(self: Any, value: Any) -> None:
        # nn.Module registers parameters by itself: only something else comes here, in place of one that was deleted.
        if eager_write(self, name, value):
            return
        raise RuntimeError(
            f"{spec.fqn} is sharded: it cannot become a {type(value).__name__} after fully_shard. Apply weight_norm, "
            "spectral_norm, pruning and the like before fully_shard."
        )

    return property(namespace["make"](eager_read, gather, wrap, mesh), write)


def taken_apart(inside: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a graph takes of a shard with an extension: the names of the tensors inside it, and these."""
    return (names, *[inside[name] for name in names])
