"""Gradient accumulation in compiled code: what is sent, what is compiled, and that the numbers are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import fsdp_compile
from fsdp_compile.passes import GraphRecord
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    backward_on_both,
    batches,
    local_loss,
    loss_of,
    mine,
    reference_backward,
)
from tests.compiling import compiled, num_graphs
from tests.models import Block, HalfUsed, Stack, mesh_of, pair
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.recording import Wire, recorded


def small() -> Stack:
    return Stack(1)


def accumulate(model: Stack, run: Callable[[Tensor], Tensor], unsharded: Stack, step: int, num: int) -> None:
    """One optimizer step's worth of gradients in ``num`` micro-batches, the last of which synchronizes."""
    for micro in range(num):
        model.set_requires_gradient_sync(micro == num - 1)
        backward_on_both(run, unsharded, 10 * step + micro)


def assert_same_and_clear(model: Stack, unsharded: Stack) -> None:
    assert_same_grads(model, unsharded)
    model.zero_grad()
    unsharded.zero_grad()


class ReadTwice(Block):
    """Both reads of the shift get the very same gradient."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.shift = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift) + (self.down(torch.relu(self.up(self.norm(x)))) + self.shift)


class InARow(Stack):
    """A stack that calls its only layer twice in a row. The schedule counts the two calls as one use of the layer."""

    def __init__(self) -> None:
        super().__init__(1, tied=True, block=ReadTwice)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.layers[0](self.embed(tokens)))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@on_two_ranks
def test_micro_batches_without_sync_send_nothing() -> None:
    """Of a weight that is tied, and a parameter whose two reads get the very same gradient."""
    unsharded, model = pair(make=InARow)
    run = compiled(model, "aot_eager")
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    for step in range(2):
        accumulate(model, run, unsharded, step, num=3)
        assert_same_grads(model, unsharded)
        assert num_graphs() == 2, "the first micro-batches hold, the last resumes; nothing is compiled again"
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
    reductions, gathers = [], []
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        with Wire() as wire:
            loss = local_loss(run, micro)
        assert wire.calls["gather"] == 7 + 3, "a block, then the tied weight, once, and two of the norm"
        with Wire() as wire:
            loss.backward()
        if micro < 2:
            assert all(param.grad is None for param in model.parameters())
        reductions.append(wire.reductions)
        gathers.append(wire.calls["gather"])
    with Wire() as alone:
        local_loss(run, 9).backward()
    assert reductions == [0, 0, alone.reductions] and alone.reductions > 0
    assert len(set(gathers)) == 1 and gathers[0] > 0
    for one in (model, unsharded):
        one.zero_grad()
    accumulate(model, torch.compile(model, backend="eager", fullgraph=True), unsharded, 3, num=2)
    assert_same_grads(model, unsharded)


def assert_steps_after_an_accumulation_copy_nothing(
    model: Stack, run: Callable[[Tensor], Tensor], unsharded: Stack, wait: Callable[[bool], None]
) -> None:
    """Gradients ask what waits for them in the step after an accumulation, and not before it or later."""
    num_asked = []
    for step in range(4):
        wait(step != 1)
        reference_backward(unsharded, batches(step))
        loss = local_loss(run, step)
        with torch.profiler.profile() as profile:
            loss.backward()
        num_asked.append(sum(event.name == "fsdpc::resume" for event in profile.events()))
        if step != 1:
            assert_same_grads(model, unsharded)
    plain, _, first, later = num_asked
    assert first > 0 and [plain, later] == [0, 0]


def assert_the_flag_that_holds_is_that_of_backward(
    model: Stack, run: Callable[[Tensor], Tensor], unsharded: Stack
) -> None:
    """As pipelines do it: forwards run ahead, and the flag is set around each backward."""
    reductions = []
    for step in range(3):
        with Wire() as wire:
            losses = [local_loss(run, 10 * step + micro) for micro in range(2)]
            for micro in range(4):
                model.set_requires_gradient_sync(micro == 3)
                losses[micro].backward()
                if micro < 2:
                    losses.append(local_loss(run, 10 * step + micro + 2))
        reductions.append(wire.reductions)
        for micro in range(4):
            reference_backward(unsharded, batches(10 * step + micro))
        assert_same_and_clear(model, unsharded)
    first, second, third = reductions
    # Until it is known that the flag changes between forward and backward, backward reduces more often.
    assert first > third and second >= third


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
@on_two_ranks
def test_what_is_held_back_is_reduced_once_whatever_comes_between(path: str) -> None:
    """zero_grad and gradients that are asked for leave what is held back; reset_iter_state drops it."""
    unsharded, model = pair(make=small)
    run = compiled(model, path)
    if path != "eager":
        assert_steps_after_an_accumulation_copy_nothing(model, run, unsharded, model.set_requires_gradient_sync)
        model.zero_grad()
        unsharded.zero_grad()
    # As with FSDP2, zero_grad clears what is registered: gradients that are there, and not those held back.
    for micro, sync in enumerate((True, False, True)):
        model.set_requires_gradient_sync(sync)
        local_loss(run, micro).backward()
        if micro < 2:
            model.zero_grad()
    for micro in (1, 2):  # the first one's were there, and are gone
        reference_backward(unsharded, batches(micro))
    assert_same_and_clear(model, unsharded)

    # A loss is weighed by the gradient of the last layer, among micro-batches.
    losses = [torch.stack([loss_of(unsharded(batch)) for batch in batches(micro)]).mean() for micro in range(3)]
    with fsdp_compile.no_sync(model):
        local_loss(run, 0).backward()
    (grad,) = torch.autograd.grad(local_loss(run, 1), [model.head.weight])
    (expected,) = torch.autograd.grad(losses[1], [unsharded.head.weight])
    torch.testing.assert_close(grad.full_tensor(), expected, atol=1e-6, rtol=1e-4)
    local_loss(run, 2).backward()
    (losses[0] + losses[2]).backward()
    assert_same_and_clear(model, unsharded)

    with fsdp_compile.no_sync(model):
        local_loss(run, 0).backward()
    model.reset_iter_state()
    backward_on_both(run, unsharded, 1)
    assert_same_and_clear(model, unsharded)

    # Compiled and eager micro-batches add up.
    for micro, forward in enumerate((run, model, run, model)):
        model.set_requires_gradient_sync(micro == 3)
        backward_on_both(forward, unsharded, micro)
    assert_same_and_clear(model, unsharded)

    if path != "eager":
        assert_the_flag_that_holds_is_that_of_backward(model, run, unsharded)

    # A backward that holds back comes behind one that left nothing waiting, as in a pipeline.
    with fsdp_compile.no_sync(model):
        late = local_loss(run, 0)
    local_loss(run, 1).backward()
    last = local_loss(run, 2)
    with fsdp_compile.no_sync(model):
        late.backward()
    last.backward()
    for micro in range(3):
        reference_backward(unsharded, batches(micro))
    assert_same_and_clear(model, unsharded)


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
@on_two_ranks
def test_gradients_that_are_asked_for_by_name_are_held_back_too(path: str) -> None:
    """``backward(inputs=...)`` holds back what it names and nothing else; ``autograd.grad`` returns the reduced ones."""
    unsharded, model = pair(make=small)
    run = compiled(model, path)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        ours, theirs = local_loss(run, micro), torch.stack([loss_of(unsharded(one)) for one in batches(micro)]).mean()
        for loss, one in ((ours, model), (theirs, unsharded)):
            loss.backward(inputs=[one.embed.weight, one.layers[0].up.weight, one.head.weight][: 3 - micro])
    assert_same_and_clear(model, unsharded)
    model.set_requires_gradient_sync(False)
    weights = [[one.layers[0].up.weight, one.head.weight] for one in (model, unsharded)]
    loss = torch.stack([loss_of(unsharded(one)) for one in batches(0)]).mean()
    for ours, theirs in zip(*map(torch.autograd.grad, (local_loss(run, 0), loss), weights)):
        torch.testing.assert_close(ours.full_tensor(), theirs, atol=1e-6, rtol=1e-4)


@on_four_ranks
def test_the_modes_mix() -> None:
    """Gradients that are held back send nothing, and replicas are summed once."""
    unsharded, model = pair(make=small, mesh=mesh_of("replicate", "shard"))
    run = compiled(model, "aot_eager")
    modes = [(False, True), (True, False), (True, False), (False, False), (True, True)]
    for step in range(2):
        wires = []
        for micro, (sync, all_reduce) in enumerate(modes):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            reference_backward(unsharded, batches(10 * step + micro))
            loss = local_loss(run, 10 * step + micro)
            with Wire() as wire:
                loss.backward()
            wires.append(wire.calls)
        assert_same_grads(model, unsharded)
    assert [wire["all_reduce"] > 0 for wire in wires] == [False, False, False, False, True]
    first, second, third, fourth, fifth = (wire["all_to_all"] + wire["reduce_scatter"] for wire in wires)
    assert first == fourth == 0 < min(second, third, fifth), (first, second, third, fourth, fifth)
    local_loss(run, 0).backward()
    for one in (model, unsharded):
        one.zero_grad()
    assert_steps_after_an_accumulation_copy_nothing(model, run, unsharded, model.set_requires_all_reduce)


@pytest.mark.parametrize("how", ["grad", "factor"])
@on_four_ranks
def test_partial_sums_are_left_alone_and_divided_as_is_said_last(how: str) -> None:
    """On two replicas of two shards, with gradients that wait to be summed over the replicas."""
    unsharded, model = pair(make=small, mesh=mesh_of("replicate", "shard"))
    losses = [torch.stack([loss_of(unsharded(batch)) for batch in batches(micro)]).mean() for micro in range(3)]
    model.set_requires_all_reduce(False)
    local_loss(model, 0).backward()
    model.set_requires_all_reduce(True)
    if how == "grad":
        (grad,) = torch.autograd.grad(local_loss(model, 1), [model.head.weight])
        (expected,) = torch.autograd.grad(losses[1], [unsharded.head.weight])
        torch.testing.assert_close(grad.full_tensor(), expected, atol=1e-6, rtol=1e-4)
    loss = local_loss(model, 2)
    if how == "factor":
        model.set_gradient_divide_factor(8.0, recurse=True)
    loss.backward()
    (losses[0] + losses[2]).backward()
    for param in unsharded.parameters():
        param.grad.mul_(0.5 if how == "factor" else 1.0)
    assert_same_grads(model, unsharded)


@on_two_ranks
def test_what_accumulates_has_the_reductions_dtype() -> None:
    policy = fsdp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _, model = pair(make=small, mp_policy=policy)
    _, eager = pair(make=small, mp_policy=policy)
    for one, run in ((model, compiled(model, "aot_eager")), (eager, eager)):
        for micro in range(3):
            one.set_requires_gradient_sync(micro == 2)
            local_loss(run, micro).backward()
    for (fqn, param), other in zip(model.named_parameters(), eager.parameters()):
        assert param.grad is not None and other.grad is not None
        torch.testing.assert_close(param.grad.to_local(), other.grad.to_local(), atol=0, rtol=0, msg=fqn)


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
@on_two_ranks
def test_what_the_last_backward_did_not_reach_is_reduced(path: str) -> None:
    """A unit that the last micro-batch skips, whose gradients were held back before."""
    unsharded, model = pair(make=HalfUsed)
    run = compiled(model, path, fullgraph=False)
    for micro in range(3):
        unsharded.skip = model.skip = micro == 2
        model.set_requires_gradient_sync(micro == 2)
        backward_on_both(run, unsharded, micro)
    assert_same_grads(model, unsharded)


# --- with compiled autograd


class Single(Stack):
    """One block, without a loop."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers[0](self.embed(tokens))))


@contextmanager
def compiled_autograd() -> Iterator[list[GraphRecord]]:
    """Backward is compiled too; the graphs that the passes see."""
    with recorded() as seen, torch._dynamo.config.patch(compiled_autograd=True):
        yield seen


def _step(model: Stack, backend: str) -> Callable[[Tensor], Tensor]:
    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens))
        loss.backward()
        return loss

    return torch.compile(step, backend=backend)


@pytest.mark.more
@on_two_ranks
def test_what_is_held_survives_an_eager_evaluation() -> None:
    """Of gradients of three micro-batches, the last of which synchronizes."""
    with compiled_autograd():
        unsharded, model = pair(make=Single)
        run = _step(model, "aot_eager")
        for step in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                reference_backward(unsharded, batches(10 * step + micro))
                run(mine(10 * step + micro))
                with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    model(mine())
            assert_same_grads(model, unsharded)
