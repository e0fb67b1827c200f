"""UnitState: what one fully_shard call left on its modules, and the hooks that mark where their forward runs.

The hooks are ordinary forward hooks and are traced with everything else. Traced, they cast inputs and outputs and
leave behind that a forward is running, as an attribute that Dynamo writes back at every graph break; so code that
then runs eagerly (a disabled function, a frame that fell back) knows that a parameter it reads must be gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import _eager_path as eager
from ._cast import cast_floating
from ._group import ParamGroup

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

    def register_hooks(self) -> None:
        for module in self.modules:
            module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(post_forward)


def state_of(module: nn.Module) -> UnitState | None:
    """The unit that ``module`` was given to fully_shard in; None for other modules."""
    return module.__dict__.get(STATE)


def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    state: UnitState = module.__dict__[STATE]
    state.in_forward = True
    policy = state.mp_policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
    if not torch.compiler.is_dynamo_compiling():
        eager.begin_forward(state)
    return args, kwargs


def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    state: UnitState = module.__dict__[STATE]
    state.in_forward = False
    if not torch.compiler.is_dynamo_compiling():
        output = eager.end_forward(state, output)
    if state.mp_policy.output_dtype is not None:
        output = cast_floating(output, state.mp_policy.output_dtype)
    return output
