"""The code of a read in a graph, written for what the unit's watch has decided.

    takes "edge", reduce     full = unshard(self.EDGE, None, None, "reduce", spec=watch.spec(fqn))
    takes "both", resume     full = unshard(self.LOCAL, self.EDGE, self.SINK.ticket, "reduce", spec=watch.spec(fqn))
    takes "edge", hold       full = unshard(self.LOCAL, self.SINK.full, None, "hold", spec=watch.spec(fqn))

Dynamo takes a tenth of a millisecond for each instruction that it traces, and a model has hundreds of parameters. So
the code decides nothing that the watch can decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._torch_compat import dynamo
from .._torch_compat.autograd import uses_compiled_autograd
from .._torch_compat.dtensors import local_tensor as local_tensor  # for the code
from ..core.accumulation import Mode
from ..core.param import beside

unshard = torch.ops.fsdpc.unshard  # for the code
_WHATS = ("watch", "fqn", "local", "edge", "full", "sink", "mesh", "carried")  # that modules hold beside a parameter
LOCAL, EDGE, DTENSOR, MESH = "{local}", "{edge}", "{sink}.param.shard.to_local()", "{mesh}"


class Reading(NamedTuple):
    """What a read does. Expressions are code, in which {edge} and the like stand for what is beside the parameter."""

    arguments: str  # the first four of the marker: shard, leaf, ticket, and what becomes of the gradient
    is_traced: bool = True
    is_extended: bool = False  # an all-gather extension takes the place of the marker
    wraps_on: str = ""  # what is gathered becomes a DTensor on this mesh
    is_in_front: bool = False  # of the branch or loop that it is in
    enables_grad: bool = False
    carried: tuple[str, ...] = ()  # names of the attributes that are copied from the parameter


@functools.cache
def code_of(name: str, reading: Reading) -> Callable[..., Any]:
    """Return the function that reads a module's parameter ``name`` so; it takes the module, and what is registered."""
    arguments = reading.arguments
    gathered = f"unshard({arguments}, spec=watch.spec(fqn))"
    if reading.is_extended:
        gathered = f"watch.gather(fqn)({arguments})"
    if reading.wraps_on:
        gathered = f"watch.wrap(fqn)({gathered}, {reading.wraps_on})"
    gathers = [f"full = {gathered}"]
    if reading.is_in_front:
        gathers = ["watch.begin_in_front()", *gathers, "watch.end_in_front()"]
    if reading.enables_grad:
        gathers = ["with torch.enable_grad():", *[f"    {line}" for line in gathers]]
    lines = [
        "watch, fqn = {watch}, {fqn}",
        *["full = None", "if watch.gives_again(fqn, 'full'):", "    return full"] * reading.is_traced,
        *gathers,
        *[f"setattr(full, {one!r}, {{carried}}[{one!r}])" for one in reading.carried],
        "full._is_param = True",
        *["watch.keep(fqn, 'full')"] * reading.is_traced,
        "return full",
    ]
    text = "def read(self, param=None):\n" + "\n".join(f"    {line}" for line in lines)
    return function_of(text, name, globals())


@functools.cache
def given_to_graphs(name: str) -> Callable[..., Any]:
    """Return the function that reads the full parameter which the eager path gives to graphs."""
    return function_of("def read(self):\n    return {full}", name, globals())


def function_of(text: str, name: str, known: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that ``text`` defines, in which names in braces are what is beside the parameter ``name``."""
    defined: dict[str, Any] = {}
    exec(text.format(name=name, **{what: f"self.{beside(name, what)}" for what in _WHATS}), known, defined)
    [made] = defined.values()
    return made  # type: ignore[no-any-return]


def frozen(local: str) -> str:
    """Return the marker's first arguments for a shard that gets no gradient there."""
    return f"{local}, None, None, 'reduce'"


def trained(mode: Mode, local: str, edge: str | None, dtensor: str, edge_is_local: bool = False) -> str:
    """Return the marker's first arguments for a shard that is trained; without an edge, AOTAutograd has the DTensor."""
    ticket = "{sink}.ticket" if mode.startswith("resume") else "None"
    if mode == "hold":
        return f"{local}, {{sink}}.full, None, 'hold'"
    if mode == "resume_over_shards":
        return f"{local}, {{sink}}.partial, {ticket}, 'over_shards'"
    if uses_compiled_autograd():
        return f"{local}, {{sink}}.leaf, {ticket}, 'reduce'"
    if edge is None:
        return f"{dtensor}, None, {ticket}, 'reduce'"
    return f"{edge}, None, {ticket}, 'reduce'" if edge_is_local else f"{local}, {edge}, {ticket}, 'reduce'"


def registered(mode: Mode) -> str:
    """Return the marker's first arguments for the shard that is registered, be it the unit's own or another one.

    ``torch.func.functional_call`` registers another one.
    """
    local, dtensor = "local_tensor(param)", "param.to_local()"
    other = trained(mode, local, None, dtensor)
    own = other if dynamo.traces_backward() else trained(mode, local, "{sink}.edge", dtensor)
    is_own = "param is {sink}.param.shard and {sink}.edge is not None"
    choice = f"({own})" if own == other else f"(({own}) if {is_own} else ({other}))"
    return f"*({choice} if param.requires_grad else ({frozen(local)}))"
