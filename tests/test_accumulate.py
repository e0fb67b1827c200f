"""Gradient accumulation in compiled code: what is sent, what is compiled, and that the numbers are right."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compile
from fsdp_compile.core.unit import unit_of
from tests.comparing import assert_same_grads, assert_same_params, batches, loss_of, mine, reference_backward
from tests.compiling import compiled, num_graphs
from tests.models import Block, Stack, mesh_of, pair
from tests.ranks import Ranks
from tests.recording import Wire


def small() -> Stack:
    return Stack(1)


def accumulate(model: Stack, run: Callable[[Tensor], Tensor], unsharded: Stack, step: int, num: int) -> None:
    """One optimizer step's worth of gradients in ``num`` micro-batches, the last of which synchronizes."""
    for micro in range(num):
        tokens = batches(10 * step + micro)
        reference_backward(unsharded, tokens)
        model.set_requires_gradient_sync(micro == num - 1)
        loss_of(run(tokens[dist.get_rank()])).backward()


def check_accumulation(backend: str, reshard: bool) -> dict[str, Any]:
    unsharded, model = pair(make=small, reshard_after_forward=reshard)
    run = compiled(model, backend)
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    graphs = []
    for step in range(4):
        accumulate(model, run, unsharded, step, num=3)
        assert_same_grads(model, unsharded)
        graphs.append(num_graphs())
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
    wires = []
    for micro in range(4):
        model.set_requires_gradient_sync(micro == 3)
        tokens = batches(micro)[dist.get_rank()]
        loss = loss_of(run(tokens))
        with Wire() as wire:
            loss.backward()
        if micro < 3:
            assert all(param.grad is None for param in model.parameters())
        wires.append((wire.reductions, wire.calls["gather"]))
    with Wire() as alone:
        loss_of(run(batches(9)[dist.get_rank()])).backward()
    return {"graphs": graphs, "wires": wires, "alone": alone.reductions}


@pytest.mark.parametrize(
    ("backend", "reshard"),
    [("aot_eager", True), *(pytest.param(*case, marks=pytest.mark.more) for case in (("aot_eager", False), ("passes", True)))],
)
def test_micro_batches_without_sync_send_nothing(two_ranks: Ranks, backend: str, reshard: bool) -> None:
    for seen in two_ranks.run(check_accumulation, backend, reshard):
        # The first micro-batches hold, the last resumes: two graphs, and nothing is compiled again.
        assert seen["graphs"] == [2, 2, 2, 2]
        reductions = [reductions for reductions, _ in seen["wires"]]
        assert reductions == [0, 0, 0, seen["alone"]] and seen["alone"] > 0
        gathers = [gathers for _, gathers in seen["wires"]]
        assert len(set(gathers)) == 1 and (gathers[0] > 0) == reshard


def check_no_sync_context(backend: str) -> None:
    unsharded, model = pair(make=small)
    run = compiled(model, backend)
    for step in range(2):
        with fsdp_compile.no_sync(model):
            for micro in range(2):
                tokens = batches(10 * step + micro)
                reference_backward(unsharded, tokens)
                loss_of(run(tokens[dist.get_rank()])).backward()
        assert all(param.grad is None for param in model.parameters()) or step > 0
        tokens = batches(10 * step + 5)
        reference_backward(unsharded, tokens)
        loss_of(run(tokens[dist.get_rank()])).backward()
        assert_same_grads(model, unsharded)


@pytest.mark.more
def test_no_sync_is_a_context(two_ranks: Ranks) -> None:
    two_ranks.run(check_no_sync_context, "aot_eager")


def check_steps_after_no_sync(replicated: bool) -> list[int]:
    """How many gradients ask what waits for them: in a plain step, in one after an accumulation, in the step after that."""
    unsharded, model = pair(make=small, **({"mesh": mesh_of("replicate", "shard")} if replicated else {}))
    run = compiled(model, "aot_eager")
    wait = model.set_requires_all_reduce if replicated else model.set_requires_gradient_sync
    num_asked = []
    for step in range(5):
        wait(step != 1)
        reference_backward(unsharded, batches(step))
        loss = loss_of(run(mine(step)))
        with torch.profiler.profile() as profile:
            loss.backward()
        num_asked.append(sum(event.name == "fsdpc::resume" for event in profile.events()))
        if step != 1:
            assert_same_grads(model, unsharded)
    return [num_asked[step] for step in (0, 2, 3, 4)]


