"""Any optimizer runs on whole tensors of sharded models, with the numbers of the unsharded one, and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pytorch_optimizer import SOAP, Shampoo
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
from torch.distributed.tensor import Shard
from torch.optim import Adafactor
from torch.optim.lr_scheduler import ExponentialLR

from fsdp_compile.core.containers import map_tensors
from fsdp_compile.optim import WholeTensorOptimizer, owners
from tests.comparing import assert_same_params, full, local_loss
from tests.models import Stack, shard, twins
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.ranks import Ranks
from tests.recording import Wire
from tests.test_muon import PLACED, matrices, matrices_on, placed, placed_like, train

CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SOAP": partial(SOAP, lr=0.01, precondition_frequency=2),
    "Shampoo": partial(Shampoo, lr=0.01, preconditioning_compute_steps=2),
    "Adafactor": partial(Adafactor, lr=0.1, weight_decay=0.1),
    "Muon": partial(torch.optim.Muon, lr=0.1),
}


@on_four_ranks
@pytest.mark.parametrize("bucket", [owners._BUCKET_ELEMENTS, 1])
@pytest.mark.parametrize("case", PLACED)
def test_numbers_are_those_of_the_class_on_unsharded_tensors(case: str, bucket: int) -> None:
    """To the bit."""
    owners._BUCKET_ELEMENTS, before = bucket, owners._BUCKET_ELEMENTS
    for name, make in CLASSES.items():
        ours, theirs = matrices_on(case), matrices()
        train(WholeTensorOptimizer(ours, make), ours, 5)
        train(make(theirs), theirs, 5)
        for mine, other in zip(ours, theirs):
            assert torch.equal(full(mine), other), name
    owners._BUCKET_ELEMENTS = before


def _own_settings(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.05}, {"params": params[2:4], "weight_decay": 0.0}, {"params": params[4:]}]


@on_four_ranks
@pytest.mark.parametrize("name", ["SOAP", "Adafactor"])
def test_groups_schedules_closures_other_dtypes_and_steps_without_some_gradients(name: str) -> None:
    """As they are without sharding; the last two parameters are added when three steps are done, one of them in bf16."""
    line = init_device_mesh("cpu", (4,))
    ours, theirs = placed(line, [Shard(0)]), matrices()
    for params in (ours, theirs):
        params[1] = nn.Parameter(params[1].detach().bfloat16())
        params[-1] = nn.Parameter(params[-1].detach().bfloat16())
        params[-1].grad_dtype = torch.float32
    steppers = [
        WholeTensorOptimizer(_own_settings(ours[:-2]), CLASSES[name]),
        CLASSES[name](_own_settings(theirs[:-2])),
    ]
    schedules = [ExponentialLR(one, 0.8) for one in steppers]
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:
            steppers[0].add_param_group({"params": ours[-2:], "lr": 0.02})
            steppers[1].add_param_group({"params": theirs[-2:], "lr": 0.02})
        for number, (param, other) in enumerate(zip(ours, theirs)):
            grad = torch.randn(other.shape, generator=generator).to(other.grad_dtype or torch.float32)
            without = number % 3 == step % 3 or (step == 4 and number < 2)
            other.grad = None if without else grad
            param.grad = None if without else placed_like(grad, param)
        for one, schedule in zip(steppers, schedules):
            assert one.step(lambda step=step: step + 1) == step + 1
            if step < 3:  # a schedule knows the groups that were there first
                schedule.step()
    for param, other in zip(ours, theirs):
        assert param.dtype == other.dtype
        assert torch.equal(full(param), other)
    for group, other in zip(*(one.param_groups for one in steppers)):
        assert {key: one for key, one in group.items() if key != "params"} == {
            key: one for key, one in other.items() if key != "params"
        }


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module, other: Any, steps: range) -> None:
    """On both, with gradients of the sharded one: a preconditioner makes much of the last bit."""
    for step in steps:
        local_loss(model, step).backward()
        for param, whole in zip(model.parameters(), reference.parameters()):
            whole.grad = full(param.grad).clone()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()


@on_two_ranks
def test_a_compiled_model_trains_as_the_unsharded_one() -> None:
    reference, model = twins(Stack)
    shard(model)
    optimizer = WholeTensorOptimizer(model.parameters(), SOAP, lr=0.01, precondition_frequency=2)
    other = SOAP(reference.parameters(), lr=0.01, precondition_frequency=2)
    run = torch.compile(model, fullgraph=True)
    _trained(run, optimizer, reference, other, range(4))
    assert_same_params(model, reference, atol=0, rtol=0)
    step = torch.compile(optimizer.step)  # it runs as it is, between the graphs
    local_loss(run, 4).backward()
    for param, whole in zip(model.parameters(), reference.parameters()):
        whole.grad = full(param.grad).clone()
    step()
    other.step()
    assert_same_params(model, reference, atol=0, rtol=0)


WHOLE = StateDictOptions(full_state_dict=True)


def _soap(sharded: bool, mesh: Any = None) -> Any:
    """Return a model and its optimizer, on ranks or on this process alone."""
    torch.manual_seed(0)
    model = Stack(1)
    if sharded:
        shard(model, mesh=mesh)
        return model, WholeTensorOptimizer(model.parameters(), SOAP, lr=0.01, precondition_frequency=2)
    return model, SOAP(model.parameters(), lr=0.01, precondition_frequency=2)


def _give_gradients(step: int, *models: nn.Module) -> None:
    """Give each model the same full gradients; they do not depend on the number of ranks."""
    for params in zip(*(model.parameters() for model in models)):
        generator = torch.Generator().manual_seed(1000 * step + params[0].numel())
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = placed_like(grad, param)


def _save(folder: str) -> None:
    (model, optimizer), (reference, other) = _soap(True), _soap(False)
    for step in range(3):
        _give_gradients(step, model, reference)
        optimizer.step()
        other.step()
    of_model, of_optim = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optim}, checkpoint_id=folder)
    ours = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    theirs = get_optimizer_state_dict(reference, other, options=WHOLE)
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], atol=0, rtol=0)


def _load(folder: str, mesh: tuple[int, ...]) -> None:
    reference, other = _soap(False)
    for step in range(3):
        _give_gradients(step, reference)
        other.step()
    # torch's broadcast takes tensors for contiguous, and SOAP's eigenvectors are not (2.11 to 2.15).
    whole = map_tensors((reference.state_dict(), get_optimizer_state_dict(reference, other)), Tensor.contiguous)
    runs = [_soap(True, init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "fsdp")[-len(mesh) :])) for _ in range(4)]
    for (model, optimizer), source in zip(runs, ("folder", "whole", "whole on one rank", "plain")):
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
            optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    for step in range(3, 6):
        _give_gradients(step, reference, *(model for model, _ in runs))
        for _, one in [*runs, (reference, other)]:
            one.step()
    for model, _ in runs:
        assert_same_params(model, reference, atol=0, rtol=0)


def test_what_two_ranks_saved_any_number_loads_and_trains_on(
    two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    """And what the class saved without sharding."""
    two_ranks.run(_save, str(tmp_path))
    three_ranks.run(_load, str(tmp_path), (3,))
    four_ranks.run(_load, str(tmp_path), (2, 2))


@on_two_ranks
def test_mistakes_are_the_classs_own_on_all_ranks() -> None:
    params = placed(init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        WholeTensorOptimizer([*params, nn.Parameter(torch.zeros(3))], torch.optim.Muon)
    with pytest.raises(Exception, match="learning rate must be positive"):
        WholeTensorOptimizer(params, SOAP, lr=-1.0)


@on_two_ranks
def test_a_step_is_two_exchanges_and_the_state_is_on_one_rank() -> None:
    params = placed(init_device_mesh("cpu", (2,)), [Shard(0)])
    optimizer = WholeTensorOptimizer(params, CLASSES["SOAP"])
    with Wire() as wire:
        train(optimizer, params, 1)
    assert wire.calls["all_to_all"] == 2
    held = [bool(optimizer.state[param]) for param in params]
    everybody: list[Any] = [None] * 2
    dist.all_gather_object(everybody, held)
    assert all(one != other for one, other in zip(*everybody))
