"""What nodes and collectives cost, against numbers worked out by hand, a ring played through, and torch's own counter."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from fsdp_compile.passes import (
    Group,
    HardwareProfile,
    Link,
    collective_seconds,
    graph_seconds,
    load_profile,
    node_seconds,
)
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.cost.fusion import fused_away, kernels_of
from fsdp_compile.passes.cost.profiles import PROFILES, Fit
from fsdp_compile.passes.cost.roofline import group_of, launch_seconds, node_flops, sent_by, slowdown
from fsdp_compile.passes.ir.aliases import DEFAULT_SIZE, base_of, is_free, storages_of
from fsdp_compile.passes.schedule.planner import plan_graph
from fsdp_compile.passes.wire.collectives import is_launch
from tests.test_passes import BF16, Builder, replicated, spec

aten = torch.ops.aten

LINK = Link(latency_s=1e-5, step_s=1e-6, bytes_per_s=100e9, efficiency=0.5)
SLOW = Link(latency_s=4e-5, step_s=2e-6, bytes_per_s=10e9, efficiency=0.8)
TOY = HardwareProfile(
    name="toy", backend="nccl", flops={"float32": 1e12, "bfloat16": 4e12}, matmul_efficiency=0.5, memory_bytes=10**9,
    memory_bytes_per_s=1e11, host_bytes_per_s=1e10, memory_efficiency=0.8, kernel_s=1e-6, ranks_per_node=4, inside=LINK,
    between=SLOW,
)  # fmt: skip
MEMORY = 0.8e11  # bytes a second that TOY reaches


def test_a_large_matmul_takes_its_flops_and_a_small_one_its_bytes() -> None:
    b = Builder()
    large = b.call(aten.mm.default, b.input("a", 512, 256, dtype=BF16), b.input("b", 256, 384, dtype=BF16))
    thin = b.call(aten.mm.default, b.input("c", 512, 1), b.input("d", 1, 384))
    assert node_flops(large) == 2 * 512 * 256 * 384
    assert node_seconds(large, TOY) == pytest.approx(1e-6 + 2 * 512 * 256 * 384 / 2e12)
    assert node_seconds(thin, TOY) == pytest.approx(1e-6 + 4 * (512 + 384 + 512 * 384) / MEMORY)


def test_float32_matmuls_take_tf32_only_where_it_is_allowed() -> None:
    b = Builder()
    node = b.call(aten.mm.default, b.input("a", 512, 512), b.input("b", 512, 512))
    with_tf32 = dataclasses.replace(TOY, flops={**TOY.flops, "tf32": 2e12}, kernel_s=0.0)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, flops in (("highest", 1e12), ("high", 2e12)):
            torch.set_float32_matmul_precision(precision)
            assert node_seconds(node, with_tf32) == pytest.approx(2 * 512**3 / (flops / 2))
            assert node_seconds(node, TOY) == pytest.approx(1e-6 + 2 * 512**3 / (1e12 / 2))
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # the newer setting, after which the older one raises
        assert node_seconds(node, with_tf32) == pytest.approx(2 * 512**3 / (2e12 / 2))
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)


def test_what_only_renames_memory_is_free() -> None:
    b = Builder()
    x = b.input("x", 8, 6)
    free = [
        x, b.call(aten.t.default, x), b.call(aten.view.default, x, [48]), b.call(aten.unsqueeze.default, x, 0),
        b.call(aten.expand.default, b.call(aten.unsqueeze.default, x, 0), [5, 8, 6]), b.call(aten.slice.Tensor, x, 0, 2, 4),
        b.call(aten.reshape.default, x, [6, 8]), b.call(aten._unsafe_view.default, x, [48]),
        b.call(aten.split.Tensor, x, 4), b.call(aten.sym_size.int, x, 0),
    ]  # fmt: skip
    assert [node_seconds(node, TOY) for node in free] == [0.0] * len(free)
    copied = b.call(aten.reshape.default, b.call(aten.t.default, x), [48])
    written = b.call(aten.mul_.Tensor, x, 2.0)
    assert node_seconds(copied, TOY) == node_seconds(written, TOY) == pytest.approx(1e-6 + 2 * 48 * 4 / MEMORY)


def test_bytes_that_are_read_are_those_that_are_there() -> None:
    b = Builder()
    table, rows = b.input("table", 50_000, 16), b.input("rows", 10, dtype=torch.int64)
    embedded = b.call(aten.embedding.default, table, rows)
    assert node_seconds(embedded, TOY) == pytest.approx(1e-6 + (2 * 10 * 16 * 4 + 10 * 8) / MEMORY)
    bias = b.call(aten.expand.default, b.input("bias", 1, 64), [100, 64])
    copied = b.call(aten.clone.default, bias)
    assert node_seconds(copied, TOY) == pytest.approx(1e-6 + (64 + 100 * 64) * 4 / MEMORY)
    summed = b.call(aten.sum.dim_IntList, b.input("x", 100, 64), [0])
    assert node_seconds(summed, TOY) == pytest.approx(1e-6 + (100 * 64 + 64) * 4 / MEMORY)


def test_copies_to_and_from_the_cpu_take_the_slow_way() -> None:
    group = Group(2, 2)
    launches = []
    for device in ("", "cpu"):
        b = Builder()
        graph = b.output(b.call(aten.relu.default, b.unshard(b.input("shard", 2, 3), spec(device=device))))
        insert(graph, plan_graph(graph, "forward"))
        launches.append(next(node for node in graph.nodes if is_launch(node)))
    there, offloaded = (launch_seconds(launch, group, TOY) for launch in launches)
    assert offloaded - there == pytest.approx(2 * 3 * 4 / (1e10 * 0.8))


def test_pointwise_ops_are_computed_where_they_are_read() -> None:
    b = Builder()
    x, y, weight = b.input("x", 64, 32), b.input("y", 64, 32), b.input("weight", 32, 16)
    scaled = b.call(aten.mul.Tensor, x, 2.0)
    added = b.call(aten.add.Tensor, scaled, y)
    active = b.call(aten.gelu.default, b.call(aten.view.default, added, [64, 32]))
    out = b.call(aten.mm.default, active, weight)
    total = b.call(aten.sum.default, b.call(aten.mul.Tensor, scaled, x))
    seconds = graph_seconds(b.output(out, total), TOY)
    one = 64 * 32 * 4
    # One kernel reads x and y and writes what mm reads; the sum is in it too, for it reads the same.
    fused = [seconds[node] for node in (scaled, added, active, total)]
    assert sum(fused) + seconds[next(iter(total.all_input_nodes))] == pytest.approx(1e-6 + (3 * one + 4) / MEMORY)
    assert seconds[scaled] == 0 and seconds[active] == pytest.approx(1e-6 + 3 * one / MEMORY)
    assert seconds[out] == node_seconds(out, TOY)
    assert sum(seconds.values()) < sum(node_seconds(node, TOY) for node in seconds)


def test_a_value_that_two_matmuls_lie_between_is_computed_in_two_kernels() -> None:
    b = Builder()
    x, y, weight, mask = b.input("x", 64, 64), b.input("y", 64, 64), b.input("weight", 64, 64), b.input("mask", 64, 64)
    stream = b.call(aten.add.Tensor, x, y)
    masked = b.call(aten.mul.Tensor, stream, b.call(aten.neg.default, mask))
    matmul = b.call(aten.mm.default, masked, weight)
    after = b.call(aten.mul.Tensor, matmul, b.call(aten.neg.default, mask))
    last = b.call(aten.mm.default, b.call(aten.add.Tensor, stream, after), weight)
    graph = b.output(last)
    seconds, one = graph_seconds(graph, TOY), 64 * 64 * 4
    kernels = [[node.name for node in writes] for writes in kernels_of(graph)]
    assert kernels == [["mul_tensor"], ["mm_default"], ["add_tensor_1"], ["mm_default_1"]]
    assert seconds[masked] == pytest.approx(1e-6 + 4 * one / MEMORY)  # x, y, mask
    assert seconds[last.args[0]] == pytest.approx(1e-6 + 5 * one / MEMORY)  # x and y again, mask, and the matmul


def test_no_size_is_data() -> None:
    b = Builder()
    x = b.input("x", 64, 32)
    hidden = b.call(aten.mul.Tensor, x, 2.0)
    rows = b.graph.call_function(aten.sym_size.int, (hidden, 0))
    rows.meta["val"] = 64
    zeros = b.graph.call_function(aten.full.default, ([rows, 32], 0.0))
    with b.mode:
        zeros.meta["val"] = torch.zeros(64, 32)
    flat = b.call(aten.mm.default, zeros, b.input("weight", 32, 8))
    total = b.call(aten.sum.default, hidden)
    graph = b.output(flat, total)
    assert base_of(rows) is rows
    assert hidden in fused_away(graph) and zeros not in fused_away(graph)  # mm needs the zeros, nobody but sum the rest
    assert graph_seconds(graph, TOY)[zeros] == pytest.approx(1e-6 + 64 * 32 * 4 / MEMORY)  # written, nothing read
    item = b.graph.call_function(aten._local_scalar_dense.default, (total,))
    item.meta["val"] = 1.0
    assert is_free(rows) and not is_free(item)


def test_cat_is_written_by_what_it_joins() -> None:
    b = Builder()
    x, y = b.input("x", 64, 32), b.input("y", 64, 32)
    left, right = b.call(aten.mul.Tensor, x, 2.0), b.call(aten.add.Tensor, y, 1.0)
    joined = b.call(aten.cat.default, [left, right])
    graph = b.output(b.call(aten.sum.default, joined))
    assert fused_away(graph) == {left, right}
    assert graph_seconds(graph, TOY)[joined] == pytest.approx(1e-6 + 4 * 64 * 32 * 4 / MEMORY)


@pytest.mark.parametrize(
    ("places", "dim", "is_read_twice", "is_nowhere"),
    [
        ((64, 1), 1, False, True),
        ((64, 1), -1, False, True),
        ((1, 32), 0, False, True),
        ((64, 2), 1, False, False),  # Inductor compares one place a row
        ((32, 1), 1, False, False),  # ... in every row
        ((64, 1), 1, True, False),
    ],
)
def test_one_hot_rows_are_nowhere(places: tuple[int, int], dim: int, is_read_twice: bool, is_nowhere: bool) -> None:
    """As the gradient of a cross entropy has them, a row a token and a column a word."""
    b = Builder()
    place = b.graph.placeholder("place")
    with b.mode:
        place.meta["val"] = torch.zeros(*places, dtype=torch.int64)
    zeros = b.call(aten.full.default, [64, 32], 0.0)
    one_hot = b.call(aten.scatter.value, zeros, dim, place, -1.0)
    results = [b.call(aten.sum.default, b.call(aten.mul.Tensor, one_hot, 2.0))]
    if is_read_twice:
        results.append(b.call(aten.mm.default, zeros, b.input("weight", 32, 8)))
    graph = b.output(*results)
    assert ({zeros, one_hot} <= fused_away(graph)) == is_nowhere
    assert (one_hot in fused_away(graph)) == is_nowhere


def test_what_the_cpu_is_slow_at_is_not_computed_twice() -> None:
    def away(device: str) -> tuple[list[str], list[list[str]]]:
        b = Builder()
        with b.mode:
            scores = b.graph.placeholder("scores")
            scores.meta["val"] = torch.empty(8, 8, device=device)
        exp = b.call(aten.exp.default, b.call(aten.mul.Tensor, scores, 2.0))
        graph = b.output(b.call(aten.div.Tensor, exp, b.call(aten.sum.dim_IntList, exp, [1], True)))
        kernels = [[node.name for node in writes] for writes in kernels_of(graph)]
        return sorted(node.name for node in fused_away(graph)), kernels

    assert away("cuda") == (["exp_default", "mul_tensor"], [["sum_dim_int_list", "div_tensor"]])
    assert away("cpu") == (["mul_tensor"], [["exp_default", "sum_dim_int_list", "div_tensor"]])


def test_a_users_triton_kernel_gives_its_results_by_name() -> None:
    b = Builder()
    x = b.input("x", 64, 32)
    kernel = b.graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_functional, (), {"kwargs": {"x": x}})
    with b.mode:
        kernel.meta["val"] = {"out": torch.empty(64, 32), "sums": torch.empty(64)}
    sums = b.graph.call_function(operator.getitem, (kernel, "sums"))
    sums.meta["val"] = kernel.meta["val"]["sums"]
    graph = b.output(sums)
    assert [(one.node, one.num_bytes) for one in storages_of(graph)[sums]] == [(kernel, 64 * 4)]
    assert node_seconds(kernel, TOY) == pytest.approx(1e-6 + (2 * 64 * 32 + 64) * 4 / MEMORY)
    assert node_seconds(sums, TOY) == 0 and base_of(sums) is kernel
    writing = b.graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, (), {"kwargs": {"x": x}})
    writing.meta["val"] = None
    assert node_seconds(writing, TOY) == pytest.approx(1e-6 + 64 * 32 * 4 / MEMORY)


class Mixed(torch.nn.Module):
    """A bit of everything that has a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.conv = torch.nn.Conv1d(8, 16, 3, groups=2)
        self.linear = torch.nn.Linear(16, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        return torch.einsum("bsd,btd->bst", x, x).softmax(-1).sum()


def _loss_and_grads(model: torch.nn.Module) -> Callable[..., Any]:
    def call(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> Any:
        loss = torch.func.functional_call(model, params, (tokens,))
        return loss, torch.autograd.grad(loss, list(params.values()))

    return call


def test_flops_of_a_step_are_what_torch_counts_when_it_runs() -> None:
    model, tokens = Mixed(), torch.arange(18).view(2, 9) % 11
    params = dict(model.named_parameters())
    graph = make_fx(_loss_and_grads(model), tracing_mode="fake")(params, tokens).graph
    with FlopCounterMode(display=False) as counter:
        _loss_and_grads(model)(params, tokens)
    assert sum(map(node_flops, graph.nodes)) == counter.get_total_flops() > 0


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_two_matmuls_forward_and_five_backward(causal: bool, kv_heads: int) -> None:
    b = Builder()
    q, k, v = b.input("q", 2, 4, 32, 8), b.input("k", 2, kv_heads, 48, 8), b.input("v", 2, kv_heads, 48, 8)
    node = b.graph.call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, causal))
    grad = b.graph.call_function(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (q, q, k, v, q, q, 0.0, causal)
    )
    matmul = 2 * (2 * 4) * 32 * 48 * 8 * (0.5 if causal else 1)
    assert (node_flops(node), node_flops(grad)) == (2 * matmul, 5 * matmul)
    if not causal and kv_heads == 4:  # torch's counter, on the same attention spelled out
        query, key, value = (torch.rand(one.meta["val"].shape) for one in (q, k, v))
        with FlopCounterMode(display=False) as counter:
            torch.softmax(query @ key.mT, -1) @ value
        assert counter.get_total_flops() == 2 * matmul


