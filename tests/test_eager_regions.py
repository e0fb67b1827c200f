"""Compiled and eager code in one step: whoever reads a parameter, the numbers are the unsharded model's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard
from tests.comparing import train_and_compare
from tests.compiling import num_graphs
from tests.models import Block, BreakBlock, Stack, pair
from tests.ranks import Ranks


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


class CheckpointedBlock(Block):
    """Recomputed in backward."""

    def _inner(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)


class OutsideCheckpointStack(Stack):
    """Checkpointing around whole units."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class ReentrantStack(OutsideCheckpointStack):
    reentrant = True


class WeightReader(Stack):
    """The root reads a block's weight, and a parameter twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        penalty = self.embed.weight.square().mean() + self.norm.weight.mean()
        return out + penalty


def _train(block: type[Block], whole: bool, backend: str = "aot_eager") -> None:
    unsharded, sharded = pair(make=lambda: Stack(block=block))
    run = torch.compile(sharded, backend=backend) if whole else sharded
    train_and_compare(run, sharded, unsharded)


def test_a_graph_break_before_a_read(two_ranks: Ranks) -> None:
    two_ranks.run(_train, BreakBlock, True)


def test_a_disabled_function_that_reads_a_weight(two_ranks: Ranks) -> None:
    two_ranks.run(_train, DisabledFunctionBlock, True)


def _train_disabled_module() -> None:
    torch.manual_seed(0)
    unsharded = Stack(block=DisabledModuleBlock)
    torch.manual_seed(0)
    from tests.models import shard

    sharded = shard(Stack(block=DisabledModuleBlock))
    train_and_compare(torch.compile(sharded, backend="aot_eager"), sharded, unsharded)


def test_a_disabled_submodule(two_ranks: Ranks) -> None:
    two_ranks.run(_train_disabled_module)


def _train_mixed(compiled_layers: list[int]) -> None:
    unsharded, sharded = pair(make=lambda: Stack(3))
    for index in compiled_layers:
        sharded.layers[index].compile(backend="aot_eager", fullgraph=True)
    train_and_compare(sharded, sharded, unsharded)


def test_compiled_blocks_in_an_eager_model(two_ranks: Ranks) -> None:
    two_ranks.run(_train_mixed, [0, 2])
    two_ranks.run(_train_mixed, [0, 1, 2])


class DisabledUnit(Block):
    """A whole unit that Dynamo never sees."""

    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_an_eager_block_in_a_compiled_model(two_ranks: Ranks) -> None:
    two_ranks.run(_train, DisabledUnit, True)


def _train_toggled_stance(start: str) -> None:
    unsharded, sharded = pair()
    compiled = torch.compile(sharded, backend="aot_eager")
    steps = iter(range(100))

    def run(tokens: Tensor) -> Tensor:
        stance = "force_eager" if next(steps) % 2 else start
        with torch.compiler.set_stance(stance):
            return compiled(tokens)

    train_and_compare(run, sharded, unsharded, steps=4)


def test_force_eager_in_every_other_step(two_ranks: Ranks) -> None:
    two_ranks.run(_train_toggled_stance, "default")


def _train_past_the_recompile_limit() -> None:
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
        compiled = torch.compile(wrapped, backend="aot_eager")

        def run(tokens: Tensor) -> Tensor:
            wrapped.step += 1
            return compiled(tokens)

        train_and_compare(run, sharded, unsharded, steps=5)


def test_a_frame_that_reached_the_recompile_limit(two_ranks: Ranks) -> None:
    two_ranks.run(_train_past_the_recompile_limit)


def _train_stack(make: type[Stack], whole: bool, reshard: bool | None) -> None:
    unsharded, sharded = pair(make=make, reshard_after_forward=reshard)
    train_and_compare(torch.compile(sharded, backend="aot_eager") if whole else sharded, sharded, unsharded)


@pytest.mark.more
def test_checkpointing_inside_and_outside_of_units(two_ranks: Ranks) -> None:
    for whole in (False, True):
        two_ranks.run(_train, CheckpointedBlock, whole)
        for reshard in (True, False):
            two_ranks.run(_train_stack, OutsideCheckpointStack, whole, reshard)
    two_ranks.run(_train_stack, ReentrantStack, False, True)


def test_the_root_reads_weights_itself(two_ranks: Ranks) -> None:
    for whole in (False, True):
        two_ranks.run(_train_stack, WeightReader, whole, None)


def _reads_outside_of_forward() -> None:
    from torch.distributed.tensor import DTensor

    _, sharded = pair()
    compiled = torch.compile(sharded, backend="aot_eager")
    tokens = torch.zeros(1, 3, dtype=torch.long)
    for run in (sharded, compiled):
        run(tokens).sum().backward()
        assert isinstance(sharded.layers[0].up.weight, DTensor)
        assert isinstance(sharded.head.weight, DTensor)


def test_outside_of_a_forward_a_parameter_is_its_shard(two_ranks: Ranks) -> None:
    two_ranks.run(_reads_outside_of_forward)


def _function_that_calls_the_model() -> None:
    unsharded, sharded = pair()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(tokens: Tensor) -> Tensor:
        return sharded(tokens) * 1.0

    train_and_compare(run, sharded, unsharded)


def test_a_compiled_function_that_calls_the_model(two_ranks: Ranks) -> None:
    two_ranks.run(_function_that_calls_the_model)


def _compile_in_place(order: str) -> None:
    torch.manual_seed(0)
    unsharded, sharded = Stack(), Stack()
    sharded.load_state_dict(unsharded.state_dict())
    for index, layer in enumerate(sharded.layers):
        if order == "compile, shard":
            layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer)
        elif order == "shard, compile":
            fully_shard(layer).compile(backend="aot_eager", fullgraph=True)
        else:
            sharded.layers[index] = fully_shard(torch.compile(layer, backend="aot_eager", fullgraph=True))
    fully_shard(sharded)
    if order == "wrapped":
        assert list(sharded.state_dict()) == [fqn for fqn, _ in sharded.named_parameters()]
        sharded.load_state_dict(sharded.state_dict())
        for index in range(len(sharded.layers)):  # parameter names of the comparison
            sharded.layers[index] = sharded.layers[index]._orig_mod
    assert list(sharded.state_dict()) == list(unsharded.state_dict())
    train_and_compare(sharded, sharded, unsharded)


def test_blocks_compiled_before_or_after_sharding(two_ranks: Ranks) -> None:
    for order in ("compile, shard", "shard, compile", "wrapped"):
        two_ranks.run(_compile_in_place, order)


def _whole_model_in_place() -> None:
    unsharded, sharded = pair()
    sharded.compile(backend="aot_eager", fullgraph=True)
    train_and_compare(sharded, sharded, unsharded)
    assert num_graphs() == 1
    assert dist.is_initialized()


def test_compile_of_the_model_in_place(two_ranks: Ranks) -> None:
    two_ranks.run(_whole_model_in_place)
