"""What explain_breaks says of models that are one graph, and of models that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_compile import explain_breaks
from tests.models import Block, BreakBlock, Stack, shard

pytestmark = [pytest.mark.usefixtures("fake_group_of_four"), pytest.mark.compat]

TOKENS = torch.zeros(2, 5, dtype=torch.long)


class Depends(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if hidden.sum() > 1e9:
            hidden = hidden + 1
        return x + self.down(torch.relu(hidden))


class Disabled(Block):
    @torch.compiler.disable
    def eagerly(self, x: Tensor) -> Tensor:
        return self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.eagerly(x))


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def test_one_graph_has_nothing_to_explain() -> None:
    report = explain_breaks(shard(Stack(1)), TOKENS)
    assert report
    assert str(report) == "1 graph, 0 breaks, 0 modules with parameters that are read outside of graphs"


@pytest.mark.parametrize(
    ("block", "line", "reason"),
    [
        (BreakBlock, "torch._dynamo.graph_break()", "Call to `torch._dynamo.graph_break()`"),
        (Depends, "if hidden.sum() > 1e9:", "Data-dependent branching"),
    ],
)
def test_a_break_is_found_in_its_module(block: type[Block], line: str, reason: str) -> None:
    report = explain_breaks(shard(Stack(2, block=block)), TOKENS)
    assert not report and report.num_graphs > 1
    found = [one for one in report.breaks if one.modules == (f"layers.0 ({block.__name__})", f"layers.1 ({block.__name__})")]
    assert found and all(one.reason.startswith(reason) for one in found)
    file, number = found[0].where.split(" in ")[0].rsplit(":", 1)
    with open(file) as source:
        assert source.readlines()[int(number) - 1].strip() == line
    assert not report.eager_reads


def test_what_is_read_outside_of_graphs_is_named() -> None:
    report = explain_breaks(shard(Stack(2, block=Disabled)), TOKENS)
    assert report.eager_reads == {
        "layers.0.up (Linear)": ["weight", "bias"],
        "layers.1.up (Linear)": ["weight", "bias"],
    }
    assert "eager: layers.0.up (Linear) reads weight, bias, gathered in no graph" in str(report)


def test_a_compiled_model_is_compiled_again_afterwards() -> None:
    model = shard(Stack(1))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = run(TOKENS)
    assert explain_breaks(run, TOKENS)  # type: ignore[arg-type]
    torch.testing.assert_close(run(TOKENS), expected)


def test_the_model_comes_first() -> None:
    with pytest.raises(TypeError, match="got Tensor as the model"):
        explain_breaks(TOKENS)  # type: ignore[arg-type]
