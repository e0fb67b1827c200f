"""Eager and compiled steps launch the same, however often and in whatever order forward calls its units."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard
from fsdp_compile.core.unit import units_in
from fsdp_compile.eager.running import running
from tests.uses import heard

pytestmark = pytest.mark.usefixtures("fake_group_of_four", "limits_for_small_models")

_Run = Callable[..., Tensor]


class Block(nn.Module):
    """A block that has a layer inside, and perhaps a parameter of its own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(64)) if own else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + (x if self.scale is None else x * self.scale)


class Recursive(Block):
    """A block that calls itself."""

    def __init__(self) -> None:
        super().__init__(own=True)

    def forward(self, x: Tensor, times: int = 0) -> Tensor:
        x = super().forward(x)
        return self(x, times - 1) if times else x  # type: ignore[no-any-return]


class Model(nn.Module):
    """A model that calls three blocks in a given order, between two layers of its own."""

    def __init__(self, order: _Run, own: bool) -> None:
        super().__init__()
        self.order = order
        self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block(own) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.order(self.first(x), *self.blocks))  # type: ignore[no-any-return]


def _recomputed(run: _Run, *args: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False)


ORDERS: dict[str, _Run] = {
    "in turns": lambda x, a, b, c: b(a(b(a(x)))),
    "each recomputed, in turns": lambda x, a, b, c: _recomputed(b, _recomputed(a, _recomputed(b, _recomputed(a, x)))),
    "each recomputed, in a row": lambda x, a, b, c: b(_recomputed(a, _recomputed(a, x))),
    "all recomputed": lambda x, a, b, c: c(_recomputed(lambda x: c(b(a(x))), x)),
    "pairs recomputed": lambda x, a, b, c: _recomputed(lambda x: c(b(x)), _recomputed(lambda x: b(a(x)), x)),
    "branches recomputed": lambda x, a, b, c: sum(_recomputed(lambda x: (a(x), b(x), c(x)), x)),  # type: ignore[dict-item]
    "a region in a region": lambda x, a, b, c: c(_recomputed(lambda x: _recomputed(b, a(x)), x)),
}


def _sharded(
    order: _Run, reshard: bool | int, inside: bool = False, frozen: bool = False, own: bool = False, root: Any = None
) -> nn.Module:
    model = Model(order, own)
    model.blocks[0].requires_grad_(not frozen)
    for block in model.blocks:
        if inside:
            fully_shard(block.inner)
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=root)


def _launches(run: Callable[[], Tensor], groups: bool = False) -> list[tuple[str, ...]]:
    for _ in range(2):  # in the first step, the eager path does not know what comes next
        with heard(groups) as found:
            loss = run()
            found.append(("backward",))
            loss.backward()
    return found


def _assert_same(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[tuple[str, ...]]:
    """Assert that a step of which ``loss`` is a compiled function launches what an eager one does, and return that."""
    torch._dynamo.reset()
    eager = _launches(lambda: loss(model))
    compiled = torch.compile(loss, backend="passes", fullgraph=True)
    assert _launches(lambda: compiled(model)) == eager
    return eager


@pytest.mark.compat
@pytest.mark.parametrize("order", [pytest.param(order, id=name) for name, order in ORDERS.items()])
def test_eager_and_compiled_steps_launch_the_same(order: _Run) -> None:
    _assert_same(_sharded(order, reshard=True), lambda model: model(torch.ones(2, 64)).sum())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("in turns", {"reshard": 2}),
        ("in turns", {"reshard": True, "frozen": True}),
        *(("all recomputed", options) for options in ({"reshard": False}, {"reshard": 2}, {"reshard": True, "frozen": True})),
    ],
    ids=str,
)
def test_so_they_do_with_other_settings(name: str, options: dict[str, Any]) -> None:
    _assert_same(_sharded(ORDERS[name], **options), lambda model: model(torch.ones(2, 64)).sum())


def test_so_they_do_if_one_graph_has_two_forwards() -> None:
    x = torch.ones(2, 64)
    model = _sharded(ORDERS["in turns"], reshard=True, root=True)
    _assert_same(model, lambda model: model(x).sum() + model(x + 1).pow(2).sum())


