"""Ranks that run a model in different ways launch the same collectives, and train on.

One falls back to Python after some steps, or never compiles, while the others run graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile
from fsdp_compile import fully_shard
from fsdp_compile.core.param import READS
from fsdp_compile.eager import forward
from tests.comparing import assert_same_grads, batches, loss_of, reference_backward, train_and_compare
from tests.compiling import compiled
from tests.models import Again, Block, Checkpointed, PartlyUsedBlock, Stack, shard, twins
from tests.ranks import Ranks
from tests.recording import Wire
from tests.test_structure import WIDTH, Net, Noisy

NUM_STEPS = 5


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 31, (2, 3 + step), generator=generator)


def _rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3 + step, WIDTH, generator=generator)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = Stack
    batch: Callable[[int, int], Tensor] = _tokens
    options: dict[str, Any] = field(default_factory=dict)
    how: str = "stance"  # or "limit": that of recompilations; or one of ``never_compiling``, from the beginning
    blocks: bool = False  # compiled one by one, not the whole model
    both: bool = False  # the whole model, and its blocks
    nested: bool = False  # a unit inside of each block
    backend: str = "passes"
    replicated: bool = False
    frozen: tuple[str, ...] = ()
    holds_back: bool = False  # every other step is without sync
    decides_late: bool = False  # to synchronize: between forward and backward
    evaluates: bool = False  # before each step, without gradients
    twice: bool = False  # backward, through the same graph
    tolerance: float = 1e-5
    never: tuple[int, ...] = (1,)  # ranks that compile nothing, where ``how`` says so


def _within(context: Callable[[], Any], run: Any) -> Any:
    def call(batch: Tensor) -> Tensor:
        with context():
            return run(batch)

    return call


def _with_an_error(model: nn.Module, run: Any) -> Any:
    def fails(module: Any, inputs: Any) -> Any:
        raise AssertionError("does not compile here")

    return _within(lambda: torch._dynamo.config.patch(suppress_errors=True), torch.compile(model, backend=fails))


# Of a model and what torch.compile made of it: what a rank calls that has no graph.
never_compiling: dict[str, Callable[[nn.Module, Any], Any]] = {
    "never": lambda model, run: _within(lambda: torch.compiler.set_stance("force_eager"), run),
    "unwrapped": lambda model, run: model,
    "disabled": lambda model, run: torch._dynamo.disable(lambda batch: model(batch)),
    "switch": lambda model, run: torch.compile(model, disable=True),
    "limit of none": lambda model, run: _within(lambda: torch._dynamo.config.patch(recompile_limit=0), run),
    "error": _with_an_error,
}


def train(case: Case) -> list[int]:
    """Rank 1 falls back after two steps; of how many units each step read parameters eagerly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded, model = twins(case.make)
    options = dict(case.options)
    if case.replicated:
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for one in (unsharded, model):
        for fqn in case.frozen:
            one.get_parameter(fqn).requires_grad_(False)
    for layer in model.layers if case.nested else ():
        fully_shard(layer.mlp, **options)
    shard(model, **options)
    if case.blocks or case.both:
        for layer in model.layers:
            layer.compile(backend=case.backend)
    run = model if case.blocks else compiled(model, case.backend, fullgraph=False)
    if rank in case.never and case.how in never_compiling:
        run = never_compiling[case.how](model, run)
    read: set[Any] = set()

    def observe(module: nn.Module, name: str) -> None:
        read.add(module.__dict__[READS][name][1])

    forward.read_observers.append(observe)
    counts, launched = [], []

    def step(number: int) -> None:
        if case.evaluates:
            with torch.no_grad():
                run(_other(case.batch(number, rank)))
        loss = run(case.batch(number, rank)).float().pow(2).mean()
        if case.decides_late:
            model.set_requires_gradient_sync(True)
        loss.backward(retain_graph=case.twice)
        if case.twice:
            loss.backward()

    try:
        for number in range(NUM_STEPS):
            read.clear()
            holds_back = case.holds_back and number % 2 == 0
            model.set_requires_gradient_sync(not (holds_back or case.decides_late))
            with ExitStack() as stack:
                # Buffers that are donated are no more for a second backward.
                stack.enter_context(torch._functorch.config.patch(donated_buffer=not case.twice))
                if rank == 1 and case.how == "stance" and number in (2, 3):
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                if rank == 1 and case.how == "limit":  # each step has another length
                    stack.enter_context(torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False))
                with Wire() as wire:
                    step(number)
                launched += wire.launches
            counts.append(len(read))
            losses = [unsharded(case.batch(number, other)).float().pow(2).mean() for other in range(world)]
            (torch.stack(losses).mean() * (2 if case.twice else 1)).backward()
            if not holds_back:
                assert_same_grads(model, unsharded, atol=case.tolerance, rtol=10 * case.tolerance)
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


def _other(batch: Tensor) -> Tensor:
    return batch.flip(0)


