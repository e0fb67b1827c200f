"""The forward that runs in the place of a unit's modules, and takes the compiled or the eager path.

What ``unit_forward`` returns becomes the modules' ``_call_impl``, so it stands around their own hooks and is one frame
with them. It also stands around other methods that a user registers as forwards.

    compiled whole            casts inputs and outputs; what its module reads are markers in the graph
    a graph breaks inside     Dynamo skips this frame and compiles those that it calls: it is the eager path
    not compiled              the eager path

So whenever Python runs inside a unit's forward, for whatever reason, there is a ``Use`` from the beginning of
``eager_forward`` to its end. Code that reads a parameter then gathers it; code that reads one outside sees the shard.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._torch_compat import dynamo, fsdp2
from ..core import left
from ..core.containers import cast_floating, move
from ..core.shared import shared
from ..core.unit import STATE, Unit, unit_of
from ..eager.around import eager_forward
from .compiled import stand_before_wrappers


def unit_forward(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls a method of a unit's module as a forward of the unit.

    It casts, gathers when something eager reads, calls the method, frees or keeps, and casts.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = self.__dict__[STATE]
        args, kwargs = cast_inputs(unit, args, kwargs)
        try:  # Dynamo never resumes inside a try: it leaves a frame that it cannot compile whole to Python
            if torch.compiler.is_dynamo_compiling():
                before = unit.watch.replaced()
                output = method(self, *args, **kwargs)
                _take_places_back(unit, before)
            else:
                if unit.outer is None and not unit.knows_wrappers:
                    unit.knows_wrappers = True
                    stand_before_wrappers(self)
                    left.settle()
                output = eager_forward(unit, self, method, args, kwargs)
        except BaseException:
            raise
        return cast_outputs(unit, output)

    return with_code_of_its_own(forward, name)


def _take_places_back(unit: Unit, before: tuple[int, ...]) -> None:
    """Register the shards again that the traced forward replaced: all but those replaced ``before`` it."""
    for place in unit.watch.replaced():
        if place not in before:
            for slot in unit.params[place].slots:
                slot.module._parameters.take_back_traced(slot.name)


def forward_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The part of a unit's forward that is compiled where the eager path runs around a graph; see ``compiled.py``."""
    unit: Unit = self.__dict__[STATE]
    args, kwargs = cast_inputs(unit, args, kwargs)
    try:  # as above
        output = type(self)._fsdp_compile_original._call_impl(self, *args, **kwargs)
    except BaseException:
        raise
    return cast_outputs(unit, output)


def cast_inputs(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the inputs of a unit's forward on the device and in the dtype in which it takes them."""
    if unit.takes_inputs_to is not None:
        args, kwargs = move(args, unit.takes_inputs_to), move(kwargs, unit.takes_inputs_to)
    policy = unit.mp_policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
    return args, kwargs


def cast_outputs(unit: Unit, output: Any) -> Any:
    """Return the output of a unit's forward in the policy's ``output_dtype``."""
    dtype = unit.mp_policy.output_dtype
    return output if dtype is None else cast_floating(output, dtype)


dynamo.leave_all_to_python(cast_inputs, cast_outputs)


def eager_forward_for(forward: Callable[..., Any], name: str, setting: str) -> Callable[..., Any]:
    """Return a forward that Dynamo must not trace. If compiled code calls it, the unit warns once and runs eagerly."""
    skipped: list[bool] = []

    @torch.compiler.assume_constant_result
    def note() -> None:
        skipped.append(True)  # while Dynamo traces the caller

    def forward_eagerly(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = self.__dict__[STATE]
        if skipped and not unit.warned_of_eager:
            unit.warned_of_eager = True
            warnings.warn(
                f"{unit.name} runs eagerly inside compiled code: {setting} works in eager mode only. The numbers are "
                "right; its collectives are in no graph.",
                stacklevel=2,
            )
        return forward(self, *args, **kwargs)

    run = torch.compiler.disable(forward_eagerly, reason=f"{name}: {setting} works in eager mode only")

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            note()
        return run(self, *args, **kwargs)

    return call


def with_code_of_its_own(function: Any, name: str) -> Callable[..., Any]:
    """Return the function with a code object of its own: Dynamo counts recompilations by code object."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name.rpartition(".")[2], closure=function.__closure__)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name`` a second forward: parameters are gathered before it and freed after it."""
    module = dynamo.behind_compile(module)  # where the wrapper looks for its methods
    if unit_of(module) is None:
        if isinstance(module, fsdp2.TORCH_FSDP_MODULE):
            raise TypeError(
                f"register_fsdp_forward_method({method_name!r}): this {type(module).__name__} was sharded by "
                "torch.distributed.fsdp.fully_shard before fsdp_compile.adopt(). Adopt first, then shard."
            )
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} does not have a method {method_name!r}. Define it before.")
    known = getattr(module, method_name)
    if getattr(known, "__func__", None) in _forwards:
        return  # registered before
    forward: Any
    if getattr(known, "__self__", None) is module:
        forward = forward_by(known.__func__, getattr(known.__func__, "__qualname__", method_name))
    else:
        # No cache may hold this function, which holds ``known``, and so perhaps the module.
        forward = unit_forward(lambda self, *args, **kwargs: known(*args, **kwargs), method_name)
        _forwards.add(forward)
    setattr(module, method_name, forward.__get__(module, type(module)))


# The forwards of registered methods.
_forwards: weakref.WeakSet[Any] = weakref.WeakSet()


@shared
def forward_by(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the forward for all modules that have this method: one function, so that they can share compiled code."""
    forward = unit_forward(method, name)
    _forwards.add(forward)
    return forward
