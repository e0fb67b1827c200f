"""torch's own names meet our units: fully_shard.state, forward methods, shared contexts, composable DDP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed._composable import replicate as composable_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as fsdp2_replicate
from torch.distributed.tensor import DTensor

import fsdp_compile
from tests.comparing import assert_same_grads, backward_on_both, batches, local_loss, mine, reference_backward
from tests.compiling import compiled
from tests.models import Stack, pair
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks


@pytest.mark.compat
@on_two_ranks
def test_torchs_name_may_be_ours() -> None:
    theirs = torch_fsdp.fully_shard
    torch_fsdp.fully_shard = fsdp_compile.fully_shard
    try:
        unsharded, model = pair()
        assert torch_fsdp.fully_shard.state(model) is not None
    finally:
        torch_fsdp.fully_shard = theirs
    backward_on_both(model, unsharded, 0)
    assert_same_grads(model, unsharded)


@pytest.mark.compat
@on_two_ranks
def test_a_unit_has_a_state_where_torch_looks_for_one() -> None:
    _, model = pair()
    for module in (model, model.layers[0]):
        assert fsdp_compile.fully_shard.state(module) is torch_fsdp.fully_shard.state(module) is not None
    for module in (model.norm, nn.Linear(2, 2)):
        assert fsdp_compile.fully_shard.state(module) is torch_fsdp.fully_shard.state(module) is None
    assert fsdp_compile.fully_shard.state(model)._comm_ctx is model._get_fsdp_state()._comm_ctx
    assert isinstance(model.unshard(async_op=True), torch_fsdp.UnshardHandle)
    model.reshard()
    replicated = fsdp_compile.replicate(nn.Linear(2, 2))
    for one in (replicated, copy.deepcopy(replicated)):
        state = fsdp_compile.replicate.state(one)
        assert state is fsdp2_replicate.state(one) is not None
        assert state._comm_ctx is one._get_fsdp_state()._comm_ctx
    assert fsdp2_replicate.state(model) is None


class Chunked(Stack):
    """Two more forwards than forward: one that trains, and one that only looks."""

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def scores(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.features(tokens) * scale)


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.compat)])
@on_two_ranks
def test_torchs_forward_methods_gather_ours(backend: str | None) -> None:
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    unsharded = Chunked()
    model = copy.deepcopy(unsharded)
    for layer in model.layers:
        fsdp_compile.fully_shard(layer, mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.float64))
    fsdp_compile.fully_shard(model, mp_policy=policy)
    torch_fsdp.register_fsdp_forward_method(model, "scores")
    torch_fsdp.register_fsdp_forward_method(nn.Linear(2, 2), "scores")  # not sharded: nothing to do
    with pytest.raises(ValueError, match="nowhere"):
        torch_fsdp.register_fsdp_forward_method(model, "nowhere")
    run = model.scores if backend is None else torch.compile(model.scores, backend=backend, fullgraph=True)
    tokens, scale = batches(0), torch.tensor(0.5)
    for _ in range(2):
        output = run(tokens[dist.get_rank()], scale)
        assert output.dtype == torch.float32
        output.pow(2).mean().backward()
        torch.stack([unsharded.scores(batch, scale).pow(2).mean() for batch in tokens]).mean().backward()
    assert_same_grads(model, unsharded)
    assert isinstance(model.head.weight, DTensor), "freed, and no forward runs"
    backward_on_both(model, unsharded, 0)
    assert_same_grads(model, unsharded)


@on_two_ranks
def test_a_reset_helps_after_such_a_method_raised() -> None:
    """torch's function tells nobody that it raised: with new weights, the numbers are right without a reset as well."""
    unsharded, model = pair(make=Chunked)
    torch_fsdp.register_fsdp_forward_method(model, "scores")
    with pytest.raises(TypeError):
        model.scores(mine(), object())
    for step in range(2):
        with torch.no_grad():
            for param in (*unsharded.parameters(), *model.parameters()):
                param.mul_(0.5)
        backward_on_both(model, unsharded, step)
        assert_same_grads(model, unsharded)
    with pytest.raises(TypeError):
        model.scores(mine(), object())
    model.reset_iter_state()
    unsharded.zero_grad()  # as the reset does
    assert isinstance(model.head.weight, DTensor)
    model.scores(mine(), torch.tensor(1.0)).pow(2).mean().backward()
    torch.stack([unsharded.scores(batch, torch.tensor(1.0)).pow(2).mean() for batch in batches(0)]).mean().backward()
    assert_same_grads(model, unsharded)


