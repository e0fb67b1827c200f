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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_compile
from tests.comparing import assert_same_grads, batches, full, loss_of, reference_backward
from tests.models import Stack, pair
from tests.ranks import Ranks


def _names_are_ours() -> None:
    theirs = torch_fsdp.fully_shard
    torch_fsdp.fully_shard = fsdp_compile.fully_shard
    try:
        unsharded, model = pair()
        assert torch_fsdp.fully_shard.state(model) is not None
    finally:
        torch_fsdp.fully_shard = theirs
    loss_of(model(batches(0)[dist.get_rank()])).backward()
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)


@pytest.mark.compat
def test_torchs_name_may_be_ours(two_ranks: Ranks) -> None:
    two_ranks.run(_names_are_ours)


def _state() -> None:
    _, model = pair()
    for module in (model, model.layers[0]):
        assert fsdp_compile.fully_shard.state(module) is not None
        assert fsdp_compile.fully_shard.state(module) is torch_fsdp.fully_shard.state(module)
    for module in (model.norm, nn.Linear(2, 2)):
        assert fsdp_compile.fully_shard.state(module) is None
        assert torch_fsdp.fully_shard.state(module) is None
    assert fsdp_compile.fully_shard.state(model)._comm_ctx is model._get_fsdp_state()._comm_ctx
    assert isinstance(model.unshard(async_op=True), torch_fsdp.UnshardHandle)
    model.reshard()
    replicated = fsdp_compile.replicate(nn.Linear(2, 2))
    for one in (replicated, copy.deepcopy(replicated)):
        state = fsdp_compile.replicate.state(one)
        assert state is fsdp2_replicate.state(one) is not None
        assert state._comm_ctx is one._get_fsdp_state()._comm_ctx
    assert fsdp2_replicate.state(model) is None


@pytest.mark.compat
def test_a_unit_has_a_state_where_torch_looks_for_one(two_ranks: Ranks) -> None:
    two_ranks.run(_state)


class Chunked(Stack):
    """Two more forwards than forward: one that trains, and one that only looks."""

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def scores(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.features(tokens) * scale)


def _forward_method(backend: str | None) -> None:
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
    loss_of(model(tokens[dist.get_rank()])).backward()
    reference_backward(unsharded, tokens)
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize(
    "backend", [None, pytest.param("aot_eager", marks=pytest.mark.compat), pytest.param("inductor", marks=pytest.mark.more)]
)
def test_torchs_forward_methods_gather_ours(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(_forward_method, backend)


def _failing_method() -> None:
    unsharded, model = pair(make=Chunked)
    torch_fsdp.register_fsdp_forward_method(model, "scores")
    with pytest.raises(TypeError):
        model.scores(batches(0)[dist.get_rank()], object())
    model.reset_iter_state()
    assert isinstance(model.head.weight, DTensor)
    model.scores(batches(0)[dist.get_rank()], torch.tensor(1.0)).pow(2).mean().backward()
    torch.stack([unsharded.scores(batch, torch.tensor(1.0)).pow(2).mean() for batch in batches(0)]).mean().backward()
    assert_same_grads(model, unsharded)


def _weights_change_behind_a_method_that_raised() -> None:
    """torch's function tells nobody that the method raised: without a reset the numbers are right all the same."""
    unsharded, model = pair(make=Chunked)
    torch_fsdp.register_fsdp_forward_method(model, "scores")
    with pytest.raises(TypeError):
        model.scores(batches(0)[dist.get_rank()], object())
    for step in range(2):
        with torch.no_grad():
            for param in (*unsharded.parameters(), *model.parameters()):
                param.mul_(0.5)
        loss_of(model(batches(step)[dist.get_rank()])).backward()
        reference_backward(unsharded, batches(step))
        assert_same_grads(model, unsharded)


def test_new_weights_are_gathered_after_such_a_method_raised(two_ranks: Ranks) -> None:
    two_ranks.run(_weights_change_behind_a_method_that_raised)


def test_a_reset_helps_after_such_a_method_raised(two_ranks: Ranks) -> None:
    two_ranks.run(_failing_method)


def _shared() -> None:
    unsharded, model = pair()
    other_unsharded, other = pair(seed=1)
    torch_fsdp.share_comm_ctx([model, other])
    contexts = {id(torch_fsdp.fully_shard.state(one)._comm_ctx) for one in (model, other)}
    assert len(contexts) == 1
    tokens = batches(0)
    (loss_of(model(tokens[dist.get_rank()])) + loss_of(other(tokens[dist.get_rank()]))).backward()
    for ours, reference in ((model, unsharded), (other, other_unsharded)):
        reference_backward(reference, tokens)
        assert_same_grads(ours, reference)


@pytest.mark.compat
def test_torchs_contexts_are_shared_by_ours(two_ranks: Ranks) -> None:
    two_ranks.run(_shared)


# --- composable DDP, inside and outside of units


def _one_in_the_middle(fully_shard: Callable[..., Any], replicate: Callable[..., Any], model: nn.Sequential) -> None:
    fully_shard(model[1])
    composable_ddp(model)


def _one_inside(fully_shard: Callable[..., Any], replicate: Callable[..., Any], model: nn.Sequential) -> None:
    composable_ddp(model[0])
    fully_shard(model[1])
    fully_shard(model)


def _replicated_outside(fully_shard: Callable[..., Any], replicate: Callable[..., Any], model: nn.Sequential) -> None:
    composable_ddp(model[0])
    replicate(model)


def _replicas_of_shards(fully_shard: Callable[..., Any], replicate: Callable[..., Any], model: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[1], mesh=mesh)
    composable_ddp(model)


def _composed(compose: Callable[..., None], compiled: bool) -> None:
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 8))
    ours, theirs = copy.deepcopy(unsharded), copy.deepcopy(unsharded)
    compose(fsdp_compile.fully_shard, fsdp_compile.replicate, ours)
    compose(torch_fsdp.fully_shard, fsdp2_replicate, theirs)
    kinds = [isinstance(param, DTensor) for param in ours.parameters()]
    assert any(kinds) and not all(kinds)
    as_theirs = compose is not _replicated_outside  # there FSDP2's takes the parameters of DDP, too
    if as_theirs:
        assert kinds == [isinstance(param, DTensor) for param in theirs.parameters()]
    run = torch.compile(ours, backend="aot_eager") if compiled else ours
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (ours, theirs, unsharded)]
    for step in range(3):
        inputs = torch.randn(dist.get_world_size(), 2, 8, generator=torch.Generator().manual_seed(step))
        outputs = [one(inputs[dist.get_rank()]) for one in (run, theirs)]
        assert outputs[0].shape == (2, 8)
        if as_theirs:
            torch.testing.assert_close(*outputs)
        for output in outputs:
            output.pow(2).mean().backward()
        torch.stack([unsharded(one).pow(2).mean() for one in inputs]).mean().backward()
        for name, param in unsharded.named_parameters():
            for one in (ours, theirs) if as_theirs else (ours,):
                grad = full(dict(one.named_parameters())[name].grad)
                torch.testing.assert_close(grad, param.grad, atol=1e-6, rtol=1e-4)
        for optim in optims:
            optim.step()
            optim.zero_grad()


