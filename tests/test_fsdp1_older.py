"""FSDP1's older optimizer-state functions, and its gradient scaler."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler
from torch.distributed.tensor import DTensor

from fsdp_compile.fsdp1 import ShardedGradScaler
from tests.comparing import batches, full, loss_of, mine, train_steps
from tests.fsdp1_scripts import OURS, THEIRS, made, mixed, optimizer, silenced, under_theirs
from tests.models import Stack
from tests.on_ranks import on_two_ranks


def same_state(given: Any, expected: Any) -> None:
    assert given["param_groups"] == expected["param_groups"]
    same_values(given["state"], expected["state"])
    for key, entries in expected["state"].items():
        for name, value in entries.items():
            assert isinstance(given["state"][key][name], DTensor) == isinstance(value, DTensor)


def same_values(given: Any, expected: Any) -> None:
    """Of states, which may be sharded or not."""
    assert set(given) == set(expected)
    for key, entries in expected.items():
        assert set(given[key]) == set(entries)
        for name, value in entries.items():
            torch.testing.assert_close(full(given[key][name]), full(value), rtol=0, atol=0)


@on_two_ranks
def test_the_older_functions_give_what_the_newer_ones_do() -> None:
    """Whole on rank 0 or all, sharded; and back by slicing, by sending, as they are."""
    model = made(OURS, 0)
    optim = optimizer(model)
    train_steps(model, optim, range(2))
    expected = optim.state_dict()
    is_first = dist.get_rank() == 0
    with silenced():
        on_first = OURS.full_optim_state_dict(model, optim)
        whole = OURS.full_optim_state_dict(model, optim, rank0_only=False)
        sharded = OURS.sharded_optim_state_dict(model, optim)
        assert bool(on_first) == is_first
        assert not any(isinstance(value, DTensor) for state in whole["state"].values() for value in state.values())
        assert isinstance(sharded["state"]["embed.weight"]["exp_avg"], DTensor)
        same_state(OURS.shard_full_optim_state_dict(whole, model), expected)
        same_state(OURS.shard_full_optim_state_dict(whole, model, optim=optim), expected)
        same_state(OURS.shard_full_optim_state_dict(whole, model, optim_input=list(model.parameters())), expected)
        same_state(OURS.scatter_full_optim_state_dict(on_first if is_first else None, model, optim=optim), expected)
        same_state(OURS.flatten_sharded_optim_state_dict(sharded, model, optim), expected)
        # The same names as torch's, whose values on the CPU are not to be relied on.
        theirs = made(under_theirs, 0)
        their_optim = optimizer(theirs)
        train_steps(theirs, their_optim, range(2))
        others = THEIRS.full_optim_state_dict(theirs, their_optim, rank0_only=False)
    assert others["param_groups"] == whole["param_groups"] and set(others["state"]) == set(whole["state"])


def step_of_all_ranks(unsharded: Any, optim: Any, number: int) -> list[float]:
    losses = [loss_of(unsharded(batch)) for batch in batches(number)]
    torch.stack(losses).mean().backward()
    optim.step()
    optim.zero_grad()
    return [loss.item() for loss in losses]


@on_two_ranks
def test_numbers_become_names_and_names_numbers() -> None:
    """As torch's does; so a plain optimizer's state goes on sharded."""
    unsharded = Stack(1, tied=True)
    plain_optim = optimizer(unsharded, 2)
    step_of_all_ranks(unsharded, plain_optim, 0)
    # As if read from a file: load_state_dict takes tensors as they are, and the plain optimizer trains on below.
    by_number = copy.deepcopy(plain_optim.state_dict())
    expected = {name: copy.deepcopy(plain_optim.state[param]) for name, param in unsharded.named_parameters()}
    assert len({state["exp_avg"].sum().item() for state in expected.values()}) == len(expected), "no two are alike"
    groups = [{*map(id, group["params"])} for group in plain_optim.param_groups]
    for fsdp in (OURS, THEIRS):
        named = fsdp.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, unsharded, optim=plain_optim)
        same_values(named["state"], expected)
        for group, ids in zip(named["param_groups"], groups):
            assert {id(unsharded.get_parameter(name)) for name in group["params"]} == ids
        again = fsdp.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, unsharded, optim=plain_optim)
        same_state(again, by_number)
    assert OURS.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_NAME, unsharded, optim=plain_optim) is named
    # A checkpoint of a model that was never sharded goes on under ours.
    model = made(OURS, 1)
    optim = optimizer(model, 2)
    for group in optim.param_groups:
        group["lr"] = 9.0  # not what was saved
    model.load_state_dict(unsharded.state_dict())
    optim.load_state_dict(OURS.optim_state_dict_to_load(model, optim, named))
    same_values({name: optim.state[param] for name, param in model.named_parameters()}, expected)
    for ours, group in zip(optim.param_groups, plain_optim.param_groups, strict=True):
        assert ours["lr"] == group["lr"]
        names = [name for name, param in model.named_parameters() if any(param is one for one in ours["params"])]
        assert {id(unsharded.get_parameter(name)) for name in names} == {*map(id, group["params"])}
    run_on_all_ranks = train_steps(model, optim, range(1, 3))
    alone = [step_of_all_ranks(unsharded, plain_optim, number) for number in (1, 2)]
    for name, param in model.named_parameters():
        torch.testing.assert_close(full(param).detach(), unsharded.get_parameter(name).detach(), msg=name)
    torch.testing.assert_close(run_on_all_ranks, [losses[dist.get_rank()] for losses in alone])


@on_two_ranks
def test_ranks_skip_a_step_together() -> None:
    """An infinity on one rank lowers the scale on all; losses and scales are those of torch's FSDP1 and its scaler."""
    seen = []
    for fsdp, scalers in ((OURS, ShardedGradScaler), (under_theirs, TorchsScaler)):
        torch.manual_seed(0)
        model = mixed(Stack(), fsdp)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        # Its default group is looked up when torch is imported, before there is one.
        scaler = scalers("cpu", init_scale=8.0, growth_interval=2, process_group=dist.group.WORLD)
        losses, scales = [], []
        for step in range(5):
            loss = loss_of(model(mine(step)))
            scaler.scale(loss).backward()
            if step == 1 and dist.get_rank() == 1:  # in a part that rank 0 knows nothing of
                model.norm.bias.grad[0] = float("inf")
            scaler.unscale_(optim)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        seen.append((losses, scales))
    assert seen[0][1] == [8.0, 4.0, 4.0, 8.0, 8.0]
    assert seen[0][1] == seen[1][1]
    torch.testing.assert_close(seen[0][0], seen[1][0], atol=1e-6, rtol=1e-4)