def test_steps_after_an_accumulation_copy_nothing(four_ranks: Ranks) -> None:
    for replicated in (False, True):
        for plain, first, *later in four_ranks.run(check_steps_after_no_sync, replicated):
            assert first > 0 and [plain, *later] == [0, 0, 0]


def check_late_backward() -> None:
    """A backward that holds back comes behind one that left nothing waiting, as in a pipeline."""
    unsharded, model = pair(make=small)
    run = compiled(model, "aot_eager")
    with fsdp_compile.no_sync(model):
        late = loss_of(run(mine(0)))
    loss_of(run(mine(1))).backward()
    last = loss_of(run(mine(2)))
    with fsdp_compile.no_sync(model):
        late.backward()
    last.backward()
    for micro in range(3):
        reference_backward(unsharded, batches(micro))
    assert_same_grads(model, unsharded)


def test_what_is_held_back_behind_a_forward_is_reduced_by_its_backward(two_ranks: Ranks) -> None:
    two_ranks.run(check_late_backward)


def check_grad_in_between(backend: str | None) -> None:
    """As a loss that is weighed by the gradient of the last layer asks for it, among micro-batches."""
    unsharded, model = pair(make=small)
    run = compiled(model, backend)
    losses = [torch.stack([loss_of(unsharded(batch)) for batch in batches(micro)]).mean() for micro in range(3)]
    with fsdp_compile.no_sync(model):
        loss_of(run(mine(0))).backward()
    (grad,) = torch.autograd.grad(loss_of(run(mine(1))), [model.head.weight])
    (expected,) = torch.autograd.grad(losses[1], [unsharded.head.weight])
    torch.testing.assert_close(grad.full_tensor(), expected, atol=1e-6, rtol=1e-4)
    loss_of(run(mine(2))).backward()
    (losses[0] + losses[2]).backward()
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_autograd_grad_leaves_alone_what_was_held_back(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(check_grad_in_between, backend)


def check_partial_sums(how: str) -> None:
    """On two replicas of two shards, with gradients that wait to be summed over the replicas."""
    unsharded, model = pair(make=small, mesh=mesh_of("replicate", "shard"))
    losses = [torch.stack([loss_of(unsharded(batch)) for batch in batches(micro)]).mean() for micro in range(3)]
    model.set_requires_all_reduce(False)
    loss_of(model(mine(0))).backward()
    model.set_requires_all_reduce(True)
    if how == "grad":
        (grad,) = torch.autograd.grad(loss_of(model(mine(1))), [model.head.weight])
        (expected,) = torch.autograd.grad(losses[1], [unsharded.head.weight])
        torch.testing.assert_close(grad.full_tensor(), expected, atol=1e-6, rtol=1e-4)
    loss = loss_of(model(mine(2)))
    if how == "factor":
        model.set_gradient_divide_factor(8.0, recurse=True)
    loss.backward()
    (losses[0] + losses[2]).backward()
    for param in unsharded.parameters():
        param.grad.mul_(0.5 if how == "factor" else 1.0)
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize("how", ["grad", "factor"])
def test_partial_sums_are_left_alone_and_divided_as_is_said_last(four_ranks: Ranks, how: str) -> None:
    four_ranks.run(check_partial_sums, how)


def test_no_sync_needs_sharded_modules() -> None:
    with pytest.raises(ValueError, match="Linear without sharded modules"), fsdp_compile.no_sync(nn.Linear(2, 2)):
        pass


def check_zero_grad_in_between(path: str) -> None:
    """As with FSDP2, zero_grad clears what is registered: gradients that are there, and not those held back."""
    unsharded, model = pair(make=small)
    run = compiled(model, path)
    for micro, sync in enumerate((True, False, True)):
        model.set_requires_gradient_sync(sync)
        loss_of(run(batches(micro)[dist.get_rank()])).backward()
        if micro < 2:
            model.zero_grad()
    for micro in (1, 2):  # the first one's were there, and are gone
        reference_backward(unsharded, batches(micro))
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
def test_zero_grad_leaves_what_is_held_back(two_ranks: Ranks, path: str) -> None:
    two_ranks.run(check_zero_grad_in_between, path)


def check_flag_around_backward(in_flight: int) -> list[int]:
    """As pipelines do it: forwards run ahead, and the flag is set around each backward."""
    unsharded, model = pair(make=small)
    run = compiled(model, "aot_eager")
    num = 4
    reductions = []
    for step in range(3):
        losses: list[Tensor] = []
        order = [("f", micro) for micro in range(in_flight)]
        for micro in range(num):
            order.append(("b", micro))
            if micro + in_flight < num:
                order.append(("f", micro + in_flight))
        with Wire() as wire:
            for kind, micro in order:
                if kind == "f":
                    losses.append(loss_of(run(batches(10 * step + micro)[dist.get_rank()])))
                    continue
                model.set_requires_gradient_sync(micro == num - 1)
                losses[micro].backward()
        reductions.append(wire.reductions)
        for micro in range(num):
            reference_backward(unsharded, batches(10 * step + micro))
        assert_same_grads(model, unsharded)
    return reductions


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.more), 2, pytest.param(3, marks=pytest.mark.more)])
def test_the_flag_that_holds_is_that_of_backward(two_ranks: Ranks, in_flight: int) -> None:
    for first, second, third in two_ranks.run(check_flag_around_backward, in_flight):
        # Until it is known that the flag changes between forward and backward, backward reduces more often.
        assert first > third and second >= third


