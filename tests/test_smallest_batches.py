"""Sequences of one element, batches of no rows, graphs that reduce nothing: backward gathers what it does elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard
from fsdp_compile.passes import Plan
from tests.comparing import assert_same_grads
from tests.compiling import compiled
from tests.models import Stack, twins
from tests.ranks import Ranks
from tests.recording import Wire, recorded
from tests.test_graphs import Stages

WIDTH = 24


class Recurrence(nn.Module):
    """By hand, from a state of zeros that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        self.w_rec = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ self.w_in + h @ self.w_rec)
        return h


class Joined(nn.Module):
    """Input and state in one tensor, one product for both."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h = torch.tanh(self.w(torch.cat([x[:, t], F.dropout(h, 0.1)], dim=1)))
        return h


class Cells(nn.Module):
    """Two layers of torch's own cells, whose state is zeros unless one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        lower, upper = None, None
        for t in range(x.shape[1]):
            lower = self.lower(x[:, t], lower)
            upper = self.upper(lower[0], upper)
        assert upper is not None
        return upper


class LastNorm(nn.Module):
    """Attention, a residual sum and norms, of which one is the last that computes."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 3, 2 * WIDTH, 0.0, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = checkpoint(self.block, y, use_reentrant=False) if self.checkpointed else self.block(y)
        return self.norm(y).pow(2).sum(-1)


class Frozen(nn.Module):
    """What follows a checkpointed region is saved where it is much smaller than what goes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.base, x, use_reentrant=False).flatten(0, 1).mean(0)
        return (y.sin() * y.cos() * y.exp()) * x.mean(1)


def _sharded(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    for one in model.children():
        fully_shard(one, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


def _plans(make: Callable[[], nn.Module], x: Tensor, backend: str, **settings: Any) -> tuple[Plan, Plan]:
    torch._dynamo.reset()
    model = _sharded(make)
    with recorded(Stages()) as stages:
        torch.compile(model, backend=backend, fullgraph=True, **settings)(x).sum().backward()
    return stages["forward"].plan, stages["backward"].plan


def _gathered(plan: Plan) -> set[str]:
    return {fqn for bucket in plan.gathers for fqn in bucket.fqns}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Recurrence, {"w_in", "w_rec"}),
        (lambda: Recurrence().requires_grad_(False), {"w_in", "w_rec"}),
        (Joined, {"w.weight", "w.bias"}),
        (Cells, {f"{cell}.{one}_{of}" for cell in ("lower", "upper") for one in ("weight", "bias") for of in ("ih", "hh")}),
    ],
    ids=["by_hand", "frozen", "joined", "cells"],
)
def test_a_sequence_of_one_element_gathers_what_longer_ones_do(
    fake_group_of_four: None, make: Callable[[], nn.Module], expected: set[str]
) -> None:
    needs_grad = not any(param.requires_grad for param in make().parameters())
    plans = [
        _plans(make, torch.randn(rows, length, WIDTH, requires_grad=needs_grad), backend)
        for rows, length, backend in ((2, 1, "passes"), (2, 3, "passes"), (1, 1, "decomposed"), (1, 2, "decomposed"))
    ]
    assert _gathered(plans[0][1]) == expected
    assert all(one == plans[0] for one in plans[1:])


def _first_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 3))


def _first_frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh(), nn.Linear(WIDTH, 3))


@pytest.mark.parametrize(
    ("make", "x", "expected"),
    [
        (_first_embedding, torch.zeros(2, 3, dtype=torch.long), {"1.weight", "1.bias"}),
        (_first_frozen, torch.zeros(2, WIDTH), {"2.weight", "2.bias"}),
    ],
)
def test_a_unit_that_is_looked_up_or_gets_no_gradient_is_not_gathered_again(
    fake_group_of_four: None, make: Callable[[], nn.Module], x: Tensor, expected: set[str]
) -> None:
    for num_rows in (2, 1, 0):
        assert _gathered(_plans(make, x[:num_rows], "decomposed")[1]) == expected


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.filterwarnings("ignore:var_mean")
def test_a_batch_of_no_rows_gathers_what_others_do(fake_group_of_four: None, checkpointed: bool) -> None:
    make = lambda: LastNorm(checkpointed)  # noqa: E731
    rows, none = (_plans(make, torch.randn(num_rows, 3, WIDTH), "decomposed") for num_rows in (2, 0))
    assert {"norm.weight", "block.linear1.weight", "block.norm1.weight"} <= _gathered(rows[1])
    assert none == rows


@pytest.mark.filterwarnings("ignore:var_mean")
def test_a_batch_of_no_rows_launches_in_the_order_of_others_where_units_are_kept(fake_group_of_four: None) -> None:
    def plan(num_rows: int) -> Plan:
        torch._dynamo.reset()
        model = Stack(3)
        for layer in model.layers[:2]:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model.layers[2], reshard_after_forward=False)
        fully_shard([model.norm, model.head], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=True)
        with recorded(Stages()) as stages:
            tokens = torch.zeros(num_rows, 5, dtype=torch.long)
            torch.compile(model, backend="decomposed", fullgraph=True)(tokens).sum().backward()
        return stages["backward"].plan

    rows = plan(2)
    assert _gathered(rows) == {fqn for fqn in _gathered(rows) if fqn.startswith(("layers.0", "layers.1"))} != set()
    assert plan(0) == rows


@pytest.mark.compat
@pytest.mark.parametrize("backend", ["passes", "aot_eager"])
def test_without_reductions_a_checkpointed_region_is_gathered_for_in_any_case(
    fake_group_of_four: None, backend: str
) -> None:
    for length in (1, 50):
        if backend == "passes":
            _, plan = _plans(Frozen, torch.randn(1, length, WIDTH, requires_grad=True), backend)
            assert _gathered(plan) == {"base.weight", "base.bias"}
        else:
            model = _sharded(Frozen)
            x = torch.randn(1, length, WIDTH, requires_grad=True)
            torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
            assert x.grad is not None


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrence, self.up, self.norm = Recurrence(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(self.recurrence(x))).pow(3).sum() / 8


# Of each rank in each step: rows and length.
SIZES = (((2, 1), (0, 3), (2, 3), (1, 1)), ((2, 3), (2, 3), (2, 1), (0, 1)))


def _train(path: str, num_steps: int) -> None:
    unsharded, model = twins(Whole)
    for one in model.children():
        fully_shard(one, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    run = compiled(model, path)
    launched: list[tuple[str, Any]] = []
    for step in range(num_steps):
        batches = [torch.randn(*sizes[step], WIDTH, generator=torch.Generator().manual_seed(step)) for sizes in SIZES]
        with Wire() as wire:
            run(batches[dist.get_rank()]).backward()
        launched += wire.launches
        torch.stack([unsharded(batch) for batch in batches]).mean().backward()
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-3)
        model.zero_grad()
        unsharded.zero_grad()
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, launched)
    assert launched and by_rank[0] == by_rank[1]


@pytest.mark.more
def test_ranks_with_one_element_and_with_no_rows_train_the_same(two_ranks: Ranks) -> None:
    two_ranks.run(_train, "inductor", 2)