def test_attention_in_a_real_graph_takes_longer_where_its_kernels_reach_less_than_matmuls() -> None:
    q = torch.rand(2, 4, 512, 64, requires_grad=True)
    graph = make_fx(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), tracing_mode="fake")(q).graph
    [node] = [node for node in graph.nodes if node_flops(node)]
    b = Builder()
    mm = b.call(aten.mm.default, b.input("a", 512, 512), b.input("b", 512, 512))
    for efficiency in (1.0, 0.25):
        profile = dataclasses.replace(TOY, attention_efficiency=efficiency)
        flops = 2 * 2 * (2 * 4) * 512 * 512 * 64 / 2
        assert node_seconds(node, profile) == pytest.approx(TOY.kernel_s + flops / (1e12 * 0.5 * efficiency))
        assert node_seconds(mm, profile) == node_seconds(mm, TOY)


def test_flex_attention_and_grouped_matmuls_have_formulas() -> None:
    b = Builder()
    q, k = b.input("q", 2, 4, 32, 8), b.input("k", 2, 4, 48, 8)
    matmul = 2 * (2 * 4) * 32 * 48 * 8
    higher = torch.ops.higher_order
    assert node_flops(b.graph.call_function(higher.flex_attention, (q, k, k, None))) == 2 * matmul
    assert node_flops(b.graph.call_function(higher.flex_attention_backward, (q, k, k, q, q, q))) == 5 * matmul
    rows, experts, parts = b.input("rows", 100, 16), b.input("experts", 4, 16, 24), b.input("parts", 16, 100)
    spread = b.call(aten.expand.default, b.input("row", 1, 16), [100, 16])
    for left, right, flops in (
        (rows, experts, 2 * 100 * 16 * 24), (spread, experts, 2 * 100 * 16 * 24), (parts, rows, 2 * 100 * 16 * 16),
        (b.input("maps", 4, 24, 16), parts, 2 * 24 * 16 * 100),
    ):  # fmt: skip
        assert node_flops(b.graph.call_function(aten._grouped_mm.default, (left, right))) == flops
        scaled = b.graph.call_function(aten._scaled_grouped_mm.default, (left, right, row := b.input("s", 1), row))
        assert node_flops(scaled) == flops


