"""Bytes alive over a graph, against what lives when the graph runs, and against numbers worked out by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile.passes import Group, events_of, load_profile, memory_curve
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.apply.overlap import overlap
from fsdp_compile.passes.cost.memory import ACTIVATION, BUFFER, GATHERED, GRADIENT, SHARD, kinds_of
from fsdp_compile.passes.schedule.planner import plan_graph
from fsdp_compile.passes.wire.collectives import gloo_all_gather, is_wait
from tests.recording import lifetimes
from tests.test_passes import Builder, spec

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators made while this mode was on, and that something still holds."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._seen = {one.untyped_storage()._cdata for one in inputs}
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self._made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def now(self) -> int:
        # An address that is free may be given out again.
        dead = [ref for ref, _ in self._made if ref.expired()]
        self._seen -= {ref.cdata for ref in dead}
        self._made = [(ref, size) for ref, size in self._made if not ref.expired()]
        return sum(size for _, size in self._made)


def run_and_weigh(graph: fx.Graph, inputs: list[Tensor]) -> list[int]:
    """Run a graph, forgetting each node's value after its last reader, and weigh while each node's readers hold it."""
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last_reader[node] = node
        for source in node.all_input_nodes:
            last_reader[source] = node
    feed = iter(inputs)
    values: dict[fx.Node, Any] = {}
    weighed = []
    with LiveBytes(inputs) as live:
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                del args, kwargs
            else:
                assert node.op == "output", node.op
            weighed.append(live.now())
            if node.op == "output":
                break
            for source in [one for one in values if last_reader[one] is node]:
                del values[source]
    return weighed


class Block(nn.Module):
    """Views, splits, a buffer in place, several results of one operator, dropout's mask, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).split(16, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1)
        x = F.relu_(self.conv(x.transpose(1, 2)).transpose(1, 2).contiguous() * 2)
        top = torch.topk(x, 4, dim=1)
        return x.mean() + top.values.sum() + (x * 2)[:, 1:].mul_(0.5).std()


def _joint(model: nn.Module) -> Callable[..., Any]:
    def call(params: dict[str, Tensor], x: Tensor) -> Any:
        loss = torch.func.functional_call(model, params, (x,))
        return loss, torch.autograd.grad(loss, list(params.values()))

    return call


@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_predicted_is_what_lives_when_the_graph_runs(batch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Identity())
    params, x = dict(model.named_parameters()), torch.rand(batch, 12, 16)
    graph = make_fx(_joint(model), tracing_mode="fake")(params, x).graph
    curve = memory_curve(graph)
    measured = run_and_weigh(graph, [one.detach() for one in params.values()] + [x])
    differences = [
        (name, predicted, found)
        for name, predicted, found in zip(curve.names, curve.live_bytes, measured, strict=True)
        if predicted != found
    ]
    assert differences == []
    assert curve.peak_bytes == max(measured) > 3 * x.nbytes
    assert curve.input_bytes == x.nbytes + sum(one.nbytes for one in params.values())
    assert sum(one.num_bytes for one in curve.peak_owners) == curve.peak_bytes


def test_optimizers_write_in_place_and_add_nothing() -> None:
    def step(param: Tensor, grad: Tensor, momentum: Tensor) -> Tensor:
        momentum.mul_(0.9).add_(grad)
        param.sub_(0.1 * momentum)
        return param.clone()

    inputs = [torch.rand(64, 4) for _ in range(3)]
    graph = make_fx(step, tracing_mode="fake")(*inputs).graph
    curve = memory_curve(graph)
    assert list(curve.live_bytes) == run_and_weigh(graph, inputs)
    assert (curve.peak_bytes, curve.input_bytes) == (1024, 3 * 1024)


def test_inputs_that_the_caller_gives_up_go_with_their_last_reader() -> None:
    b = Builder()
    saved, kept = b.input("saved", 100), b.input("kept", 10)
    b.input("unread", 1000)
    y = b.call(aten.mul.Tensor, b.call(aten.view.default, saved, [100]), 2.0)
    z = b.call(aten.relu.default, y)
    graph = b.output(z, kept)
    curve = memory_curve(graph, given_up=("saved", "unread"))
    assert dict(zip(curve.names, curve.live_bytes)) == {
        "saved": 4400, "kept": 4400, "unread": 4400, "view_default": 400, "mul_tensor": 800, "relu_default": 800, "output": 400,
    }  # fmt: skip
    assert curve.input_bytes == 40
    with pytest.raises(
        ValueError, match=r"given_up has 'safed', which is no input of the graph\. Give some of saved, kept"
    ):
        memory_curve(graph, given_up=("safed",))


