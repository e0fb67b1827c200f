"""Forwards that do not come to their end: after them parameters are shards again, and the next step is right."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import full_params, fully_shard
from tests.comparing import assert_same_grads, train_and_compare
from tests.compiling import PATHS, compile_blocks, compiled
from tests.models import Block, BreakBlock, Checkpointed, Fault, Stack, pair, twins
from tests.on_ranks import on_two_ranks
from tests.recording import Collectives


class FailingBlock(Block):
    """Raises behind a graph break when it is told to."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        torch._dynamo.graph_break()
        if self.error is not None:
            raise self.error("behind the break")
        return x + self.down(torch.relu(hidden))


def _assert_at_rest(model: nn.Module) -> None:
    """What a read gives is the registered shard, and a read by this rank alone sends nothing."""
    for module in model.modules():
        for name, param in filter(lambda one: one[1] is not None, module._parameters.items()):
            with Collectives() as launched:
                read = getattr(module, name)
            assert read is param and isinstance(read, DTensor), f"{name} reads as a {type(read).__name__}"
            assert launched.seen == []


@on_two_ranks
def test_early_stop_in_a_compiled_block_with_a_break() -> None:
    unsharded, sharded = pair(make=lambda: Checkpointed(block=BreakBlock))
    compile_blocks(sharded, fullgraph=False)
    train_and_compare(sharded, sharded, unsharded, steps=1)
    _assert_at_rest(sharded)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    sharded(tokens).sum().backward()
    unsharded(tokens).sum().backward()
    for layer, plain in zip(sharded.layers, unsharded.layers):
        torch.testing.assert_close(layer.up.weight.grad.full_tensor(), plain.up.weight.grad)
    with torch.no_grad():
        sharded.layers[0].up.weight.mul_(0.5)
        unsharded.layers[0].up.weight.mul_(0.5)
        torch.testing.assert_close(sharded(tokens), unsharded(tokens))


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_an_error_behind_a_break_that_the_user_catches(path: str) -> None:
    """In the first forward, and once more when everything is compiled."""
    unsharded, sharded = pair(make=lambda: Stack(block=FailingBlock))
    run = compiled(sharded, path, fullgraph=False)
    for error in (KeyboardInterrupt, ValueError):
        sharded.layers[1].error = error
        with pytest.raises(error, match="behind the break"):
            run(torch.zeros(2, 5, dtype=torch.long))
        _assert_at_rest(sharded)
        sharded.layers[1].error = None
        train_and_compare(run, sharded, unsharded, steps=1)
        _assert_at_rest(sharded)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_steps_after_a_backward_that_raised_have_their_gradients_and_no_others(backend: str | None) -> None:
    """It raises in front of the model, whose gradients are there by then and wait for the end of that backward."""
    unsharded, model = twins(lambda: nn.Sequential(Block(16), Block(16)))
    for block in (*model, model):
        fully_shard(block)
    run = compiled(model, backend)
    for step in range(3):
        x = torch.randn(2, 16, requires_grad=True)
        model.zero_grad()
        unsharded.zero_grad()
        model.set_requires_gradient_sync(False)
        loss = run(Fault.apply(x, step == 0)).pow(2).sum()
        model.set_requires_gradient_sync(True)
        if step == 0:
            with pytest.raises(ArithmeticError):
                loss.backward()
            continue
        loss.backward()
        unsharded(x.detach()).pow(2).sum().backward()
        for param in unsharded.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
        assert_same_grads(model, unsharded)


class _Fault(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.now = False

    def forward(self, x: Tensor) -> Tensor:
        return Fault.apply(x, self.now)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("backend", "synced", "warning"),
    [
        (None, 3, r"These are kept and have its part: 2 \(Block\): down.bias, "),
        ("aot_eager", 3, r"These are kept and have its part: 2 \(Block\): down.bias, "),
        (None, 2, r"These are lost: 2 \(Block\): down.bias, "),
    ],
)
@on_two_ranks
def test_gradients_that_no_sync_holds_outlive_a_backward_that_raises(
    backend: str | None, synced: int, warning: str
) -> None:
    """What a reduction lost is named. Of four backwards the third raises; from ``synced`` on they synchronize."""
    unsharded, model = twins(lambda: nn.Sequential(Block(16), _Fault(), Block(16)))
    for block in (model[0], model[2], model):
        fully_shard(block)
    for block in (model[0], model[2]) if backend is not None else ():
        block.compile(backend=backend)
    batches = torch.randn(4, 2, 16)
    for one in (unsharded, model):
        for place, x in enumerate(batches):
            one[1].now = place == 2
            if one is model:
                model.set_requires_gradient_sync(place >= synced)
            warns = pytest.warns(UserWarning, match=warning)
            with warns if one is model and place == 3 else nullcontext():
                loss = one(x).pow(2).sum()
            with pytest.raises(ArithmeticError) if place == 2 else nullcontext():
                loss.backward()
    if synced == 3:
        assert_same_grads(model, unsharded)
    else:  # what the last block held was on its way when the third one raised
        assert_same_grads(model[0], unsharded[0])


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_held_gradients_that_a_hook_keeps_from_their_shards_are_named(path: str) -> None:
    """A shard's hook raises: of what no_sync held, those that did not come to their shards are lost, others are kept."""
    _, model = twins(lambda: nn.Sequential(Block(16), Block(16)))
    for block in (*model, model):
        fully_shard(block)
    run = compiled(model, path)
    x = torch.randn(2, 16)
    model.set_requires_gradient_sync(False)
    run(x).pow(2).sum().backward()
    model.set_requires_gradient_sync(True)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    handle = model[1].up.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        run(x).pow(2).sum().backward()
    handle.remove()
    with pytest.warns(UserWarning, match="after it had added to gradients that no_sync held") as warned:
        model(x)
    said = {what: "".join(str(one.message) for one in warned if what in str(one.message)) for what in ("lost", "kept")}
    assert model[1].up.weight.grad is None and model[1].norm.weight.grad is not None
    for place, block in enumerate(model):
        for fqn, param in block.named_parameters():
            assert f"{place} (Block): {fqn}" in said["lost" if param.grad is None else "kept"]


class OddOutput(nn.Linear):
    is_odd = False

    def forward(self, x: Tensor) -> Any:
        found: list[Any] = [super().forward(x)]
        if not self.is_odd:
            return found[0]
        found.append(found)  # a list in itself
        return found


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_an_output_that_cannot_be_looked_through(backend: str | None) -> None:
    """The unit's forward raises while it ends. Afterwards no forward runs, and the next step is right."""
    unsharded, sharded = twins(lambda: nn.Sequential(OddOutput(8, 8), nn.Linear(8, 8)))
    for unit in (*sharded, sharded):
        fully_shard(unit)
    if backend is not None:
        sharded[0].compile(backend=backend)
    x = torch.ones(2, 8)
    for is_odd in (False, True, False):
        sharded[0].is_odd = is_odd
        with pytest.raises(RuntimeError, match="circular reference") if is_odd else nullcontext():
            sharded(x).sum().backward()
        _assert_at_rest(sharded)
    with full_params(sharded):  # refuses inside of a forward
        pass
    for _ in range(2):
        unsharded(x).sum().backward()
    assert_same_grads(sharded, unsharded)
