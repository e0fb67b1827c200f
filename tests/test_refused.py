"""A call of fully_shard that raises, wherever that is, leaves everything as it was."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard, replicate
from fsdp_compile.api.classes import sharded_class
from fsdp_compile.api.fully_shard import make_unit
from tests.models import Block, Stack
from tests.test_extension import Opaque

pytestmark = pytest.mark.usefixtures("fake_group_of_four")

PACKAGE = str(Path(fsdp_compile.__file__).parent)
_SOURCE, _FIRST = inspect.getsourcelines(make_unit)
ALL_OR_NOTHING = _FIRST + next(number for number, line in enumerate(_SOURCE) if "with all_or_nothing(" in line)


class Fault(Exception):
    """What a step is made to raise."""


class FaultAt:
    """Raises at one event inside ``make_unit``, until all is changed: as a function of ours is entered, or is done."""

    def __init__(self, place: int) -> None:
        self.left, self.inside, self.changing = place, False, False

    def __enter__(self) -> None:
        sys.settrace(self._on_event)

    def __exit__(self, *unused: object) -> None:
        sys.settrace(None)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code is make_unit.__code__:
            if event in ("call", "return"):
                self.inside = event == "call"
                return self._on_event
            if event == "line" and frame.f_lineno == ALL_OR_NOTHING:
                self.inside, self.changing = not self.changing, True  # Python comes back to the line when its block ends
        elif not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename.endswith("/undo.py"):
            return None
        elif frame.f_code.co_flags & inspect.CO_GENERATOR:
            return None  # Python resumes it once more to close it, and drops what is raised then
        if self.inside and event in ("call", "return"):
            self.left -= 1
            if self.left == 0:
                raise Fault(f"{event} {frame.f_code.co_qualname}:{frame.f_lineno}")
        return self._on_event


def look(thing: Any, seen: dict[int, Any]) -> Any:
    """Everything that can be found from ``thing``, with what it is: modules, their units, parameters, hooks, groups."""
    if isinstance(thing, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)):
        return thing
    if id(thing) in seen:
        return id(thing)
    seen[id(thing)] = thing
    if isinstance(thing, (list, tuple)):
        return id(thing) * isinstance(thing, list), [look(item, seen) for item in thing]
    if isinstance(thing, dict):
        return id(thing), [(look(key, seen), look(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (set, frozenset)):
        return id(thing), sorted(map(id, thing))
    about: list[Any] = [id(thing), type(thing)]
    if isinstance(thing, Tensor):
        about += [thing.requires_grad, thing.dtype, thing.device, thing.tolist() if type(thing) in (Tensor, nn.Parameter) else None, thing._backward_hooks, look(thing.grad if thing.is_leaf else None, seen)]
    if isinstance(thing, (nn.Module, Tensor)) or dataclasses.is_dataclass(thing):
        about.append(look(getattr(thing, "__dict__", {}), seen))
    if isinstance(thing, torch.distributed.tensor.DTensor):
        about.append(look(thing._local_tensor, seen))
    return about


def everything(model: nn.Module) -> tuple[Any, dict[int, Any]]:
    seen: dict[int, Any] = {}  # keeps what it has looked at, so that no address is used again
    return [look(model, seen), [id(group) for group in dist.distributed_c10d._world.pg_map]], seen


class Model(Stack):
    """Tied to what an earlier call has sharded, compiled before, with buffers, hooks and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(2, dim=4, vocab=5, tied=True)
        self.batch_norm = nn.BatchNorm1d(4)
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(4, 2), requires_grad=False)])
        self.compile(backend="eager")
        self.register_forward_pre_hook(lambda module, args: None)


def _prepared() -> Model:
    model = Model()
    fully_shard(model.embed)
    fully_shard(model.layers[0])
    fully_shard([model.layers[1].up, model.layers[1].down])
    return model


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "one module": fully_shard,
    "slices of two": lambda model: fully_shard(model, reshard_after_forward=2),
    "replicas": replicate,
    "a compiled module": fully_shard,
}


def _raise_everywhere(kind: str, step: int) -> list[str]:
    call, model = CALLS[kind], _prepared()
    if kind == "a compiled module":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    dist.new_group([0, 1], use_local_synchronization=True)
    place, raised = 1, []
    while True:
        sharded_class.forget()  # type: ignore[attr-defined]
        before, kept = everything(model)
        try:
            with FaultAt(place):
                call(model)
            return raised
        except Fault as fault:
            after, _ = everything(model)
            # A process group that was made stays, for the next call.
            assert before[0] == after[0], f"{fault} leaves a trace"
            assert before[1] == after[1][: len(before[1])] and len(after[1]) <= len(before[1]) + 1
            raised.append(str(fault))
            del kept
        place += step


@pytest.mark.parametrize(
    ("call", "step"), [("one module", 13), *(pytest.param(call, 37, marks=pytest.mark.more) for call in [*CALLS][1:])]
)
def test_every_step_may_raise_and_nothing_has_changed(call: str, step: int) -> None:
    raised = _raise_everywhere(call, step)
    assert len(raised) > 10
    assert {"call", "return"} == {one.partition(" ")[0] for one in raised}


class TwoArguments(Opaque):
    """An all-gather extension that takes what nobody gives it."""

    def fsdp_pre_all_gather(self, mesh: Any, also: Any) -> Any: ...  # type: ignore[override]


class Half(Opaque):
    fsdp_post_all_gather = property()  # type: ignore[assignment]


@pytest.mark.parametrize("subclass", [TwoArguments, Half])
def test_an_extension_is_refused_before_anything_changes(subclass: type[Opaque]) -> None:
    model = Block(4)
    model.down.weight = nn.Parameter(subclass(model.down.weight.detach()))
    before, _kept = everything(model)
    with pytest.raises(AssertionError, match=r"down\.weight"):
        fully_shard(model)
    assert everything(model)[0] == before


def test_after_a_refusal_the_same_call_works() -> None:
    model = Block(4)
    with pytest.raises(ValueError, match="should be a factor of 4, not 3"):
        fully_shard(model, reshard_after_forward=3)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert isinstance(model, fsdp_compile.FSDPModule)
