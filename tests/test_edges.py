"""Compiled graphs take plain tensors in the place of sharded parameters: autograd and its hooks see none of that."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import inspect
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    backward_on_both,
    batches,
    full,
    local_loss,
    loss_of,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import compiled, num_graphs
from tests.models import Again, Stack, mesh_of, pair
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.ranks import Ranks
from tests.recording import Wire

PATHS = ["eager", pytest.param("aot_eager", marks=pytest.mark.compat)]


class Spare(Stack):
    """A parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__(1)
        self.layers[0].spare = nn.Linear(3, 3)


class Runs:
    """A sharded model, compiled as a rule, and the unsharded one with equal parameters."""

    def __init__(self, path: str = "aot_eager", make: type[Stack] = Spare) -> None:
        self.unsharded, self.model = pair(make=make)
        self.compiled = compiled(self.model, path)
        self.up, self.up_unsharded = self.model.layers[0].up.weight, self.unsharded.layers[0].up.weight

    def loss(self, step: int) -> Tensor:
        return local_loss(self.compiled, step)

    def warm_up(self) -> None:
        """Compile, and call again: a unit's edges are joined by now."""
        self.check()
        with no_compilation():
            self.check()

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.unsharded.zero_grad()

    def check(self, step: int = 0) -> None:
        """A step from no gradients gives both the same."""
        self.zero_grad()
        backward_on_both(self.compiled, self.unsharded, step)
        assert_same_grads(self.model, self.unsharded)


@contextlib.contextmanager
def num_compilations() -> Iterator[list[int]]:
    count = [-num_graphs()]
    yield count
    count[0] += num_graphs()


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    with num_compilations() as count:
        yield
    assert count == [0]


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_autograd_and_its_hooks_see_shards_and_their_gradients(path: str) -> None:
    """Gradients asked for, hooks, a penalty on the shards, and an optimizer in backward: nothing compiles again."""
    runs = Runs(path)
    # As who keeps a graph for a second backward sets it.
    with torch._functorch.config.patch(donated_buffer=False):
        runs.warm_up()
        with no_compilation():
            for check in (
                _gradients_are_asked_for,
                _gradients_add_up_over_backwards_and_over_graphs,
                _hooks_see_the_gradients_that_there_are,
                _hooks_run_in_order_and_replace_the_gradient,
                _what_a_hook_keeps_stays_as_it_was,
                _an_optimizer_runs_in_backward,
            ):
                runs.zero_grad()
                check(runs)
        runs.zero_grad()
        _a_penalty_on_the_shards_adds_to_their_gradients(runs)


def _gradients_are_asked_for(runs: Runs) -> None:
    reference_backward(runs.unsharded, batches(0))
    expected = {fqn: param.grad for fqn, param in runs.unsharded.named_parameters() if param.grad is not None}
    params = {fqn: param for fqn, param in runs.model.named_parameters() if fqn in expected}
    grads = torch.autograd.grad(runs.loss(0), list(params.values()))
    assert all(param.grad is None for param in runs.model.parameters())
    for (fqn, param), got in zip(params.items(), grads):
        assert isinstance(got, DTensor) and got.placements == param.placements
        torch.testing.assert_close(full(got), expected[fqn], atol=1e-6, rtol=1e-4)
    runs.loss(0).backward(inputs=[runs.up])
    assert [fqn for fqn, one in runs.model.named_parameters() if one.grad is not None] == ["layers.0.up.weight"]
    torch.testing.assert_close(full(runs.up.grad), expected["layers.0.up.weight"], atol=1e-6, rtol=1e-4)


def _a_penalty_on_the_shards_adds_to_their_gradients(runs: Runs) -> None:
    penalty = sum(param.pow(2).sum() for param in runs.model.parameters())
    assert isinstance(penalty, DTensor)
    (runs.loss(0) + 0.1 * penalty.full_tensor()).backward()
    reference_backward(runs.unsharded, batches(0))
    (0.1 * sum(param.pow(2).sum() for param in runs.unsharded.parameters())).backward()  # type: ignore[union-attr]
    assert_same_grads(runs.model, runs.unsharded)


def _gradients_add_up_over_backwards_and_over_graphs(runs: Runs) -> None:
    loss = runs.loss(0)
    loss.backward(retain_graph=True)
    first = runs.model.head.weight.grad
    loss.backward()
    assert runs.model.head.weight.grad is first
    (runs.loss(1) + runs.loss(2)).backward()
    for step in (0, 0, 1, 2):
        reference_backward(runs.unsharded, batches(step))
    assert_same_grads(runs.model, runs.unsharded)


