"""Compiled graphs take plain tensors in the place of sharded parameters: autograd sees none of that."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import inspect
from tests.comparing import assert_same_grads, assert_same_params, batches, full, loss_of, reference_backward
from tests.compiling import compiled, num_graphs
from tests.models import Stack, pair
from tests.ranks import Ranks

BACKENDS = ["aot_eager", pytest.param("passes", marks=pytest.mark.more)]
COMPAT = [pytest.param("aot_eager", marks=pytest.mark.compat), pytest.param("passes", marks=pytest.mark.more)]


class Spare(Stack):
    """A parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].spare = nn.Linear(3, 3)


class Runs:
    """A compiled sharded model, and the unsharded one with equal parameters."""

    def __init__(self, backend: str, make: type[Stack] = Stack) -> None:
        self.unsharded, self.model = pair(make=make)
        self.compiled = compiled(self.model, backend)

    def loss(self, step: int) -> Tensor:
        return loss_of(self.compiled(batches(step)[dist.get_rank()]))

    def warm_up(self) -> None:
        """Compile, and call again: a unit's edges are joined by now."""
        self.check()
        with no_compilation():
            self.check()
        self.model.zero_grad()

    def check(self, step: int = 0) -> None:
        """A step from no gradients gives both the same."""
        self.model.zero_grad()
        self.unsharded.zero_grad()
        self.loss(step).backward()
        reference_backward(self.unsharded, batches(step))
        assert_same_grads(self.model, self.unsharded)


def check_warnings_are_errors() -> None:
    unsharded, model = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = compiled(model, "aot_eager")
        loss_of(run(batches(0)[dist.get_rank()])).backward()
        with pytest.raises(UserWarning, match="not a leaf"):
            _ = (torch.ones(1, requires_grad=True) * 1).grad  # a user's look is not hidden
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)


def test_a_compiled_step_where_warnings_are_errors(two_ranks: Ranks) -> None:
    """Dynamo looks at ``.grad`` of each input, which is no leaf where it is an edge."""
    two_ranks.run(check_warnings_are_errors)


@contextmanager
def num_compilations() -> Iterator[list[int]]:
    count = [-num_graphs()]
    yield count
    count[0] += num_graphs()


@contextmanager
def no_compilation() -> Iterator[None]:
    with num_compilations() as count:
        yield
    assert count == [0]