@pytest.mark.parametrize(
    ("how", "backend", "blocks"),
    [
        ("limit", "passes", False),
        ("limit", "passes", True),
        pytest.param("limit", "inductor", False, marks=pytest.mark.more),
        pytest.param("stance", "inductor", True, marks=pytest.mark.more),
    ],
)
def test_a_rank_that_falls_back_trains_on(two_ranks: Ranks, how: str, backend: str, blocks: bool) -> None:
    stays, falls_back = two_ranks.run(train, Case(how=how, blocks=blocks, backend=backend))
    around = 1 if blocks else 0  # the root, which is not compiled then
    assert stays == [around] * NUM_STEPS
    assert falls_back == [around, around, 3, 3, around if how == "stance" else 3]


def _compiled_later(backend: str) -> None:
    unsharded, model = twins(lambda: Stack(3))
    shard(model)
    for step in range(4):
        model.zero_grad()
        unsharded.zero_grad()
        compiles = step > 0 and dist.get_rank() == 0
        run = compiled(model, backend) if compiles else model
        loss_of(run(batches(step)[dist.get_rank()])).backward()
        reference_backward(unsharded, batches(step))
        assert_same_grads(model, unsharded)


@pytest.mark.parametrize("backend", ["passes", pytest.param("inductor", marks=pytest.mark.more)])
def test_a_rank_may_compile_after_all_ran_eagerly(two_ranks: Ranks, backend: str) -> None:
    """Nobody follows anybody: the eager path launches, bucket by bucket, what the graph of such a model does."""
    two_ranks.run(_compiled_later, backend)


BLOCKS = {
    "tied": Case(partial(Stack, tied=True), blocks=True, how="never"),
    "called twice": Case(partial(Again, 3), blocks=True, how="never"),
    "partly used": Case(partial(Stack, 3, block=PartlyUsedBlock), blocks=True, how="never"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "called twice" else pytest.mark.more) for kind in BLOCKS]
)
def test_around_compiled_blocks_ranks_launch_the_same_whatever_they_compile(two_ranks: Ranks, kind: str) -> None:
    stays, never = two_ranks.run(_of_blocks, kind)
    assert max(stays) == 1 < min(never)


def _of_blocks(kind: str) -> list[int]:
    return train(BLOCKS[kind])


class Inner(Block):
    """A block, and one inside of it that is a unit as well."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.mlp = Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mlp(x))


class Shifted(nn.Module):
    """Its first parameter is on one rank alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shift, self.up = nn.Parameter(torch.ones(1, dim)), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x * self.shift)


CASES = {
    "checkpointed": Case(Checkpointed),
    "tied": Case(partial(Stack, tied=True)),
    "kept behind forward": Case(options={"reshard_after_forward": False}),
    "in bfloat16": Case(
        options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        tolerance=3e-2,
    ),
    "frozen": Case(frozen=("layers.0.up.weight", "layers.1.down.bias", "embed.weight")),
    "accumulating": Case(holds_back=True),
    "synchronizing late": Case(decides_late=True),
    "a parameter with one row": Case(partial(Stack, block=Shifted)),
    "backward twice": Case(twice=True),
    "blocks that accumulate": Case(blocks=True, holds_back=True, evaluates=True),
    "whole over blocks": Case(both=True),
    "units in blocks": Case(partial(Stack, 3, block=Inner), nested=True),
    "whole over blocks with units": Case(partial(Stack, 3, block=Inner), both=True, nested=True),
    "many kinds of layers": Case(lambda: Net(without=(Noisy,)), _rows, {"reshard_after_forward": True}),
}


