"""Blocks compiled one by one: their graphs take gathered weights, and the eager path gathers and reduces around them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from tests.comparing import (
    assert_same_grads,
    batches,
    loss_of,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import compile_blocks, num_graphs
from tests.models import (
    Block,
    BreakBlock,
    FrozenBlock,
    PartlyUsedBlock,
    Stack,
    TiedInBlock,
    TwiceBlock,
    pair,
    shard,
    twins,
)
from tests.on_ranks import on_two_ranks
from tests.recording import no_markers
from tests.test_around_graphs import CheckpointedBlock, saved_full_weights, units_inside
from tests.test_eager_regions import DisabledFunctionBlock


@pytest.mark.compat
@on_two_ranks
def test_many_equal_blocks_train_as_unsharded_with_one_graph() -> None:
    """And with one more for each kind of evaluation, before training and after it."""
    unsharded, model = pair(make=functools.partial(Stack, 4))
    compile_blocks(model)

    def evaluate(mode: Any) -> None:
        with mode():
            torch.testing.assert_close(model(mine()), unsharded(mine()), atol=1e-5, rtol=1e-4)
        for unit in units_inside(model):
            assert all(full.untyped_storage().nbytes() == 0 for full in unit.running.gathered.fulls)

    with no_markers():
        evaluate(torch.inference_mode)
        evaluate(torch.no_grad)
        assert num_graphs() == 2
        train_and_compare(model, model, unsharded, steps=1)
        assert num_graphs() == 3
        for training in (False, True):
            model.train(training), unsharded.train(training)
            evaluate(torch.no_grad)
        evaluate(torch.inference_mode)
        _accumulate(unsharded, model)
        assert num_graphs() == 3


def _accumulate(unsharded: nn.Module, model: Any) -> None:
    """Two backwards without a reduction, one with it; then flags set between forward and backward."""
    for switch_late in (False, True):
        unsharded.zero_grad(), model.zero_grad()
        for number, sync in enumerate((False, False, True)):
            if not switch_late:
                model.set_requires_gradient_sync(sync)
            loss = loss_of(model(mine(number)))
            model.set_requires_gradient_sync(sync)
            loss.backward()
            reference_backward(unsharded, batches(number))
        assert_same_grads(model, unsharded)


class OfEveryKind(Stack):
    """Tied outside of its blocks; the first one is called twice, and the last one is recomputed with its unit."""

    def __init__(self) -> None:
        super().__init__(0, tied=True)
        kinds = (
            FrozenBlock, PartlyUsedBlock, TiedInBlock, TwiceBlock, CheckpointedBlock, BreakBlock, DisabledFunctionBlock,
            Block,
        )  # fmt: skip
        self.layers = nn.ModuleList(kind(16) for kind in kinds)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers[:-1], self.layers[0]]:
            x = layer(x)
        return self.head(self.norm(checkpoint(self.layers[-1], x, use_reentrant=False)))


class ReentrantStack(Stack):
    """Checkpointing around whole units, with backwards inside of backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(self.norm(x))


@pytest.mark.parametrize("make", [OfEveryKind, ReentrantStack])
@on_two_ranks
def test_blocks_of_every_kind(make: type[Stack]) -> None:
    unsharded, model = pair(make=make)
    compile_blocks(model, fullgraph=False)
    with no_markers():
        train_and_compare(model, model, unsharded, steps=2)


@on_two_ranks
def test_resharding_and_freezing() -> None:
    for reshard in (True, False):
        unsharded, model = pair(reshard_after_forward=reshard)
        compile_blocks(model)
        with no_markers():
            train_and_compare(model, model, unsharded, steps=2)
    # the frozen parts of a model that trains none of a block's parameters but a bias
    for one in (unsharded, model):
        one.layers[0].requires_grad_(False)
        one.layers[1].up.weight.requires_grad_(False)
    train_and_compare(model, model, unsharded, steps=2)
    for one in (unsharded, model):
        one.requires_grad_(True)
    train_and_compare(model, model, unsharded, steps=2)


@on_two_ranks
def test_units_of_two_blocks() -> None:
    unsharded, model = twins(functools.partial(Stack, 4))
    for first in (0, 2):
        fully_shard(list(model.layers[first : first + 2]))
    compile_blocks(fully_shard(model))
    with no_markers():
        train_and_compare(model, model, unsharded, steps=2)


class Inner(Block):
    """A unit in a unit, and in front of it."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.mlp = Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(super().forward(x))


@on_two_ranks
def test_a_unit_inside_a_compiled_block_gathers_in_its_graph() -> None:
    unsharded, model = twins(lambda: Stack(3, block=Inner))
    for layer in model.layers:
        fully_shard(layer.mlp)
    compile_blocks(shard(model))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])  # which is heeded: no word of it
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "set_modules_to_forward_prefetch")
        train_and_compare(model, model, unsharded, steps=2)
    assert num_graphs() == 1


@on_two_ranks
def test_mixed_precision_as_on_the_eager_path() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (_, model), (_, eager) = (pair(mp_policy=policy) for _ in range(2))
    compile_blocks(model)
    for step in range(2):
        for one in (model, eager):
            loss_of(one(mine(step))).backward()
    assert all(param.grad.dtype is torch.float32 for param in model.parameters())
    expected = {fqn: param.grad.full_tensor() for fqn, param in eager.named_parameters()}
    for fqn, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[fqn], atol=2e-2, rtol=5e-2, msg=fqn)
    assert saved_full_weights(model) == 0
