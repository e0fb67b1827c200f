"""Parameters that stay gathered over the micro-batches of a step: what is sent, and that the numbers are right."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compile
from fsdp_compile.core.unit import units_in
from fsdp_compile.passes.budget.residency import AGAIN, KEPT
from fsdp_compile.passes.ir.plan import Plan
from fsdp_compile.passes.wire.ledger import Called, ledger
from tests.comparing import assert_same_grads, assert_same_params, loss_of
from tests.compiling import compiled, num_graphs
from tests.models import Stack, pair
from tests.on_ranks import on_two_ranks
from tests.recording import Wire, planned


def tokens(number: int, rank: int) -> Tensor:
    """A micro-batch; lengths differ between micro-batches and between ranks."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 31, (2, 3 + (number + rank) % 3), generator=generator)


def both(run: Callable[[Tensor], Tensor], unsharded: nn.Module, number: int) -> int:
    """Backward of a micro-batch on the sharded model, and of all ranks' on the other; how often this rank gathered."""
    with Wire() as wire:
        loss_of(run(tokens(number, dist.get_rank()))).backward()
    losses = [loss_of(unsharded(tokens(number, rank))) for rank in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    return wire.calls["gather"]


def accumulated(model: Any, run: Callable[[Tensor], Tensor], unsharded: nn.Module, numbers: Sequence[int]) -> list[int]:
    """The gathers of each micro-batch of a step; its gradients are those of the unsharded model."""
    gathers = []
    for number in numbers:
        model.set_requires_gradient_sync(number == numbers[-1])
        gathers.append(both(run, unsharded, number))
    assert_same_grads(model, unsharded)
    return gathers


@on_two_ranks
def test_a_step_gathers_each_parameter_once() -> None:
    """With ``no_sync`` and with the flag, of a model that has a tied weight."""
    unsharded, model = pair(make=lambda: Stack(1, tied=True))
    fsdp_compile.configure(model, gather="once a step")
    run = torch.compile(model, backend="passes", dynamic=True, fullgraph=True)
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model, unsharded)]
    for step in range(3):
        numbers = range(4 * step, 4 * step + 4)
        if step == 1:
            with fsdp_compile.no_sync(model):
                gathers = [both(run, unsharded, number) for number in numbers[:3]]
            gathers.append(both(run, unsharded, numbers[3]))
            assert_same_grads(model, unsharded)
        else:
            gathers = accumulated(model, run, unsharded, numbers)
        assert gathers[0] > 0 and gathers[1:] == [0, 0, 0]
        assert not any(unit.keeper.buckets for unit in units_in(model))
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
    assert num_graphs() == 2, "the first micro-batches hold gradients back, the last one resumes"


