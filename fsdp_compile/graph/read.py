"""The property that reads a parameter, and what a traced read does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import dtensors, dynamo
from .._torch_compat.autograd import uses_compiled_autograd
from ..core.accumulation import Mode
from ..core.param import BY_MARKER as BY_MARKER  # for the generated code
from ..core.param import READS, Mark, beside
from .sink import Sink
from .watch import UnitWatch


def traced_read(param: Any, sink: Sink, watch: UnitWatch, fqn: str, mesh: DeviceMesh | None, traced: bool) -> Any:
    """Return the parameter as a value: an unshard marker on the local shard, or what its all-gather extension computes.

    ``param`` is the registered DTensor; or, if that is the shard that the unit watches, what the graph takes of it, its
    local tensor, and its edge. ``mesh`` is the mesh of the DTensor to make of what is gathered.
    """
    given = _shard_and_backward(param, sink, watch.mode(fqn))
    in_front = traced and watch.begin_in_front()
    gather = watch.gather(fqn)
    full = torch.ops.fsdpc.unshard(*given, **watch.spec(fqn)) if gather is None else gather(*given)
    wrap = watch.wrap(fqn)
    full = full if wrap is None else wrap(full, mesh)
    if in_front:
        watch.end_in_front()
    return full


def as_computed_with(param: Any, sink: Sink, watch: UnitWatch, fqn: str) -> Any:
    """Return what is registered in the shard's place and is no shard: None, or a full tensor.

    The user or ``torch.func.functional_call`` put it there, or ``full_params``, whose tensor is cast to the dtype that
    the unit computes in.
    """
    is_ours = isinstance(param, torch.Tensor) and sink.param.is_full and watch.gather(fqn) is None
    return param.to(watch.spec(fqn)["dtype"]) if is_ours else param


def _shard_and_backward(param: Any, sink: Sink, mode: Mode) -> tuple[Any, Any, Any, str]:
    """Return a marker's first arguments."""
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
    # Another DTensor in the shard's place, by torch.func.functional_call, or no edge: AOTAutograd handles the DTensor.
    registered: Any = sink.param.shard if isinstance(param, tuple) else param
    return registered.to_local(), None, ticket, "reduce"


def named_parts(inside: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return what a graph takes of a shard with an extension: the names of the tensors inside it, and these."""
    return (names, *[inside[name] for name in names])


# The eager path has ``eager_read``: (module, name, what is registered) -> what a read gives, or BY_MARKER; and
# ``eager_write``: (module, name, value) -> whether it took the value.
GETTER = """
def make(eager_read):
    def read(self):
        traced = torch.compiler.is_dynamo_compiling()
        takes = self.{watch}.takes(self.{fqn}) if traced else None
        if takes == "full":
            return self.{full}
        if takes is None:
            param = dict.get(self._parameters, {name!r}, MISSING)
            if param is MISSING:
                raise AttributeError({name!r})
            if not traced:
                full = eager_read(self, {name!r}, param)
                if full is not BY_MARKER:
                    return full
        watch, fqn = self.{watch}, self.{fqn}
        full = None
        if takes is None and not self.{sink}.param.is_cut(param):
            return as_computed_with(param, self.{sink}, watch, fqn)
        if traced and watch.gives_again(fqn, "full"):
            return full
        mesh = self.{mesh} if watch.takes_mesh(fqn) else None
        if takes is not None:
            names = watch.names(fqn)
            param = takes, self.{local} if names is None else named_parts(self.{local}, names), self.{edge}
        if torch.is_grad_enabled() or not watch.records():
            full = traced_read(param, self.{sink}, watch, fqn, mesh, traced)
        else:
            with torch.enable_grad():
                full = traced_read(param, self.{sink}, watch, fqn, mesh, traced)
        for one in watch.carries(fqn):
            setattr(full, one, self.{carried}[one])
        full._is_param = True
        if traced:
            watch.keep(fqn, "full")
        return full
    return read
"""

MISSING = Mark()  # no such parameter: it was deleted after sharding


def getter(name: str, eager_read: Callable[..., Any], eager_write: Callable[..., bool]) -> property:
    """Return a property that reads parameter ``name`` of any module; the watch knows what differs between modules.

    Its code is generated, so that names in it are constants, which need no guards.
    """

    def write(self: Any, value: Any) -> None:
        # nn.Module registers parameters by itself: only other values come here, in place of a deleted parameter.
        if eager_write(self, name, value):
            return
        raise RuntimeError(
            f"{self.__dict__[READS][name][0].fqn} is sharded: it cannot become a {type(value).__name__} after "
            "fully_shard. Apply weight_norm, spectral_norm, pruning and the like before fully_shard."
        )

    return property(_made(name)(eager_read), write)


@functools.cache
def _made(name: str) -> Any:
    whats = ("watch", "fqn", "local", "edge", "full", "sink", "mesh", "carried")
    namespace: dict[str, Any] = {}
    exec(GETTER.format(name=name, **{what: beside(name, what) for what in whats}), globals(), namespace)
    return namespace["make"]
