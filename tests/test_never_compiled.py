"""A rank that never had the graph launches what the others' graphs launch, from the first step on."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile
from fsdp_compile import fully_shard
from fsdp_compile.core import exchange
from fsdp_compile.core.exchange import others_of
from fsdp_compile.core.unit import unit_of, units_in
from fsdp_compile.eager.ways import own_way
from fsdp_compile.passes.ledger import ledger
from tests.comparing import assert_same_grads
from tests.compiling import compiled
from tests.models import Checkpointed, Stack, shard, twins
from tests.ranks import Ranks
from tests.test_route import NUM_STEPS, Case, Inner, _rows, _tokens, never_compiling, train
from tests.test_structure import Net, Noisy


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "never" else pytest.mark.more) for how in never_compiling]
)
def test_it_trains_on(two_ranks: Ranks, how: str) -> None:
    compiles, never = two_ranks.run(train, Case(how=how))
    assert (compiles, never) == ([0] * NUM_STEPS, [3] * NUM_STEPS)


CASES = {
    "in bfloat16": Case(
        options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        tolerance=3e-2,
    ),
    "tied": Case(partial(Stack, tied=True)),
    "checkpointed": Case(Checkpointed),
    "kept behind forward": Case(options={"reshard_after_forward": False}),
    "computing again": Case(budget=1),
    "frozen": Case(frozen=("layers.0.up.weight", "layers.1.down.bias", "embed.weight")),
    "accumulating": Case(holds_back=True),
    "synchronizing late": Case(decides_late=True),
    "evaluating": Case(evaluates=True),
    "backward twice": Case(twice=True),
    "units in blocks": Case(partial(Stack, 3, block=Inner), nested=True),
    "whole over blocks": Case(both=True),
    "on Inductor": Case(backend="inductor"),
}


@pytest.mark.filterwarnings("ignore:memory_budget is 1 byte")
@pytest.mark.parametrize("how", [pytest.param("never", marks=pytest.mark.more), pytest.param("unwrapped", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_it_does_in_every_mode(two_ranks: Ranks, name: str, how: str) -> None:
    compiles, never = two_ranks.run(_by_name, name, how)
    assert max(compiles) < min(never)


def _by_name(name: str, how: str) -> list[int]:
    return train(dataclasses.replace(CASES[name], how=how))


@pytest.mark.parametrize(
    "never",
    [
        pytest.param(ranks, marks=pytest.mark.more if ranks in ((0,), (0, 1, 2)) else pytest.mark.slow)
        for ranks in ((0,), (2,), (0, 1), (0, 1, 2))
    ],
)
def test_of_three_ranks(three_ranks: Ranks, never: tuple[int, ...]) -> None:
    """Whichever they are; and where none compiles, they are as they were."""
    counts = three_ranks.run(train, Case(how="never", never=never))
    assert [max(one) > 0 for one in counts] == [rank in never for rank in range(3)]


def _compile_after_all() -> None:
    """Rank 1 follows for a step; then all ranks compile another model whose parameters are called the same."""
    for never, options in ((1, {}), (2, CASES["in bfloat16"].options)):
        run: Any = compiled(shard(Stack(), **options), "passes")
        with torch.compiler.set_stance("force_eager" if dist.get_rank() == never else "default"):
            run(_tokens(0, 0)).float().pow(2).mean().backward()


def _over_taken_shards() -> None:
    """Both ranks compile one model. A second model takes over its shards: rank 0 compiles that one, rank 1 does not."""
    unsharded, model = twins()
    shard(model)
    run: Any = compiled(model, "passes")
    run(_tokens(0, 0)).float().pow(2).mean().backward()
    other = shard(Stack())
    other.load_state_dict({name: value.detach() for name, value in model.state_dict().items()}, assign=True)
    torch._dynamo.reset()
    run = compiled(other, "passes") if dist.get_rank() == 0 else other
    run(_tokens(0, dist.get_rank())).float().pow(2).mean().backward()
    torch.stack([unsharded(_tokens(0, rank)).float().pow(2).mean() for rank in range(2)]).mean().backward()
    assert_same_grads(other, unsharded)


@pytest.mark.more
def test_it_follows_a_model_whose_graph_ran_on_the_same_shards(two_ranks: Ranks) -> None:
    two_ranks.run(_over_taken_shards, limit_s=100)


@pytest.mark.more
def test_it_may_compile_after_all(two_ranks: Ranks) -> None:
    """Ranks compare the plans that they make, and this one has made fewer."""
    two_ranks.run(_compile_after_all)


def _nothing_trains(backend: str, inputs_train: bool) -> None:
    """Rank 1 runs eagerly: from the first step on, and then after it has compiled."""
    for first in range(2):
        unsharded, model = (nn.Sequential(*one.layers) for one in twins())
        for layer in model:
            fully_shard(layer)
        fully_shard(model).requires_grad_(False)
        run: Any = compiled(model, backend)
        for step in range(3):
            x = torch.randn(2, 16, requires_grad=inputs_train)
            eagerly = dist.get_rank() == 1 and step >= first
            with torch.compiler.set_stance("force_eager" if eagerly else "default"):
                y = run(x)
            expected = unsharded(x)
            torch.testing.assert_close(y, expected)
            if inputs_train:
                (grad,), (its,) = torch.autograd.grad(y.sum(), [x]), torch.autograd.grad(expected.sum(), [x])
                torch.testing.assert_close(grad, its)


@pytest.mark.parametrize(
    ("backend", "inputs_train"), [("passes", False), pytest.param("inductor", True, marks=pytest.mark.more)]
)
def test_it_runs_a_model_of_which_nothing_trains(two_ranks: Ranks, backend: str, inputs_train: bool) -> None:
    """A teacher, whose graph has no backward although gradients are on, unless its inputs ask for them."""
    two_ranks.run(_nothing_trains, backend, inputs_train)


PLANNED = {
    **{name: CASES[name] for name in ("in bfloat16", "tied", "checkpointed", "kept behind forward", "frozen")},
    "many kinds of layers": Case(lambda: Net(without=(Noisy,)), _rows, {"reshard_after_forward": True}),
}


def _texts(name: str) -> list[tuple[Any, Any]]:
    """Of each step, what its forward said that its backward launches, and what that launched."""
    case = PLANNED[name]
    model = case.make()
    for fqn in case.frozen:
        model.get_parameter(fqn).requires_grad_(False)
    run = compiled(shard(model, **case.options), "passes")
    for step in range(2):
        run(case.batch(step, dist.get_rank())).float().pow(2).mean().backward()
    texts = [text for text, _ in ledger.ran()]
    launched = {text.step: _plainly(text.launches) for text in texts if text.stage == "backward"}
    return [(_plainly(text.then), launched[text.step]) for text in texts if text.step in launched and text.then]


def _plainly(launches: Any) -> list[Any]:
    return [(one.kind == "all_gather", one.dtype, one.num_bytes, one.names, one.members) for one in launches or ()]


@pytest.mark.more
@pytest.mark.parametrize("name", PLANNED)
def test_a_forward_says_what_its_backward_launches(two_ranks: Ranks, name: str) -> None:
    for said in two_ranks.run(_texts, name):
        assert said
        for planned, launched in said:
            assert planned == launched and launched


def _all_eager(late_s: float, patience_s: float) -> tuple[int, float]:
    """How often a rank asks in three steps that all run eagerly, the first without gradients on one, and how long."""
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded, model = twins(Stack)
    shard(model, reshard_after_forward=True)
    asked: list[float] = []
    ask = exchange.Others._ask

    def timed(self: exchange.Others, kind: str) -> str:
        begun = time.monotonic()
        heard = ask(self, kind)
        asked.append(time.monotonic() - begun)
        return heard

    with mock.patch.object(exchange.Others, "_ask", timed), mock.patch.object(exchange, "PATIENCE_S", patience_s):
        dist.barrier()
        time.sleep(late_s if rank == 0 else 0)
        with torch.set_grad_enabled(rank == 1):
            model(_tokens(0, rank))
        for step in range(2):
            model(_tokens(step, rank)).pow(2).mean().backward()
            torch.stack([unsharded(_tokens(step, of)).pow(2).mean() for of in range(world)]).mean().backward()
            assert_same_grads(model, unsharded, atol=1e-5)
    return len(asked), max(asked)


def _where_another_model_was() -> tuple[bool, bool]:
    """On rank 1 the shards of an eager model lie where those of a compiled one lay, which is gone."""
    _, compiled_one = twins(Stack)
    shard(compiled_one)
    batch = torch.arange(12).view(2, 6)
    compiled(compiled_one, "passes")(batch).sum().backward()
    unsharded, model = twins(Stack)
    shard(model)
    lay, lie = ([param.address for unit in units_in(one) for param in unit.params] for one in (compiled_one, model))
    now = dict(zip(lay, lie, strict=True))
    if dist.get_rank() == 1:
        ran = list(ledger._ran.items())
        ledger._ran.clear()
        for (text, addresses), number in ran:
            ledger._ran[text, tuple(now.get(one, one) for one in addresses)] = number
    top = unit_of(model)
    assert top is not None
    followed = own_way(top) is not None
    model(batch).sum().backward()
    unsharded(batch).sum().backward()
    assert_same_grads(model, unsharded)
    return followed, others_of(top).has_asked


def test_a_graph_of_a_model_that_is_gone_is_nobodys_way(two_ranks: Ranks) -> None:
    assert two_ranks.run(_where_another_model_was) == [(False, True), (False, True)]


def test_where_all_ranks_run_eagerly_each_asks_once(two_ranks: Ranks) -> None:
    for times, longest_s in two_ranks.run(_all_eager, 0.0, 300.0):
        assert times == 1
        assert longest_s < 60  # and not until patience is at its end


@pytest.mark.more
def test_a_rank_does_not_wait_without_end(two_ranks: Ranks) -> None:
    """One that comes much too late finds the others on their way, eagerly, and joins them."""
    late, early = two_ranks.run(_all_eager, 4.0, 0.5)
    assert late[0] == early[0] == 1
    assert early[1] < 4


def _alone() -> None:
    """One rank runs forwards in which nothing is gathered, while the others are elsewhere."""
    model = shard(Stack())
    inputs = torch.ones(2, 3, 16)
    full, embedded = fsdp_compile.full_params(model), torch.zeros(2, 5, dtype=torch.long)
    with full:
        if dist.get_rank() == 0:
            model(embedded)
    model.layers[1].unshard()
    if dist.get_rank() == 0:
        model.layers[1](inputs)
    dist.barrier()
    model.layers[1].reshard()


def _alone_without_asking() -> None:
    with mock.patch.object(exchange.Others, "_ask", side_effect=AssertionError("it asks")):
        _alone()


def test_a_forward_that_gathers_nothing_asks_nobody(two_ranks: Ranks) -> None:
    two_ranks.run(_alone_without_asking)
