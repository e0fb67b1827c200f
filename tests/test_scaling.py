"""What is done to a model takes as long for each parameter, however many there are, in one unit or in many.

``python -m benchmarks.scaling`` has the seconds. Here lines of ours that run are counted: the third n parameters cost
no more of them than the second n.
"""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compile
from benchmarks.scaling import LAYOUTS, OurFSDP1s, Ours, Subject
from fsdp_compile import passes
from fsdp_compile.api.classes import sharded_class
from fsdp_compile.core.unit import unit_of, units_in
from fsdp_compile.lookout.names import Namer

FEW = 7
FOLDERS = tuple(str(Path(one.__file__).parent) for one in (fsdp_compile, passes))


class Odd(Subject):
    """What else is done to models: to what is inside a unit, to units without one around them, to a list."""

    def operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        inner = self.plain()
        outer = fsdp_compile.fully_shard(nn.Sequential(inner))
        state = inner.state_dict()
        yield "load_state_dict(assign=True) inside a unit", lambda: inner.load_state_dict(state, assign=True)
        yield "to(bfloat16) inside a unit", lambda: inner.to(torch.bfloat16)
        yield "deepcopy inside a unit", lambda: copy.deepcopy(inner)
        del outer
        separate: Any = self.plain()
        for layer in separate:
            fsdp_compile.fully_shard(layer)
        yield "deepcopy of separate units", lambda: copy.deepcopy(separate)
        members: Any = list(self.plain())
        yield "fully_shard of a list", lambda: fsdp_compile.fully_shard(members)
        yield "to(bfloat16) of a list", lambda: [member.to(torch.bfloat16) for member in members]
        tied, others = self.plain(), self.plain()
        for layer, other in zip(tied, others):  # type: ignore[call-overload]
            other.weight = layer.weight
        fsdp_compile.fully_shard(tied)
        both = nn.Sequential(tied, others)
        yield "fully_shard around tied weights", lambda: fsdp_compile.fully_shard(both)
        namer = Namer()
        yield "names of parameters", lambda: [namer._in(unit) for unit in units_in(both)]


def lines_by_operation(subject: Subject) -> dict[str, Counter[str]]:
    gc.collect()  # models of the size before, which somebody may look through
    return {name: lines_run(call) for name, call in subject.operations()}


def lines_run(call: Callable[[], Any]) -> Counter[str]:
    """How often each of our lines ran."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            counts[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename.startswith(FOLDERS) else None

    sharded_class.forget()  # type: ignore[attr-defined]  # or a model of as many layers before has made some
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return counts


@pytest.mark.parametrize(
    ("kind", "layout"), [*((kind, layout) for kind in (Ours, OurFSDP1s) for layout in LAYOUTS), (Odd, "several units")]
)
@pytest.mark.usefixtures("fake_group_of_four")
def test_no_loop_over_all_parameters_is_inside_another(kind: type[Subject], layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines_by_operation(kind(2, layout))  # what runs once in a process
        once, twice, thrice = (lines_by_operation(kind(size, layout)) for size in (FEW, 2 * FEW, 3 * FEW))
    grown = {}
    for name, last in thrice.items():
        first, middle = once[name], twice[name]
        if last.total() - middle.total() > 1.02 * (middle.total() - first.total()):
            grown[name] = (last + first - middle - middle).most_common(3)
    assert sum(map(Counter.total, thrice.values())) > 1000 * len(thrice)  # lines were counted
    assert grown == {}


@pytest.mark.usefixtures("fake_group_of_four")
def test_edges_made_module_by_module_are_one_node_again_after_a_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp_compile.fully_shard(model)
    unit = unit_of(model)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 4)).sum().backward()

    def nodes() -> list[Any]:
        assert unit is not None
        assert all(param.sink.is_current for param in unit.params)
        return [param.sink.node for param in unit.params]

    assert len(set(nodes())) == 1
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    changes: list[Callable[[], Any]] = [
        lambda: model[1].to_empty(device="cpu"),
        lambda: model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True),
        lambda: model[0].load_state_dict(model[0].state_dict(), assign=True),
    ]
    for change in changes:
        change()
        assert len(set(nodes())) == len(model)
        compiled(torch.ones(2, 4)).sum().backward()
        assert len(set(nodes())) == 1
        assert all(param.param.grad is not None for param in unit.params)  # type: ignore[union-attr]
        model.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