@pytest.mark.compat
@on_two_ranks
def test_torchs_contexts_are_shared_by_ours() -> None:
    unsharded, model = pair()
    other_unsharded, other = pair(seed=1)
    torch_fsdp.share_comm_ctx([model, other])
    contexts = {id(torch_fsdp.fully_shard.state(one)._comm_ctx) for one in (model, other)}
    assert len(contexts) == 1
    (local_loss(model, 0) + local_loss(other, 0)).backward()
    for ours, reference in ((model, unsharded), (other, other_unsharded)):
        reference_backward(reference, batches(0))
        assert_same_grads(ours, reference)


# --- composable DDP, inside and outside of units


def _one_in_the_middle(api: Any, model: nn.Sequential) -> None:
    api.fully_shard(model[1])
    composable_ddp(model)


def _one_inside(api: Any, model: nn.Sequential) -> None:
    composable_ddp(model[0])
    api.fully_shard(model[1])
    api.fully_shard(model)


def _replicated_inside(api: Any, model: nn.Sequential) -> None:
    api.replicate(model[1])
    composable_ddp(model)


def _replicated_outside(api: Any, model: nn.Sequential) -> None:
    composable_ddp(model[0])
    api.replicate(model)


class FSDP2:
    """What is given beside our package."""

    fully_shard, replicate = staticmethod(torch_fsdp.fully_shard), staticmethod(fsdp2_replicate)


def _composed(compose: Callable[..., None], backend: str | None = None) -> None:
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 8))
    ours, theirs = copy.deepcopy(unsharded), copy.deepcopy(unsharded)
    compose(fsdp_compile, ours)
    kinds = [isinstance(param, DTensor) for param in ours.parameters()]
    assert any(kinds) and not all(kinds)
    models, runs = [ours], [compiled(ours, backend, fullgraph=False)]
    if compose not in (_replicated_inside, _replicated_outside):  # outside, FSDP2's takes the parameters of DDP, too
        compose(FSDP2, theirs)
        assert kinds == [isinstance(param, DTensor) for param in theirs.parameters()]
        models, runs = [*models, theirs], [*runs, theirs]
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (*models, unsharded)]
    for step in range(3):
        inputs = torch.randn(dist.get_world_size(), 2, 8, generator=torch.Generator().manual_seed(step))
        outputs = [run(inputs[dist.get_rank()]) for run in runs]
        for output in outputs:
            torch.testing.assert_close(output, outputs[-1])
            output.pow(2).mean().backward()
        torch.stack([unsharded(one).pow(2).mean() for one in inputs]).mean().backward()
        for model in models:
            assert_same_grads(model, unsharded)
        for optim in optims:
            optim.step()
            optim.zero_grad()


@pytest.mark.compat
@pytest.mark.parametrize("compose", [_one_in_the_middle, _one_inside, _replicated_outside])
def test_composable_ddp_beside_units(two_ranks: Ranks, compose: Callable[..., None]) -> None:
    two_ranks.run(_composed, compose)


@pytest.mark.slow
def test_composable_ddp_beside_compiled_units(two_ranks: Ranks) -> None:
    two_ranks.run(_composed, _one_in_the_middle, "aot_eager")


def test_composable_ddp_around_a_replicated_unit(two_ranks: Ranks) -> None:
    two_ranks.run(_composed, _replicated_inside)


@pytest.mark.compat
@on_two_ranks
def test_two_engines_on_the_same_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    composable_ddp(model)
    with pytest.raises(ValueError, match=r"fully_shard: torch.distributed._composable.replicate was applied to this"):
        fsdp_compile.fully_shard(model)
    model = fsdp_compile.fully_shard(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        composable_ddp(model)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch_fsdp.fully_shard(model[1])
    with pytest.raises(ValueError, match=r"A FSDPLinear was sharded by torch.distributed.fsdp.fully_shard"):
        fsdp_compile.fully_shard(model)
    assert not any(isinstance(param, DTensor) for param in model[0].parameters())


@on_two_ranks
def test_plain_ddp_refuses_shards_as_it_does_with_fsdp2() -> None:
    said = []
    for api in (fsdp_compile, FSDP2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        api.fully_shard(model[1])
        with warnings.catch_warnings(), pytest.raises((RuntimeError, NotImplementedError)) as error:
            warnings.simplefilter("ignore")
            nn.parallel.DistributedDataParallel(model)
        said.append(str(error.value))
    assert said[0] and said[0] == said[1]