class Elementwise(nn.Module):
    """Its weights are as large as what it computes, so Inductor would compute it in their memory after their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.mix, self.gate = (nn.Parameter(torch.randn(16, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x + self.shift) @ self.mix).tanh() * self.gate


@on_two_ranks
def test_nothing_is_computed_in_the_memory_of_what_stays() -> None:
    torch.manual_seed(1)
    unsharded = Elementwise()
    model = fsdp_compile.fully_shard(copy.deepcopy(unsharded))
    run = torch.compile(model, fullgraph=True)
    for gather in ("for each micro-batch", "once a step"):  # the second finds no graphs of the first in a cache
        fsdp_compile.configure(model, gather=gather, bucketing="none")
        for micro in range(4):
            model.set_requires_gradient_sync(micro == 3)
            inputs = [torch.randn(16, 16, generator=torch.Generator().manual_seed(2 * micro + rank)) for rank in range(2)]
            run(inputs[dist.get_rank()]).pow(2).mean().backward()
            torch.stack([unsharded(one).pow(2).mean() for one in inputs]).mean().backward()
        assert_same_grads(model, unsharded)
        scaled(model, unsharded)


def after_backward(model: Any, micro: int) -> None:
    model.set_reshard_after_backward(micro == 2)


def after_both(model: Any, micro: int) -> None:
    model.set_reshard_after_forward(False)
    after_backward(model, micro)


def scaled(*models: nn.Module) -> None:
    """Write to all parameters, as an optimizer does, and drop their gradients."""
    with torch.no_grad():
        for param in (param for model in models for param in model.parameters()):
            param.mul_(1.01).grad = None


@pytest.mark.parametrize("how", [after_backward, after_both])
@on_two_ranks
def test_graphs_gather_as_often_as_the_eager_path(how: Callable[[Any, int], None]) -> None:
    gathers: dict[str, list[list[int]]] = {}
    for path in ("eager", "passes"):
        unsharded, model = pair(make=partial(Stack, 1))
        run = compiled(model, path)
        gathers[path] = []
        for step in range(2):
            of_step = []
            for micro in range(3):
                how(model, micro)
                model.set_requires_gradient_sync(micro == 2)
                of_step.append(both(run, unsharded, 3 * step + micro))
            gathers[path].append(of_step)
            assert_same_grads(model, unsharded)
            scaled(model, unsharded)
    assert gathers["passes"] == gathers["eager"]
    first, second, third = gathers["passes"][1]
    assert first > second >= third


@pytest.mark.parametrize("bucketing", ["size", pytest.param("neighbours", marks=pytest.mark.more)])
@on_two_ranks
def test_what_stays_goes_when_it_is_stale_and_with_the_model(bucketing: str) -> None:
    """A write between micro-batches, evaluation between them, ``reshard``, and the end of the model."""
    unsharded, model = pair(make=partial(Stack, 1))
    fsdp_compile.configure(model, gather="once a step", bucketing=bucketing)
    run = torch.compile(model, backend="passes", dynamic=True, fullgraph=True)
    model.set_requires_gradient_sync(False)
    all_of_them = both(run, unsharded, 0)
    assert both(run, unsharded, 1) == 0 < all_of_them
    with torch.no_grad():
        for one in (model, unsharded):
            one.layers[0].up.bias.mul_(2.0)
    assert 0 < both(run, unsharded, 2) <= all_of_them
    with torch.no_grad(), Wire() as wire:
        torch.testing.assert_close(run(tokens(3, 0)), unsharded(tokens(3, 0)))
    assert wire.calls["gather"] == 0
    assert both(run, unsharded, 3) == all_of_them, "a forward without a backward frees, on both paths"
    for unit in units_in(model):
        unit.modules[0].reshard()
    assert both(run, unsharded, 4) == all_of_them
    model.set_requires_gradient_sync(True)
    assert both(run, unsharded, 5) == 0
    assert_same_grads(model, unsharded)
    model.set_requires_gradient_sync(False)
    assert both(run, unsharded, 6) == all_of_them
    stay = [weakref.ref(bucket) for unit in units_in(model) for bucket in unit.keeper.buckets.values()]
    assert len({ref() for ref in stay}) == all_of_them
    del run, model, unit
    torch._dynamo.reset()
    gc.collect()
    assert not any(ref() is not None for ref in stay)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("how", ["foreach", "fused"])
@on_two_ranks
def test_a_step_of_any_optimizer_is_a_write(how: str, keeps: bool) -> None:
    """Torch counts no write by these optimizers to a DTensor. The forward without a backward leaves the root gathered."""
    unsharded, model = pair(make=partial(Stack, 1))
    if keeps:
        model.set_reshard_after_backward(False)
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2, **{how: True}) for one in (model, unsharded)]
    for step in range(3):
        assert both(model, unsharded, step) > 0
        assert_same_grads(model, unsharded)
        model(tokens(step, 0))
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)


@contextmanager
def announced() -> Iterator[list[Called]]:
    """The calls of graphs inside the block, as they are compared with those of other ranks."""
    calls: list[Called] = []
    ledger.hear = lambda entry: calls.append(entry) if isinstance(entry, Called) else None
    try:
        yield calls
    finally:
        ledger.hear = None


@on_two_ranks
def test_graphs_announce_the_launches_that_they_make() -> None:
    unsharded, model = pair(make=partial(Stack, 1))
    fsdp_compile.configure(model, gather="once a step")
    run = compiled(model, "passes")
    model.set_requires_gradient_sync(False)
    for number in range(2):
        with announced() as calls:
            num_gathers = both(run, unsharded, number)
        kinds = [launch.kind for called in calls for launch in called.text.launches]
        assert kinds == ["all_gather"] * num_gathers
        assert (num_gathers == 0) == (number > 0)


@on_two_ranks
def test_a_rank_may_run_eagerly_beside_one_that_compiles() -> None:
    unsharded, model = pair(make=partial(Stack, 1))
    fsdp_compile.configure(model, gather="once a step")
    run = compiled(model, "passes")
    with torch.compiler.set_stance("force_eager" if dist.get_rank() == 1 else "default"):
        for step in range(3):
            with Wire() as wire:
                accumulated(model, run, unsharded, range(3 * step, 3 * step + 3))
            launches: list[Any] = [None, None]
            dist.all_gather_object(launches, wire.launches)
            assert launches[0] == launches[1] and launches[0]
            scaled(model, unsharded)


class Returns(Stack):
    """Returns a weight as well, to which the caller may write."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), self.layers[0].up.weight


