"""Inputs that a forward writes to, and random numbers: nothing is moved across a write, nor computed again behind it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.apply.overlap import overlap
from fsdp_compile.passes.ir.effects import held_behind
from fsdp_compile.passes.schedule.activations import activations_of
from fsdp_compile.passes.schedule.planner import plan_graph
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    batches,
    compare_one_step,
    full,
    loss_of,
    mine,
    reference_backward,
)
from tests.models import one_unit, pair
from tests.on_ranks import on_two_ranks
from tests.test_passes import Builder, spec

aten = torch.ops.aten


class Counted(nn.Module):
    """Adds how often it was called, and something random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.calls.view(2, 4).reshape(8) + torch.rand(8)
        self.calls.add_(1.0)
        return y + torch.rand(8)


@on_two_ranks
def test_a_buffer_is_read_before_it_is_written_to() -> None:
    unsharded, sharded = one_unit(Counted)
    runs = {one: torch.compile(one, fullgraph=True) for one in (sharded, unsharded)}
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(4):
        results = []
        for model, run in runs.items():
            torch.manual_seed(step)
            with torch.set_grad_enabled(step < 2), torch._inductor.config.patch(fallback_random=True):
                results.append(run(x))
            if step < 2:
                model.zero_grad()
                results[-1].sum().backward()
        torch.testing.assert_close(*results)
        torch.testing.assert_close(sharded.calls, torch.full((8,), step + 1.0))
    for ours, theirs in zip(sharded.parameters(), unsharded.parameters()):
        mean = theirs.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(full(ours.grad), mean / dist.get_world_size())


def _linear_with_a_buffer() -> fx.Graph:
    b = Builder()
    its = spec("weight", (4, 4))
    shard, buffer, x = b.input("primals_1", 2, 4), b.input("primals_2", 4), b.input("primals_3", 3, 4)
    more = b.call(aten.add.Tensor, buffer, 1.0)
    weight = b.unshard(shard, its)
    out = b.call(aten.add.Tensor, b.call(aten.mm.default, x, weight), b.call(aten.view.default, buffer, [1, 4]))
    written = b.call(aten.copy_.default, buffer, more)
    return b.output(out, written)


def test_a_write_stays_behind_what_reads_views_of_the_old_value() -> None:
    graph = _linear_with_a_buffer()
    plan = plan_graph(graph, "forward")
    insert(graph, plan)
    overlap(graph, plan)
    names = [node.name for node in graph.nodes]
    assert names.index("add_tensor_1") < names.index("copy__default")
    assert names.index("add_tensor") < names.index("wait_tensor_default")  # that needs no weight, and may stay


def test_the_next_write_and_reads_of_the_new_value_are_held_behind_a_write() -> None:
    b = Builder()
    buffer, other = b.input("primals_1", 4), b.input("primals_2", 4)
    before = b.call(aten.mul.Tensor, buffer, 2.0)
    first = b.call(aten.copy_.default, buffer, other)
    after = b.call(aten.mul.Tensor, buffer, 3.0)
    second = b.call(aten.copy_.default, buffer, after)
    one, two = (b.call(aten.rand_like.default, other) for _ in range(2))
    graph = b.output(before, first, after, second, one, two)
    behind = {node: {*held} for node, held in held_behind(list(graph.nodes)).items() if held}
    assert behind == {first: {before}, after: {first}, second: {first, after}, two: {one}}


def test_what_is_computed_with_an_input_that_is_written_to_is_not_computed_again() -> None:
    def named(writes: bool) -> set[str]:
        b = Builder()
        up, down = spec("up", (64, 256)), spec("down", (256, 64))
        shards = [b.input("primals_1", 32, 256), b.input("primals_2", 128, 64)]
        buffer, h, grad = b.input("primals_3", 256), b.input("primals_4", 256, 64), b.input("tangents_1", 256, 64)
        weights = [b.unshard(shards[0], up, "0.up"), b.unshard(shards[1], down, "0.down")]
        wide = b.call(aten.relu.default, b.call(aten.add.Tensor, b.call(aten.mm.default, h, weights[0]), buffer))
        out = b.call(aten.mm.default, wide, weights[1])
        written = [b.call(aten.copy_.default, buffer, b.call(aten.add.Tensor, buffer, 1.0))] if writes else []
        of_down = b.reduce(b.call(aten.mm.default, b.call(aten.t.default, wide), grad), down, weights[1])
        inner = b.call(aten.mm.default, grad, b.call(aten.t.default, weights[1]))
        of_wide = b.call(aten.mul.Tensor, inner, wide)
        of_up = b.reduce(b.call(aten.mm.default, b.call(aten.t.default, h), of_wide), up, weights[0])
        graph = b.output(out, *written, of_up, of_down)
        return {node.name for nodes in activations_of(graph).values() for node in nodes}

    assert named(False) - named(True) == {"relu_default", "add_tensor"}


# --- parameters that the graph writes to


