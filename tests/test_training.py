"""What a training script does around the model: optimizers, accumulation, clipping, checkpoints, copies."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from fsdp_compile import fully_shard
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    backward_on_both,
    batches,
    full,
    local_loss,
    loss_of,
    mine,
    train_and_compare,
    train_steps,
)
from tests.compiling import PATHS, compiled
from tests.models import Block, Checkpointed, Stack, one_unit, pair, shard, twins
from tests.on_ranks import on_two_ranks
from tests.recording import Wire

small = functools.partial(Stack, 1)  # whose matrices two ranks do not share evenly
tied = functools.partial(Stack, 1, tied=True)


@pytest.mark.compat
@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_trains_like_the_unsharded_model(path: str) -> None:
    """With uneven shards, and a weight that two modules share."""
    unsharded, sharded = pair(make=tied)
    train_and_compare(compiled(sharded, path), sharded, unsharded)


@on_two_ranks
def test_clip_grad_norm_gives_the_unsharded_norm() -> None:
    unsharded, sharded = pair()
    backward_on_both(sharded, unsharded, 0)
    norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.01)
    expected = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.01)
    torch.testing.assert_close(full(norm), expected)
    assert_same_grads(sharded, unsharded)


@on_two_ranks
def test_grad_scaler_skips_a_step_on_every_rank() -> None:
    unsharded, sharded = pair()
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, unsharded)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in optims]
    for step in range(4):
        # One rank alone overflows in step 2: every rank must skip it, and halve the scale.
        factor = torch.tensor(float("inf") if step == 2 and dist.get_rank() == 1 else 1.0)
        scalers[0].scale(local_loss(sharded, step) * factor).backward()
        expected = torch.stack([loss_of(unsharded(batch)) for batch in batches(step)]).mean()
        scalers[1].scale(expected * (float("inf") if step == 2 else 1.0)).backward()
        norms = []
        for scaler, optim, model in zip(scalers, optims, (sharded, unsharded)):
            scaler.unscale_(optim)
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        if step != 2:
            torch.testing.assert_close(*norms)
    assert_same_params(sharded, unsharded, atol=1e-5, rtol=1.3e-6)
    assert [scaler.get_scale() for scaler in scalers] == [1024.0, 1024.0]  # doubled once, halved once


@on_two_ranks
def test_state_dict_holds_shards_under_the_original_keys() -> None:
    """Without communication."""
    unsharded, sharded = pair(make=tied)
    if dist.get_rank() == 0:
        sharded.state_dict()  # a collective on one rank alone would hang, and the test with it
    sharded(batches(0)[0])
    state = sharded.state_dict()
    assert list(state) == list(unsharded.state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
    for fqn, value in state.items():
        torch.testing.assert_close(value.full_tensor(), unsharded.state_dict()[fqn])
    other = shard(tied())
    other.load_state_dict(state)
    assert_same_params(other, unsharded, atol=0, rtol=0)


@on_two_ranks
def test_state_dicts_without_helpers_resume_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    first, second = (shard(Stack()) for _ in range(2))
    optim, other = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (first, second))
    train_steps(first, optim, range(2))
    train_steps(second, other, range(1))  # so that it has a state to load into
    dcp.save({"model": first.state_dict(), "optim": optim.state_dict()}, checkpoint_id=str(tmp_path))
    state = {"model": second.state_dict(), "optim": other.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path))
    second.load_state_dict(state["model"])
    other.load_state_dict(state["optim"])
    for model, its_optim in ((first, optim), (second, other)):
        train_steps(model, its_optim, range(2, 4))
    for (fqn, ours), theirs in zip(second.named_parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(ours.to_local(), theirs.to_local(), msg=fqn)


@pytest.mark.parametrize(("path", "on_meta"), [("eager", False), ("eager", True), ("aot_eager", False)])
@on_two_ranks
def test_what_is_tied_stays_tied_when_a_state_is_assigned(path: str, on_meta: bool) -> None:
    """A checkpoint has a tied parameter under each of its names; here each comes as a tensor of its own."""
    unsharded, sharded = pair(make=tied)
    state = {fqn: value.clone() for fqn, value in sharded.state_dict().items()}
    if on_meta:
        with torch.device("meta"):
            sharded = shard(tied())
    run = compiled(sharded, path)
    if not on_meta:
        run(batches(0)[0])
    sharded.load_state_dict(state, assign=True)
    assert sharded.head.weight is sharded.embed.weight
    train_and_compare(run, sharded, unsharded)
    state = sharded.state_dict()
    torch.testing.assert_close(full(state["head.weight"]), full(state["embed.weight"]), atol=0, rtol=0)


@on_two_ranks
def test_loading_what_is_not_cut_so_is_refused_and_names_it() -> None:
    """Whole tensors, or replicas that are assigned; nothing has changed."""
    unsharded, sharded = pair()
    before = {fqn: param.to_local().clone() for fqn, param in sharded.named_parameters()}
    with pytest.raises(RuntimeError, match=r'"layers\.1\.up\.weight"') as error:
        sharded.load_state_dict(unsharded.state_dict())
    assert "DTensor" in str(error.value)
    mesh = init_device_mesh("cpu", (2,))
    copies = {
        fqn: distribute_tensor(value, mesh, [Replicate()]) if value.is_floating_point() else value
        for fqn, value in unsharded.state_dict().items()
    }
    for given, what in ((unsharded.state_dict(), "a Tensor"), (copies, r"a DTensor with placements \(Replicate\(\),\)")):
        with pytest.raises(RuntimeError, match=rf"embed\.weight: load_state_dict\(assign=True\) would put {what}"):
            sharded.load_state_dict(given, assign=True)
    for fqn, param in sharded.named_parameters():
        assert torch.equal(param.to_local(), before[fqn])
    train_and_compare(sharded, sharded, unsharded, steps=1)


@on_two_ranks
def test_a_model_built_on_meta_trains_once_it_has_data() -> None:
    """What is tied stays tied."""
    unsharded, _ = pair(make=tied)
    with torch.device("meta"):
        sharded = shard(tied())
    for path in PATHS:
        with pytest.raises(Exception, match="meta device") as failure:
            compiled(sharded, path)(batches(0)[0])
        assert "weight" in str(failure.value)
    sharded.to_empty(device="cpu")
    assert sharded.head.weight is sharded.embed.weight
    set_model_state_dict(sharded, unsharded.state_dict(), options=StateDictOptions(full_state_dict=True))
    train_and_compare(sharded, sharded, unsharded)


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_functional_call_takes_shards_or_full_tensors(path: str) -> None:
    unsharded, sharded = pair(make=small)
    tokens = batches(0)[0]
    doubled = {fqn: value * 2 for fqn, value in sharded.state_dict().items()}
    plain = {fqn: value.detach() * 2 for fqn, value in unsharded.state_dict().items()}

    def call(params: dict[str, Any]) -> Any:
        return functional_call(sharded, params, (tokens,))

    run = call if path == "eager" else torch.compile(call, backend=path)
    expected = functional_call(unsharded, plain, (tokens,))
    torch.testing.assert_close(run(doubled), expected)
    torch.testing.assert_close(run(plain), expected)


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_to_dtype_after_sharding_is_followed(path: str) -> None:
    unsharded, sharded = pair(make=small)
    sharded.to(torch.bfloat16)
    unsharded.to(torch.bfloat16)
    backward_on_both(compiled(sharded, path), unsharded, 0)
    assert all(param.grad.dtype is torch.bfloat16 for param in sharded.parameters())
    assert_same_grads(sharded, unsharded, atol=1e-4, rtol=5e-2)


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_parameters_may_be_frozen_and_thawed_between_steps(path: str) -> None:
    unsharded, sharded = pair(make=small)
    run = compiled(sharded, path)
    optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (sharded, unsharded)]
    for step, trains in enumerate((True, False, False, True)):
        for one in (sharded, unsharded):
            one.layers[0].requires_grad_(trains)
            one.head.requires_grad_(trains)
        backward_on_both(run, unsharded, step)
        assert (sharded.head.weight.grad is None) != trains
        assert_same_grads(sharded, unsharded)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same_params(sharded, unsharded)


@on_two_ranks
def test_a_list_of_modules_is_one_unit() -> None:
    unsharded, sharded = twins(small)
    fully_shard(sharded.layers[0])
    tail = [sharded.norm, sharded.head]
    assert fully_shard(tail) is tail
    fully_shard(sharded)
    train_and_compare(compiled(sharded, "aot_eager"), sharded, unsharded)


@on_two_ranks
def test_evaluation_leaves_the_shards_in_place() -> None:
    unsharded, sharded = pair(make=small)
    tokens = batches(0)[0]
    for path, mode in (("eager", torch.no_grad), ("eager", torch.inference_mode), ("aot_eager", torch.inference_mode)):
        with mode():
            torch.testing.assert_close(compiled(sharded, path)(tokens), unsharded(tokens))
    assert all(isinstance(param, DTensor) for param in sharded.parameters())
    assert isinstance(sharded.head.weight, DTensor)
    train_and_compare(sharded, sharded, unsharded, steps=1)


@on_two_ranks
def test_parameters_cut_on_another_dim() -> None:
    def last_dim(param: nn.Parameter) -> Shard | None:
        return Shard(-1) if param.ndim == 2 and param.shape[1] % dist.get_world_size() == 0 else None

    unsharded, sharded = pair(make=small, shard_placement_fn=last_dim)
    assert sharded.embed.weight.placements == (Shard(1),)
    train_and_compare(compiled(sharded, "aot_eager"), sharded, unsharded)


def _alone() -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu")


@on_two_ranks
def test_one_rank_never_hands_out_the_shard() -> None:
    class Leaky(Block):
        """Gives its weight away: with one rank it may not be the shard itself."""

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.up.weight, self.up.weight.t()

    unsharded, sharded = one_unit(Leaky, mesh=_alone())
    x = torch.randn(3, 16)
    run = compiled(sharded, "aot_eager")
    out, weight, turned = run(x)
    expected = unsharded(x)
    torch.testing.assert_close((out, weight, turned), expected)
    before = sharded.up.weight.to_local().clone()
    with torch.no_grad():
        weight.add_(1)
    torch.testing.assert_close(sharded.up.weight.to_local(), before)
    run(x)[0].sum().backward()
    unsharded(x)[0].sum().backward()
    assert_same_grads(sharded, unsharded)


@on_two_ranks
def test_recomputation_and_its_backward_share_a_gather() -> None:
    run = compiled(shard(Checkpointed(1), reshard_after_forward=True), "aot_eager")
    loss_of(run(mine())).backward()
    with Wire() as forward:
        loss = loss_of(run(mine()))
    with Wire() as backward:
        loss.backward()
    # Each parameter is gathered by itself: the block has six, the root has four. Backward gathers the block's six once,
    # for the recomputation and for the gradients.
    assert forward.calls["gather"] == 10
    assert backward.calls["gather"] == 6 + 3  # without the embedding, whose rows are looked up