class Placed(Block):
    """A block that looks rows of a table up, so that a checkpointed one does it twice."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.places = nn.Embedding(16, dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.places(torch.arange(x.shape[1])))


LONG = ("many kinds of layers", "whole over blocks with units", "backward twice")


@pytest.mark.parametrize("how", ["stance", "never"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else pytest.mark.more) for name in CASES]
)
def test_it_does_in_every_mode(two_ranks: Ranks, name: str, how: str) -> None:
    stays, differs = two_ranks.run(_by_name, name, how)
    assert max(differs) > max(stays)


def _placed(backend: str) -> None:
    for make in (partial(Checkpointed, block=Placed), partial(Stack, block=Placed)):
        unsharded, model = twins(make)
        train_and_compare(compiled(shard(model, reshard_after_forward=True), backend), model, unsharded)


@pytest.mark.parametrize("backend", ["passes", pytest.param("inductor", marks=pytest.mark.more)])
def test_tables_are_gathered_again_where_a_checkpointed_region_reads_them(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(_placed, backend)


def _by_name(name: str, how: str) -> list[int]:
    case = CASES[name]
    return train(dataclasses.replace(case, how=how))


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "never" else pytest.mark.more) for how in never_compiling]
)
def test_a_rank_that_never_compiles_trains_on(two_ranks: Ranks, how: str) -> None:
    compiles, never = two_ranks.run(train, Case(how=how))
    assert (compiles, never) == ([0] * NUM_STEPS, [3] * NUM_STEPS)


@pytest.mark.parametrize("never", [pytest.param((0,), marks=pytest.mark.more), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_of_three_ranks(three_ranks: Ranks, never: tuple[int, ...]) -> None:
    counts = three_ranks.run(train, Case(how="never", never=never))
    assert [max(one) > 0 for one in counts] == [rank in never for rank in range(3)]


@pytest.mark.more
@pytest.mark.parametrize("how", ["stance", "never"])
def test_on_replicated_meshes(four_ranks: Ranks, how: str) -> None:
    _, differs, *_ = four_ranks.run(train, Case(replicated=True, how=how))
    assert differs == ([0, 0, 3, 3, 0] if how == "stance" else [3] * NUM_STEPS)


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


def _all_fall_back(what: str) -> None:
    """Every rank compiles, and then every rank runs eagerly: what worked without a graph still does."""
    unsharded, model = twins(Rows)
    for one in (unsharded, model):
        one.twice = what == "called twice"
        one.layers[1].up.weight.requires_grad_(what != "thawed")
    shard(model, reshard_after_forward=True)
    run = compiled(model, "passes", fullgraph=False)
    rank, world = dist.get_rank(), dist.get_world_size()

    def batch(number: int, rank: int = rank) -> Tensor:
        generator = torch.Generator().manual_seed(10 * number + rank)
        return torch.randn(3, 16, generator=generator)

    def reference(*numbers: int) -> None:
        for number in numbers:
            torch.stack([unsharded(batch(number, other)).pow(2).mean() for other in range(world)]).mean().backward()

    def check() -> None:
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-4)
        for one in (model, unsharded):
            one.zero_grad()

    for number in range(2):
        run(batch(number)).pow(2).mean().backward()
        reference(number)
        check()
    with torch.compiler.set_stance("force_eager"):
        if what == "inputs alone":
            ours, theirs = (batch(2).requires_grad_() for _ in range(2))
            (grad,) = torch.autograd.grad(run(ours).pow(2).mean(), [ours])
            (expected,) = torch.autograd.grad(unsharded(theirs).pow(2).mean(), [theirs])
            torch.testing.assert_close(grad, expected)
            assert all(param.grad is None for param in model.parameters())
        elif what == "asked for":
            grads = torch.autograd.grad(run(batch(2)).pow(2).mean(), list(model.parameters()))
            reference(2)
            for param, grad in zip(model.parameters(), grads, strict=True):
                assert param.grad is None
                param.grad = grad
            check()
        elif what == "penalty":
            ours, theirs = (batch(2).requires_grad_() for _ in range(2))
            grad, expected = (
                torch.autograd.grad(one(x).sum(), [x], create_graph=True)[0]
                for one, x in ((run, ours), (unsharded, theirs))
            )
            torch.testing.assert_close(grad, expected)
            grad.pow(2).sum().backward()
            everybody = [batch(2, other).requires_grad_() for other in range(world)]
            unsharded.zero_grad()
            for x in everybody:
                (first,) = torch.autograd.grad(unsharded(x).sum(), [x], create_graph=True)
                (first.pow(2).sum() / world).backward()
            check()
        elif what == "sync decided late":
            model.set_requires_gradient_sync(False)
            loss = run(batch(2)).pow(2).mean()
            model.set_requires_gradient_sync(True)
            loss.backward()
            reference(2)
            check()
        elif what == "two forwards first":
            losses = [run(batch(number)).pow(2).mean() for number in (2, 3)]
            for loss in losses:
                loss.backward()
            reference(2, 3)
            check()
        elif what == "after an error":
            model.fails = True
            with pytest.raises(KeyError):
                run(batch(2))
            model.fails = False
        elif what == "thawed":
            for one in (unsharded, model):
                one.layers[1].up.weight.requires_grad_()
        run(batch(4)).pow(2).mean().backward()
        reference(4)
        check()
    run(batch(5)).pow(2).mean().backward()
    reference(5)
    check()


@pytest.mark.parametrize(
    "what",
    [
        "called twice", "inputs alone", "asked for", "penalty", "sync decided late", "two forwards first",
        "after an error", "thawed",
    ],
)  # fmt: skip
def test_where_all_ranks_fall_back_all_is_as_it_was(two_ranks: Ranks, what: str) -> None:
    two_ranks.run(_all_fall_back, what)


def _compile_after_all() -> None:
    """Rank 1 follows for a step; then all ranks compile another model whose parameters are called the same."""
    for never, options in ((1, {}), (2, CASES["in bfloat16"].options)):
        run: Any = compiled(shard(Stack(), **options), "passes")
        with torch.compiler.set_stance("force_eager" if dist.get_rank() == never else "default"):
            run(_tokens(0, 0)).float().pow(2).mean().backward()


@pytest.mark.more
def test_it_may_compile_after_all(two_ranks: Ranks) -> None:
    """Ranks compare their plans, of which a rank that ran eagerly has made fewer."""
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


def test_a_rank_may_run_a_forward_that_gathers_nothing_alone(two_ranks: Ranks) -> None:
    two_ranks.run(_alone)
