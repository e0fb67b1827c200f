"""Ranks that run a model in different ways launch the same collectives, and train on.

One falls back to Python after some steps, or never compiles, while the others run graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compile
from fsdp_compile import fully_shard
from fsdp_compile.core.param import READS
from fsdp_compile.eager import forward
from tests.comparing import assert_same_grads, batches, loss_of, mine, reference_backward, train_and_compare
from tests.compiling import compile_blocks, compiled
from tests.models import Again, Block, Checkpointed, PartlyUsedBlock, Stack, shard, twins
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks
from tests.recording import Wire
from tests.test_compiled_blocks import Inner

NUM_STEPS = 5


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 31, (2, 3 + step), generator=generator)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = Stack
    options: dict[str, Any] = field(default_factory=dict)
    how: str = "stance"  # or "limit": that of recompilations; or "never", or an "error", from the beginning
    blocks: bool = False  # compiled one by one, not the whole model
    nested: bool = False  # a unit inside of each block
    holds_back: bool = False  # every other step is without sync
    decides_late: bool = False  # to synchronize: between forward and backward
    evaluates: bool = False  # before each step, without gradients
    differs: int = 1  # the rank that falls back, or compiles nothing


def _does_not_compile(module: Any, inputs: Any) -> Any:
    raise AssertionError("does not compile here")


def train(case: Case) -> list[int]:
    """One rank falls back after two steps; of how many units each step read parameters eagerly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    differs = rank == case.differs
    unsharded, model = twins(case.make)
    for layer in model.layers if case.nested else ():
        fully_shard(layer.mlp, **case.options)
    shard(model, **case.options)
    if case.blocks:
        compile_blocks(model, "passes", fullgraph=False)
    run = model if case.blocks else compiled(model, "passes", fullgraph=False)
    if differs and case.how == "error":
        run = torch.compile(model, backend=_does_not_compile)
    read: set[Any] = set()

    def observe(module: nn.Module, name: str) -> None:
        read.add(module.__dict__[READS][name][1])

    def around(number: int) -> Any:
        if differs and (case.how == "never" or (case.how == "stance" and number in (2, 3))):
            return torch.compiler.set_stance("force_eager")
        if differs and case.how == "limit":  # each step has another length
            return torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
        if differs and case.how == "error":
            return torch._dynamo.config.patch(suppress_errors=True)
        return nullcontext()

    def step(number: int) -> None:
        if case.evaluates:
            with torch.no_grad():
                run(_tokens(number, rank).flip(0))
        loss = loss_of(run(_tokens(number, rank)))
        if case.decides_late:
            model.set_requires_gradient_sync(True)
        loss.backward()

    forward.read_observers.append(observe)
    counts, launched = [], []
    try:
        for number in range(NUM_STEPS):
            read.clear()
            holds_back = case.holds_back and number % 2 == 0
            model.set_requires_gradient_sync(not (holds_back or case.decides_late))
            with around(number), Wire() as wire:
                step(number)
            launched += wire.launches
            counts.append(len(read))
            torch.stack([loss_of(unsharded(_tokens(number, other))) for other in range(world)]).mean().backward()
            if not holds_back:
                assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-4)
                for one in (model, unsharded):
                    one.zero_grad()
                    with torch.no_grad():
                        for param in one.parameters():
                            param.mul_(1.01)
    finally:
        forward.read_observers.remove(observe)
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, launched)
    assert all(one == by_rank[0] for one in by_rank) and launched
    return counts


@pytest.mark.parametrize("blocks", [False, True])
def test_a_rank_that_falls_back_trains_on(two_ranks: Ranks, blocks: bool) -> None:
    stays, falls_back = two_ranks.run(train, Case(how="limit", blocks=blocks))
    around = 1 if blocks else 0  # the root, which is not compiled then
    assert stays == [around] * NUM_STEPS
    assert falls_back == [around, around, 3, 3, 3]


@on_two_ranks
def test_a_rank_may_compile_after_all_ran_eagerly() -> None:
    """Nobody follows anybody: the eager path launches, bucket by bucket, what the graph of such a model does."""
    unsharded, model = twins()
    shard(model)
    for step in range(3):
        model.zero_grad()
        unsharded.zero_grad()
        compiles = step > 0 and dist.get_rank() == 0
        run = compiled(model, "passes") if compiles else model
        loss_of(run(mine(step))).backward()
        reference_backward(unsharded, batches(step))
        assert_same_grads(model, unsharded)


def test_around_compiled_blocks_ranks_launch_the_same_whatever_they_compile(two_ranks: Ranks) -> None:
    """Of a model whose head is tied, and whose blocks have parameters that nobody reads; one is called twice."""
    make = partial(Again, 3, tied=True, block=PartlyUsedBlock)
    stays, never = two_ranks.run(train, Case(make, blocks=True, how="never"))
    assert max(stays) == 1 < min(never)


class Shifted(nn.Module):
    """Its first parameter is on one rank alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shift, self.up = nn.Parameter(torch.ones(1, dim)), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x * self.shift)


CASES = {
    "kept behind forward": Case(partial(Stack, 1), options={"reshard_after_forward": False}),
    "synchronizing late, and a parameter with one row": Case(partial(Stack, 1, block=Shifted), decides_late=True),
    "blocks that accumulate": Case(blocks=True, holds_back=True, evaluates=True),
    "units in blocks": Case(partial(Stack, 1, block=Inner), nested=True),
}


class Placed(Block):
    """A block that looks rows of a table up, so that a checkpointed one does it twice."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.places = nn.Embedding(16, dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.places(torch.arange(x.shape[1])))


