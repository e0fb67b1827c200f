"""The schedule says what a step launches, from the order in which a model uses its parameters and from metadata alone.

One line is one collective. ``test_sequence.py`` compares what eager and compiled steps launch with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from tests.models import Again, Stack, shard
from tests.uses import heard, launched, scheduled, written

pytestmark = pytest.mark.usefixtures("fake_group_of_four", "limits_for_small_models")

TOKENS = torch.arange(6).view(2, 3)


def _of(model: nn.Module, shard: Callable[[Any], object], loss: Callable[[Any], Tensor]) -> str:
    """Return the schedule as text, if a compiled step launches it, and an eager one."""
    plain = copy.deepcopy(model)
    shard(model)
    plan = scheduled(model, plain, loss)
    for run in [torch.compile(model, backend="passes"), model]:
        with heard() as found:
            result = loss(run)
            found.append(("backward",))
            result.backward()
        assert found == launched(plan)
    return written(plan)


def _of_tokens(model: nn.Module) -> Tensor:
    return model(TOKENS).sum()  # type: ignore[no-any-return]


class Thin(nn.Linear):
    """A block of one matrix: what is said of it is one line."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, bias=False)


class Skips(Stack):
    """Leaves its second layer out."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [self.layers[0], *self.layers[2:]]:
            x = layer(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen layer and what trains beside it."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class Experts(nn.Module):
    """Four experts as one parameter each way."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, dim, dim)), nn.Parameter(torch.randn(4, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.einsum("bsd,edf,efg->bsg", x, self.up, self.down))


class Mixture(nn.Module):
    """A router, and experts behind it."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(dim, 4, bias=False), Experts(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x) * F.softmax(self.router(x), -1).sum(-1, keepdim=True)


def test_the_root_comes_in_parts_and_blocks_as_wholes() -> None:
    assert_expected_inline(
        _of(Stack(), shard, _of_tokens),
        """\
forward
  gather  embed.weight  (512 bytes of float32, 4 ranks)
  gather  layers.0.norm.weight layers.0.norm.bias layers.0.up.bias layers.0.down.bias  (84 bytes of float32, 4 ranks)
  gather  layers.0.up.weight  (576 bytes of float32, 4 ranks)
  gather  layers.0.down.weight  (528 bytes of float32, 4 ranks)
  gather  layers.1.norm.weight layers.1.norm.bias layers.1.up.bias layers.1.down.bias  (84 bytes of float32, 4 ranks)
  gather  layers.1.up.weight  (576 bytes of float32, 4 ranks)
  gather  layers.1.down.weight  (528 bytes of float32, 4 ranks)
  gather  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
  gather  head.weight  (512 bytes of float32, 4 ranks)
backward
  gather  layers.1.down.weight  (528 bytes of float32, 4 ranks)
  gather  layers.1.up.weight  (576 bytes of float32, 4 ranks)
  gather  layers.1.norm.weight layers.1.norm.bias layers.1.up.bias layers.1.down.bias  (84 bytes of float32, 4 ranks)
  reduce  head.weight  (512 bytes of float32, 4 ranks)
  gather  layers.0.down.weight  (528 bytes of float32, 4 ranks)
  gather  layers.0.up.weight  (576 bytes of float32, 4 ranks)
  gather  layers.0.norm.weight layers.0.norm.bias layers.0.up.bias layers.0.down.bias  (84 bytes of float32, 4 ranks)
  reduce  layers.1.down.weight  (528 bytes of float32, 4 ranks)
  reduce  layers.1.up.weight  (576 bytes of float32, 4 ranks)
  reduce  layers.1.norm.weight layers.1.norm.bias layers.1.up.bias layers.1.down.bias  (84 bytes of float32, 4 ranks)
  reduce  layers.0.down.weight  (528 bytes of float32, 4 ranks)
  reduce  layers.0.up.weight  (576 bytes of float32, 4 ranks)
  reduce  layers.0.norm.weight layers.0.norm.bias layers.0.up.bias layers.0.down.bias  (84 bytes of float32, 4 ranks)
  reduce  embed.weight  (512 bytes of float32, 4 ranks)
  reduce  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
""",
    )


def test_a_tied_table_is_gathered_again_for_the_head() -> None:
    assert_expected_inline(
        _of(Stack(1, tied=True, block=Thin), lambda model: shard(model, reshard_after_forward=True), _of_tokens),
        """\
forward
  gather  embed.weight  (512 bytes of float32, 4 ranks)
  gather  layers.0.weight  (256 bytes of float32, 4 ranks)
  gather  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
backward
  gather  embed.weight  (512 bytes of float32, 4 ranks)
  gather  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
  gather  layers.0.weight  (256 bytes of float32, 4 ranks)
  reduce  layers.0.weight  (256 bytes of float32, 4 ranks)
  reduce  embed.weight  (512 bytes of float32, 4 ranks)
  reduce  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
""",
    )


def test_a_unit_that_is_called_again_after_another_is_gathered_again() -> None:
    assert_expected_inline(
        _of(Again(block=Thin), shard, _of_tokens),
        """\
forward
  gather  embed.weight  (512 bytes of float32, 4 ranks)
  gather  layers.0.weight  (256 bytes of float32, 4 ranks)
  gather  layers.1.weight  (256 bytes of float32, 4 ranks)
  gather  layers.0.weight@2  (256 bytes of float32, 4 ranks)
  gather  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
  gather  head.weight  (512 bytes of float32, 4 ranks)
