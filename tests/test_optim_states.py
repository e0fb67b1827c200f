"""The states of our optimizers move to other ranks, to unsharded optimizers and back, and into copies.

Each next step is that of the unsharded optimizer, to the bit.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.optim import Optimizer

from fsdp_compile.core.containers import map_tensors
from tests.comparing import assert_same_params, full
from tests.fsdp1_scripts import BLOCKS, CPU, OURS
from tests.models import Stack, mesh_of, shard
from tests.on_ranks import on_four_ranks
from tests.ranks import Ranks
from tests.test_muon import placed_like
from tests.test_optim_models import KINDS

WHOLE = StateDictOptions(full_state_dict=True)


def _sharded(kind: str, *mesh: int) -> tuple[Any, Optimizer]:
    torch.manual_seed(0)
    mesh = mesh or (dist.get_world_size(),)
    model = shard(Stack(1), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "fsdp")[-len(mesh) :]))
    return model, KINDS[kind][0](model)


def _unsharded(kind: str) -> tuple[Any, list[Optimizer]]:
    torch.manual_seed(0)
    model = Stack(1)
    return model, KINDS[kind][1](model)


def _step(steps: Iterable[int], *trained: tuple[nn.Module, Any]) -> None:
    """Step optimizers with the same full gradients, which do not depend on the number of ranks."""
    for step in steps:
        for params in zip(*(model.parameters() for model, _ in trained)):
            generator = torch.Generator().manual_seed(1000 * step + params[0].numel())
            grad = torch.randn(params[0].shape, generator=generator)
            for param in params:
                param.grad = placed_like(grad, param)
        for _, optimizers in trained:
            for one in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
                one.step()
                one.zero_grad()


def _assert_same(ours: Any, theirs: Any) -> None:
    """Compare state dicts; the groups of ours may say more."""
    torch.testing.assert_close(ours["state"], theirs["state"], atol=0, rtol=0)
    for one, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert other.items() <= one.items()


def _save(kind: str, folder: str) -> None:
    sharded, unsharded = _sharded(kind), _unsharded(kind)
    _step(range(3), sharded, unsharded)
    of_model, of_optim = get_state_dict(*sharded)
    dcp.save({"model": of_model, "optim": of_optim}, checkpoint_id=folder)
    ours = get_optimizer_state_dict(*sharded, options=WHOLE)
    _assert_same(ours, get_optimizer_state_dict(*unsharded, options=WHOLE))
    back, others = _unsharded(kind)
    back.load_state_dict(unsharded[0].state_dict())
    if len(others) == 1:  # torch's set_optimizer_state_dict leaves out SOAP's lists without tensors (2.11 to 2.15)
        others[0].load_state_dict(copy.deepcopy(map_tensors(sharded[1].state_dict(), full)))  # step counts, too
    else:
        set_optimizer_state_dict(back, others, copy.deepcopy(ours), options=WHOLE)  # they would share step counts
    _step(range(3, 5), sharded, unsharded, (back, others))
    for model in (sharded[0], back):
        assert_same_params(model, unsharded[0], atol=0, rtol=0)


def _load(kind: str, folder: str) -> None:
    reference, others = _unsharded(kind)
    _step(range(3), (reference, others))
    # torch's broadcast takes tensors for contiguous, and SOAP's eigenvectors are not (2.11 to 2.15).
    whole = map_tensors((reference.state_dict(), get_optimizer_state_dict(reference, others)), Tensor.contiguous)
    sources = ["folder", "whole", "whole on one rank", *(["plain"] if kind == "SOAP" else [])]
    runs = [_sharded(kind, 2, 2) for _ in sources]
    for (model, optimizer), source in zip(runs, sources):
        of_model, of_optim = get_state_dict(model, optimizer)
        if source == "folder":
            dcp.load({"model": of_model, "optim": of_optim}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optim)
            continue
        is_sent = source == "whole on one rank"
        of_model, of_optim = ({}, {}) if is_sent and dist.get_rank() else copy.deepcopy(whole)  # torch writes to them
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_sent)
        set_model_state_dict(model, of_model, options=options)
        set_optimizer_state_dict(model, optimizer, of_optim, options=options)
        if source == "plain":
            optimizer.load_state_dict(copy.deepcopy(others[0].state_dict()))
    _step(range(3, 6), (reference, others), *runs)
    for model, _ in runs:
        assert_same_params(model, reference, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_three_ranks_saved_four_load_and_train_on(
    three_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """And what the classes saved without sharding, which load what the ranks saved."""
    three_ranks.run(_save, kind, str(tmp_path))
    four_ranks.run(_load, kind, str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [0, 3])
@on_four_ranks
def test_a_copy_and_the_original_train_like_two(kind: str, num_steps: int) -> None:
    sharded, unsharded, expected = _sharded(kind, 2, 2), _unsharded(kind), _unsharded(kind)
    _step(range(num_steps), sharded, unsharded, expected)
    copied = copy.deepcopy(sharded)
    _step(range(3, 5), sharded, unsharded)
    _step(range(5, 8), copied, expected)
    assert_same_params(sharded[0], unsharded[0], atol=0, rtol=0)
    assert_same_params(copied[0], expected[0], atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@on_four_ranks
def test_a_pickled_optimizer_steps_as_the_original(kind: str) -> None:
    """It has parameters of its own, as any unpickled optimizer has."""
    model, optimizer = _sharded(kind)
    _step(range(3), (model, optimizer))
    saved = io.BytesIO()
    torch.save(optimizer, saved)
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    params = [[param for group in one.param_groups for param in group["params"]] for one in (optimizer, loaded)]
    for one, other in zip(*params):
        assert one is not other
        one.grad = placed_like(torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())), one)
        other.grad = one.grad.clone()
    for stepping in (optimizer, loaded):
        stepping.step()
    for one, other in zip(*params):
        assert torch.equal(full(one), full(other))


@pytest.mark.parametrize("kind", KINDS)
@on_four_ranks
def test_fsdp1s_state_dicts_are_those_of_the_unsharded_optimizer(kind: str) -> None:
    unsharded = _unsharded(kind)
    runs = []
    settings = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh_of("dp", "fsdp")}
    for _ in range(2):
        torch.manual_seed(0)
        model = OURS(Stack(1), auto_wrap_policy=BLOCKS, use_orig_params=True, device_id=CPU, **settings)
        runs.append((model, KINDS[kind][0](model)))
    first, (second, optimizer) = runs
    _step(range(3), first, unsharded)
    with OURS.state_dict_type(first[0], StateDictType.FULL_STATE_DICT):
        state = OURS.optim_state_dict(*first)
    _assert_same(state, get_optimizer_state_dict(*unsharded, options=WHOLE))
    with OURS.state_dict_type(second, StateDictType.FULL_STATE_DICT):
        second.load_state_dict(unsharded[0].state_dict())
        optimizer.load_state_dict(OURS.optim_state_dict_to_load(second, optimizer, state))
    _step(range(3, 5), unsharded, *runs)
    for model, _ in runs:
        assert_same_params(model, unsharded[0], atol=0, rtol=0)