def _hooks_see_the_gradients_that_there_are(runs: Runs) -> None:
    spare = runs.model.layers[0].spare.weight
    seen: list[Any] = []
    handles = [runs.up.register_hook(lambda grad: seen.append(type(grad)) or grad * 2), spare.register_hook(seen.append)]
    backward_on_both(runs.compiled, runs.unsharded, 0)
    assert seen == [DTensor]
    torch.testing.assert_close(full(runs.up.grad), 2 * runs.up_unsharded.grad, atol=1e-6, rtol=1e-4)
    for handle in handles:
        handle.remove()
    runs.check(1)
    loss = runs.loss(1)
    late = spare.register_hook(seen.append)
    loss.backward()
    late.remove()
    assert seen == [DTensor]


def _hooks_run_in_order_and_replace_the_gradient(runs: Runs) -> None:
    other = runs.model.layers[0].up.bias
    order: list[str] = []
    handles = [
        runs.up.register_hook(lambda grad: order.append("first") or grad * 2),
        runs.up.register_hook(lambda grad: order.append("second") or grad + 1),
        runs.up.register_post_accumulate_grad_hook(lambda param: order.append("accumulated")),
    ]
    backward_on_both(runs.compiled, runs.unsharded, 0)
    runs.up_unsharded.grad.mul_(2).add_(1)
    assert order == ["first", "second", "accumulated"]
    assert_same_grads(runs.model, runs.unsharded)
    runs.loss(0).backward()  # adds to what is there
    torch.testing.assert_close(full(runs.up.grad), 2 * runs.up_unsharded.grad, atol=1e-5, rtol=1e-4)
    for handle in handles:
        handle.remove()
    runs.model.zero_grad()
    wrong = other.register_hook(lambda grad: torch.zeros(3))
    with pytest.raises(TypeError, match=r"up\.bias: a tensor hook made a Tensor"):
        runs.loss(0).backward()
    wrong.remove()
    runs.model.reset_iter_state()
    runs.check(1)


def _what_a_hook_keeps_stays_as_it_was(runs: Runs) -> None:
    """Whatever becomes of the gradient that the shard has: it is added to, clipped, made zero."""
    seen: list[Tensor] = []
    handle = runs.up.register_hook(seen.append)
    expected = []
    for step in range(2):
        runs.unsharded.zero_grad()
        backward_on_both(runs.compiled, runs.unsharded, step)
        runs.up.grad.mul_(0.5)
        expected.append(runs.up_unsharded.grad.clone())
    handle.remove()
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(full(ours), theirs, atol=1e-6, rtol=1e-4)


def _an_optimizer_runs_in_backward(runs: Runs) -> None:
    stepped: list[nn.Parameter] = []

    def step(param: nn.Parameter) -> None:
        assert isinstance(param.grad, DTensor)
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None
        stepped.append(param)

    handles = [param.register_post_accumulate_grad_hook(step) for param in runs.model.parameters()]
    for index in range(3):
        runs.unsharded.zero_grad()
        backward_on_both(runs.compiled, runs.unsharded, index)
        torch.optim.SGD(runs.unsharded.parameters(), lr=0.1).step()
    assert len(stepped) == 3 * (len(list(runs.model.parameters())) - 2)
    assert_same_params(runs.model, runs.unsharded)
    for handle in handles:
        handle.remove()


@pytest.mark.compat
@pytest.mark.usefixtures("fake_group_of_four")
def test_a_graph_takes_a_parameter_once() -> None:
    _, model = pair(make=lambda: Stack(1))
    with inspect(model) as report:
        local_loss(compiled(model, "aot_eager"), 0).backward()
    [record] = report.records
    assert record.graph is not None
    inputs = [node for node in record.graph.find_nodes(op="placeholder") if node.name.startswith("primals")]
    assert len(inputs) == len(list(model.parameters())) + 1  # and the tokens


