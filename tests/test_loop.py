"""A training loop as people write it, compiled: accumulation, evaluation and lengths that change; frozen bases."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compile
from tests.comparing import assert_same_grads, assert_same_params, batches, full, loss_of
from tests.compiling import compiled, num_graphs
from tests.models import Block, Checkpointed, Stack, pair, shard
from tests.ranks import Ranks
from tests.recording import Wire


def _batch(step: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 31, (dist.get_world_size(), 4, length), generator=generator)


def _alternate(backend: str) -> list[int]:
    unsharded, model = pair()
    run = compiled(model, backend)
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    graphs = []
    for step in range(20):
        length = 7 if step % 2 else 11
        for micro in range(3):
            tokens = _batch(10 * step + micro, length)
            model.set_requires_gradient_sync(micro == 2)
            loss = loss_of(run(tokens[dist.get_rank()]))
            loss.backward()
            torch.stack([loss_of(unsharded(one)) for one in tokens]).mean().backward()
        assert_same_grads(model, unsharded)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(run(tokens[0]), unsharded(tokens[0]), atol=1e-3, rtol=1e-3)
        graphs.append(num_graphs())
    assert_same_params(model, unsharded, atol=1e-3, rtol=1e-2)
    return graphs


@pytest.mark.more
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_nothing_is_compiled_again_once_everything_was_seen(two_ranks: Ranks, backend: str) -> None:
    for graphs in two_ranks.run(_alternate, backend):
        # hold, resume, evaluation; the second length makes each of them dynamic, and then they serve every length
        assert graphs[0] == 3 and graphs[1] == 6 and set(graphs[1:]) == {6}


def _gathers(make: type[Stack], backend: str) -> tuple[int, int]:
    model = shard(make(2), reshard_after_forward=True)
    run = compiled(model, backend)
    tokens = batches(0)[dist.get_rank()]
    loss_of(run(tokens)).backward()
    with Wire() as forward:
        loss = loss_of(run(tokens))
    with Wire() as backward:
        loss.backward()
    return forward.calls["gather"], backward.calls["gather"]


def test_recomputation_and_its_backward_share_a_gather(two_ranks: Ranks) -> None:
    for (forward, backward), (plain_forward, plain_backward) in zip(
        two_ranks.run(_gathers, Checkpointed, "aot_eager"), two_ranks.run(_gathers, Stack, "aot_eager")
    ):
        # One gather a parameter: 2 blocks of 6, embedding, norm, head. Recomputing a block reads all six once.
        assert (forward, plain_forward) == (16, 16)
        assert backward == plain_backward == 2 * 6 + 3  # without the embedding, whose rows are looked up


class Adapted(nn.Module):
    """A frozen linear and a trainable low-rank addition, as PEFT writes it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class AdaptedBlock(Block):
    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.up = Adapted(self.up)  # type: ignore[assignment]
        self.down = Adapted(self.down)  # type: ignore[assignment]
        self.norm.requires_grad_(False)


def _adapted() -> Stack:
    model = Stack(2, block=AdaptedBlock)
    for part in (model.embed, model.norm, model.head):
        part.requires_grad_(False)
    return model


def _lora(backend: str, dtype: torch.dtype) -> int:
    torch.manual_seed(0)
    unsharded = _adapted()
    for param in unsharded.parameters():
        if not param.requires_grad:
            param.data = param.data.to(dtype).to(torch.float32)
    model = copy.deepcopy(unsharded)
    for param in model.parameters():
        if not param.requires_grad:
            param.data = param.data.to(dtype)  # gathered as it is stored
    policy = fsdp_compile.MixedPrecisionPolicy()
    if dtype is not torch.float32:
        _upcast_at_reading(model)
    shard(model, mp_policy=policy)
    run = compiled(model, backend)
    for step in range(2):
        tokens = batches(step)
        loss = loss_of(run(tokens[dist.get_rank()]))
        with Wire() as wire:
            loss.backward()
        torch.stack([loss_of(unsharded(one)) for one in tokens]).mean().backward()
    for (fqn, ours), theirs in zip(model.named_parameters(), unsharded.parameters()):
        assert (ours.grad is None) == (theirs.grad is None) == (not theirs.requires_grad), fqn
        if theirs.grad is not None:
            torch.testing.assert_close(full(ours.grad), theirs.grad, atol=1e-6, rtol=1e-4)
        elif ".base." in fqn:
            assert ours.dtype is dtype
    return wire.reductions


class Upcast(nn.Linear):
    """A linear whose weight is stored in low precision and computed with in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def _upcast_at_reading(model: Stack) -> None:
    for layer in model.layers:
        for part in (layer.up, layer.down):
            part.base.__class__ = Upcast  # type: ignore[union-attr]
        layer.norm.float()
    model.embed.float()
    model.norm.float()
    model.head.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("passes", marks=pytest.mark.more)])
def test_only_adapters_are_reduced_and_the_base_is_gathered_as_it_is_stored(
    two_ranks: Ranks, backend: str, dtype: torch.dtype
) -> None:
    for reductions in two_ranks.run(_lora, backend, dtype):
        # 2 blocks of 4 adapters: each by itself, or one bucket a block
        assert reductions == (8 if backend == "aot_eager" else 2)
