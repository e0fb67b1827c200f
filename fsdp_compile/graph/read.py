"""What a traced read of a parameter does, and the property that reads it."""

from __future__ import annotations

import functools
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
        takes = {sink}.watch.takes({fqn}) if traced else None
        if takes == "full":
            return {full}
        if takes is not None:
            param = takes, {local}, {edge}
        else:
            param = dict.get(self._parameters, {name!r}, MISSING)
            if param is MISSING:
                raise AttributeError({name!r})
        if not traced:
            full = eager_read(self, {name!r}, param)
            if full is not BY_MARKER:
                return full
        mode = {sink}.watch.mode({fqn})
        in_front = traced and {sink}.watch.begin_in_front()
        full = {read}(param, {sink}, mode, {arguments})
        if in_front:
            {sink}.watch.end_in_front()
{carry}        return full
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
    said = {f"{_PLACE}{key}": value for key, value in spec.kwargs().items()}
    # From a closure: Dynamo looks for globals in this module, by name.
    gather = None if spec.extension is None else extended_gather(spec)
    wrap = None if spec.read_as is None else wrapper(spec.read_as)
    mesh = spec.read_as.mesh if spec.read_as is not None and dtensors.MESH_IS_GRAPH_INPUT else None
    places = tuple((place, _text_of(place, value)) for place, value in said.items())
    is_taken_apart = spec.extension is not None and spec.extension.look is not None
    given = [one is not None for one in (gather, wrap, mesh)]
    read = _made(name, places, spec.carries, is_taken_apart, *given)(eager_read, gather, wrap, mesh)
    consts = [said.get(one, one) if isinstance(one, str) else one for one in read.__code__.co_consts]
    consts = [tuple(one) if isinstance(one, list) else one for one in consts]
    read.__code__ = read.__code__.replace(co_consts=tuple(consts))

    def write(self: Any, value: Any) -> None:
        # nn.Module registers parameters by itself: only something else comes here, in place of one that was deleted.
        if eager_write(self, name, value):
            return
        raise RuntimeError(
            f"{spec.fqn} is sharded: it cannot become a {type(value).__name__} after fully_shard. Apply weight_norm, "
            "spectral_norm, pruning and the like before fully_shard."
        )

    return property(read, write)


_PLACE = "in place of "  # begins the constants, in a getter's code, that each parameter has its own value for


def _text_of(place: str, value: Any) -> str:
    """What stands in a getter's text for an argument of the marker; a dtype is a global's attribute."""
    if isinstance(value, torch.dtype):
        return repr(value)
    return f"[*{place!r}]" if isinstance(value, list) else repr(place)


@functools.cache
def _made(
    name: str,
    arguments: tuple[tuple[str, str], ...],
    carries: tuple[str, ...],
    is_taken_apart: bool,
    extended: bool,
    wraps: bool,
    on_mesh: bool,
) -> Any:
    """The function ``make`` of a getter, for all parameters of that name: compiling it takes longer than the rest."""
    said = ", ".join(f"{place.removeprefix(_PLACE)}={text}" for place, text in arguments)
    fqn = repr(f"{_PLACE}fqn")
    places = {what: f"self.{beside(name, what)}" for what in ("sink", "local", "edge", "full")}
    read = "traced_read"
    if extended:
        read, said = "traced_extended_read", "gather"
    if is_taken_apart:
        places["local"] = "taken_apart({local}, {sink}.watch.names({fqn}))".format(**places, fqn=fqn)
    if wraps:
        read, said = "traced_dtensor_read", "gather, wrap, mesh" + ("" if extended else f", {said}")
        places["full"] = "wrap({})".format(places["full"] + (", mesh" if on_mesh else ""))
    # What stands in the shard's place, and is handed back as it is, has attributes of its own.
    carry = "        if takes is not None or isinstance(param, DTensor):\n" if carries else ""
    carry += "".join(f"            full.{one} = self.{beside(name, 'carried')}[{one!r}]\n" for one in carries)
    namespace: dict[str, Any] = {}
    exec(GETTER.format(name=name, fqn=fqn, read=read, arguments=said, carry=carry, **places), globals(), namespace)
    return namespace["make"]


def taken_apart(inside: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """What a graph takes of a shard with an extension: the names of the tensors inside it, and these."""
    return (names, *[inside[name] for name in names])