@on_two_ranks
def test_a_scaler_that_is_off_does_nothing() -> None:
    """And without a group it asks all ranks."""
    model = made(OURS, 0)
    before = {name: full(param.detach()) for name, param in model.named_parameters()}
    optim, scaler = optimizer(model), ShardedGradScaler("cpu", enabled=False)
    loss = loss_of(model(mine()))
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.step(optim)
    scaler.update()
    assert any(not torch.equal(full(param.detach()), before[name]) for name, param in model.named_parameters())
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model(mine(1)))).backward()
    scaler.step(optim)
    assert copy.deepcopy(scaler.state_dict())["scale"] == 4.0


@on_two_ranks
def test_the_scaler_keeps_dtypes_and_takes_sparse_gradients() -> None:
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    loss, other = torch.tensor(2.0, dtype=torch.float16), torch.tensor(3.0)
    scaled = scaler.scale([loss, other])
    assert [one.dtype for one in scaled] == [torch.float16, torch.float32] and [one.item() for one in scaled] == [8, 12]
    embed = nn.Embedding(5, 3, sparse=True)
    optim = torch.optim.SGD(embed.parameters(), lr=1.0)
    scaler.scale(embed(torch.tensor([1, 1, 2])).sum()).backward()
    scaler.unscale_(optim)
    grad: Tensor = embed.weight.grad  # type: ignore[assignment]
    assert grad.to_dense()[:, 0].tolist() == [0, 2, 1, 0, 0]
