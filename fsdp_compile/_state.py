"""UnitState: what one fully_shard call left on its modules, and the forward that runs in their place.

``unit_forward`` becomes the modules' ``_call_impl``, so it stands around their own hooks and is one frame with them:

    compiled whole            casts inputs and outputs; what its module reads are markers in the graph
    a graph breaks inside     Dynamo skips this frame and compiles those that it calls: it is the eager path
    not compiled              the eager path

So wherever Python runs inside a unit's forward, a ``Call`` says so, from ``eager_forward``'s beginning to its end,
however that comes about: what reads a parameter there gathers it, and what reads one outside sees the shard.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import _eager_path as eager
from . import _torch_compat as compat
from ._captures import refuse_run
from ._cast import cast_floating, move
from ._group import ParamGroup
from ._iteration import Iteration
from ._mistakes import read_around
from ._trace import span

if TYPE_CHECKING:
    from ._call import Call
    from ._gathered import Gathered

STATE = "_fsdp_compile_state"


@dataclass(eq=False)
class UnitState:
    """One fully_shard call: its modules, its parameters, and where in a step it is."""

    modules: tuple[nn.Module, ...]
    group: ParamGroup
    mp_policy: MixedPrecisionPolicy
    mixin: type  # what the modules' classes get as a base
    # The unit around this one.
    outer: UnitState | None = None
    takes_inputs_to: torch.device | None = None  # of the outermost unit, on accelerators
    gathered: Gathered | None = None
    # Eager forwards of this unit that are running, innermost last.
    calls: list[Call] = field(default_factory=list)
    # What reads outside of a forward see between unshard() and reshard().
    held_call: Call | None = None
    # Of a unit of several modules: the forward that its members share, and those that have yet to run in it.
    pass_call: Call | None = None
    not_run_yet: set[nn.Module] = field(default_factory=set)
    # The forward call whose backward is running, and which backward that is: checkpointing recomputes with what it
    # holds. After a backward that raised it is another one's, and stale.
    backward_call: Call | None = None
    backward_task: int | None = None
    in_backward: set[Call] = field(default_factory=set)
    reduced_in: int | None = None
    forward_prefetch: list[UnitState] = field(default_factory=list)
    backward_prefetch: list[UnitState] = field(default_factory=list)
    warned_of_view: bool = False
    warned_of_eager: bool = False
    _iteration: Iteration = field(default_factory=Iteration)

    @property
    def name(self) -> str:
        """Path and class of the modules, for messages."""
        paths = {module: path for root in self.root.modules for path, module in root.named_modules()}
        classes = [getattr(type(one), "_fsdp_compile_original", type(one)).__name__ for one in self.modules]
        return ", ".join(f"{paths.get(one) or '(root)'} ({cls})" for one, cls in zip(self.modules, classes))

    @property
    def root(self) -> UnitState:
        """The outermost unit around this one."""
        unit = self
        while unit.outer is not None:
            unit = unit.outer
        return unit

    @property
    def iteration(self) -> Iteration:
        return self.root._iteration

    @property
    def runs_forward(self) -> bool:
        """Whether a forward of this unit, or of one around it, is running."""
        unit: UnitState | None = self
        while unit is not None:
            if unit.calls:
                return True
            unit = unit.outer
        return False

    @property
    def unheeded_in_graphs(self) -> tuple[str, ...]:
        """Names of the methods that were called to say what only the eager path goes by."""
        said = {
            "set_modules_to_forward_prefetch": self.forward_prefetch,
            "set_modules_to_backward_prefetch": self.backward_prefetch,
            "set_reduce_scatter_max_input_buffers": self.group.max_reductions > 1,
            "set_separate_reduce_scatter_group": self.group.reduce_groups,
            "set_keep_unsharded_storage": self.group.keep_storage,
            "set_unshard_in_backward": not self.group.unshard_in_backward,
            "set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm": self.group.comms.allocator,
        }
        return tuple(name for name, value in said.items() if value)

    def units(self) -> list[UnitState]:
        """This unit and those inside it, outermost first."""
        return list(dict.fromkeys(unit for module in self.modules for unit in states_in(module)))

    def max_reductions_in_flight(self) -> int:
        return max(unit.group.max_reductions for unit in self.units())

    def recover(self) -> None:
        """Bring every unit back to where a step begins, after a forward or a backward that raised."""
        iteration = self._iteration
        iteration.traffic.forget([unit.group for unit in self.units()])
        iteration.abandon_forward()
        iteration.tasks.clear()
        iteration.incomplete.clear()
        iteration.depth, iteration.creates_graph = 0, False
        iteration.pending_handle = None
        for unit in self.units():
            unit.calls.clear()
            unit.held_call = unit.pass_call = unit.backward_call = unit.backward_task = unit.reduced_in = None
            unit.in_backward.clear()
            unit.not_run_yet.clear()
            unit.group.pending.clear()
            unit.group.partials.clear()
            if unit.gathered is not None:
                unit.gathered.free()
        iteration.touched.clear()
        iteration.hooks.release()


def state_of(module: nn.Module) -> UnitState | None:
    """The unit that ``module`` was given to fully_shard in; None for other modules."""
    return module.__dict__.get(STATE)


def states_in(model: nn.Module) -> list[UnitState]:
    """The units inside ``model``, itself included, outermost first."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Pass the model that fully_shard was applied to, not a {type(model).__name__}.")
    return list(dict.fromkeys(state for module in model.modules() if (state := state_of(module)) is not None))


