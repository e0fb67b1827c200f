"""The code of a read in a graph, written for what the unit's watch has decided.

    takes "edge", reduce     full = unshard(self.EDGE, None, None, "reduce", **watch.spec(fqn))
    takes "both", resume     full = unshard(self.LOCAL, self.EDGE, self.SINK.ticket, "reduce", **watch.spec(fqn))
    takes "edge", hold       full = unshard(self.LOCAL, self.SINK.full, None, "hold", **watch.spec(fqn))

Dynamo takes a tenth of a millisecond for each instruction that it traces, and a model has hundreds of parameters. So
this code decides nothing: its instructions are those that end in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._torch_compat import dtensors, dynamo
from .._torch_compat.autograd import uses_compiled_autograd
from ..core.accumulation import Mode
from ..core.param import beside

Given = tuple[str, str, str, str]  # a marker's first arguments: shard, leaf, ticket, and what becomes of the gradient
unshard = torch.ops.fsdpc.unshard  # for the code
WHATS = ("watch", "fqn", "local", "edge", "full", "sink", "mesh", "carried")  # that modules hold beside a parameter


class Reading(NamedTuple):
    """What a read does; expressions have {edge} and the like for what is beside the parameter."""

    given: Given | str  # or one expression for all four
    is_traced: bool = True
    is_extended: bool = False  # an all-gather extension takes the place of the marker
    wraps_on: str = ""  # what is gathered becomes a DTensor on this mesh
    is_in_front: bool = False  # of the branch or loop that it is in
    enables_grad: bool = False
    carried: tuple[str, ...] = ()  # names of the attributes that are copied from the parameter


@functools.cache
def code_of(name: str, reading: Reading) -> Callable[..., Any]:
    """Return the function that reads a module's parameter ``name`` so; it takes the module, and what is registered."""
    return _function(name, "def read(self, param=None):\n" + "\n".join(f"    {line}" for line in lines_of(reading)))


def lines_of(reading: Reading) -> list[str]:
    """Return the lines of the function, with {edge} and the like."""
    given = reading.given if isinstance(reading.given, str) else ", ".join(reading.given)
    gathered = f"watch.gather(fqn)({given})" if reading.is_extended else f"unshard({given}, **watch.spec(fqn))"
    if reading.wraps_on:
        gathered = f"watch.wrap(fqn)({gathered}, {reading.wraps_on})"
    gathers = [f"full = {gathered}"]
    if reading.is_in_front:
        gathers = ["watch.begin_in_front()", *gathers, "watch.end_in_front()"]
    if reading.enables_grad:
        gathers = ["with torch.enable_grad():", *[f"    {line}" for line in gathers]]
    return [
        "watch, fqn = {watch}, {fqn}",
        *["full = None", "if watch.gives_again(fqn, 'full'):", "    return full"] * reading.is_traced,
        *gathers,
        *[f"setattr(full, {one!r}, {{carried}}[{one!r}])" for one in reading.carried],
        "full._is_param = True",
        *["watch.keep(fqn, 'full')"] * reading.is_traced,
        "return full",
    ]


@functools.cache
def given_to_graphs(name: str) -> Callable[..., Any]:
    """Return the function that reads the full parameter which the eager path gives to graphs."""
    return _function(name, "def read(self):\n    return {full}")


def _function(name: str, text: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(text.format(**{what: f"self.{beside(name, what)}" for what in WHATS}), globals(), namespace)
    made: Callable[..., Any] = namespace["read"]
    return made


def given_of(param: Any, sink: Any, mode: Mode) -> tuple[Any, Any, Any, str]:
    """Return a marker's first arguments for a shard that is registered, be it the unit's own or another one's.

    ``torch.func.functional_call`` puts another one in its place. Without an edge, AOTAutograd handles the DTensor.
    """
    if not param.requires_grad:
        return dtensors.local_tensor(param), None, None, "reduce"
    if mode == "hold":
        return dtensors.local_tensor(param), sink.full, None, "hold"
    if mode == "resume_over_shards":
        return dtensors.local_tensor(param), sink.partial, sink.ticket, "over_shards"
    ticket = sink.ticket if mode == "resume" else None
    if uses_compiled_autograd():
        return dtensors.local_tensor(param), sink.leaf, ticket, "reduce"
    if param is sink.param.shard and sink.edge is not None and not dynamo.traces_backward():
        return dtensors.local_tensor(param), sink.edge, ticket, "reduce"
    return param.to_local(), None, ticket, "reduce"
