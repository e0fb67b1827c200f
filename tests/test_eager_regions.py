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

from tests.comparing import assert_same_grads, backward_on_both, local_loss, train_and_compare
from tests.compiling import compiled, num_graphs
from tests.models import Block, BreakBlock, Stack, pair, shard, twins
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


class Mixed(Stack):
    """A block of each kind, and a root that reads a weight of its own, and a parameter twice."""

    def __init__(self) -> None:
        super().__init__(0)
        kinds = (BreakBlock, DisabledFunctionBlock, DisabledModuleBlock, DisabledUnit)
        self.layers = nn.ModuleList(kind(16) for kind in kinds)

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        penalty = self.embed.weight.square().mean() + self.norm.weight.mean()
        return out + penalty


@on_two_ranks
def test_parameters_are_read_behind_a_break_and_where_dynamo_never_looks() -> None:
    models = []
    for _ in range(2):  # made twice: in a copy, a function in the place of a forward is still that of the original
        torch.manual_seed(0)
        models.append(Mixed())
    unsharded, sharded = models
    shard(sharded)
    train_and_compare(compiled(sharded, "aot_eager", fullgraph=False), sharded, unsharded, steps=2)


@on_two_ranks
def test_steps_may_be_eager_and_frames_reach_the_recompile_limit() -> None:
    """Compiled blocks in an eager model; a stance that changes; a guard that fails at each call."""
    unsharded, sharded = pair()
    compiled_one = compiled(sharded, "aot_eager", fullgraph=False)
    steps = iter(range(100))

    class Counting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.step = 0

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens) + 0.0 * self.step  # the guard on step fails at each call

    def every_other(tokens: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager" if next(steps) % 2 else "default"):
            return compiled_one(tokens)

    train_and_compare(every_other, sharded, unsharded)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False, specialize_int=True):
        wrapped = Counting(sharded)
        counted = compiled(wrapped, "aot_eager", fullgraph=False)

        def run(tokens: Tensor) -> Tensor:
            wrapped.step += 1
            return counted(tokens)

        train_and_compare(run, sharded, unsharded)
    sharded.layers[1].compile(backend="aot_eager", fullgraph=True)
    train_and_compare(sharded, sharded, unsharded, steps=1)


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


@on_two_ranks
def test_one_warning_names_the_module_and_the_reason() -> None:
    """Of each block but the first, which has a reason of its own; with a full graph, that is the error."""
    reference, model = twins(lambda: Stack(1 + len(CHANGES)))
    for reason, ours, theirs in zip(CHANGES, model.layers[1:], reference.layers[1:]):
        if "extension" in reason:
            CHANGES[reason](ours)
            with torch.no_grad():
                theirs.down.weight.copy_(theirs.down.weight.to(torch.bfloat16))
    shard(model)
    for reason, ours in zip(CHANGES, model.layers[1:]):
        if "extension" not in reason:
            CHANGES[reason](ours)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward_on_both(compiled(model, "aot_eager", fullgraph=False), reference, 0, 1)
    assert_same_grads(model, reference)
    said = [str(one.message) for one in caught if "eagerly inside compiled code" in str(one.message)]
    assert len(said) == len(CHANGES), said
    for number, reason in enumerate(CHANGES):
        assert said[number].startswith(f"layers.{number + 1} (Block) runs eagerly inside compiled code: {reason}")
    assert num_graphs() >= 2  # what stands around them is compiled
    torch._dynamo.reset()
    for reason, layer in zip(CHANGES, model.layers[1:]):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
            torch.compile(lambda x, layer=layer: layer(x), backend="aot_eager", fullgraph=True)(torch.ones(2, 16))


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
    with pytest.warns(UserWarning, match="set_unshard_in_backward has no effect"):
        model.set_unshard_in_backward(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_unshard_in_backward(False)