def check_replicas(backend: str) -> list[Counter[str]]:
    mesh = mesh_of("replicate", "shard")
    unsharded, model = pair(make=small, mesh=mesh)
    run = compiled(model, backend)
    for step in range(3):
        wires = []
        for micro in range(3):
            tokens = batches(10 * step + micro)
            reference_backward(unsharded, tokens)
            model.set_requires_all_reduce(micro == 2)
            loss = loss_of(run(tokens[dist.get_rank()]))
            with Wire() as wire:
                loss.backward()
            wires.append(wire.calls)
        assert_same_grads(model, unsharded)
    return wires


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("passes", marks=pytest.mark.more)])
def test_replicas_are_summed_once(four_ranks: Ranks, backend: str) -> None:
    for wires in four_ranks.run(check_replicas, backend):
        assert [wire["all_reduce"] > 0 for wire in wires] == [False, False, True]
        assert len({wire["all_to_all"] + wire["reduce_scatter"] for wire in wires}) == 1


def check_all_three_modes() -> None:
    mesh = mesh_of("replicate", "shard")
    unsharded, model = pair(make=small, mesh=mesh)
    run = compiled(model, "aot_eager")
    for step in range(3):
        for micro, (sync, all_reduce) in enumerate([(False, True), (True, False), (False, False), (True, True)]):
            tokens = batches(10 * step + micro)
            reference_backward(unsharded, tokens)
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            loss_of(run(tokens[dist.get_rank()])).backward()
        assert_same_grads(model, unsharded)


def test_the_modes_mix(four_ranks: Ranks) -> None:
    four_ranks.run(check_all_three_modes)


def check_mixed_with_eager() -> None:
    unsharded, model = pair(make=small)
    run = compiled(model, "aot_eager")
    for step in range(2):
        for micro, forward in enumerate([run, model, run, model, run][step:]):
            tokens = batches(10 * step + micro)
            reference_backward(unsharded, tokens)
            model.set_requires_gradient_sync(micro == 4 - step)
            loss_of(forward(tokens[dist.get_rank()])).backward()
        assert_same_grads(model, unsharded)


def test_compiled_and_eager_micro_batches_add_up(two_ranks: Ranks) -> None:
    two_ranks.run(check_mixed_with_eager)