def unit_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a unit's module: cast, gather when something eager reads, call, free or keep, cast."""
    state: UnitState = self.__dict__[STATE]
    call = type(self)._fsdp_compile_original._call_impl
    args, kwargs = as_taken(state, args, kwargs)
    try:  # Dynamo never resumes inside one: a frame that it cannot compile whole, it leaves to Python
        if torch.compiler.is_dynamo_compiling():
            output = call(self, *args, **kwargs)
        else:
            output = eager_forward(state, self, call, args, kwargs)
    except BaseException:
        raise
    return as_given(state, output)


def as_taken(state: UnitState, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs of a unit's forward, where and in the dtype in which it takes them."""
    if state.takes_inputs_to is not None:
        args, kwargs = move(args, state.takes_inputs_to), move(kwargs, state.takes_inputs_to)
    policy = state.mp_policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
    return args, kwargs


def as_given(state: UnitState, output: Any) -> Any:
    """The output of a unit's forward, in the dtype in which it gives it."""
    dtype = state.mp_policy.output_dtype
    return output if dtype is None else cast_floating(output, dtype)


# Dynamo compiles frames inside of a forward that it left to Python; what is ours around them is not for it.
_not_traced = functools.partial(torch.compiler.disable, reason="the eager path runs in Python")


def begin_unit(state: UnitState, module: nn.Module, args: Any, kwargs: Any) -> tuple[Call | None, Any, Any]:
    """The first half of ``unit_forward``, for code that makes the call itself; its eager call, where it is one."""
    args, kwargs = as_taken(state, args, kwargs)
    if torch.compiler.is_dynamo_compiling():
        return None, args, kwargs
    return _begin(state, module, args, kwargs, compat.reads_are_compiled(module))


def end_unit(state: UnitState, module: nn.Module, call: Call | None, output: Any) -> Any:
    """The second half."""
    if call is not None:
        output = _end(state, module, call, output)
    return as_given(state, output)


def eager_forward(state: UnitState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``forward(module, ...)`` between the two ends of the eager path."""
    are_compiled = compat.reads_are_compiled(module)
    running = None
    try:
        running, args, kwargs = _begin(state, module, args, kwargs, are_compiled)
        output = forward(module, *args, **kwargs)
    except BaseException as error:
        _fail(state, running, error)
        raise
    return _end(state, module, running, output)


for _skipped in (begin_unit, end_unit, eager_forward):
    compat.leave_to_python(_skipped)
compat.leave_all_to_python(as_taken, as_given)


@_not_traced
def _begin(state: UnitState, module: nn.Module, args: Any, kwargs: Any, are_compiled: bool) -> tuple[Call, Any, Any]:
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        refuse_run(state.name)
    with span("pre_forward", state), _naming_circles(state, "inputs"):
        return eager.begin_forward(state, module, args, kwargs, are_compiled)


@_not_traced
def _end(state: UnitState, module: nn.Module, running: Call, output: Any) -> Any:
    with span("post_forward", state), _naming_circles(state, "outputs"):
        return eager.end_forward(state, module, running, output)


@_not_traced
def _fail(state: UnitState, running: Call | None, error: BaseException) -> None:
    if running is not None:
        eager.abandon_forward(state, running)
    mistake = read_around(state.group, error)
    if mistake is not None:
        raise mistake from error


@contextmanager
def _naming_circles(state: UnitState, what: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise RuntimeError(
            f"{state.name}: the tensors in its {what} cannot be found, because the containers around them are nested "
            "too deep, or in a circle."
        ) from error


def eager_forward_for(name: str, setting: str) -> Callable[..., Any]:
    """``unit_forward`` for modules that Dynamo must not trace; where it would have, they say once why it did not."""
    skipped: list[bool] = []

    @torch.compiler.assume_constant_result
    def note() -> None:
        skipped.append(True)  # while Dynamo traces the caller

    def forward_eagerly(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: UnitState = self.__dict__[STATE]
        if skipped and not state.warned_of_eager:
            state.warned_of_eager = True
            warnings.warn(
                f"{state.name} runs eagerly inside compiled code: {setting} works in eager mode only. The numbers are "
                "right; its collectives are in no graph.",
                stacklevel=2,
            )
        return unit_forward(self, *args, **kwargs)

    run = torch.compiler.disable(forward_eagerly, reason=f"{name}: {setting} works in eager mode only")

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            note()
        return run(self, *args, **kwargs)

    return call


def unit_forward_for(name: str, unheeded: tuple[str, ...] = ()) -> Callable[..., Any]:
    """``unit_forward`` for a class called ``name``; traced, it says which settings are ``unheeded``."""
    forward = _with_code_of_its_own(unit_forward, name)
    if not unheeded:
        return forward

    @torch.compiler.assume_constant_result
    def say() -> None:
        warnings.warn(
            f"{', '.join(unheeded)} has no effect where {name} is compiled: there compiler passes decide when to "
            "gather, reduce and free. It holds where the module runs eagerly.",
            stacklevel=2,
        )

    def say_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            say()
        return forward(self, *args, **kwargs)

    return _with_code_of_its_own(say_and_call, name)


def _with_code_of_its_own(function: Any, name: str) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo counts recompilations by code object."""
    code = function.__code__.replace(co_name=f"{name}._call_impl")
    return types.FunctionType(code, function.__globals__, "_call_impl", closure=function.__closure__)