def _asked_for(backend: str) -> None:
    runs = Runs(backend)
    runs.warm_up()
    expected = {fqn: param.grad for fqn, param in runs.unsharded.named_parameters()}
    runs.model.zero_grad()
    with no_compilation():
        grads = torch.autograd.grad(runs.loss(0), list(runs.model.parameters()))
        assert all(param.grad is None for param in runs.model.parameters())
        for (fqn, param), got in zip(runs.model.named_parameters(), grads):
            assert isinstance(got, DTensor) and got.placements == param.placements
            torch.testing.assert_close(full(got), expected[fqn], atol=1e-6, rtol=1e-4)
        chosen = runs.model.layers[1].up.weight
        runs.loss(0).backward(inputs=[chosen])
        assert [fqn for fqn, one in runs.model.named_parameters() if one.grad is not None] == ["layers.1.up.weight"]
        torch.testing.assert_close(full(chosen.grad), expected["layers.1.up.weight"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("backend", COMPAT)
def test_gradients_asked_for_by_autograd(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(_asked_for, backend)


def _tensor_hooks(backend: str) -> None:
    runs = Runs(backend, Spare)
    runs.warm_up()
    expected = runs.unsharded.layers[1].up.weight.grad.clone()  # type: ignore[union-attr]
    chosen, spare = runs.model.layers[1].up.weight, runs.model.layers[0].spare.weight
    seen: list[Any] = []
    handles = [chosen.register_hook(lambda grad: seen.append(type(grad)) or grad * 2), spare.register_hook(seen.append)]
    runs.model.zero_grad()
    with no_compilation():
        runs.loss(0).backward()
    assert seen == [DTensor]
    torch.testing.assert_close(full(chosen.grad), 2 * expected, atol=1e-6, rtol=1e-4)
    for handle in handles:
        handle.remove()
    with no_compilation():
        runs.check(1)
        loss = runs.loss(1)
        late = spare.register_hook(seen.append)
        loss.backward()
    late.remove()
    assert seen == [DTensor]


@pytest.mark.parametrize("backend", COMPAT)
def test_tensor_hooks_see_the_gradients_that_there_are(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(_tensor_hooks, backend)


def _optimizer_in_backward(backend: str) -> None:
    runs = Runs(backend, Spare)
    runs.warm_up()
    stepped: list[nn.Parameter] = []

    def step(param: nn.Parameter) -> None:
        assert isinstance(param.grad, DTensor)
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None
        stepped.append(param)

    for param in runs.model.parameters():
        param.register_post_accumulate_grad_hook(step)
    with no_compilation():
        for index in range(3):
            runs.loss(index).backward()
            runs.unsharded.zero_grad()
            reference_backward(runs.unsharded, batches(index))
            torch.optim.SGD(runs.unsharded.parameters(), lr=0.1).step()
    assert len(stepped) == 3 * (len(list(runs.model.parameters())) - 2)
    assert_same_params(runs.model, runs.unsharded)


@pytest.mark.parametrize("backend", COMPAT)
def test_an_optimizer_in_backward(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(_optimizer_in_backward, backend)


def _nodes(backend: str) -> None:
    runs = Runs(backend, Spare)
    runs.warm_up()

    def num_nodes() -> int:
        nodes: Any = {runs.loss(0).grad_fn}
        for _ in range(4):  # loss, graph, edges, shards
            nodes |= {following for node in nodes for following, _ in node.next_functions if following is not None}
        return sum(node.name() == "_EdgesBackward" for node in nodes)

    num_units = len(runs.model.layers) + 1
    with no_compilation():
        assert num_nodes() == num_units
        handle = runs.model.layers[1].up.weight.register_hook(lambda grad: None)
        assert num_nodes() == num_units
        runs.check()
        handle.remove()
        runs.check()


@pytest.mark.compat
def test_a_unit_has_one_node_whoever_hooks_its_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(_nodes, "aot_eager")


def _num_inputs() -> list[int]:
    _, model = pair()
    with inspect(model) as report:
        loss_of(torch.compile(model, backend="aot_eager")(batches(0)[dist.get_rank()])).backward()
    [record] = report.records
    assert record.graph is not None
    inputs = [node for node in record.graph.find_nodes(op="placeholder") if node.name.startswith("primals")]
    return [len(inputs), len(list(model.parameters())) + 1]  # and the tokens


@pytest.mark.compat
def test_a_graph_takes_a_parameter_once(two_ranks: Ranks) -> None:
    for num_inputs, expected in two_ranks.run(_num_inputs):
        assert num_inputs == expected


def _frozen_meanwhile(backend: str) -> None:
    runs = Runs(backend)
    runs.warm_up()
    loss = runs.loss(0)
    frozen = runs.model.layers[1].up.weight.requires_grad_(False)
    loss.backward()
    assert frozen.grad is None and runs.model.head.weight.grad is not None
    frozen.requires_grad_(True)
    runs.check(1)


def test_a_parameter_frozen_between_forward_and_backward(two_ranks: Ranks) -> None:
    two_ranks.run(_frozen_meanwhile, "aot_eager")


def _backward_again(backend: str) -> None:
    runs = Runs(backend)
    loss = runs.loss(0)
    loss.backward(retain_graph=True)
    first = runs.model.head.weight.grad
    loss.backward()
    assert runs.model.head.weight.grad is first
    (runs.loss(1) + runs.loss(2)).backward()  # by now edges are joined
    reference_backward(runs.unsharded, batches(0))
    for step in range(3):
        reference_backward(runs.unsharded, batches(step))
    assert_same_grads(runs.model, runs.unsharded)


@pytest.mark.compat
def test_gradients_add_up_over_backwards_and_over_graphs(two_ranks: Ranks) -> None:
    two_ranks.run(_backward_again, "aot_eager")


def _penalty(backend: str) -> None:
    runs = Runs(backend)
    runs.warm_up()
    runs.unsharded.zero_grad()
    penalty = sum(param.pow(2).sum() for param in runs.model.parameters())
    assert isinstance(penalty, DTensor)
    (runs.loss(0) + 0.1 * penalty.full_tensor()).backward()
    reference_backward(runs.unsharded, batches(0))
    (0.1 * sum(param.pow(2).sum() for param in runs.unsharded.parameters())).backward()  # type: ignore[union-attr]
    assert_same_grads(runs.model, runs.unsharded)


def test_a_penalty_on_the_shards_adds_to_their_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(_penalty, "aot_eager")


def _changed_behind_our_back(backend: str) -> None:
    runs = Runs(backend)
    runs.warm_up()
    chosen, unsharded = runs.model.layers[1].up.weight, runs.unsharded.layers[1].up.weight
    for one in (chosen, unsharded):
        one.requires_grad_(False)
    runs.check(1)
    assert chosen.grad is None
    for one in (chosen, unsharded):
        one.requires_grad_(True)
    with no_compilation():
        runs.check(2)
    local: Any = chosen._local_tensor
    chosen._local_tensor = local * 2
    unsharded.data.mul_(2)
    runs.check(3)
    handle = runs.model.layers[1].down.weight.register_hook(lambda grad: None)
    runs.check(3)
    handle.remove()
    chosen._local_tensor = local
    unsharded.data.div_(2)
    with no_compilation():
        runs.check(4)
    values = local.data
    local.data = values * 2
    unsharded.data.mul_(2)
    with no_compilation():
        runs.check(3)
    local.data = values
    unsharded.data.div_(2)
    with no_compilation():
        runs.check(4)
    chosen.grad = None
    other = nn.Parameter(chosen.detach() * 3)
    runs.model.layers[1].up.weight = other
    unsharded.data.mul_(3)
    runs.check(5)
    assert other.grad is not None and chosen.grad is None
    runs.model.layers[1].up.weight = chosen
    unsharded.data.div_(3)
    with no_compilation():
        runs.check(6)
    runs.model.requires_grad_(False)
    assert not runs.loss(7).requires_grad


@pytest.mark.more
@pytest.mark.parametrize("backend", COMPAT)
def test_the_next_call_sees_what_was_frozen_and_replaced(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(_changed_behind_our_back, backend)


def _functional(backend: str) -> None:
    runs = Runs(backend)
    runs.warm_up()
    tokens = batches(0)[dist.get_rank()]
    halves = {fqn: param.detach() / 2 for fqn, param in runs.model.named_parameters()}
    got = torch.func.functional_call(runs.compiled, {f"_orig_mod.{fqn}": value for fqn, value in halves.items()}, tokens)
    for param in runs.unsharded.parameters():
        param.data.div_(2)
    torch.testing.assert_close(got, runs.unsharded(tokens))
    for param in runs.unsharded.parameters():
        param.data.mul_(2)
    with no_compilation():
        runs.check(1)


@pytest.mark.compat
def test_shards_of_a_functional_call_are_those_that_are_read(two_ranks: Ranks) -> None:
    two_ranks.run(_functional, "aot_eager")


def _blocks_share(backend: str) -> None:
    runs = Runs("eager")
    for layer in runs.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    runs.compiled = runs.model
    with num_compilations() as count:
        runs.check()
    assert count[0] == 1
    for layers in (runs.model.layers, runs.unsharded.layers):
        layers[1].up.weight.requires_grad_(False)
    with num_compilations() as count:
        runs.check(1)
    assert count[0] == 1
    for layers in (runs.model.layers, runs.unsharded.layers):
        layers[0].up.weight.requires_grad_(False)
    with no_compilation():
        runs.check(2)


def test_equal_blocks_share_graphs_also_when_frozen(two_ranks: Ranks) -> None:
    two_ranks.run(_blocks_share, "aot_eager")


def _replaced(how: str) -> None:
    runs = Runs("aot_eager")
    runs.warm_up()
    before = runs.model.head.weight
    if how == "assign":
        other = {fqn: value.detach().clone() * 2 for fqn, value in runs.model.state_dict().items()}
        runs.model.load_state_dict(other, assign=True)
        runs.unsharded.load_state_dict({fqn: value * 2 for fqn, value in runs.unsharded.state_dict().items()})
        assert runs.model.head.weight is not before
    elif how == "to":
        for one in (runs.model, runs.unsharded):
            one.to(torch.float64).to(torch.float32)
    elif how == "swap":
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            runs.model.load_state_dict({fqn: value * 2 for fqn, value in runs.model.state_dict().items()})
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        runs.unsharded.load_state_dict({fqn: value * 2 for fqn, value in runs.unsharded.state_dict().items()})
    seen = []
    runs.model.head.weight.register_hook(lambda grad: seen.append(grad))
    runs.check(1)
    assert len(seen) == 1
    with no_compilation():
        runs.check(2)


@pytest.mark.compat
@pytest.mark.parametrize("how", ["assign", "to", "swap"])
def test_replaced_shards_are_followed(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(_replaced, how)


def _converted_for_inference(backend: str) -> None:
    runs = Runs(backend)
    runs.warm_up()
    frozen = runs.model.layers[0].up.weight.requires_grad_(False)
    with torch.inference_mode():
        runs.model.to(torch.float64).to(torch.float32)
    assert runs.model.head.weight.is_inference()
    tokens = batches(1)[dist.get_rank()]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(runs.compiled(tokens), runs.unsharded(tokens))
    assert [param for param in runs.model.parameters() if not param.requires_grad] == [frozen]


@pytest.mark.compat
def test_shards_made_in_inference_mode_are_read(two_ranks: Ranks) -> None:
    two_ranks.run(_converted_for_inference, "aot_eager")
