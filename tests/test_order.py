"""The order of launches in generated code is the plan's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from fsdp_compile import fully_shard
from fsdp_compile.passes.cost.roofline import is_product
from fsdp_compile.passes.ir.meta import ROLE
from fsdp_compile.passes.wire.collectives import c10d, is_launch, is_wait
from tests.compiling import no_kernels_built
from tests.models import (
    Block,
    Checkpointed,
    ConvBlock,
    Stack,
    TwiceBlock,
    loop_of,
    mesh_of,
    shard,
)
from tests.recording import recorded

LETTERS = {
    r"(all_gather_(into_tensor|members)|gather_offloaded)\.default\(": "G",
    r"(reduce_scatter_tensor|reduce_scatter_members|all_to_all_single)\.default\(": "R",
    r"all_reduce_?\.default\(": "S",
    r"wait_tensor\.default\(": "w",
    r"(extern_kernels\.\w*(mm|convolution)\w*|mkldnn\w*|aten\._scaled_dot\w*\.default|aten.convolution_backward\.default)\(": "M",
}


def order_of(code: str) -> str:
    """G gather, w wait, M product, R reduction, S sum over replicas, as they stand in generated code; MM is M."""
    found = ""
    for line in code.split("def call", 1)[1].splitlines():
        found += "".join(letter for pattern, letter in LETTERS.items() if re.search(pattern, line))
    return re.sub(r"M+", "M", found)


def planned_order(graph: fx.Graph) -> str:
    """The same of a graph as the passes leave it."""
    found = ""
    for node in graph.nodes:
        if is_launch(node):
            name = node.target.name()
            found += "G" if "gather" in name else "S" if "all_reduce" in name else "R"
        elif is_wait(node):
            found += "w"
        else:
            found += "M" * (ROLE not in node.meta and is_product(node))
    return re.sub(r"M+", "M", found)


class Linears(nn.Module):
    """Blocks of one weight each: the order of collectives is easy to read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.compat
@pytest.mark.usefixtures("fake_group_of_four")
def test_gathers_go_a_unit_ahead_and_reductions_behind_them() -> None:
    model = Linears()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    run = torch.compile(model, fullgraph=True)
    with recorded() as records:
        _, (forward, backward) = run_and_get_code(lambda: run(torch.randn(8, 64, requires_grad=True)).sum().backward())
    # One unit ahead, waited for at its use. The plan lists launches in this order, and the group is the plan's.
    assert order_of(forward) == "GGwMGwMGwMGwMwM"
    # Backward: the last unit first. The gradient of its weight needs no gather, so it is computed while the gather runs.
    # The next gather has its turn before each reduction (R), which is waited for before the next unit's is launched.
    assert order_of(backward) == "GMGRwMGwRwMGwRwMGwRwMwRwMw"
    plans = {one.stage: one.plan for one in records}
    assert [bucket.unit for bucket in plans["forward"].gathers] == [f"Linear:layers.{i}" for i in range(5)]
    assert [bucket.unit for bucket in plans["backward"].gathers] == [f"Linear:layers.{4 - i}" for i in range(5)]
    assert [bucket.unit for bucket in plans["backward"].reduces] == [f"Linear:layers.{4 - i}" for i in range(5)]


class Averages(Block):
    """Its activations' size, summed over ranks: a collective of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        size = (x.T @ x if x.ndim == 2 else x.transpose(1, 2) @ x).detach().mean()
        summed = c10d.all_reduce(size, "sum", dist.group.WORLD.group_name)
        return x / (1 + c10d.wait_tensor(summed))


TOKENS = torch.zeros(2, 5, dtype=torch.long)
MODELS: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "blocks": (lambda: shard(Stack(4)), TOKENS),
    "a large embedding": (lambda: shard(Stack(2, vocab=8192)), TOKENS),
    "a tied head": (lambda: shard(Stack(3, tied=True)), TOKENS),
    "checkpointed": (lambda: shard(Checkpointed(3)), TOKENS),
    "replicas of shards": (lambda: shard(Stack(2), mesh=mesh_of("replicate", "shard")), TOKENS),
    "called twice": (lambda: shard(loop_of(TwiceBlock, 16)()), torch.randn(2, 16)),
    "a user's collectives": (lambda: shard(Stack(2, block=Averages)), TOKENS),
    "convolutions": (lambda: shard(loop_of(ConvBlock, 8)()), torch.randn(2, 8, 6, 8)),
}
ALWAYS = (("replicas of shards", True), ("a user's collectives", False))


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
        for case in itertools.product(MODELS, (False, True))
    ],
)
def test_the_generated_code_launches_and_waits_where_the_plan_does(name: str, deterministic: bool) -> None:
    make, inputs = MODELS[name]
    model = make()
    torch._dynamo.reset()
    with no_kernels_built(), recorded() as records, inductor_config.patch(deterministic=deterministic):
        _, codes = run_and_get_code(lambda: torch.compile(model, fullgraph=True)(inputs).sum().backward())
    planned = [planned_order(one.graph) for one in records if one.stage in ("forward", "backward")]
    assert list(map(order_of, codes)) == planned and {*"GRwM"} <= {*"".join(planned)}