def test_what_inductor_fuses_has_no_memory_and_is_written_over_what_it_reads_last() -> None:
    b = Builder()
    x, weight = b.input("x", 10, 10), b.input("weight", 10, 10)
    y = b.call(aten.mm.default, x, weight)
    away = b.call(aten.mul.Tensor, y, 2.0)  # read by pointwise ops alone: not in memory, and y lives until they ran
    kept = b.call(aten.mm.default, x, x)
    over = b.call(aten.add.Tensor, b.call(aten.view.default, away, [10, 10]), 1.0)  # written over y
    other = b.call(aten.relu.default, kept)  # not over kept, which is returned
    out = b.call(aten.mm.default, over, other)
    total = b.call(aten.sum.default, b.call(aten.exp.default, out))
    graph = b.output(kept, total)

    def alive(fused: bool) -> dict[str, int]:
        curve = memory_curve(graph, fused=fused)
        return {
            name: num_bytes for name, num_bytes in zip(curve.names, curve.live_bytes) if name not in ("x", "weight")
        }

    assert alive(fused=True) == {
        "mm_default": 400, "mul_tensor": 400, "mm_default_1": 800, "view_default": 800, "add_tensor": 800,
        "relu_default": 1200, "mm_default_2": 1600, "exp_default": 800, "sum_default": 804, "output": 404,
    }  # fmt: skip
    assert alive(fused=False) == {
        "mm_default": 400, "mul_tensor": 800, "mm_default_1": 800, "view_default": 800, "add_tensor": 1200,
        "relu_default": 1200, "mm_default_2": 1600, "exp_default": 1200, "sum_default": 804, "output": 404,
    }  # fmt: skip


@pytest.mark.parametrize("normed", [False, True])
def test_a_residual_stream_is_written_now_and_then(normed: bool) -> None:
    """Else the results of all matmuls would live until somebody sums them up."""

    def peak(layers: int) -> int:
        def forward(x: Tensor, weight: Tensor) -> Tensor:
            for _ in range(layers):
                x = x + (x * x.mean(-1, keepdim=True) if normed else x * 2) @ weight
            return x.sum()

        graph = make_fx(forward, tracing_mode="fake")(torch.rand(32, 16), torch.rand(16, 16)).graph
        return memory_curve(graph, fused=True).peak_bytes

    assert peak(8) == peak(16) == peak(64) < 8 * 32 * 16 * 4


def test_a_storage_that_two_inputs_share_is_counted_once_and_given_up_when_both_are() -> None:
    b = Builder()
    base = b.input("base", 100)
    view = b.graph.placeholder("view")
    view.meta["val"] = base.meta["val"].view(10, 10)
    graph = b.output(b.call(aten.relu.default, base), b.call(aten.relu.default, view))
    for given_up in ((), ("base",), ("view",)):
        assert memory_curve(graph, given_up).input_bytes == 400
    curve = memory_curve(graph, ("base", "view"))
    assert (curve.input_bytes, curve.live_bytes) == (0, (400, 400, 800, 1200, 800))


@pytest.mark.parametrize(
    ("op", "arguments"),
    [(aten.reshape.default, ([12],)), (aten.contiguous.default, ()), (aten.flatten.using_ints, ())],
)
def test_what_need_not_copy_a_gathered_parameter_does_not(op: Any, arguments: tuple[Any, ...]) -> None:
    b = Builder()
    w = b.unshard(b.input("shard", 2, 3), spec())
    moved = b.call(op, b.call(aten.t.default, w), *arguments)
    graph = b.output(b.call(aten.relu.default, b.call(op, w, *arguments)), b.call(aten.relu.default, moved))
    insert(graph, plan_graph(graph, "forward"))
    made = [one.storage.node for one in lifetimes(graph) if one.storage.node.op == "call_function"]
    assert [node.target for node in made if node.target not in (aten.relu.default, op)] == [gloo_all_gather]
    assert [node for node in made if node.target is op] == [moved]


def test_offloaded_shards_and_their_gradients_are_not_in_the_devices_memory() -> None:
    b = Builder()
    with b.mode:
        tangent = b.graph.placeholder("tangents_1")
        tangent.meta["val"] = torch.empty(4, 3, device="cuda")
    w = b.unshard(b.input("shard", 2, 3), spec(device="cuda"))
    grad = b.call(aten.mul.Tensor, tangent, 2.0)
    graph = b.output(b.reduce(grad, spec(device="cuda")), b.call(aten.mul.Tensor, w, tangent))
    plan = plan_graph(graph, "backward")
    insert(graph, plan)
    curve = memory_curve(graph)
    names = {one.storage.node.name for one in lifetimes(graph)}
    assert "gather_offloaded_default" in names and not {"shard", "to_host_default"} & names
    assert curve.input_bytes == 48 and curve.live_bytes[-1] == 48  # the tangent; what is returned of the two
    made = {name for one in events_of(graph, load_profile("h100"), {"g": Group(2, 2)}) for name, _ in one.allocs}
    assert "gather_offloaded_default" in made and "to_host_default" not in made


