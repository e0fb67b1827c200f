"""UnitState: what one fully_shard call left on its modules, and the forward that runs in their place.

``unit_forward`` becomes the modules' ``_call_impl``, so it stands around their own hooks and is one frame with them:
traced, it casts inputs and outputs and leaves behind that a forward is running, as an attribute that Dynamo writes
back at every graph break. So code that then runs eagerly (a disabled function, a frame that fell back) knows that a
parameter it reads must be gathered. Run eagerly, it is the eager path.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import _eager_path as eager
from ._cast import cast_floating
from ._group import ParamGroup
from ._mistakes import read_around

if TYPE_CHECKING:
    from ._eager_path import GatheredCall

STATE = "_fsdp_compile_state"


@dataclass(eq=False)
class UnitState:
    """One fully_shard call: its modules, its parameters, and where in a step it is."""

    modules: tuple[nn.Module, ...]
    group: ParamGroup
    mp_policy: MixedPrecisionPolicy
    in_forward: bool = False
    # Eager forwards of this unit that are running, innermost last.
    calls: list[GatheredCall] = field(default_factory=list)
    # The forward call whose backward is running, and which backward that is: checkpointing recomputes with what it
    # holds. After a backward that raised it is another one's, and stale.
    backward_call: GatheredCall | None = None
    backward_task: int | None = None
    # The unit around this one.
    outer: UnitState | None = None

    @property
    def runs_forward(self) -> bool:
        """Whether a forward of this unit, or of one around it, is running."""
        unit: UnitState | None = self
        while unit is not None:
            if unit.in_forward or unit.calls:
                return True
            unit = unit.outer
        return False


def state_of(module: nn.Module) -> UnitState | None:
    """The unit that ``module`` was given to fully_shard in; None for other modules."""
    return module.__dict__.get(STATE)


def states_in(model: nn.Module) -> list[UnitState]:
    """The units inside ``model``, itself included, outermost first."""
    return list(dict.fromkeys(state for module in model.modules() if (state := state_of(module)) is not None))


def unit_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a unit's module: cast, gather when something eager reads, call, free or keep, cast."""
    state: UnitState = self.__dict__[STATE]
    call = type(self)._fsdp_compile_original._call_impl
    policy = state.mp_policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
    state.in_forward = True
    if torch.compiler.is_dynamo_compiling():
        output = call(self, *args, **kwargs)
    else:
        gathered = eager.begin_forward(state)
        try:
            output = call(self, *args, **kwargs)
        except BaseException as error:
            state.in_forward = False
            eager.abandon_forward(state, gathered)
            mistake = read_around(state.group, error)
            if mistake is not None:
                raise mistake from error
            raise
        output = eager.end_forward(state, gathered, output)
    state.in_forward = False
    if policy.output_dtype is not None:
        output = cast_floating(output, policy.output_dtype)
    return output


def unit_forward_for(name: str) -> Callable[..., Any]:
    """``unit_forward`` with a code object of its own: Dynamo counts recompilations by code object."""
    code = unit_forward.__code__.replace(co_name=f"{name}._call_impl")
    return types.FunctionType(code, unit_forward.__globals__, "_call_impl")