@on_two_ranks
def test_what_the_caller_gets_does_not_stay() -> None:
    unsharded, model = pair(make=partial(Returns, 1))
    fsdp_compile.configure(model, gather="once a step")
    whole = torch.compile(model, backend="passes", dynamic=True, fullgraph=True)
    model.set_requires_gradient_sync(False)

    def run(batch: Tensor) -> Tensor:
        logits, weight = whole(batch)
        loss_of(logits).backward()
        weight.detach().zero_()
        return logits.detach().requires_grad_()

    for number in range(3):
        run(tokens(number, dist.get_rank()))
        for rank in range(2):
            (loss_of(unsharded(tokens(number, rank))[0]) / 2).backward()
    model.set_requires_gradient_sync(True)
    run(tokens(3, dist.get_rank()))
    for rank in range(2):
        (loss_of(unsharded(tokens(3, rank))[0]) / 2).backward()
    assert_same_grads(model, unsharded)


def plan_within(model: Any, budget: int | str) -> Plan:
    fsdp_compile.configure(model, memory_budget=budget)
    return planned(model, tokens(0, 0))


@on_two_ranks
def test_within_a_budget_what_it_keeps_is_gathered_once() -> None:
    unsharded, model = pair(make=partial(Stack, 2))
    fsdp_compile.configure(model, gather="once a step")
    choice = plan_within(model, "1TiB").choice
    assert choice is not None
    sizes = {one.name: one.peak_bytes for one in (choice.chosen, *choice.lost)}
    plan = plan_within(model, (sizes[AGAIN] + sizes[KEPT]) // 2)
    assert plan.choice is not None and plan.choice.is_met
    assert plan.keep and {*plan.params} > {*plan.keep}
    run = torch.compile(model, backend="passes", dynamic=True, fullgraph=True)
    first, *others = accumulated(model, run, unsharded, range(4))
    assert 0 < others[0] == others[1] < first
    # The graph of the last one may keep less: it takes what is there, and gathers again in backward.
    assert 0 < others[2] <= first
    assert not any(unit.keeper.buckets for unit in units_in(model))


@pytest.mark.usefixtures("fake_group_of_four")
def test_what_keeps_slices_is_refused() -> None:
    model = fsdp_compile.fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    with pytest.raises(ValueError, match="keeps whole parameters"):
        fsdp_compile.configure(model, gather="once a step")
    with pytest.raises(ValueError, match="gather='always' is none of for each micro-batch, once a step"):
        fsdp_compile.configure(model, gather="always")