@pytest.mark.parametrize("op", [aten.split.Tensor, aten.chunk.default, aten.unbind.int])
def test_views_in_a_list_stay_views_when_their_source_is_lowered(op: Any) -> None:
    """``insert`` puts another node, with a value of its own, where the marker was."""
    b = Builder()
    parts = b.call(op, b.unshard(b.input("shard", 2, 3), spec()), *((2,) if op != aten.unbind.int else ()))
    first = b.graph.call_function(operator.getitem, (parts, 0))
    first.meta["val"] = parts.meta["val"][0]
    graph = b.output(b.call(aten.relu.default, first))
    insert(graph, plan_graph(graph, "forward"))
    assert [one.storage.node.name for one in lifetimes(graph) if one.storage.node.op == "call_function"] == [
        "all_gather_into_tensor_default", "relu_default"
    ]  # fmt: skip


def test_what_a_collective_reads_lives_until_it_is_waited_for() -> None:
    b = Builder()
    tangent, x = b.input("tangents_1", 4, 3), b.input("x", 100)
    reduced = b.reduce(b.call(aten.mul.Tensor, tangent, 2.0), spec())
    other = b.call(aten.relu.default, x)
    graph = b.output(reduced, other)
    plan = plan_graph(graph, "backward")
    insert(graph, plan)
    late = next(node for node in graph.nodes if is_wait(node))
    relu = next(node for node in graph.nodes if node.target is aten.relu.default)
    late.prev.append(relu)  # in flight beside it
    alive = dict(zip(memory_curve(graph).names, memory_curve(graph).live_bytes))
    assert alive["mul_tensor"] == 48
    assert alive["reduce_scatter_tensor_default"] == 48 + 24
    assert alive["relu_default"] == alive["wait_tensor_default"] == 48 + 24 + 400
    assert alive["div_tensor"] == 24 + 24 + 400
    assert alive["output"] == 24 + 400


def kinds_by_name(graph: fx.Graph) -> dict[str, str]:
    return {storage.node.name: kind for storage, kind in kinds_of(graph).items()}


def test_the_peak_names_its_owners_and_what_they_are() -> None:
    """Two parameters in one bucket, gathered again; a gradient in a bucket of its own, a saved activation."""
    b = Builder()
    shards = [b.input("w_shard", 2, 3), b.input("b_shard", 2)]
    saved, tangent = b.input("saved", 5, 4), b.input("tangents_1", 5, 3)
    w = b.unshard(shards[0], spec())
    bias = b.unshard(shards[1], spec("up.bias", (4,), order=1))
    scaled = b.call(aten.mul.Tensor, b.call(aten.relu.default, saved), bias)
    grad = b.call(aten.mm.default, b.call(aten.t.default, scaled), tangent)
    back = b.call(aten.mm.default, tangent, b.call(aten.t.default, w))
    graph = b.output(b.reduce(grad, spec()), back)
    plan = plan_graph(graph, "backward")
    insert(graph, plan)
    overlap(graph, plan)
    kinds = kinds_by_name(graph)
    assert kinds["saved"] == kinds["relu_default"] == ACTIVATION and kinds["w_shard"] == SHARD
    assert kinds["pack_default"] == kinds["all_gather_into_tensor_default"] == BUFFER
    assert kinds["copied_default"] == kinds["copied_default_1"] == GATHERED  # unpacked
    assert kinds["mm_default"] == kinds["mm_default_1"] == kinds["div_tensor"] == GRADIENT
    assert kinds["reduce_scatter_tensor_default"] == BUFFER
    curve = memory_curve(graph, given_up=("saved", "w_shard"))
    assert curve.peak_owners and all(one.kind == kinds[one.name] for one in curve.peak_owners)
    sizes = [one.num_bytes for one in curve.peak_owners]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == curve.peak_bytes
    assert str(curve).startswith(f"peak {curve.peak_bytes} bytes at {curve.peak_at}, inputs 68 bytes\n")


def test_markers_have_their_kinds_before_they_are_lowered() -> None:
    b = Builder()
    w = b.unshard(b.input("shard", 2, 3), spec())
    half = b.call(aten.mul.Tensor, w, 0.5)  # of gathered parameters alone
    x = b.call(aten.mm.default, b.input("x", 5, 4), half)
    mask = b.call(aten.gt.Scalar, x, 0.0)
    graph = b.output(x, mask, b.reduce(b.input("g", 4, 3), spec("other")))
    assert kinds_by_name(graph) == {
        "shard": SHARD, "unshard_default": GATHERED, "mul_tensor": GATHERED, "x": ACTIVATION, "mm_default": ACTIVATION,
        "gt_scalar": "other", "g": GRADIENT, "reduce_grad_default": GRADIENT,
    }  # fmt: skip
