"""Tensor hooks on shards, on one rank alone where a test says nothing else: they change nothing that is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_compile.eager import reduction
from tests.comparing import (
    assert_same_grads,
    batches,
    full,
    local_loss,
    loss_of,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import compiled
from tests.models import mesh_of, pair
from tests.ranks import Ranks


@contextlib.contextmanager
def _reductions() -> Iterator[list[list[str]]]:
    """FQNs of what each eager reduction carries, in the order of their launch."""
    launched: list[list[str]] = []
    add = reduction.Reduction.add

    def watch(self: Any, grads: Any) -> None:
        launched.append([self.gathered.params[index].fqn for index in sorted(grads)])
        add(self, grads)

    with mock.patch.object(reduction.Reduction, "add", watch):
        yield launched


def _a_hook_on_one_rank(path: str | None) -> list[Any]:
    unsharded, model = pair()
    run = compiled(model, path, fullgraph=False)
    seen: dict[str, Tensor] = {}
    train_and_compare(run, model, unsharded, steps=1)  # the hooks come in the middle of training
    handles = []
    if dist.get_rank() == 0:
        for name, param in model.named_parameters():
            handles.append(param.register_hook(lambda grad, name=name: seen.update({name: grad})))
    with _reductions() as launched:
        loss_of(run(batches(0)[dist.get_rank()])).backward()
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
    return [sorted(seen), launched, [name for name, _ in model.named_parameters()]]


def test_every_rank_sends_the_same_with_hooks_on_one(two_ranks: Ranks) -> None:
    (seen, launched, names), (nothing, also_launched, _) = two_ranks.run(_a_hook_on_one_rank, None)
    assert seen == sorted(names) and nothing == []
    assert launched == also_launched and len(launched) == 3  # two blocks, and what is left of the root


COMPILED = [
    pytest.param("aot_eager", marks=pytest.mark.compat),
    pytest.param("passes", marks=pytest.mark.more),
    pytest.param("inductor", marks=pytest.mark.more),
]


@pytest.mark.parametrize("backend", COMPILED)
def test_hooks_on_one_rank_of_a_compiled_model(two_ranks: Ranks, backend: str) -> None:
    (seen, _, names), (nothing, _, _) = two_ranks.run(_a_hook_on_one_rank, backend)
    assert seen == sorted(names) and nothing == []


def _replacing(path: str | None) -> None:
    unsharded, model = pair()
    run = compiled(model, path, fullgraph=False)
    chosen, other = model.layers[1].up.weight, model.layers[1].up.bias
    order: list[str] = []
    chosen.register_hook(lambda grad: order.append("first") or grad * 2)
    chosen.register_hook(lambda grad: order.append("second") or grad + 1)
    chosen.register_post_accumulate_grad_hook(lambda param: order.append("accumulated"))
    local_loss(run, 0).backward()
    reference_backward(unsharded, batches(0))
    plain = unsharded.layers[1].up.weight
    plain.grad.mul_(2).add_(1)
    assert order == ["first", "second", "accumulated"]
    assert_same_grads(model, unsharded)
    local_loss(run, 0).backward()  # adds to what is there
    torch.testing.assert_close(full(chosen.grad), 2 * plain.grad, atol=1e-5, rtol=1e-4)

    model.zero_grad()
    other.register_hook(lambda grad: torch.zeros(3))
    with pytest.raises(TypeError, match=r"up\.bias: a tensor hook made a Tensor"):
        local_loss(run, 0).backward()


@pytest.mark.parametrize("path", [None, *COMPILED])
def test_a_hook_replaces_the_gradient_and_hooks_run_in_order(two_ranks: Ranks, path: str | None) -> None:
    two_ranks.run(_replacing, path)


def _set_between_forward_and_backward() -> None:
    unsharded, model = pair()
    seen: list[Any] = []
    loss = local_loss(model, 0)
    if dist.get_rank() == 1:
        model.head.weight.register_hook(seen.append)
        model.layers[0].norm.bias.register_hook(seen.append)
    loss.backward()
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)
    assert len(seen) == (2 if dist.get_rank() == 1 else 0)
    assert all(isinstance(grad, DTensor) for grad in seen)


def test_a_hook_that_comes_after_the_forward(two_ranks: Ranks) -> None:
    two_ranks.run(_set_between_forward_and_backward)


def _micro_batches(replicas: bool) -> None:
    mesh = mesh_of("replicate", "shard") if replicas else None
    unsharded, model = pair(**({} if mesh is None else {"mesh": mesh}))
    seen: list[Tensor] = []
    if dist.get_rank() == 0:
        model.layers[1].down.weight.register_hook(seen.append)
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        if replicas:
            model.set_requires_all_reduce(step == 2)
        local_loss(model, step).backward()
        reference_backward(unsharded, batches(step))
        if replicas and step == 1:
            assert seen == []
    assert_same_grads(model, unsharded)
    if dist.get_rank() == 0:
        assert len(seen) == (1 if replicas else 2)
        if replicas:  # the first one's waited for it
            torch.testing.assert_close(seen[0].to_local(), model.layers[1].down.weight.grad.to_local())


def test_a_hook_sees_what_micro_batches_held_back(two_ranks: Ranks) -> None:
    two_ranks.run(_micro_batches, False)


def test_a_hook_sees_sums_over_replicas(four_ranks: Ranks) -> None:
    four_ranks.run(_micro_batches, True)


def _multi_grad() -> None:
    unsharded, model = pair()
    both = [model.layers[0].up.weight, model.head.weight]
    every: list[Any] = []
    first: list[Any] = []
    if dist.get_rank() == 0:
        torch.autograd.graph.register_multi_grad_hook(both, every.append)
        torch.autograd.graph.register_multi_grad_hook(both, first.append, mode="any")
    for _ in range(2):
        local_loss(model, 0).backward()
        reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)
    if dist.get_rank() == 0:
        assert len(every) == 2 and all(isinstance(grad, DTensor) for grads in every for grad in grads)
        assert len(first) == 2


def test_hooks_on_several_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(_multi_grad)


def _asked_for_with_a_hook() -> None:
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


def test_autograd_grad_and_inputs_with_a_hook_on_one_rank(two_ranks: Ranks) -> None:
    two_ranks.run(_asked_for_with_a_hook)


def _kept(backend: str | None) -> None:
    unsharded, model = pair()
    run = compiled(model, backend)
    seen: list[Tensor] = []
    model.layers[1].up.weight.register_hook(seen.append)
    for step in range(3):
        loss_of(run(mine(step))).backward()
        unsharded.zero_grad()
        reference_backward(unsharded, batches(step))
        model.layers[1].up.weight.grad.mul_(0.5)
        torch.testing.assert_close(full(seen[step]), unsharded.layers[1].up.weight.grad, atol=1e-6, rtol=1e-4)
    first = full(seen[0])
    unsharded.zero_grad()
    reference_backward(unsharded, batches(0))
    torch.testing.assert_close(first, unsharded.layers[1].up.weight.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_what_a_hook_keeps_stays_as_it_was(two_ranks: Ranks, backend: str | None) -> None:
    """Whatever becomes of the gradient that the shard has: it is added to, clipped, made zero."""
    two_ranks.run(_kept, backend)


def _an_end_that_raises() -> None:
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


def test_a_hook_that_raises_leaves_nothing_for_the_next_step(two_ranks: Ranks) -> None:
    two_ranks.run(_an_end_that_raises)
