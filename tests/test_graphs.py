"""What stands in the graphs: equal blocks share one, resharding saves no weight, and the planned order is what runs."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.passes import GraphRecord
from tests.models import Block, BreakBlock, Checkpointed, Stack, shard
from tests.recording import recorded
from tests.test_extension import Halved, InEights

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


class Stages(dict[str, GraphRecord]):
    """The graphs by stage; one of each."""

    def append(self, record: GraphRecord) -> None:
        assert record.stage not in self, f"a second {record.stage} graph"
        self[record.stage] = record


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def records() -> Iterator[dict[str, GraphRecord]]:
    with recorded(Stages()) as by_stage:
        yield by_stage


@pytest.mark.parametrize("order", ["compile, shard", "wrapped"])
@pytest.mark.compat
def test_equal_blocks_share_their_graphs(order: str) -> None:
    """Of more blocks than Dynamo would compile one by one. Where they break, each part has one."""
    num_blocks = torch._dynamo.config.recompile_limit + 2
    block, num_graphs = (BreakBlock, 2) if order == "wrapped" else (Block, 1)
    model = Stack(num_blocks, block=block)
    for index, layer in enumerate(model.layers):
        if order == "compile, shard":
            layer.compile(backend="aot_eager")
            fully_shard(layer)
        else:
            model.layers[index] = fully_shard(torch.compile(layer, backend="aot_eager"))
    fully_shard(model)
    for _ in range(2):
        model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
    keys = list(Stack(num_blocks).state_dict())
    if order == "wrapped":
        keys = [re.sub(r"^(layers\.\d+\.)", r"\1_orig_mod.", key) for key in keys]
    assert list(model.state_dict()) == keys


def saved_tensors(out: Tensor) -> list[Tensor]:
    """What the compiled forward saved for backward."""
    node: Any = out.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    return list(node.saved_tensors)


def saved_weights(model: Stack, out: Tensor) -> list[tuple[int, ...]]:
    """Shapes, among those of full weights, of what the compiled forward saved for backward."""
    shapes = {tuple(param.shape) for param in model.parameters() if param.ndim == 2}
    shapes |= {tuple(reversed(shape)) for shape in shapes}
    return sorted(tuple(saved.shape) for saved in saved_tensors(out) if tuple(saved.shape) in shapes)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("make", "backend", "policy"),
    [
        (Stack, "aot_eager", MixedPrecisionPolicy()),
        (Checkpointed, "aot_eager", BF16),
        # Inductor's own joint passes ran between the tags and the partitioner
        pytest.param(Stack, "inductor", BF16, marks=pytest.mark.slow),
    ],
)
def test_with_resharding_no_full_weight_is_saved(
    make: type[Stack], backend: str, policy: MixedPrecisionPolicy, records: dict[str, GraphRecord]
) -> None:
    model = shard(make(1), reshard_after_forward=True, mp_policy=policy)
    out = torch.compile(model, backend=backend, fullgraph=True)(torch.zeros(2, 5, dtype=torch.long))
    assert saved_weights(model, out) == []
    out.float().sum().backward()
    if backend == "inductor":
        gathered = {fqn for bucket in records["backward"].plan.gathers for fqn in bucket.fqns}
        assert gathered == {fqn for fqn, _ in model.named_parameters()} - {"embed.weight"}  # rows are looked up


@pytest.mark.parametrize(("make", "frozen_in_bf16"), [(Checkpointed, True), (Stack, True), (Stack, False)])
def test_no_cast_of_a_full_weight_is_saved_either(make: type[Stack], frozen_in_bf16: bool) -> None:
    model = make(1)
    if frozen_in_bf16:
        for layer in model.layers:
            layer.up.to(torch.bfloat16).requires_grad_(False)
            layer.up.forward = types.MethodType(_in_the_dtype_of_its_input, layer.up)
    run = torch.compile(shard(model, reshard_after_forward=True), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not frozen_in_bf16):
        out = run(torch.zeros(2, 5, dtype=torch.long))
    assert saved_weights(model, out) == []
    out.float().sum().backward()


def _in_the_dtype_of_its_input(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))


def test_without_resharding_backward_gathers_nothing(records: dict[str, GraphRecord]) -> None:
    """Though a block is recomputed."""
    model = shard(Checkpointed(1), reshard_after_forward=False)
    out = torch.compile(model, backend="passes", fullgraph=True)(torch.zeros(2, 5, dtype=torch.long))
    assert len(saved_weights(model, out)) == 3  # two in the block, and the head
    out.sum().backward()
    plan = records["joint"].plan
    assert plan.again == () and {*plan.params} == {*plan.keep}
    assert records["backward"].plan.gathers == ()


def test_only_the_root_is_kept_by_default(records: dict[str, GraphRecord]) -> None:
    """And what is frozen is gathered and not reduced."""
    model = Stack(1)
    model.layers[0].up.weight.requires_grad_(False)
    shard(model)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.zeros(2, 5, dtype=torch.long))
    assert saved_weights(model, out) == [(31, 16)]
    assert set(records["joint"].plan.keep) == {"embed.weight", "norm.weight", "norm.bias", "head.weight"}
    out.sum().backward()
    assert records["joint"].num_unshards - records["joint"].num_reduces == 1


@pytest.mark.slow
def test_with_an_int_backward_gathers_what_few_ranks_kept(records: dict[str, GraphRecord]) -> None:
    model = shard(Checkpointed(2, dim=32), reshard_after_forward=2)
    out = torch.compile(model, fullgraph=True)(torch.zeros(2, 5, dtype=torch.long))
    saved = {tuple(one.shape): one for one in saved_tensors(out)}
    # Of 65 rows rank 0 of 4 has 17, and keeps 33, half of them, until backward; of 31 it has 8 and keeps 16.
    slices = {(33, 32), (16, 65), (16, 32)}
    assert slices <= {*saved} and not {(65, 32), (32, 65), (31, 32), (17, 32), (8, 65)} & {*saved}
    assert all(saved[shape].untyped_storage().nbytes() == saved[shape].nbytes for shape in slices), "holds the whole"
    out.sum().backward()
    assert {bucket.num_ranks for bucket in records["forward"].plan.gathers} == {4}
    assert {bucket.num_ranks for bucket in records["backward"].plan.gathers} == {2}
    assert {bucket.num_ranks for bucket in records["backward"].plan.reduces} == {4}
    in_forward = {fqn for bucket in records["forward"].plan.gathers for fqn in bucket.fqns}
    assert in_forward == set(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(("subclass", "dtype"), [(Halved, "bfloat16"), (InEights, "float8_e4m3fn")])
def test_backward_makes_a_weight_again_from_what_its_subclass_sends(
    subclass: type[Halved], dtype: str, records: dict[str, GraphRecord]
) -> None:
    model = Stack(2)
    for layer in model.layers:
        layer.down.weight = nn.Parameter(subclass(layer.down.weight.detach()))
    shard(model, reshard_after_forward=True)
    out = torch.compile(model, fullgraph=True)(torch.zeros(2, 5, dtype=torch.long))
    assert saved_weights(model, out) == []
    out.sum().backward()
    for stage, layers in (("forward", (0, 1)), ("backward", (1, 0))):
        gathers = [one for one in records[stage].plan.gathers if any(":" in fqn for fqn in one.fqns)]
        assert [one.fqns for one in gathers] == [(f"layers.{layer}.down.weight:0",) for layer in layers]
        size = 4 * 33 * getattr(torch, dtype).itemsize  # rows of 33: a quarter of 16
        assert [(one.dtype, one.num_bytes) for one in gathers] == [(dtype, size)] * 2
    reduced = {fqn for bucket in records["backward"].plan.reduces for fqn in bucket.fqns}
    assert reduced == set(model.state_dict())