def test_backward_gathers_no_use_without_a_gradient() -> None:
    def improved(x: Tensor, a: Any, b: Any, c: Any) -> Tensor:
        with torch.no_grad():
            better = b(a(b(a(x))))
        return b(a(x + better))  # type: ignore[no-any-return]

    launches = _assert_same(_sharded(improved, reshard=True), lambda model: model(torch.ones(2, 64)).sum())
    backward = [one for one in launches[launches.index(("backward",)) :] if one[0] == "gather"]
    assert backward == [("gather", f"blocks.{place}.inner.weight") for place in (1, 0)]


def test_a_unit_that_calls_itself_is_one_use() -> None:
    def again(x: Tensor, a: Any) -> Tensor:
        return a(x, 2)  # type: ignore[no-any-return]

    model = Model(again, own=True)
    model.blocks = nn.ModuleList([Recursive()])
    for unit in (model.blocks[0].inner, model.blocks[0]):
        fully_shard(unit)
    launches = _assert_same(fully_shard(model), lambda model: model(torch.ones(2, 64)).sum())
    assert launches.count(("reduce", "blocks.0.inner.weight")) == 1


def test_so_they_do_if_nothing_is_between_two_uses_of_a_unit() -> None:
    """Each forward of an outermost unit is a use: its second gather is launched when its first is freed, or reduced."""
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), reshard_after_forward=True)
    x = torch.ones(2, 64, requires_grad=True)
    launches = _assert_same(model, lambda model: model(model(x)).sum())
    kinds = [kind for kind, *_ in launches[launches.index(("backward",)) + 1 :]]
    assert [kind for kind, _ in groupby(kinds)] == ["gather", "reduce", "gather", "reduce"]


@pytest.mark.compat
def test_a_use_ends_where_another_unit_begins() -> None:
    model = _sharded(lambda x, a, b, c: a(a(b(a(a(x))))), reshard=True)
    launches = _assert_same(model, lambda model: model(torch.ones(2, 64)).sum())
    a, b = ("gather", "blocks.0.inner.weight"), ("gather", "blocks.1.inner.weight")
    forward, backward = launches[: launches.index(("backward",))], launches[launches.index(("backward",)) :]
    assert [one for one in forward if one in (a, b)] == [a, b, a]
    assert [one for one in backward if one in (a, b)] == [a, b, a]
    assert backward.count(("reduce", "blocks.0.inner.weight")) == 2


def test_each_use_gathers_from_slices_in_backward_alone() -> None:
    model = _sharded(ORDERS["in turns"], reshard=2)
    loss = torch.compile(lambda model: model(torch.ones(2, 64)).sum(), backend="passes", fullgraph=True)
    eager = _launches(lambda: model(torch.ones(2, 64)).sum(), groups=True)
    assert _launches(lambda: loss(model), groups=True) == eager
    backward = eager.index(("backward",))
    assert {group for _, group in eager[:backward]} == {"0"}
    assert len([group for kind, group in eager[backward + 1 :] if kind == "all_gather" and group != "0"]) == 4


def test_a_kept_unit_is_gathered_once_and_reduced_for_each_use() -> None:
    launches = _assert_same(_sharded(ORDERS["in turns"], reshard=False), lambda model: model(torch.ones(2, 64)).sum())
    assert launches.count(("gather", "blocks.0.inner.weight")) == 1
    assert launches.count(("reduce", "blocks.0.inner.weight")) == 2


def test_a_kept_unit_is_gathered_once_without_gradients() -> None:
    model, x = _sharded(ORDERS["in turns"], reshard=False), torch.ones(2, 64)
    evaluated = []
    with torch.no_grad():
        for run in (model, torch.compile(model, backend="passes", fullgraph=True)):
            for _ in range(2):
                with heard() as found:
                    run(x)
            evaluated.append(found)
    eager, compiled = evaluated
    assert compiled == eager and eager.count(("gather", "blocks.0.inner.weight")) == 1
    assert not any(gathered.is_here for unit in units_in(model) if (gathered := running(unit).gathered))


@pytest.mark.parametrize("has_own", [True, False])
def test_a_unit_inside_one_that_goes_on_goes_on_as_well(has_own: bool) -> None:
    def twice(x: Tensor, a: Any, b: Any, c: Any) -> Tensor:
        return a(a(x))  # type: ignore[no-any-return]

    model = _sharded(twice, reshard=True, inside=True, own=has_own)
    launches = _assert_same(model, lambda model: model(torch.ones(2, 64)).sum())
    assert launches.count(("reduce", "blocks.0.inner.weight")) == 1