@pytest.mark.parametrize("how", ["one by one", "together"])
@pytest.mark.parametrize("path", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_two_ranks
def test_a_graph_reads_what_it_has_written_into_shards(path: str, how: str) -> None:
    """As the encoder is that follows another one slowly, or weights that are clipped before each forward."""
    unsharded, sharded = pair()

    def update(model: nn.Module) -> None:
        with torch.no_grad():
            if how == "one by one":
                for param in model.parameters():
                    param.mul_(0.9).add_(0.001)
            else:
                torch._foreach_mul_(list(model.parameters()), 0.5)

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        update(model)
        return loss_of(model(tokens))

    run = torch.compile(step, backend=path)
    for number in range(3):
        sharded.zero_grad()
        unsharded.zero_grad()
        run(sharded, mine(number)).backward()
        update(unsharded)
        reference_backward(unsharded, batches(number))
        assert_same_params(sharded, unsharded)
        assert_same_grads(sharded, unsharded)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampedAsData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.compat
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@on_two_ranks
def test_what_a_forward_writes_into_a_gathered_parameter_it_reads_again(backend: str | None) -> None:
    for kind in (Clamped, ClampedAsData):
        compare_one_step(*one_unit(lambda kind=kind: kind(8, 8)), torch.ones(2, 8), backend)


class LookedUpTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, max_norm=1.0)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.table(a) + self.table(b)


@on_two_ranks
def test_rows_that_a_lookup_scales_are_no_writes() -> None:
    unsharded, sharded = one_unit(LookedUpTwice)
    inputs = torch.arange(5), torch.arange(3, 8)
    torch.testing.assert_close(torch.compile(sharded, backend="aot_eager")(*inputs), unsharded(*inputs))


def test_no_graph_is_kept_for_having_been_asked_about() -> None:
    b = Builder()
    marker = b.reduce(b.call(aten.mul.Tensor, b.input("tangents_1", 4, 4), 2.0), spec("weight", (4, 4)))
    graph = b.output(marker, b.call(aten.add.Tensor, marker.args[0], 1.0))
    insert(graph, plan_graph(graph, "backward"))
    gone = weakref.ref(graph)
    del b, marker, graph
    gc.collect()
    assert gone() is None


# --- memory that is in flight, or handed out


class Overwritten(nn.Module):
    """The table's gradient is the one that goes on backward, where Inductor writes zeros into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)
        self.table = nn.Parameter(torch.randn(4096, 512))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        hidden = self.first(x).index_put((rows,), torch.zeros(len(rows), 512))
        return self.last(hidden + self.table)


@pytest.mark.slow
@on_two_ranks
def test_a_gradient_in_flight_is_not_written_to() -> None:
    unsharded, sharded = one_unit(Overwritten)
    inputs = torch.randn(4096, 512), torch.arange(4096)
    torch.compile(sharded)(*inputs).pow(2).sum().backward()
    unsharded(*inputs).pow(2).sum().backward()
    assert_same_grads(sharded, unsharded, atol=1e-2, rtol=1e-3)


def test_what_may_be_written_to_is_not_sent_itself() -> None:
    b = Builder()
    its, other = (spec(name, (4, 4), bucketing="none") for name in ("weight", "other"))
    grad, rows = b.input("tangents_1", 4, 4), b.input("rows", 2, dtype=torch.int64)
    shared, alone = (b.call(aten.mul.Tensor, grad, factor) for factor in (2.0, 3.0))
    zeros = b.call(aten.index_put.default, b.call(aten.view.default, shared, [4, 4]), [rows], b.call(aten.sum.default, grad))
    sums = b.call(aten.add.Tensor, alone, 1.0)
    graph = b.output(b.reduce(shared, its), b.reduce(alone, other), zeros, sums)
    insert(graph, plan_graph(graph, "backward"))
    sent = {node.args[0] for node in graph.nodes if str(node.target).startswith("_c10d_functional.reduce_scatter")}
    assert {node.target for node in sent} == {aten.lift_fresh_copy.default, aten.mul.Tensor}


@pytest.mark.parametrize("writes", [False, True])
def test_a_shard_that_the_graph_writes_to_is_not_sent_itself(writes: bool) -> None:
    b = Builder()
    shard, x = b.input("primals_1", 2, 4), b.input("primals_2", 3, 4)
    out = b.call(aten.mm.default, x, b.unshard(shard, spec("weight", (4, 4))))
    written = [b.call(aten.copy_.default, shard, b.call(aten.mul.Tensor, shard, 2.0))] if writes else []
    graph = b.output(out, *written)
    insert(graph, plan_graph(graph, "forward"))
    (sent,) = [node.args[0] for node in graph.nodes if "all_gather_into_tensor" in str(node.target)]
    assert (sent is shard) != writes


class Summed(nn.Module):
    """Of two matrices with one gradient, each large enough to travel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(512, 512)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b)


@pytest.mark.slow
@on_two_ranks
def test_two_parameters_with_one_gradient_get_one_each() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "alone"))["alone"]
    unsharded, sharded = one_unit(Summed, mesh=mesh)
    run, x = torch.compile(sharded), torch.randn(4, 512)
    for _ in range(2):
        run(x).sum().backward()
        unsharded(x).sum().backward()
        assert_same_grads(sharded, unsharded, rtol=1e-3)