def _matmul_of(size: Any, mode: FakeTensorMode) -> fx.Node:
    graph = fx.Graph()
    with mode:
        left, right = graph.placeholder("left"), graph.placeholder("right")
        left.meta["val"], right.meta["val"] = torch.empty(size, 64), torch.empty(64, 32)
        node = graph.call_function(aten.mm.default, (left, right))
        node.meta["val"] = left.meta["val"] @ right.meta["val"]
    return node


def test_a_symbolic_size_is_what_was_seen_of_it_or_a_constant() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    traced = make_fx(lambda x: x @ x.new_ones(64, 32), tracing_mode="symbolic")(torch.rand(96, 64)).graph
    symbolic = next(node for node in traced.nodes if node.target is aten.mm.default)
    assert isinstance(symbolic.meta["val"].shape[0], torch.SymInt)
    assert node_seconds(symbolic, TOY) == node_seconds(_matmul_of(96, FakeTensorMode()), TOY)
    unseen = _matmul_of(env.create_unbacked_symint(), mode)
    assert node_seconds(unseen, TOY) == node_seconds(_matmul_of(DEFAULT_SIZE, FakeTensorMode()), TOY)


def _ring(kind: str, num_bytes: int, group: Group) -> tuple[float, float]:
    """Play a ring through, chunk by chunk: bytes that a rank sends, and bytes that leave its node."""
    chunk = num_bytes / group.num_ranks
    rounds = (group.num_ranks - 1) * (2 if kind == "all_reduce" else 1)
    by_rank, left_node = [0.0] * group.num_ranks, [0.0] * group.num_ranks
    for _ in range(rounds):
        for rank in range(group.num_ranks):
            by_rank[rank] += chunk
            if rank // group.ranks_per_node != (rank + 1) % group.num_ranks // group.ranks_per_node:
                left_node[rank // group.ranks_per_node] += chunk
    return max(by_rank), max(left_node)


@pytest.mark.parametrize(
    ("ranks", "inside", "between", "levels"),
    [((2, 2), 1, 0, 1), ((4, 4), 3, 0, 2), ((8, 4), 6, 1, 3), ((16, 4), 12, 3, 4), ((3, 1), 0, 2, 2), ((16, 1), 0, 15, 4)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_ring_takes_the_slower_of_its_links(
    kind: str, ranks: tuple[int, int], inside: int, between: int, levels: int
) -> None:
    group, num_bytes = Group(*ranks), 48_000_000
    sent, left = _ring(kind, num_bytes, group)
    inside_s = sent / 50e9 if group.ranks_per_node > 1 else 0.0
    between_s = left / group.ranks_per_node / 8e9  # a node has as many adapters as it has ranks of the group
    link = SLOW if group.num_ranks > group.ranks_per_node else LINK
    # From the first rank to the last one along the ring; a small sum goes up a tree and down again.
    steps_s = 2 * levels * link.step_s if kind == "all_reduce" else inside * 1e-6 + between * 2e-6
    expected = link.latency_s + steps_s + max(inside_s, between_s)
    assert collective_seconds(kind, num_bytes, group, TOY) == pytest.approx(expected)


def test_an_all_to_all_sends_each_rank_its_part() -> None:
    # Of 8 parts a rank keeps one, sends 3 inside its node and 4 through its adapter.
    seconds = collective_seconds("all_to_all", 80_000_000, Group(8, 4), TOY)
    assert seconds == pytest.approx(4e-5 + 2e-6 + max(30e6 / 50e9, 40e6 / 8e9))
    assert collective_seconds("all_to_all", 80_000_000, Group(4, 4), TOY) == pytest.approx(1.1e-5 + 60e6 / 50e9)
    assert collective_seconds("all_to_all", 80_000_000, Group(1, 1), TOY) == 0.0


def test_gloo_scatters_by_reducing_everything() -> None:
    gloo = dataclasses.replace(TOY, backend="gloo")
    group, num_bytes = Group(4, 4), 40_000_000
    scatter, reduce = (collective_seconds(kind, num_bytes, group, gloo) for kind in ("reduce_scatter", "all_reduce"))
    assert scatter == reduce == pytest.approx(1e-5 + 2 * 3 * 1e-6 + 2 * 30e6 / 50e9)
    assert collective_seconds("all_gather", num_bytes, group, gloo) == pytest.approx(1e-5 + 3e-6 + 30e6 / 50e9)


def test_what_was_measured_goes_before_the_figures() -> None:
    link = dataclasses.replace(LINK, measured={"all_gather": Fit(1e-3, 1e9)}, measured_ranks=2)
    profile = dataclasses.replace(TOY, backend="gloo", inside=link)
    assert collective_seconds("all_gather", 8_000_000, Group(2, 2), profile) == pytest.approx(1e-3 + 4e-3)
    assert collective_seconds("all_gather", 8_000_000, Group(4, 4), profile) == pytest.approx(1e-3 + 2e-6 + 6e-3)
    assert collective_seconds("all_reduce", 8_000_000, Group(2, 2), profile) == pytest.approx(1e-5 + 2e-6 + 8e6 / 50e9)
    one_link = dataclasses.replace(TOY, inside=link, between=link)
    # 12 MB go around the ring, and leave a node by 2 adapters; 3 steps, of which the measured figure has one.
    assert collective_seconds("all_gather", 16_000_000, Group(4, 2), one_link) == pytest.approx(1e-3 + 2e-6 + 6e-3)


def test_what_was_measured_between_nodes_of_many_ranks_is_what_it_was() -> None:
    link = dataclasses.replace(SLOW, measured={"all_gather": Fit(1e-4, 8e9)}, measured_ranks=8, measured_per_node=4)
    profile = HardwareProfile.from_json(dataclasses.replace(TOY, between=link).to_json())
    assert collective_seconds("all_gather", 64, Group(8, 4), profile) == pytest.approx(1e-4, rel=1e-3)
    # Of twice as many nodes: two steps more between them, and six inside.
    more_s = 2 * 2e-6 + 6 * 1e-6
    assert collective_seconds("all_gather", 64, Group(16, 4), profile) == pytest.approx(1e-4 + more_s, rel=1e-3)


def test_floats_that_were_not_measured_are_no_slower_than_wider_ones() -> None:
    h100 = PROFILES["h100"]
    flops = {name: rate for name, rate in h100.flops.items() if not name.startswith("float8")}
    b = Builder()
    x, w = (b.input(name, 4096, 4096, dtype=torch.float8_e4m3fn) for name in ("x", "w"))
    product = b.call(aten.mm.default, x, w)
    narrow, wide = (node_seconds(product, one) for one in (h100, dataclasses.replace(h100, flops=flops)))
    assert wide == pytest.approx(2 * narrow, rel=0.2)


def test_compute_is_slowed_by_all_links_that_are_taken() -> None:
    links = {
        name: dataclasses.replace(LINK, slows_compute=share) for name, share in (("inside", 0.3), ("between", 0.1))
    }
    profile = dataclasses.replace(TOY, **links)
    assert [slowdown(Group(*ranks), profile) for ranks in ((4, 4), (8, 4), (2, 1))] == [0.3, 0.3, 0.1]


def test_a_group_is_placed_on_nodes_by_its_ranks() -> None:
    assert Group.of(range(8), TOY) == Group(8, 4)
    assert Group.of([1, 5, 9], TOY) == Group(3, 1)
    assert Group.of([0, 1, 4], TOY) == Group(3, 2)
    assert group_of("g", TOY, {"g": Group(2, 2)}) == group_of("g", TOY, lambda name: Group(2, 2)) == Group(2, 2)
    with pytest.raises(ValueError, match=r"speaks to the group 'g', but groups has h\. Add it"):
        group_of("g", TOY, {"h": Group(2, 2)})
    with pytest.raises(ValueError, match="2 ranks cannot have 3 of them on a node"):
        Group(2, 3)
    with pytest.raises(ValueError, match="'gather' is no kind of collective"):
        collective_seconds("gather", 1, Group(2, 2), TOY)


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_launches_say_what_they_send(reduction: str) -> None:
    b = Builder()
    its_spec = replicated(size=(6, 3), local_length=3, dtype=BF16, reduction=reduction, group="g", replicate_group="r")
    w = b.unshard(b.input("shard", 3, 3), its_spec)
    graph = b.output(b.call(aten.relu.default, w), b.reduce(b.input("grad", 6, 3), its_spec))
    insert(graph, plan_graph(graph, "backward"))
    sent = [dataclasses.astuple(sent_by(node)) for node in graph.nodes if node.name.startswith(("all_", "reduce_sc"))]
    assert sorted(sent) == sorted(
        [("all_gather", 6 * 3 * 2, "g"), (reduction, 6 * 3 * 4, "g"), ("all_reduce", 3 * 3 * 4, "r")]
    )


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_built_in_profiles_go_to_json_and_back(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    assert HardwareProfile.from_json(profile.to_json()) == profile and profile.name == name
    assert load_profile(name.upper()) is profile
    (tmp_path / "p.json").write_text(profile.to_json())
    assert load_profile(tmp_path / "p.json") == profile
    assert hash(profile) == hash(load_profile(tmp_path / "p.json"))


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "gb200"])
def test_peaks_are_those_of_dense_matmuls(name: str) -> None:
    """Tensor cores double their rate with each halving of the dtype; a figure with sparsity would stand out."""
    profile = load_profile(name)
    flops = profile.flops
    assert flops["bfloat16"] == flops["float16"] == pytest.approx(2 * flops["tf32"], rel=0.03)
    assert flops.get("float8_e4m3fn", 2 * flops["bfloat16"]) == pytest.approx(2 * flops["bfloat16"], rel=0.01)
    # 312 a published measurement of A100; of the others, what the best shapes were measured at lies below the peak.
    measured = {"a100": 268e12, "h100": 794.5e12, "h200": 720e12, "b200": 1745e12, "gb200": 1822e12}[name]
    assert 0.7 < measured / flops["bfloat16"] < 0.9
    # Sustained, under the limit of power, is no faster than the best shape in a short burst.
    assert flops["bfloat16"] * profile.matmul_efficiency <= measured


def test_64_ranks_are_inside_one_rack_of_gb200() -> None:
    rack, nodes = (Group.of(range(64), load_profile(name)) for name in ("gb200", "b200"))
    assert not rack.spans_nodes and nodes.spans_nodes
    inside = collective_seconds("all_gather", 10**9, rack, load_profile("gb200"))
    assert inside < collective_seconds("all_gather", 10**9, nodes, load_profile("b200"))


def _edited(**changes: Any) -> str:
    fields = json.loads(TOY.to_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = fields
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("{", ValueError, "This is not JSON .* `fsdp-compile calibrate --out` writes a profile"),
        ("[]", TypeError, r"HardwareProfile is \[\], not an object of fields"),
        (_edited(kernel_us=1), ValueError, "HardwareProfile has no field 'kernel_us'. Its fields are name, backend, "),
        (_edited(kernel_s=None), ValueError, "HardwareProfile lacks 'kernel_s'. Add it; its fields are name, "),
        (_edited(kernel_s="1"), TypeError, "HardwareProfile.kernel_s is '1'. Give a number at least 0."),
        (_edited(kernel_s=-1), ValueError, "HardwareProfile.kernel_s is -1. Give a number at least 0."),
        (_edited(matmul_efficiency=1.2), ValueError, "matmul_efficiency is 1.2. Give a number above 0 and at most 1."),
        (_edited(attention_efficiency=0), ValueError, "attention_efficiency is 0. Give a number above 0 and at most 1."),
        (_edited(memory_bytes=1.5), TypeError, "HardwareProfile.memory_bytes is 1.5. Give a whole number, at least 1."),
        (_edited(flops__bfloat16=0), ValueError, r"HardwareProfile.flops\['bfloat16'\] is 0. Give a number above 0."),
        (_edited(flops={}), ValueError, "HardwareProfile.flops has no 'float32', which stands in for"),
        (_edited(backend="mpi"), ValueError, "HardwareProfile.backend is 'mpi', not one of gloo, nccl."),
        (_edited(name=""), ValueError, "HardwareProfile.name is ''. Give it a name"),
        (_edited(inside=3), TypeError, "HardwareProfile.inside is 3, not an object of fields."),
        (_edited(inside__step_s=None), ValueError, "HardwareProfile.inside lacks 'step_s'. Add it"),
        (_edited(inside__slows_compute=1), ValueError, "Link.slows_compute is 1. Give a number at least 0 and below 1."),
        (_edited(inside__measured={"gather": {"latency_s": 0, "bytes_per_s": 1}}, inside__measured_ranks=2), ValueError,
         "Link.measured has 'gather', which is none of all_gather, "),
        (_edited(inside__measured={"all_gather": {"latency_s": 0, "bytes_per_s": 1}}), ValueError,
         "Link.measured_ranks is 0. Give a number at least 2."),
        (_edited(inside__measured={"all_gather": {"latency_s": 0}}), ValueError,
         "HardwareProfile.inside.measured.all_gather lacks 'bytes_per_s'"),
    ],
)  # fmt: skip
def test_a_wrong_profile_says_what_is_wrong_with_it(
    text: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        HardwareProfile.from_json(text)
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(error, match=f"mine.json: .*{says}"):
        load_profile(tmp_path / "mine.json")


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(b"\x80\x02}q")
    with pytest.raises(ValueError, match=r"mine.json is not text \(.*\)\. `fsdp-compile calibrate --out` writes a profile"):
        load_profile(tmp_path / "mine.json")
    known = "no hardware profile 'h1000': give one of cpu, a100, h100, h200, b200, gb200, or the path of a file"
    with pytest.raises(ValueError, match=known):
        load_profile("h1000")