backward
  gather  layers.0.weight@2  (256 bytes of float32, 4 ranks)
  reduce  head.weight  (512 bytes of float32, 4 ranks)
  gather  layers.1.weight  (256 bytes of float32, 4 ranks)
  reduce  layers.0.weight@2  (256 bytes of float32, 4 ranks)
  gather  layers.0.weight  (256 bytes of float32, 4 ranks)
  reduce  layers.1.weight  (256 bytes of float32, 4 ranks)
  reduce  layers.0.weight  (256 bytes of float32, 4 ranks)
  reduce  embed.weight  (512 bytes of float32, 4 ranks)
  reduce  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
""",
    )


def test_a_unit_that_a_step_skips_is_not_gathered() -> None:
    assert_expected_inline(
        _of(Skips(num_blocks=3, block=Thin), shard, _of_tokens),
        """\
forward
  gather  embed.weight  (512 bytes of float32, 4 ranks)
  gather  layers.0.weight  (256 bytes of float32, 4 ranks)
  gather  layers.2.weight  (256 bytes of float32, 4 ranks)
  gather  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
  gather  head.weight  (512 bytes of float32, 4 ranks)
backward
  gather  layers.2.weight  (256 bytes of float32, 4 ranks)
  reduce  head.weight  (512 bytes of float32, 4 ranks)
  gather  layers.0.weight  (256 bytes of float32, 4 ranks)
  reduce  layers.2.weight  (256 bytes of float32, 4 ranks)
  reduce  layers.0.weight  (256 bytes of float32, 4 ranks)
  reduce  embed.weight  (512 bytes of float32, 4 ranks)
  reduce  norm.weight norm.bias  (32 bytes of float32, 4 ranks)
""",
    )


def test_replicas_of_shards() -> None:
    def replicated(model: Stack) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), mp_policy=policy)

    assert_expected_inline(
        _of(Stack(1, block=Thin), replicated, _of_tokens),
        """\
forward
  gather  embed.weight  (512 bytes of bfloat16, 2 ranks)
  gather  layers.0.weight  (256 bytes of bfloat16, 2 ranks)
  gather  norm.weight norm.bias  (32 bytes of bfloat16, 2 ranks)
  gather  head.weight  (512 bytes of bfloat16, 2 ranks)
backward
  gather  layers.0.weight  (256 bytes of bfloat16, 2 ranks)
  reduce  head.weight  (1024 bytes of float32, 2 ranks, 2 replicas)
  reduce  layers.0.weight  (512 bytes of float32, 2 ranks, 2 replicas)
  reduce  embed.weight  (1024 bytes of float32, 2 ranks, 2 replicas)
  reduce  norm.weight norm.bias  (64 bytes of float32, 2 ranks, 2 replicas)
""",
    )


def test_adapters_beside_a_frozen_base() -> None:
    """Backward gathers what is frozen too, also where no gradient goes through it, as in the first layer."""

    def by_layer(model: nn.Sequential) -> None:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)

    assert_expected_inline(
        _of(nn.Sequential(Adapted(), Adapted()), by_layer, lambda model: model(torch.ones(2, 16)).sum()),
        """\
forward
  gather  0.base.weight 0.base.bias 0.lora_a.weight 0.lora_b.weight  (368 bytes of float32, 4 ranks)
  gather  1.base.weight 1.base.bias 1.lora_a.weight 1.lora_b.weight  (368 bytes of float32, 4 ranks)
backward
  gather  1.base.weight 1.base.bias 1.lora_a.weight 1.lora_b.weight  (368 bytes of float32, 4 ranks)
  gather  0.base.weight 0.base.bias 0.lora_a.weight 0.lora_b.weight  (368 bytes of float32, 4 ranks)
  reduce  1.lora_a.weight 1.lora_b.weight  (96 bytes of float32, 4 ranks)
  reduce  0.lora_a.weight 0.lora_b.weight  (96 bytes of float32, 4 ranks)
""",
    )


def test_experts_on_a_mesh_of_their_own() -> None:
    def on_two(model: nn.Sequential) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        for layer in model:
            fully_shard(layer.experts, mesh=mesh["dp"])
            fully_shard(layer)
        fully_shard(model)

    assert_expected_inline(
        _of(nn.Sequential(Mixture(), Mixture()), on_two, lambda model: model(torch.ones(2, 3, 8)).sum()),
        """\
forward
  gather  0.experts.up  (512 bytes of float32, 2 ranks)
  gather  0.experts.down  (512 bytes of float32, 2 ranks)
  gather  0.router.weight  (32 bytes of float32, 4 ranks)
  gather  1.experts.up  (512 bytes of float32, 2 ranks)
  gather  1.experts.down  (512 bytes of float32, 2 ranks)
  gather  1.router.weight  (32 bytes of float32, 4 ranks)
backward
  gather  1.router.weight  (32 bytes of float32, 4 ranks)
  gather  1.experts.down  (512 bytes of float32, 2 ranks)
  gather  1.experts.up  (512 bytes of float32, 2 ranks)
  reduce  1.router.weight  (32 bytes of float32, 4 ranks)
  gather  0.router.weight  (32 bytes of float32, 4 ranks)
  reduce  1.experts.down  (512 bytes of float32, 2 ranks)
  reduce  1.experts.up  (512 bytes of float32, 2 ranks)
  gather  0.experts.down  (512 bytes of float32, 2 ranks)
  gather  0.experts.up  (512 bytes of float32, 2 ranks)
  reduce  0.router.weight  (32 bytes of float32, 4 ranks)
  reduce  0.experts.down  (512 bytes of float32, 2 ranks)
  reduce  0.experts.up  (512 bytes of float32, 2 ranks)
""",
    )
