"""Each pass on a graph built by hand: the picture in its docstring, as a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.passes import Bucket, ParamSpec, Plan
from fsdp_compile.passes.apply.check import check
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.apply.keep import keep
from fsdp_compile.passes.apply.merge import merge
from fsdp_compile.passes.apply.overlap import overlap
from fsdp_compile.passes.apply.parts import parts
from fsdp_compile.passes.ir import markers
from fsdp_compile.passes.ir.markers import keep_slice, spec_in
from fsdp_compile.passes.ir.meta import AC_GRAPH_ID, ROLE
from fsdp_compile.passes.ir.provenance import find_unshards
from fsdp_compile.passes.schedule.buckets import gather_buckets
from fsdp_compile.passes.schedule.calls import name_markers
from fsdp_compile.passes.schedule.planner import plan_graph, plan_joint
from fsdp_compile.passes.schedule.slices import slices, use_first_gather
from fsdp_compile.passes.wire import sums
from fsdp_compile.passes.wire.collectives import is_launch
from fsdp_compile.passes.wire.copies import to_host

BF16 = torch.bfloat16
aten = torch.ops.aten


def spec(fqn: str = "up.weight", size: tuple[int, ...] = (4, 3), **changes: Any) -> ParamSpec:
    """One rank's view of a parameter on two ranks."""
    dim = changes.get("dim", 0)
    fields: dict[str, Any] = dict(
        fqn=fqn, unit="Block", order=0, size=size, dim=0, num_shards=2, local_length=-(-size[dim] // 2), group="g",
        backend="gloo", dtype=torch.float32, reduce_dtype=torch.float32, grad_dtype=torch.float32, regather=True,
        reduce_op="sum", predivide=1.0, postdivide=2.0, reduction="reduce_scatter", bucketing="size",
    )  # fmt: skip
    return ParamSpec(**{**fields, **changes})


# Of Llama 3 8B; the last one is of 70B.
LAYER = {"norm": (4096,), "wk": (1024, 4096), "wq": (4096, 4096), "up": (14336, 4096), "large up": (28672, 8192)}


@pytest.mark.parametrize(
    ("backend", "num_ranks", "alone"),
    [
        ("nccl", 8, ["large up"]),  # 448 MiB, and the others have up to 112
        # On more ranks the launch that merging saves takes longer.
        ("nccl", 512, []),
        # Where buckets are packed, merging also copies all ranks' parts.
        ("gloo", 8, ["wk", "wq", "up", "large up"]),
        ("gloo", 64, ["wq", "up", "large up"]),
        ("gloo", 512, ["large up"]),
    ],
)
def test_what_travels_alone_depends_on_the_bytes_of_all_ranks_and_on_their_number(
    backend: str, num_ranks: int, alone: list[str]
) -> None:
    specs = [
        spec(fqn, size, order=order, num_shards=num_ranks, backend=backend, dtype=BF16, local_length=size[0] // num_ranks)
        for order, (fqn, size) in enumerate(LAYER.items())
    ]
    together, *others = [[specs[index].fqn for index in bucket] for bucket in gather_buckets(specs)]
    assert others == [[one] for one in alone] and together == [one for one in LAYER if one not in alone]


class Builder:
    """Writes a graph of markers and compute on fake tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *size: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(size, dtype=dtype)
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
        with self.mode:
            node.meta["val"] = op(*values[0], **values[1])
        node.meta["seq_nr"] = len(self.graph.nodes)
        return node

    def gradient(self, of: fx.Node, op: Any, *args: Any) -> fx.Node:
        """What backward computes for an operation of forward."""
        node = self.call(op, *args)
        node.meta["seq_nr"] = of.meta["seq_nr"]
        return node

    def unshard(self, shard: fx.Node, its_spec: ParamSpec, reader: str = "") -> fx.Node:
        node = self.call(markers.unshard, shard, spec=its_spec.text)
        if reader:
            node.meta["nn_module_stack"] = {reader: (f"L['self'].{reader}", torch.nn.Linear)}
        return node

    def reduce(self, grad: fx.Node, its_spec: ParamSpec, of: fx.Node | None = None) -> fx.Node:
        node = self.call(markers.reduce_grad, grad, spec=its_spec.text)
        if of is not None:
            node.meta["seq_nr"] = of.meta["seq_nr"]
        return node

    def output(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        self.graph.lint()
        return self.graph


def text(graph: fx.Graph) -> str:
    """The graph without marker arguments: name = op(nodes and literals)."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            op = str(node.target).replace(".default", "").split(".", 1)[-1]
            lines.append(f"{node.name} = {op}({', '.join(str(arg) for arg in node.args)})")
        elif node.op == "output":
            lines.append(f"return {', '.join(str(arg) for arg in node.args[0])}")
    return "\n".join(lines)


def lowered(graph: fx.Graph, stage: str = "forward") -> str:
    plan = plan_graph(graph, stage)
    insert(graph, plan)
    graph.lint()
    check(graph, plan)
    return text(graph)


def test_the_cast_comes_before_the_gather_and_padding_goes_after_it() -> None:
    b = Builder()
    shard = b.input("shard", 1, 3)  # the last rank holds one row of three
    its_spec = spec(size=(3, 3), dtype=BF16, local_length=1)
    graph = b.output(b.call(torch.ops.aten.relu.default, b.unshard(shard, its_spec)))
    assert_expected_inline(lowered(graph), """\
convert_element_type_default = convert_element_type(shard, torch.bfloat16)
constant_pad_nd_default = constant_pad_nd(convert_element_type_default, [0, 0, 0, 1], 0)
all_gather_into_tensor_default = all_gather_into_tensor(constant_pad_nd_default, 2, g)
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
slice_tensor = slice.Tensor(wait_tensor_default, 0, 0, 3)
relu_default = relu(slice_tensor)
return relu_default""")


def test_small_parameters_of_a_unit_share_a_collective() -> None:
    b = Builder()
    first, second = b.input("first", 2, 3), b.input("second", 2)
    w = b.unshard(first, spec())
    bias = b.unshard(second, spec("up.bias", (4,), order=1))
    graph = b.output(b.call(torch.ops.aten.mv.default, b.call(torch.ops.aten.t.default, w), bias))
    assert_expected_inline(lowered(graph), """\
pack_default = pack([first, second], 1, torch.float32)
all_gather_into_tensor_default = all_gather_into_tensor(pack_default, 2, g)
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
view_default = view(wait_tensor_default, [2, 8])
slice_tensor = slice.Tensor(view_default, 1, 0, 6)
view_default_1 = view(slice_tensor, [2, 2, 3])
copied_default = copied(view_default_1)
view_default_2 = view(copied_default, [4, 3])
slice_tensor_1 = slice.Tensor(view_default, 1, 6, 8)
view_default_3 = view(slice_tensor_1, [2, 2])
copied_default_1 = copied(view_default_3)
view_default_4 = view(copied_default_1, [4])
t_default = t(view_default_2)
mv_default = mv(t_default, view_default_4)
return mv_default""")


def test_a_gradient_is_cast_reduced_and_divided() -> None:
    b = Builder()
    grad = b.input("grad", 4, 3, dtype=BF16)
    graph = b.output(b.reduce(grad, spec()))
    assert_expected_inline(lowered(graph, "backward"), """\
convert_element_type_default = convert_element_type(grad, torch.float32)
reduce_scatter_tensor_default = reduce_scatter_tensor(convert_element_type_default, sum, 2, g)
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default)
div_tensor = div.Tensor(wait_tensor_default, 2.0)
return div_tensor""")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_parts", "divisor"), [(2, 2.0), (3, 1.0), (5, 3.0)])
def test_parts_are_summed_block_by_block_as_one_sum_would(dtype: torch.dtype, num_parts: int, divisor: float) -> None:
    for size in [(0, 4), (1,), (2, 3), (130_001,), (40, 1000, 3)]:
        received = torch.randn(num_parts * size[0], *size[1:], dtype=dtype)
        exact = received.to(torch.float64).view(num_parts, *size).sum(0) / divisor
        got = torch.ops.fsdpc.sum_of_parts(received, num_parts, divisor)
        torch.testing.assert_close(got, exact.to(dtype))
        assert got.is_contiguous() and got.untyped_storage().nbytes() == got.numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [37, 300_001])
def test_parts_are_summed_in_the_order_of_ranks(dtype: torch.dtype, numel: int) -> None:
    parts = torch.randn(8, numel).to(dtype)
    expected = parts[0].clone().float()
    for part in parts[1:]:
        expected.add_(part)
    assert torch.equal(torch.ops.fsdpc.sum_of_parts(parts.reshape(-1), 8, 1.0), expected.to(dtype))


def test_a_sum_in_half_precision_overflows_only_where_the_mean_does() -> None:
    received = torch.full((4,), 60_000.0, dtype=torch.float16)
    assert torch.ops.fsdpc.sum_of_parts(received, 2, 2.0).tolist() == [60_000.0, 60_000.0]
    at_once = torch.empty(2, dtype=torch.float16)  # as on a GPU
    sums._sum_at_once(received.view(2, 2), at_once, 2.0)
    assert at_once.tolist() == [60_000.0, 60_000.0]
    sums._sum_at_once(received.view(2, 2), at_once, 1.0)
    assert at_once.isinf().all()


def test_gradients_share_a_reduction_once_the_last_one_is_there() -> None:
    b = Builder()
    early, late = b.input("early", 4), b.input("late", 3)
    first = b.reduce(early, spec("a", (4,)))
    later = b.call(torch.ops.aten.relu.default, late)
    second = b.reduce(later, spec("b", (3,), order=1, local_length=2))
    graph = b.output(first, second)
    assert_expected_inline(lowered(graph, "backward"), """\
relu_default = relu(late)
constant_pad_nd_default = constant_pad_nd(relu_default, [0, 1], 0)
pack_default = pack([early, constant_pad_nd_default], 2, torch.float32)
reduce_scatter_tensor_default = reduce_scatter_tensor(pack_default, sum, 2, g)
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default)
div_tensor = div.Tensor(wait_tensor_default, 2.0)
view_default = view(div_tensor, [-1])
slice_tensor = slice.Tensor(view_default, 0, 0, 2)
view_default_1 = view(slice_tensor, [2])
slice_tensor_1 = slice.Tensor(view_default, 0, 2, 4)
view_default_2 = view(slice_tensor_1, [2])
return view_default_1, view_default_2""")


def replicated(**changes: Any) -> ParamSpec:
    """On two ranks that shard, in each of two replicas."""
    return spec(**{"replicate_group": "r", "num_replicas": 2, "postdivide": 4.0, **changes})


def test_replicas_sum_what_the_ranks_of_each_have_reduced() -> None:
    b = Builder()
    graph = b.output(b.reduce(b.input("grad", 4, 3), replicated()))
    assert_expected_inline(lowered(graph, "backward"), """\
reduce_scatter_tensor_default = reduce_scatter_tensor(grad, sum, 2, g)
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default)
all_reduce_default = all_reduce(wait_tensor_default, sum, r)
wait_tensor_default_1 = wait_tensor(all_reduce_default)
div_tensor = div.Tensor(wait_tensor_default_1, 4.0)
return div_tensor""")


def test_all_to_all_sums_in_rank_order_and_replicas_after_that() -> None:
    b = Builder()
    graph = b.output(b.reduce(b.input("grad", 4, 3), spec(reduction="all_to_all")))
    assert_expected_inline(lowered(graph, "backward"), """\
all_to_all_single_default = all_to_all_single(grad, [2, 2], [2, 2], g)
wait_tensor_default = wait_tensor(all_to_all_single_default)
sum_of_parts_default = sum_of_parts(wait_tensor_default, 2, 2.0)
return sum_of_parts_default""")
    b = Builder()
    graph = b.output(b.reduce(b.input("grad", 4, 3), replicated(reduction="all_to_all")))
    assert_expected_inline(lowered(graph, "backward"), """\
all_to_all_single_default = all_to_all_single(grad, [2, 2], [2, 2], g)
wait_tensor_default = wait_tensor(all_to_all_single_default)
sum_of_parts_default = sum_of_parts(wait_tensor_default, 2, 1.0)
all_reduce_default = all_reduce(sum_of_parts_default, sum, r)
wait_tensor_default_1 = wait_tensor(all_reduce_default)
div_tensor = div.Tensor(wait_tensor_default_1, 4.0)
return div_tensor""")


def test_without_shards_nothing_is_gathered_or_packed_and_gradients_share_an_all_reduce() -> None:
    b = Builder()
    whole = dict(num_shards=1, group="", postdivide=2.0)
    weight = replicated(local_length=4, **whole)
    bias = replicated(fqn="up.bias", size=(4,), order=1, local_length=4, **whole)
    w, v = b.unshard(b.input("weight", 4, 3), weight), b.unshard(b.input("bias", 4), bias)
    y = b.call(torch.ops.aten.mul.Tensor, w, b.call(torch.ops.aten.unsqueeze.default, v, 1))
    graph = b.output(b.reduce(y, weight), b.reduce(b.call(torch.ops.aten.relu.default, v), bias))
    assert_expected_inline(lowered(graph, "backward"), """\
reshape_default = reshape(weight, [4, 3])
reshape_default_1 = reshape(bias, [4])
unsqueeze_default = unsqueeze(reshape_default_1, 1)
mul_tensor = mul.Tensor(reshape_default, unsqueeze_default)
relu_default = relu(reshape_default_1)
pack_default = pack([mul_tensor, relu_default], 1, torch.float32)
all_reduce_default = all_reduce(pack_default, sum, r)
wait_tensor_default = wait_tensor(all_reduce_default)
div_tensor = div.Tensor(wait_tensor_default, 2.0)
view_default = view(div_tensor, [-1])
slice_tensor = slice.Tensor(view_default, 0, 0, 12)
view_default_1 = view(slice_tensor, [4, 3])
slice_tensor_1 = slice.Tensor(view_default, 0, 12, 16)
view_default_2 = view(slice_tensor_1, [4])
return view_default_1, view_default_2""")


def test_with_one_rank_the_parameter_itself_stands_there_and_outputs_get_a_copy() -> None:
    b = Builder()
    shard = b.input("shard", 4, 3)
    w = b.unshard(shard, spec(num_shards=1, local_length=4))
    graph = b.output(b.call(torch.ops.aten.relu.default, w), b.call(torch.ops.aten.t.default, w))
    assert_expected_inline(lowered(graph), """\
reshape_default = reshape(shard, [4, 3])
relu_default = relu(reshape_default)
t_default = t(reshape_default)
lift_fresh_copy_default = lift_fresh_copy(t_default)
return relu_default, lift_fresh_copy_default""")


def joint_of_a_parameter_read_twice() -> fx.Graph:
    b = Builder()
    shard, x = b.input("shard", 2, 3), b.input("x", 4, 3)
    w1 = b.unshard(shard, spec(), "layers.0.up")
    w2 = b.unshard(shard, spec(), "head")
    y = b.call(torch.ops.aten.add.Tensor, b.call(torch.ops.aten.mul.Tensor, x, w1), w2)
    r1, r2 = b.reduce(x, spec(), w1), b.reduce(y, spec(), w2)
    return b.output(y, b.call(torch.ops.aten.add.Tensor, r1, r2))


def test_a_parameter_read_twice_is_gathered_and_reduced_once() -> None:
    graph = joint_of_a_parameter_read_twice()
    assert merge(graph, Plan("joint")) == 2
    graph.lint()
    assert_expected_inline(text(graph), """\
unshard_default = unshard(shard)
mul_tensor = mul.Tensor(x, unshard_default)
add_tensor = add.Tensor(mul_tensor, unshard_default)
add_tensor_2 = add.Tensor(x, add_tensor)
reduce_grad_default_2 = reduce_grad(add_tensor_2)
return add_tensor, reduce_grad_default_2""")


@pytest.mark.parametrize(
    ("reader", "fqn", "expected"),
    [
        ("layers.3.attn.wq", "attn.wq.weight", "layers.3.attn.wq.weight"),
        ("layers[3].attn.wq", "attn.wq.weight", "layers.3.attn.wq.weight"),
        ("layers.3.attn", "attn.out_proj.weight", "layers.3.attn.out_proj.weight"),
        ("layers.3", "attn.wq.weight", "layers.3.attn.wq.weight"),
        ("_orig_mod.layers.3.up", "up.bias", "layers.3.up.bias"),
    ],
)
def test_a_name_is_completed_by_its_reader(reader: str, fqn: str, expected: str) -> None:
    b = Builder()
    graph = b.output(b.unshard(b.input("shard", 2, 3), spec(fqn), reader))
    name_markers(graph)
    assert [marker.fqn for marker in find_unshards(graph)] == [expected]


def test_the_reader_that_agrees_with_the_name_says_where_the_unit_is() -> None:
    graph = joint_of_a_parameter_read_twice()
    name_markers(graph)
    assert [marker.fqn for marker in find_unshards(graph)] == ["layers.0.up.weight", "layers.0.up.weight@2"]
    assert {marker.unit for marker in find_unshards(graph)} == {"Block:layers.0"}


def test_gathers_are_tagged_above_every_checkpoint() -> None:
    b = Builder()
    kept = b.unshard(b.input("a", 2, 3), spec("a", regather=False))
    gone = b.unshard(b.input("b", 2, 3), spec("b", regather=True))
    graph = b.output(kept, gone)
    plan = plan_joint(graph)
    assert plan.keep == ("a",) and plan.params == ("a", "b")
    assert keep(graph, plan) == 2
    assert kept.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert gone.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
    assert kept.meta["ac_graph_id"] == gone.meta["ac_graph_id"] == AC_GRAPH_ID


def tagged(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]


def joint_graph() -> Builder:
    """A product with what takes no gradient, a bias that does, and a table beside that; then their gradients."""
    build = Builder()
    x, mask = build.input("x", 5, 3), build.input("mask", 4, 3)
    shards = build.input("a", 2, 3), build.input("b", 2), build.input("c", 3, 4)
    tangent = build.input("tangents_1", 5, 4)
    specs = spec("w"), spec("bias", (4,), order=1), spec("table", (5, 4), order=2, local_length=3)
    weight, bias, table = (build.unshard(*each, reader="up") for each in zip(shards, specs))
    masked = build.call(aten.mul.Tensor, weight, mask)
    added = build.call(aten.add.Tensor, build.call(aten.mm.default, x, build.call(aten.t.default, masked)), bias)
    out = build.call(aten.add.Tensor, added, table)
    grad = build.call(aten.mul.Tensor, tangent, build.call(aten.cos.default, out))
    grad_x = build.call(aten.mm.default, grad, masked)
    grad_bias = build.reduce(build.call(aten.sum.dim_IntList, grad, [0]), specs[1], of=bias)
    build.output(out, grad_x, grad_bias)
    name_markers(build.graph)
    return build


def test_backward_gathers_all_of_a_unit_that_a_gradient_comes_to() -> None:
    graph = joint_graph().graph
    plan = plan_joint(graph)
    assert plan.params == ("up.w", "up.bias", "up.table") and not plan.keep
    assert plan.again == ("up.w", "up.bias", "up.table")
    assert plan.forward and plan.forward.order == (("gather", 0),)
    assert plan.backward and plan.backward.order == (("gather", 0), ("reduce", 0))
    assert [bucket.fqns for bucket in plan.backward.gathers] == [("up.w", "up.bias", "up.table")]
    keep(graph, plan)
    policies = {node.name: node.meta["recompute"].name for node in graph.nodes if "recompute" in node.meta}
    assert policies == {
        "unshard_default": "MUST_RECOMPUTE",
        "unshard_default_1": "MUST_RECOMPUTE",
        "unshard_default_2": "MUST_RECOMPUTE",
        "mul_tensor": "MUST_RECOMPUTE",  # a mask over a weight
        "t_default": "MUST_RECOMPUTE",
        "mm_default": "MUST_SAVE",  # what reads a weight and more; a bias may be added once more
        "add_tensor_1": "MUST_SAVE",
    }


def test_a_backward_that_gathers_more_than_planned_is_refused() -> None:
    graph = joint_graph().graph
    plan = plan_joint(graph)
    assert plan.backward
    without = tuple(dataclasses.replace(bucket, fqns=("up.w", "up.table")) for bucket in plan.backward.gathers)
    keep(graph, dataclasses.replace(plan, backward=dataclasses.replace(plan.backward, gathers=without)))
    with pytest.raises(RuntimeError, match=r"up\.bias, .*set_reshard_after_forward\(False\)"):
        plan_graph(graph, "backward")


def test_what_an_extension_makes_of_parts_is_made_again() -> None:
    build = Builder()
    x, scale = build.input("x", 5, 3), build.input("scale")
    sent = build.call(aten._to_copy.default, build.input("shard", 2, 3), dtype=BF16)
    part = build.unshard(sent, spec(part=0, dtype=BF16), reader="up")
    value = build.call(aten.mul.Tensor, part, build.call(aten.neg.default, scale))
    made = build.call(markers.made_of_parts, value)
    graph = build.output(build.call(aten.mm.default, x, build.call(aten.t.default, made)))
    plan = plan_joint(graph)
    assert plan.params == ("up.weight:0",) and not plan.keep
    assert parts(graph, plan) == 1
    keep(graph, plan)
    assert tagged(graph) == [part.name, value.name, "t_default"]
    assert_expected_inline(text(graph), """\
_to_copy_default = _to_copy(shard)
unshard_default = unshard(_to_copy_default)
neg_default = neg(scale)
mul_tensor = mul.Tensor(unshard_default, neg_default)
t_default = t(mul_tensor)
mm_default = mm(x, t_default)
return mm_default""")


def test_eight_bit_floats_travel_as_bytes() -> None:
    build = Builder()
    eight = spec(part=0, dtype=torch.float8_e4m3fn)
    graph = build.output(build.unshard(build.input("sent", 2, 3, dtype=torch.float8_e4m3fn), eight, reader="up"))
    assert_expected_inline(lowered(graph), """\
view_dtype = view.dtype(sent, torch.uint8)
all_gather_into_tensor_default = all_gather_into_tensor(view_dtype, 2, g)
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
view_dtype_1 = view.dtype(wait_tensor_default, torch.float8_e4m3fn)
return view_dtype_1""")


def offloaded(**changes: Any) -> ParamSpec:
    """Kept on the CPU, computed on a GPU; BF16 there."""
    return spec(**{"device": "cuda:0", "pinned": True, "dtype": BF16, "backend": "nccl", "reduce_op": "avg", **changes})


def test_offloaded_shards_are_copied_as_they_are_stored_and_gradients_as_one() -> None:
    b = Builder()
    shards = b.input("weight", 2, 3), b.input("bias", 2)
    specs = offloaded(postdivide=1.0), offloaded(fqn="up.bias", size=(4,), order=1, postdivide=1.0)
    w, v = (b.unshard(shard, its_spec) for shard, its_spec in zip(shards, specs))
    grads = b.call(aten.relu.default, w), b.call(aten.relu.default, v)
    graph = b.output(*(b.reduce(grad, its_spec) for grad, its_spec in zip(grads, specs)))
    assert_expected_inline(lowered(graph, "backward"), """\
gather_offloaded_default = gather_offloaded([weight, bias], [0, 0], [2, 2], torch.bfloat16, cuda:0, nccl, 2, g)
wait_tensor_default = wait_tensor(gather_offloaded_default)
slice_tensor = slice.Tensor(wait_tensor_default, 0, 0, 12)
slice_tensor_1 = slice.Tensor(wait_tensor_default, 0, 64, 68)
view_default = view(slice_tensor, [4, 3])
relu_default = relu(view_default)
relu_default_1 = relu(slice_tensor_1)
pack_default = pack([relu_default, relu_default_1], 2, torch.float32)
reduce_scatter_tensor_default = reduce_scatter_tensor(pack_default, avg, 2, g)
wait_tensor_default_1 = wait_tensor(reduce_scatter_tensor_default)
to_host_default = to_host(wait_tensor_default_1, True)
view_default_1 = view(to_host_default, [-1])
slice_tensor_2 = slice.Tensor(view_default_1, 0, 0, 6)
view_default_2 = view(slice_tensor_2, [2, 3])
slice_tensor_3 = slice.Tensor(view_default_1, 0, 6, 8)
view_default_3 = view(slice_tensor_3, [2])
wait_for_copies_default = wait_for_copies([to_host_default], cuda:0)
return view_default_2, view_default_3""")
    values = {node: node.meta["val"] for node in graph.nodes if node.op != "output" and node.meta["val"] is not None}
    on_cpu = [node for node, value in values.items() if value.device.type == "cpu"]
    # The shards, and views of what has been copied: no work for the CPU.
    assert {node.target for node in on_cpu if node.op != "placeholder"} == {to_host, aten.view.default, aten.slice.Tensor}
    assert {value.device for node, value in values.items() if node not in on_cpu} == {torch.device("cuda:0")}


def test_an_offloaded_gradient_that_the_graph_reads_is_waited_for_at_once() -> None:
    b = Builder()
    sharded = dict(num_shards=1, local_length=4, postdivide=1.0)
    first = b.reduce(b.input("x", 4, 3), offloaded(fqn="a", bucketing="none", **sharded))
    second = b.reduce(b.input("y", 4, 3), offloaded(fqn="b", bucketing="none", **sharded))
    graph = b.output(b.call(aten.mul.Tensor, b.call(aten.view.default, first, [12]), 2), b.call(aten.detach.default, second))
    assert_expected_inline(lowered(graph, "backward"), """\
to_host_default_1 = to_host(x, True)
to_host_default = to_host(y, True)
view_default = view(to_host_default_1, [12])
mul_tensor = mul.Tensor(view_default, 2)
detach_default = detach(to_host_default)
wait_for_copies_default = wait_for_copies([to_host_default], cpu)
return mul_tensor, detach_default""")
    assert [node.kwargs for node in graph.nodes if node.target is to_host] == [{}, {"wait": False}]


def test_a_slice_of_an_offloaded_parameter_is_on_the_device() -> None:
    b = Builder()
    its_spec = offloaded(num_shards=4, local_length=1, inner_shards=2, inner_group="pair", inner_rank=1)
    graph = b.output(b.call(aten.relu.default, b.unshard(b.input("shard", 1, 3), its_spec)))
    slices(graph, Plan("joint"))
    assert_expected_inline(lowered(graph), """\
gather_offloaded_default = gather_offloaded([shard], [0], [1], torch.bfloat16, cuda:0, nccl, 4, g)
wait_tensor_default = wait_tensor(gather_offloaded_default)
slice_tensor = slice.Tensor(wait_tensor_default, 0, 2, 4)
lift_fresh_copy_default = lift_fresh_copy(slice_tensor)
all_gather_into_tensor_default = all_gather_into_tensor(lift_fresh_copy_default, 2, pair)
wait_tensor_default_1 = wait_tensor(all_gather_into_tensor_default)
relu_default = relu(wait_tensor_default_1)
return relu_default""")


def test_offloaded_gradients_leave_when_they_arrive_and_are_waited_for_at_the_end() -> None:
    graph = layers_in(reversed(range(3)), offloaded(device="cpu", dtype=torch.float32), offloaded(device="cpu"))
    assert_expected_inline(ordered(graph), "G0 G1 w0 C R0 G2 w1 C w'0 D0 R1 w2 C w'1 D1 R2 w'2 D2 end")


def test_a_slice_stands_for_a_parameter_until_backward() -> None:
    b = Builder()
    x, shard = b.input("x", 5, 3), b.input("shard", 1, 3)
    its_spec = spec(num_shards=4, local_length=1, inner_shards=2, inner_group="pair", inner_rank=1)
    w = b.unshard(shard, its_spec, reader="")
    graph = b.output(b.call(torch.ops.aten.mm.default, x, b.call(torch.ops.aten.t.default, w)))
    assert slices(graph, Plan("joint")) == 1
    graph.lint()
    assert_expected_inline(text(graph), """\
unshard_default = unshard(shard)
keep_slice_default = keep_slice(unshard_default, 0, 2, 2)
unshard_default_1 = unshard(keep_slice_default)
t_default = t(unshard_default_1)
mm_default = mm(x, t_default)
return mm_default""")
    its = spec_in(graph.find_nodes(op="call_function", target=markers.unshard)[1])
    assert (its.group, its.num_shards, its.local_length) == ("pair", 2, 2)
    plan = plan_joint(graph)
    keep(graph, plan)
    tags = {node.name: node.meta["recompute"].name for node in graph.nodes if "recompute" in node.meta}
    assert tags.pop("keep_slice_default") == tags.pop("mm_default") == "MUST_SAVE"  # no backward, so nothing is wanted
    assert tags == dict.fromkeys(["unshard_default", "unshard_default_1", "t_default"], "MUST_RECOMPUTE")


def test_where_a_slice_is_cut_the_whole_is_there() -> None:
    b = Builder()
    x, shard = b.input("x", 5, 3), b.input("shard", 1, 3)
    its_spec = spec(num_shards=4, local_length=1, inner_shards=2, inner_group="pair", inner_rank=1)
    graph = b.output(b.call(torch.ops.aten.mm.default, x, b.call(torch.ops.aten.t.default, b.unshard(shard, its_spec))))
    slices(graph, Plan("joint"))
    piece = graph.find_nodes(op="call_function", target=keep_slice)[0]
    graph.output_node().args = ((*graph.output_node().args[0], piece),)
    use_first_gather(graph)
    assert_expected_inline(lowered(graph), """\
all_gather_into_tensor_default = all_gather_into_tensor(shard, 4, g)
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)
slice_tensor = slice.Tensor(wait_tensor_default, 0, 2, 4)
lift_fresh_copy_default = lift_fresh_copy(slice_tensor)
t_default = t(wait_tensor_default)
mm_default = mm(x, t_default)
return mm_default, lift_fresh_copy_default""")


def test_gathers_run_one_unit_ahead() -> None:
    b = Builder()
    x = b.input("x", 4, 3)
    for layer in range(4):
        w = b.unshard(b.input(f"shard{layer}", 2, 3), spec(), f"layers.{layer}.up")
        x = b.call(torch.ops.aten.add.Tensor, x, w)
    assert_expected_inline(ordered(b.output(x), "forward"), "G0 G1 w0 C G2 w1 C G3 w2 C w3 C")


def layers_in(places: Iterable[int], gathered: ParamSpec, reduced: ParamSpec) -> fx.Graph:
    """Layers one behind the other, each of which adds its weight and reduces the sum."""
    b = Builder()
    x = b.input("x", 4, 3)
    sums = []
    for layer in places:
        w = b.unshard(b.input(f"shard{layer}", 2, 3), gathered, f"layers.{layer}.up")
        x = b.call(aten.add.Tensor, x, w)
        sums.append(b.reduce(x, reduced, w))
        sums[-1].meta["nn_module_stack"] = w.meta["nn_module_stack"]
    return b.output(*sums)


def ordered(graph: fx.Graph, stage: str = "backward", **changes: Any) -> str:
    """The order (see ``order``) of a graph that is lowered and overlapped, by its plan with these changes."""
    plan = dataclasses.replace(plan_graph(graph, stage), **changes)
    insert(graph, plan)
    overlap(graph, plan)
    graph.lint()
    found = order(graph)
    assert check(graph, plan) == sum(found.count(launch) for launch in "GRA")
    return found


def test_a_reduction_is_waited_for_before_the_next_units_is_launched() -> None:
    # The first unit of backward is gathered at once: nothing before it could hide it.
    graph = layers_in(reversed(range(3)), spec(), spec())
    assert_expected_inline(ordered(graph), "G0 G1 w0 C R0 G2 w1 C w'0 R1 w2 C w'1 R2 w'2")


def units_reduced(*specs: ParamSpec) -> str:
    """The order in which units are reduced whose gradients come one after another, each from the one before."""
    b = Builder()
    x = b.input("x", 4, 3)
    reduced = []
    for layer, its_spec in enumerate(specs):
        grows = its_spec.size != tuple(x.meta["val"].shape)
        x = b.call(torch.ops.aten.cat.default, [x, x]) if grows else b.call(torch.ops.aten.relu.default, x)
        reduced.append(b.reduce(x, its_spec))
        reduced[-1].meta["nn_module_stack"] = {f"layers.{layer}.up": (f"L['self'].layers.{layer}.up", torch.nn.Linear)}
    return ordered(b.output(*reduced))


def test_nothing_is_in_flight_beside_a_last_gradient_that_is_large() -> None:
    """As an embedding's: it stands beside the gradients of the whole model."""
    large = units_reduced(*[spec()] * 3, spec(size=(8, 3)))
    assert_expected_inline(large, """C R0 C w'0 R1 C w'1 R2 w'2 C R3 w'3""")
    assert_expected_inline(units_reduced(*[spec()] * 4), """C R0 C w'0 R1 C w'1 R2 C w'2 R3 w'3""")


def test_launches_keep_the_plans_order_whatever_is_ready_first() -> None:
    late = (("gather", 0), ("gather", 1), ("gather", 2), ("reduce", 0), ("reduce", 1), ("reduce", 2))
    # The first reduction is ready before the last gather is due, and lets it go first.
    graph = layers_in(range(3), spec(), spec())
    assert_expected_inline(ordered(graph, order=late), "G0 G1 w0 C G2 R0 w1 C w'0 R1 w2 C w'1 R2 w'2")


def test_an_order_that_cannot_be_kept_is_refused() -> None:
    never = (("gather", 0), ("reduce", 1), ("gather", 1), ("gather", 2), ("reduce", 0), ("reduce", 2))
    # What the second unit sends is computed from what it gathers.
    with pytest.raises(RuntimeError, match="computed from what a later one brings"):
        ordered(layers_in(range(3), spec(), spec()), order=never)


def test_sums_over_replicas_are_launched_before_the_next_reduction_and_waited_for_one_later() -> None:
    ordered = units_reduced(*[replicated()] * 4)
    assert_expected_inline(ordered, """C R0 C w'0 A0 R1 C w'0 w'1 A1 R2 C w'1 w'2 A2 R3 w'2 w'3 A3 w'3""")


def order(graph: fx.Graph) -> str:
    """G gather, w its wait, C compute, R reduction, A all-reduce, w' their waits, each with its bucket.

    D copies to the host, of offloaded shards, and the end, which waits for these.
    """
    letters = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        role, name = node.meta.get(ROLE), str(node.target)
        if role is None:
            letters.append("C")
        elif "wait_tensor" in name:
            letters.append(f"{'w' if role.kind == 'gather' else chr(119) + chr(39)}{role.bucket}")
        elif "all_reduce" in name:
            letters.append(f"A{role.bucket}")
        elif "to_host" in name:
            letters.append(f"D{role.bucket}")
        elif "wait_for_copies" in name:
            letters.append("end")
        elif is_launch(node):
            letters.append(f"{'G' if role.kind == 'gather' else 'R'}{role.bucket}")
    return " ".join(letters)


def test_a_plan_survives_json() -> None:
    bucket = Bucket("Block:layers.0", ("a", "b"), "bfloat16", 64)
    forward = Plan("forward", gathers=(bucket,), order=(("gather", 0),))
    plan = Plan("joint", again=("a",), keep=("b",), forward=forward, backward=Plan("backward"))
    changes: list[dict[str, Any]] = [{}, {"lookahead": 2}, {"recompute": ("a",)}, {"slices": ("a",)}]
    plans = [dataclasses.replace(plan, **change) for change in changes]
    assert [Plan.from_json(one.to_json()) for one in plans] == plans == [Plan.unpacked(one.packed()) for one in plans]
    assert len({one.id for one in plans}) == len(plans)


def test_check_refuses_a_wait_that_is_not_direct() -> None:
    b = Builder()
    graph = b.output(b.call(torch.ops.aten.relu.default, b.unshard(b.input("shard", 2, 3), spec())))
    plan = plan_graph(graph, "forward")
    with pytest.raises(AssertionError, match="not lowered"):
        check(graph, plan)
    insert(graph, plan)
    (wait,) = [node for node in graph.nodes if "wait_tensor" in str(node.target)]
    with graph.inserting_before(wait):
        view = graph.call_function(torch.ops.aten.view.default, (wait.args[0], [4, 3]))
    wait.args = (view,)
    with pytest.raises(AssertionError, match="not by one wait"):
        check(graph, plan)