@pytest.mark.compat
@pytest.mark.parametrize("compose", [_one_in_the_middle, _one_inside, _replicated_outside])
def test_composable_ddp_beside_units(two_ranks: Ranks, compose: Callable[..., None]) -> None:
    two_ranks.run(_composed, compose, False)


@pytest.mark.more
@pytest.mark.parametrize("compose", [_one_in_the_middle, _replicas_of_shards])
def test_composable_ddp_beside_units_on_four(four_ranks: Ranks, compose: Callable[..., None]) -> None:
    four_ranks.run(_composed, compose, False)


@pytest.mark.more
def test_composable_ddp_beside_compiled_units(two_ranks: Ranks) -> None:
    two_ranks.run(_composed, _one_in_the_middle, True)


def _replicated_inside() -> None:
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8))
    model = copy.deepcopy(unsharded)
    fsdp_compile.replicate(model[1])
    composable_ddp(model)
    for step in range(2):
        inputs = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(step))
        model(inputs[dist.get_rank()]).pow(2).mean().backward()
        torch.stack([unsharded(one).pow(2).mean() for one in inputs]).mean().backward()
        assert [isinstance(param, DTensor) for param in model.parameters()] == [False, False, True, True]
        assert_same_grads(model, unsharded)


def test_composable_ddp_around_a_replicated_unit(two_ranks: Ranks) -> None:
    two_ranks.run(_replicated_inside)


def _mistakes() -> None:
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


@pytest.mark.compat
def test_two_engines_on_the_same_parameters_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(_mistakes)


def _wrapped_in_ddp(fully_shard: Callable[..., Any]) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            nn.parallel.DistributedDataParallel(model)
        except (RuntimeError, NotImplementedError) as error:
            return str(error)
    return ""


def _ddp_as_with_fsdp2() -> None:
    ours, theirs = _wrapped_in_ddp(fsdp_compile.fully_shard), _wrapped_in_ddp(torch_fsdp.fully_shard)
    assert ours and ours == theirs, (ours, theirs)


def test_plain_ddp_refuses_shards_as_it_does_with_fsdp2(two_ranks: Ranks) -> None:
    two_ranks.run(_ddp_as_with_fsdp2)
