"""Compiled and eager code in one step: whoever reads a parameter, the numbers are the unsharded model's.

What a graph cannot honour runs eagerly inside a compiled model, and says so once, by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.comparing import assert_same_grads, backward_on_both, local_loss, mine, train_and_compare
from tests.compiling import compiled, num_graphs
from tests.models import Block, BreakBlock, Checkpointed, Stack, pair, shard, twins
from tests.on_ranks import on_two_ranks
from tests.test_eager import PlainAllGather, PlainReduceScatter
from tests.test_extension import Opaque


class DisabledFunctionBlock(Block):
    """A function that Dynamo never sees reads a weight."""

    @torch._dynamo.disable
    def _down(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.down.weight, self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self._down(torch.relu(self.up(self.norm(x))))


class DisabledModuleBlock(Block):
    """A submodule of the unit that Dynamo never sees."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.down.forward = torch._dynamo.disable(self.down.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class DisabledUnit(Block):
    """A whole unit that Dynamo never sees."""

    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("block", [BreakBlock, DisabledFunctionBlock, DisabledModuleBlock, DisabledUnit])
@on_two_ranks
def test_parameters_are_read_behind_a_break_and_where_dynamo_never_looks(block: type[Block]) -> None:
    models = []
    for _ in range(2):  # made twice: in a copy, a function in the place of a forward is still that of the original
        torch.manual_seed(0)
        models.append(Stack(block=block))
    unsharded, sharded = models
    shard(sharded)
    train_and_compare(compiled(sharded, "aot_eager", fullgraph=False), sharded, unsharded)


@on_two_ranks
def test_compiled_blocks_in_an_eager_model() -> None:
    unsharded, sharded = pair(make=lambda: Stack(3))
    for index in (0, 2):
        sharded.layers[index].compile(backend="aot_eager", fullgraph=True)
    train_and_compare(sharded, sharded, unsharded)


@on_two_ranks
def test_force_eager_in_every_other_step() -> None:
    unsharded, sharded = pair()
    compiled_one = compiled(sharded, "aot_eager", fullgraph=False)
    steps = iter(range(100))

    def run(tokens: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager" if next(steps) % 2 else "default"):
            return compiled_one(tokens)

    train_and_compare(run, sharded, unsharded, steps=4)


@on_two_ranks
def test_a_frame_that_reached_the_recompile_limit() -> None:
    unsharded, sharded = pair()

    class Counting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.step = 0

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens) + 0.0 * self.step  # the guard on step fails at each call

    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False, specialize_int=True):
        wrapped = Counting(sharded)
        compiled_one = compiled(wrapped, "aot_eager", fullgraph=False)

        def run(tokens: Tensor) -> Tensor:
            wrapped.step += 1
            return compiled_one(tokens)

        train_and_compare(run, sharded, unsharded, steps=5)


class CheckpointedBlock(Block):
    """Recomputed in backward."""

    def _inner(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)


class ReentrantStack(Stack):
    """Checkpointing around whole units, with backwards inside of backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(self.norm(x))


def _checkpointed_inside() -> Stack:
    return Stack(block=CheckpointedBlock)


class WeightReader(Stack):
    """The root reads a weight of its own, and a parameter twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        penalty = self.embed.weight.square().mean() + self.norm.weight.mean()
        return out + penalty


def _train(make: Callable[[], Stack], path: str, reshard: bool | None) -> None:
    unsharded, sharded = pair(make=make, reshard_after_forward=reshard)
    train_and_compare(compiled(sharded, path, fullgraph=False), sharded, unsharded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "path", "reshard"),
    [
        *((_checkpointed_inside, path, None) for path in ("eager", "aot_eager")),
        *((Checkpointed, path, reshard) for path in ("eager", "aot_eager") for reshard in (True, False)),
        (ReentrantStack, "eager", True),
    ],
)
@on_two_ranks
def test_checkpointing_inside_and_outside_of_units(make: Callable[[], Stack], path: str, reshard: bool | None) -> None:
    _train(make, path, reshard)


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
@on_two_ranks
def test_the_root_reads_weights_itself(path: str) -> None:
    _train(WeightReader, path, None)


@on_two_ranks
def test_outside_of_a_forward_a_parameter_is_its_shard() -> None:
    _, sharded = pair()
    for run in (sharded, torch.compile(sharded, backend="aot_eager")):
        run(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
        assert isinstance(sharded.layers[0].up.weight, DTensor)
        assert isinstance(sharded.head.weight, DTensor)


# --- what a graph cannot honour

CHANGES: dict[str, Callable[[Any], Any]] = {
    "set_custom_all_gather": lambda block: block.set_custom_all_gather(PlainAllGather()),
    "set_custom_reduce_scatter": lambda block: block.set_custom_reduce_scatter(PlainReduceScatter()),
    "set_all_reduce_hook": lambda block: block.set_all_reduce_hook(lambda summed: None),
    "set_reduce_scatter_unused_params": lambda block: block.set_reduce_scatter_unused_params(True),
    "the all-gather extension of down.weight": lambda block: setattr(
        block.down, "weight", nn.Parameter(Opaque(block.down.weight.detach()))
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
@on_two_ranks
def test_one_warning_names_the_module_and_the_reason(reason: str) -> None:
    reference, model = twins()
    if "extension" in reason:
        CHANGES[reason](model.layers[1])
        with torch.no_grad():
            down = reference.layers[1].down.weight
            down.copy_(down.to(torch.bfloat16))
        shard(model)
    else:
        CHANGES[reason](shard(model).layers[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward_on_both(compiled(model, "aot_eager", fullgraph=False), reference, 0, 1)
    assert_same_grads(model, reference)
    said = [str(one.message) for one in caught if "eagerly inside compiled code" in str(one.message)]
    assert len(said) == 1 and said[0].startswith(f"layers.1 (Block) runs eagerly inside compiled code: {reason}"), said
    assert num_graphs() >= 2  # what stands around it is compiled
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch._dynamo.reset()
        compiled(model, "aot_eager")(mine())


@on_two_ranks
def test_a_setting_for_the_eager_path_alone_says_so_when_it_is_compiled() -> None:
    reference, model = pair(make=lambda: Stack(3))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    model.layers[1].set_separate_reduce_scatter_group()
    model.layers[2].set_reduce_scatter_max_input_buffers(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local_loss(model, 0).backward()
        assert not caught
        model.zero_grad()
        backward_on_both(compiled(model, "aot_eager"), reference, 0)
    assert_same_grads(model, reference)
    said = [str(one.message).split(" has no effect where ") for one in caught if "has no effect" in str(one.message)]
    assert [setting for setting, _ in said] == [
        "set_modules_to_forward_prefetch", "set_separate_reduce_scatter_group", "set_reduce_scatter_max_input_buffers"
    ]  # fmt: skip
    assert [where.partition(" is compiled")[0] for _, where in said] == [f"layers.{n} (Block)" for n in range(3)]
    with pytest.warns(UserWarning, match="set_is_last_backward has no effect where .root. .Stack. is compiled"):
        model.set_is_last_backward(False)  # said when there are graphs already
    with pytest.warns(UserWarning, match="set_reshard_after_backward has no effect"):
        model.set_reshard_after_backward(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_reshard_after_backward(False)