@pytest.mark.compat
@on_two_ranks
def test_shards_are_followed_and_a_unit_has_one_node_whoever_hooks_them() -> None:
    """Shards that a functional call gives, and those of inference mode; what is frozen before its backward."""
    runs = Runs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo looks at .grad of each input, which is no leaf where it is an edge
        runs.warm_up()
        with pytest.raises(UserWarning, match="not a leaf"):
            _ = (torch.ones(1, requires_grad=True) * 1).grad  # a user's look is not hidden

    def num_nodes() -> int:
        nodes: Any = {runs.loss(0).grad_fn}
        for _ in range(4):  # loss, graph, edges, shards
            nodes |= {following for node in nodes for following, _ in node.next_functions if following is not None}
        return sum(node.name() == "_EdgesBackward" for node in nodes)

    num_units = len(runs.model.layers) + 1
    with no_compilation():
        assert num_nodes() == num_units
        handle = runs.up.register_hook(lambda grad: None)
        assert num_nodes() == num_units
        runs.check()
        handle.remove()
        runs.check()

    tokens = mine()
    halves = {f"_orig_mod.{fqn}": param.detach() / 2 for fqn, param in runs.model.named_parameters()}
    got = torch.func.functional_call(runs.compiled, halves, tokens)
    of_unsharded = {fqn: param.detach() / 2 for fqn, param in runs.unsharded.named_parameters()}
    torch.testing.assert_close(got, torch.func.functional_call(runs.unsharded, of_unsharded, tokens))
    with no_compilation():
        runs.check(1)

    runs.model.zero_grad()
    loss = runs.loss(0)
    runs.up.requires_grad_(False)
    loss.backward()
    del loss  # whose graph refers to shards, which nobody else may while they are swapped
    assert runs.up.grad is None and runs.model.head.weight.grad is not None
    runs.up.requires_grad_(True)
    runs.check(1)

    runs.up.requires_grad_(False)
    runs.model.zero_grad()
    with torch.inference_mode():
        runs.model.to(torch.float64).to(torch.float32)
    assert runs.model.head.weight.is_inference()
    tokens = mine(1)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(runs.compiled(tokens), runs.unsharded(tokens))
    assert [fqn for fqn, param in runs.model.named_parameters() if not param.requires_grad] == ["layers.0.up.weight"]


@on_two_ranks
def test_equal_blocks_share_graphs_also_when_frozen() -> None:
    runs = Runs("eager", Stack)
    for layer in runs.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
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


@pytest.mark.compat
@on_two_ranks
def test_replaced_shards_are_followed() -> None:
    runs = Runs()
    runs.warm_up()

    def is_followed() -> None:
        seen: list[Any] = []
        handle = runs.model.head.weight.register_hook(seen.append)
        runs.check(1)
        assert len(seen) == 1
        handle.remove()
        with no_compilation():
            runs.check(2)

    local: Any = runs.up._local_tensor
    runs.up._local_tensor = local * 2
    runs.up_unsharded.data.mul_(2)
    runs.check(3)
    runs.up._local_tensor = local
    local.data = local.data * 2
    with no_compilation():
        runs.check(3)

    before = runs.model.head.weight
    other = {fqn: value.detach().clone() * 2 for fqn, value in runs.model.state_dict().items()}
    runs.model.load_state_dict(other, assign=True)
    runs.unsharded.load_state_dict({fqn: value * 2 for fqn, value in runs.unsharded.state_dict().items()})
    assert runs.model.head.weight is not before
    is_followed()
    for one in (runs.model, runs.unsharded):
        one.to(torch.float64).to(torch.float32)
    is_followed()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        runs.model.load_state_dict({fqn: value / 2 for fqn, value in runs.model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    runs.unsharded.load_state_dict({fqn: value / 2 for fqn, value in runs.unsharded.state_dict().items()})
    is_followed()
    runs.model.layers[0].up.weight = nn.Parameter(runs.model.layers[0].up.weight.detach() * 3)
    runs.unsharded.layers[0].up.weight.data.mul_(3)
    is_followed()
    runs.model.requires_grad_(False)
    assert not runs.loss(7).requires_grad


# --- tensor hooks: most tests set them on one rank only, since hooks change no collective


def _a_hook_on_one_rank(path: str) -> list[Any]:
    unsharded, model = pair()
    run = compiled(model, path, fullgraph=False)
    seen: dict[str, Tensor] = {}
    train_and_compare(run, model, unsharded, steps=1)  # the hooks come in the middle of training
    handles = []
    if dist.get_rank() == 0:
        for name, param in model.named_parameters():
            handles.append(param.register_hook(lambda grad, name=name: seen.update({name: grad})))
    loss = local_loss(run, 0)
    with Wire() as wire:
        loss.backward()
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)
    for name, grad in seen.items():
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.to_local(), model.get_parameter(name).grad.to_local())
    for handle in handles:
        handle.remove()
    assert all(not param._backward_hooks for param in model.parameters())
    model.zero_grad()
    unsharded.zero_grad()
    train_and_compare(run, model, unsharded, steps=1)
    return [sorted(seen), wire.launches, [name for name, _ in model.named_parameters()]]