@pytest.mark.more
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_it_does_in_every_mode(two_ranks: Ranks, case: Case) -> None:
    stays, differs = two_ranks.run(train, case)
    assert max(differs) > max(stays)


@on_two_ranks
def test_tables_are_gathered_again_where_a_checkpointed_region_reads_them() -> None:
    unsharded, model = twins(partial(Checkpointed, 1, block=Placed))
    train_and_compare(compiled(shard(model, reshard_after_forward=True), "passes"), model, unsharded, steps=1)


@pytest.mark.parametrize("how", ["never", pytest.param("error", marks=pytest.mark.more)])
def test_a_rank_that_never_compiles_trains_on(two_ranks: Ranks, how: str) -> None:
    # Where a graph failed, all that the root has is gathered at once. That is one bucket if embedding and head are tied.
    never, compiles = two_ranks.run(train, Case(partial(Stack, 1, tied=how == "error"), how=how, differs=0))
    assert never == [2] * NUM_STEPS
    assert compiles == [0] * NUM_STEPS


class Rows(nn.Module):
    """Blocks alone: its root has no parameters. The first one may be called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(2))
        self.twice, self.fails = False, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.fails:
            raise KeyError("on the way")
        return self.layers[1](self.layers[0](x) if self.twice else x)


@on_two_ranks
def test_where_all_ranks_fall_back_all_is_as_it_was() -> None:
    """Every rank compiles, and then every rank runs eagerly: what worked without a graph still does."""
    unsharded, model = twins(Rows)
    shard(model, reshard_after_forward=True)
    run = compiled(model, "passes", fullgraph=False)
    rank, world = dist.get_rank(), dist.get_world_size()

    def batch(number: int, rank: int = rank) -> Tensor:
        return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * number + rank))

    def check(*numbers: int) -> None:
        """Gradients are those of these batches."""
        for number in numbers:
            torch.stack([unsharded(batch(number, other)).pow(2).mean() for other in range(world)]).mean().backward()
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-4)
        for one in (model, unsharded):
            one.zero_grad()

    def train_on(number: int) -> None:
        run(batch(number)).pow(2).mean().backward()
        check(number)

    @contextmanager
    def eagerly() -> Iterator[None]:
        """Two steps of the graph; then what stands in the block is the first that runs without it, and a step follows."""
        train_on(0)
        train_on(1)
        with torch.compiler.set_stance("force_eager"):
            yield
            train_on(4)

    with eagerly():  # gradients of inputs alone
        ours, theirs = (batch(2).requires_grad_() for _ in range(2))
        (grad,) = torch.autograd.grad(run(ours).pow(2).mean(), [ours])
        (expected,) = torch.autograd.grad(unsharded(theirs).pow(2).mean(), [theirs])
        torch.testing.assert_close(grad, expected)
        assert all(param.grad is None for param in model.parameters())
    with eagerly():  # gradients that are asked for
        grads = torch.autograd.grad(run(batch(2)).pow(2).mean(), list(model.parameters()))
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert param.grad is None
            param.grad = grad
        check(2)
    with eagerly():  # a penalty on gradients
        x = batch(2).requires_grad_()
        (slope,) = torch.autograd.grad(run(x).sum(), [x], create_graph=True)
        inputs = [batch(2, other).requires_grad_() for other in range(world)]
        slopes = [torch.autograd.grad(unsharded(one).sum(), [one], create_graph=True)[0] for one in inputs]
        torch.testing.assert_close(slope, slopes[rank])
        slope.pow(2).sum().backward()
        for one in slopes:
            (one.pow(2).sum() / world).backward()
        check()
    with eagerly():  # synchronization that is decided between forward and backward
        model.set_requires_gradient_sync(False)
        loss = run(batch(2)).pow(2).mean()
        model.set_requires_gradient_sync(True)
        loss.backward()
        check(2)
    with eagerly():  # two forwards in front of their backwards
        losses = [run(batch(number)).pow(2).mean() for number in (2, 3)]
        for loss in losses:
            loss.backward()
        check(2, 3)
    with eagerly():  # an error on the way
        model.fails = True
        with pytest.raises(KeyError):
            run(batch(2))
        model.fails = False
    for one in (unsharded, model):
        one.twice = True
    with eagerly():  # a block that is called twice
        pass
    for one in (unsharded, model):
        one.layers[1].up.weight.requires_grad_(False)
    with eagerly():  # a parameter that does not train as long as there is a graph
        for one in (unsharded, model):
            one.layers[1].up.weight.requires_grad_()
    train_on(5)


@pytest.mark.parametrize(
    ("backend", "inputs_train"), [("passes", False), pytest.param("inductor", True, marks=pytest.mark.slow)]
)
@on_two_ranks
def test_it_runs_a_model_of_which_nothing_trains(backend: str, inputs_train: bool) -> None:
    """A teacher, whose graph has no backward although gradients are on, unless its inputs ask for them."""
    for first in range(2):  # rank 1 runs eagerly from the first step on, and then after it has compiled
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


@on_two_ranks
def test_a_rank_may_run_a_forward_that_gathers_nothing_alone() -> None:
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
