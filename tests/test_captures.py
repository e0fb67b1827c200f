"""What a sharded model cannot be captured by says so; what traces backward into forward's graph keeps its gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile import fully_shard
from tests.comparing import (
    assert_same_grads,
    backward_on_both,
    batches,
    loss_of,
    mean_over_ranks,
    mine,
    reference_backward,
)
from tests.models import Stack, pair
from tests.on_ranks import on_two_ranks

X = torch.ones(2, 8)


def _sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model[0])
    return fully_shard(model)


def _export_strictly(model: nn.Module) -> Any:
    return torch.export.export(model, (X,), strict=True)


def _export(model: nn.Module) -> Any:
    return torch.export.export(model, (X,), strict=False)


def _trace(model: nn.Module) -> Any:
    return torch.jit.trace(model, (X,))


def _freeze(model: nn.Module) -> Any:
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        return torch.compile(model.eval())(X)


@pytest.mark.compat
@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize(
    ("capture", "said"),
    [
        (_export_strictly, r"weight is sharded: torch.export.export would record this rank's shards.* Export an unsharded"),
        (_export, r"\(root\) \(Sequential\) is sharded: torch.export.export would record.* Export an unsharded model"),
        (_trace, r"\(root\) \(Sequential\) is sharded: torch.jit.trace would record.* Trace an unsharded model"),
        (torch.jit.script, r"FSDPSequential is sharded: torch.jit.script would record.* Script an unsharded model"),
        (_freeze, r"weight is sharded: torch._inductor.config.freezing would make .* a constant. Set it to False"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.torch.jit.(trace|trace_method|script). is deprecated:FutureWarning")
def test_what_cannot_be_captured_says_what_to_do_instead(capture: Callable[[nn.Module], Any], said: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=said):
        capture(_sharded())


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_setting_for_evaluation_leaves_training_alone() -> None:
    torch._dynamo.reset()
    model = _sharded()
    with torch._inductor.config.patch(freezing=True):
        torch.compile(model, backend="aot_eager")(X).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def _traces_backward() -> AbstractContextManager[Any]:
    return torch._dynamo.config.patch(trace_autograd_ops=True)


def _backward_in_the_graph(backend: str) -> None:
    unsharded, sharded = pair(make=lambda: Stack(num_blocks=1))

    @torch.compile(backend=backend, fullgraph=True)
    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(sharded(tokens))
        loss.backward()
        return loss.detach()

    with _traces_backward():
        for number in range(2):  # the second one adds to the gradients of the first
            loss = step(mine(number))
            expected = reference_backward(unsharded, batches(number))
            torch.testing.assert_close(mean_over_ranks(loss), expected)
            assert_same_grads(sharded, unsharded)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_backward_in_the_graph_of_its_forward(two_ranks: Any, backend: str) -> None:
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 12):
        # torch 2.11 asserts that leaves are no DTensors. Gradients are not lost without a word.
        with pytest.raises(AssertionError, match="in method_backward"):
            two_ranks.run(_backward_in_the_graph, backend)
        return
    two_ranks.run(_backward_in_the_graph, backend)


@on_two_ranks
def test_the_setting_changes_nothing_for_a_backward_outside() -> None:
    unsharded, sharded = pair(make=lambda: Stack(1))
    with _traces_backward():
        backward_on_both(torch.compile(sharded, backend="aot_eager"), unsharded, 0)
    assert_same_grads(sharded, unsharded)


@on_two_ranks
def test_gradients_cannot_be_held_back_in_the_graph() -> None:
    _, sharded = pair()
    sharded.set_requires_gradient_sync(False)
    said = r"embed\.weight: torch\._dynamo\.config\.trace_autograd_ops traces backward into the graph"
    with _traces_backward(), pytest.raises(RuntimeError, match=said):
        torch.compile(sharded, backend="aot_eager")(batches(0)[0])