def check_bf16() -> None:
    policy = fsdp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _, model = pair(make=small, mp_policy=policy)
    _, eager = pair(make=small, mp_policy=policy)
    run = compiled(model, "aot_eager")
    for one, forward in ((model, run), (eager, eager)):
        for micro in range(3):
            one.set_requires_gradient_sync(micro == 2)
            loss_of(forward(batches(micro)[dist.get_rank()])).backward()
    for (fqn, param), other in zip(model.named_parameters(), eager.parameters()):
        assert param.grad is not None and other.grad is not None
        torch.testing.assert_close(param.grad.to_local(), other.grad.to_local(), atol=0, rtol=0, msg=fqn)


def test_what_accumulates_has_the_reductions_dtype(two_ranks: Ranks) -> None:
    two_ranks.run(check_bf16)


class HalfUsed(Stack):
    """The second block runs on request alone."""

    skip = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if not (self.skip and index == 1):
                x = layer(x)
        return self.head(self.norm(x))


def check_unit_that_the_last_backward_skips() -> None:
    unsharded, model = pair(make=lambda: HalfUsed(2))
    run = torch.compile(model, backend="aot_eager")
    for micro in range(3):
        unsharded.skip = model.skip = micro == 2
        tokens = batches(micro)
        reference_backward(unsharded, tokens)
        model.set_requires_gradient_sync(micro == 2)
        loss_of(run(tokens[dist.get_rank()])).backward()
    assert_same_grads(model, unsharded)


def test_what_the_last_backward_did_not_reach_is_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(check_unit_that_the_last_backward_skips)


def check_reset() -> None:
    unsharded, model = pair(make=small)
    run = compiled(model, "aot_eager")
    model.set_requires_gradient_sync(False)
    loss_of(run(batches(0)[dist.get_rank()])).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    tokens = batches(1)
    reference_backward(unsharded, tokens)
    loss_of(run(tokens[dist.get_rank()])).backward()
    assert_same_grads(model, unsharded)


def test_reset_drops_what_was_held(two_ranks: Ranks) -> None:
    two_ranks.run(check_reset)


class ReadTwice(Block):
    """Both reads of the shift get the very same gradient."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.shift = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift) + (self.down(torch.relu(self.up(self.norm(x)))) + self.shift)


def check_read_twice(backend: str) -> None:
    unsharded, model = pair(make=lambda: Stack(1, block=ReadTwice))
    run = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(2):
        accumulate(model, run, unsharded, step, num=2)
        assert_same_grads(model, unsharded)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("passes", marks=pytest.mark.more)])
def test_what_waits_joins_once_however_often_a_parameter_is_read(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(check_read_twice, backend)


def check_tied() -> int:
    unsharded, model = pair(make=lambda: Stack(1, tied=True))
    run = compiled(model, "aot_eager")
    gathers = []
    for step in range(2):
        accumulate(model, run, unsharded, step, num=2)
        assert_same_grads(model, unsharded)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        with Wire() as wire:
            run(batches(0)[dist.get_rank()])
        gathers.append(wire.calls["gather"])
    assert gathers[0] == gathers[1]
    return gathers[0]


def test_a_tied_weight_is_gathered_once_in_every_mode(two_ranks: Ranks) -> None:
    assert two_ranks.run(check_tied) == [6 + 3] * 2  # a block, then the weight and two of the norm


def check_freed(path: str) -> list[str]:
    _, model = pair(make=small)
    run = compiled(model, path)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        loss_of(run(batches(0)[dist.get_rank()])).backward()
    param, unit = model.head.weight, unit_of(model)
    held = {"the model": model, "a block": model.layers[0], "a parameter": param, "its shard": param.to_local()}
    held |= {"its gradient": param.grad, "the unit": unit, "its settings": unit.settings}
    alive = {name: weakref.ref(one) for name, one in held.items()}
    del model, run, param, unit, held
    gc.collect()
    return [name for name, ref in alive.items() if ref() is not None]


@pytest.mark.parametrize("path", ["eager", "aot_eager", "passes"])
def test_nothing_keeps_a_model_alive(two_ranks: Ranks, path: str) -> None:
    """Dynamo's caches stay as they are: it drops what it compiled for a model when that goes. What outlives a model are
    the classes that were generated for its modules' classes, and meshes, which torch's DTensor keeps in caches."""
    assert two_ranks.run(check_freed, path) == [[], []]