@pytest.mark.parametrize("path", PATHS)
def test_every_rank_sends_the_same_with_hooks_on_one(two_ranks: Ranks, path: str) -> None:
    (seen, launched, names), (nothing, also_launched, _) = two_ranks.run(_a_hook_on_one_rank, path)
    assert seen == sorted(names) and nothing == []
    assert launched == also_launched and len(launched) > 3


@on_two_ranks
def test_hooks_that_come_after_the_forward_and_hooks_on_several_gradients() -> None:
    unsharded, model = pair()
    seen: list[Any] = []
    every: list[Any] = []
    first: list[Any] = []
    loss = local_loss(model, 0)
    if dist.get_rank() == 1:
        model.head.weight.register_hook(seen.append)
        model.layers[0].norm.bias.register_hook(seen.append)
        both = [model.layers[0].up.weight, model.head.weight]
        torch.autograd.graph.register_multi_grad_hook(both, every.append)
        torch.autograd.graph.register_multi_grad_hook(both, first.append, mode="any")
    loss.backward()
    reference_backward(unsharded, batches(0))
    backward_on_both(model, unsharded, 0)
    assert_same_grads(model, unsharded)
    if dist.get_rank() == 1:
        assert (len(seen), len(every), len(first)) == (4, 2, 2)
        assert all(isinstance(grad, DTensor) for grad in [*seen, *every[0], *every[1]])


@on_four_ranks
def test_a_hook_sees_sums_over_replicas_and_what_micro_batches_held_back() -> None:
    unsharded, model = pair(mesh=mesh_of("replicate", "shard"))
    seen: list[Tensor] = []
    if dist.get_rank() == 0:
        model.layers[1].down.weight.register_hook(seen.append)
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        model.set_requires_all_reduce(step == 2)
        backward_on_both(model, unsharded, step)
        assert seen == [] or step == 2
    assert_same_grads(model, unsharded)
    if dist.get_rank() == 0:
        (grad,) = seen  # the first one's waited for it
        torch.testing.assert_close(grad.to_local(), model.layers[1].down.weight.grad.to_local())


@on_two_ranks
def test_autograd_grad_and_inputs_with_a_hook_on_one_rank() -> None:
    unsharded, model = pair()
    reference_backward(unsharded, batches(0))
    seen: list[Tensor] = []
    chosen, other = model.layers[1].up.weight, model.head.weight
    for param in (chosen, other):
        if dist.get_rank() == 0:
            param.register_hook(seen.append)
    (grad,) = torch.autograd.grad(local_loss(model, 0), [chosen])
    torch.testing.assert_close(full(grad), unsharded.layers[1].up.weight.grad, atol=1e-6, rtol=1e-4)
    assert chosen.grad is None and len(seen) == (1 if dist.get_rank() == 0 else 0)
    local_loss(model, 0).backward(inputs=[other])
    torch.testing.assert_close(full(other.grad), unsharded.head.weight.grad, atol=1e-6, rtol=1e-4)
    assert chosen.grad is None and len(seen) == (2 if dist.get_rank() == 0 else 0)


@on_two_ranks
def test_a_hook_that_raises_leaves_nothing_for_the_next_step() -> None:
    """More than one reduction is in flight when a hook raises at the end of backward; the next step is right."""
    unsharded, model = pair()
    model.set_reduce_scatter_max_input_buffers(3)
    handle = model.layers[1].up.weight.register_hook(lambda grad: grad.to_local())
    with pytest.raises(TypeError, match=r"up\.weight: a tensor hook made a Tensor of its gradient"):
        local_loss(model, 0).backward()
    handle.remove()
    model.zero_grad()
    loss = local_loss(model, 1)  # which begins by getting rid of what is left
    model.zero_grad()
    loss.backward()
    reference_backward(unsharded, batches(1))
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_hooks_of_a_shard_run_once_for_all_uses_in_a_backward(path: str) -> None:
    """Its unit is called twice in each of two forwards, with another unit between."""
    unsharded, model = pair(make=Again)
    run, ran, largest = compiled(model, path), [], 1e-3
    for one in (model, unsharded):
        weight = one.layers[0].up.weight
        weight.register_hook(lambda grad: grad.clamp(-largest, largest))
        weight.register_post_accumulate_grad_hook(ran.append)
    for step in range(2):
        (local_loss(run, step) + local_loss(run, step + 5)).backward()
        losses = [loss_of(unsharded(batch)) for batch in (*batches(step), *batches(step + 5))]
        (torch.stack(losses).sum() / 2).backward()
        assert_same_grads(model, unsharded)
    assert len(ran) == 4 and full(model.layers[0].up.weight.grad).abs().max() == 2 * largest
