"""FSDP1's state dicts on our core: of models and of optimizers, of each type, to and from torch's FSDP1."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compile._torch_compat.fsdp1 import without_checkpointing
from fsdp_compile.fsdp1.wrap import ModuleWrapPolicy
from tests.comparing import full, loss_of, mine
from tests.compiling import compiled, num_graphs
from tests.fsdp1_scripts import OURS, THEIRS, Buffered, silenced, under_theirs
from tests.models import Block, Stack
from tests.ranks import Ranks

BLOCKS = ModuleWrapPolicy({Block})
FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD)


def small() -> Stack:
    return Stack(1, tied=True)


def made(fsdp: Any, seed: int, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    with silenced():
        return fsdp(small(), auto_wrap_policy=BLOCKS, **kwargs)


def equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(full(ours.detach()), full(theirs.detach()), rtol=0, atol=0)


# --- models --------------------------------------------------------------------------------------------------------


def check_types(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    unsharded = small()
    expected = unsharded.state_dict()
    model = made(OURS, 0, sharding_strategy=strategy)
    for kind in (FULL, SHARDED, LOCAL):
        with OURS.state_dict_type(model, kind):
            state = model.state_dict()
        assert list(state) == list(expected)
        for name, value in state.items():
            shard = dict(model.named_parameters(remove_duplicate=False))[name]
            if kind is FULL:
                assert not isinstance(value, DTensor)
                equal(value, expected[name])
            else:
                assert isinstance(value, DTensor)
                equal(value.to_local(), shard.to_local())
                equal(value, expected[name])
        # And back, into other values.
        other = made(OURS, 1, sharding_strategy=strategy)
        with OURS.state_dict_type(other, kind):
            result = other.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        for name, param in other.named_parameters():
            assert isinstance(param, DTensor)
            equal(param, expected[name])
        assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_dict_of_each_type_is_loaded_again(two_ranks: Ranks, strategy: ShardingStrategy) -> None:
    """Names as before wrapping, tied ones twice; whole tensors or DTensors."""
    two_ranks.run(check_types, strategy)


def check_crossed() -> None:
    torch.manual_seed(0)
    plain = small()
    ours, theirs = made(OURS, 0), made(under_theirs, 0)
    for name, value in ours.state_dict().items():
        equal(value, theirs.state_dict()[name])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for target in (made(OURS, 1), made(under_theirs, 1), Stack(1, tied=True)):
        for source in (ours, theirs, plain):
            for param in target.parameters():
                with torch.no_grad():
                    param.zero_()
            target.load_state_dict(source.state_dict())
            for name, value in target.state_dict().items():
                equal(value, plain.state_dict()[name])


def test_whole_state_dicts_go_to_and_from_torchs_fsdp1_and_plain_models(two_ranks: Ranks) -> None:
    two_ranks.run(check_crossed)


def check_configured() -> list[str]:
    torch.manual_seed(0)
    expected = small().state_dict()
    model = made(OURS, 0)
    with OURS.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        first = model.state_dict()
    for name, value in first.items():
        equal(value, expected[name])
    around = nn.ModuleDict({"model": model, "beside": nn.Linear(2, 2)})
    with OURS.state_dict_type(around, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        state = around.state_dict()
        assert list(state) == [*(f"model.{name}" for name in expected), "beside.weight", "beside.bias"]
        for name in expected:
            assert isinstance(state[f"model.{name}"], DTensor)
            equal(state[f"model.{name}"], expected[name])
        beside = state["beside.weight"].clone()
        around.load_state_dict({name: value * 3 for name, value in state.items()})
        equal(around["beside"].weight, beside * 3)
    for name, value in model.state_dict().items():  # FULL again, on every rank
        assert not isinstance(value, DTensor)
        equal(value, expected[name] * 3)
    return list(first)


@pytest.mark.compat
def test_rank_0_alone_may_get_it(two_ranks: Ranks) -> None:
    """Others get nothing; and a module that is not wrapped passes wrapped ones' state on."""
    assert two_ranks.run(check_configured) == [list(small().state_dict()), []]


def check_buffers() -> None:
    torch.manual_seed(0)
    unsharded = Buffered()
    expected = unsharded.state_dict()
    with silenced():
        model = OURS(Buffered(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model.load_state_dict(expected)
    assert list(model.state_dict()) == list(expected)
    for name, value in model.state_dict().items():
        equal(value, expected[name])
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in unsharded.named_buffers()]


def test_buffers_are_saved_as_they_are(two_ranks: Ranks) -> None:
    two_ranks.run(check_buffers)


def check_settings() -> None:
    model = made(OURS, 0)
    default = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert OURS.get_state_dict_type(model) == default == THEIRS.get_state_dict_type(made(under_theirs, 0))
    assert OURS.set_state_dict_type(model, LOCAL) == default
    with OURS.state_dict_type(
        model, SHARDED, optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=False)
    ):
        assert OURS.get_state_dict_type(model.layers[0]).state_dict_type is SHARDED
        assert not OURS.get_state_dict_type(model).optim_state_dict_config.offload_to_cpu
    assert OURS.get_state_dict_type(model).state_dict_config == LocalStateDictConfig()
    with pytest.raises(KeyError), OURS.state_dict_type(model, FULL):
        raise KeyError
    assert OURS.get_state_dict_type(model).state_dict_type is LOCAL
    assert OURS.get_state_dict_type(nn.Linear(2, 2)) is None
    for fsdp, cls in ((under_theirs, THEIRS), (OURS, OURS)):
        model = made(fsdp, 0)
        with silenced(), pytest.raises(RuntimeError):
            cls.set_state_dict_type(model, SHARDED, FullStateDictConfig())
        with silenced(), pytest.raises(RuntimeError):
            cls.set_state_dict_type(model, FULL, FullStateDictConfig(), ShardedOptimStateDictConfig())
        with silenced():
            cls.set_state_dict_type(model.layers[0], SHARDED)
        with pytest.raises(AssertionError):
            cls.get_state_dict_type(model)
        with silenced(), pytest.raises(AssertionError):
            cls.set_state_dict_type(model, FULL)


def test_the_type_is_set_for_a_tree(two_ranks: Ranks) -> None:
    """Defaults, what was said before, contexts, also where they raise; errors are those of torch's FSDP1."""
    two_ranks.run(check_settings)


def check_misfits() -> None:
    model = made(OURS, 0)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layers.0.up.bias"') as raised:
        model.load_state_dict({name: value for name, value in state.items() if name != "layers.0.up.bias"})
    assert "wrapped" not in str(raised.value)
    result = model.load_state_dict({**state, "layers.0.other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["layers.0.other"]
    with pytest.raises(RuntimeError, match=r"size mismatch for .*up\.weight"):
        model.load_state_dict({**state, "layers.0.up.weight": torch.ones(3, 3)})
    with OURS.summon_full_params(model):
        for name, value in model.state_dict().items():
            equal(value, state[name])
        with pytest.raises(RuntimeError, match="Call it outside"):
            model.load_state_dict(state)


def test_what_is_missing_or_does_not_fit_is_named(two_ranks: Ranks) -> None:
    two_ranks.run(check_misfits)


def check_tensor_parallel() -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(16, 34), nn.ReLU(), nn.Linear(34, 3))
    model = copy.deepcopy(unsharded)
    parallelize_module(model, both["tp"], {"0": ColwiseParallel()})
    model = OURS(model, device_mesh=both["dp"])
    state = model.state_dict()
    for name, value in state.items():
        assert not isinstance(value, DTensor)
        equal(value, unsharded.state_dict()[name])
    model.load_state_dict({name: 2 * value for name, value in state.items()})
    for name, param in model.named_parameters():
        equal(param, 2 * unsharded.get_parameter(name))


@pytest.mark.more
def test_a_whole_state_dict_is_whole_over_tensor_parallelism(four_ranks: Ranks) -> None:
    four_ranks.run(check_tensor_parallel)


# --- optimizers ----------------------------------------------------------------------------------------------------


def optimizer(model: Any, num_groups: int = 1) -> torch.optim.Optimizer:
    params = [param for _, param in model.named_parameters()]
    groups = [{"params": params[number::num_groups], "lr": 0.05 / (number + 1)} for number in range(num_groups)]
    return torch.optim.AdamW(groups, eps=1e-3)


def steps(run: Any, optim: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = loss_of(run(mine(number)))
        loss.backward()
        losses.append(loss.item())
        optim.step()
        optim.zero_grad()
    return losses


def check_resumed(kind: StateDictType, strategy: ShardingStrategy, backend: str | None) -> None:
    first = made(OURS, 0, sharding_strategy=strategy)
    run, optim = compiled(first, backend), optimizer(first, 2)
    steps(run, optim, range(2))
    for group in optim.param_groups:  # as a schedule does
        group["lr"] *= 0.5
    with OURS.state_dict_type(first, kind):
        state, optim_state = first.state_dict(), OURS.optim_state_dict(first, optim)
        # Not what the first one goes on to write to.
        state, optim_state = copy.deepcopy(state), copy.deepcopy(optim_state)
    graphs = num_graphs()
    assert graphs == (backend is not None)
    uninterrupted = steps(run, optim, range(2, 5))
    rates = [group["lr"] for group in optim.param_groups]
    second = made(OURS, 1, sharding_strategy=strategy)
    run, optim = compiled(second, backend), optimizer(second, 2)
    with OURS.state_dict_type(second, kind):
        second.load_state_dict(state)
        loadable = OURS.optim_state_dict_to_load(second, optim, optim_state)
    optim.load_state_dict(loadable)
    assert [group["lr"] for group in optim.param_groups] == rates and rates[0] != rates[1]
    assert steps(run, optim, range(2, 5)) == uninterrupted
    for ours, param in zip(second.parameters(), first.parameters(), strict=True):
        equal(ours, param)
    assert num_graphs() == graphs, "saving and loading compile nothing"


@pytest.mark.parametrize(
    ("kind", "strategy", "backend"),
    [
        (FULL, STRATEGIES[0], None),
        (SHARDED, STRATEGIES[0], None),
        (LOCAL, STRATEGIES[0], None),
        (FULL, STRATEGIES[1], None),
        (SHARDED, STRATEGIES[2], None),
        pytest.param(FULL, STRATEGIES[0], "aot_eager", marks=pytest.mark.more),
        pytest.param(SHARDED, STRATEGIES[0], "aot_eager", marks=pytest.mark.more),
    ],
)
def test_training_goes_on_from_a_state_of_each_type(
    two_ranks: Ranks, kind: StateDictType, strategy: ShardingStrategy, backend: str | None
) -> None:
    """Losses are those of the run that was not interrupted, bitwise, with two parameter groups."""
    two_ranks.run(check_resumed, kind, strategy, backend)


def check_optim_crossed() -> None:
    trained = {}
    for name, fsdp, cls in (("ours", OURS, OURS), ("theirs", under_theirs, THEIRS)):
        model = made(fsdp, 0)
        optim = optimizer(model)
        steps(model, optim, range(2))
        # On the CPU, torch's .cpu() of what it gathered is no copy, and the next one is gathered over it.
        config = FullOptimStateDictConfig(offload_to_cpu=cls is OURS)
        with silenced(), cls.state_dict_type(model, FULL, optim_state_dict_config=config):
            trained[name] = (model.state_dict(), cls.optim_state_dict(model, optim))
        config = FullOptimStateDictConfig(rank0_only=True)
        with silenced(), cls.state_dict_type(model, FULL, optim_state_dict_config=config):
            assert bool(cls.optim_state_dict(model, optim)) == (dist.get_rank() == 0)
    (_, ours), (_, theirs) = trained["ours"], trained["theirs"]
    assert set(ours["state"]) == set(theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]
    for name, entries in theirs["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(ours["state"][name][key], value, atol=1e-6, rtol=1e-4)
    losses = []
    for fsdp, cls, source in ((OURS, OURS, "theirs"), (OURS, OURS, "ours"), (under_theirs, THEIRS, "ours")):
        model = made(fsdp, 1)
        optim = optimizer(model)
        state, optim_state = trained[source]
        with silenced():
            model.load_state_dict(state)
            cls.optim_state_dict_to_load(model, optim, copy.deepcopy(optim_state), load_directly=True)
        losses.append(steps(model, optim, range(2, 4)))
    for some in losses[1:]:
        torch.testing.assert_close(losses[0], some, atol=1e-5, rtol=1e-4)


def test_an_optimizers_state_goes_to_and_from_torchs_fsdp1(two_ranks: Ranks) -> None:
    """Names, groups and values are the same, and training goes on alike on either side."""
    two_ranks.run(check_optim_crossed)


def check_from_rank_0(group: bool) -> None:
    model = made(OURS, 0)
    optim = optimizer(model)
    steps(model, optim, range(1))
    with OURS.state_dict_type(model, FULL, optim_state_dict_config=FullOptimStateDictConfig(rank0_only=True)):
        state = OURS.optim_state_dict(model, optim)
        assert bool(state) == (dist.get_rank() == 0)
        loadable = OURS.optim_state_dict_to_load(model, optim, state, group=dist.group.WORLD if group else None)
        named = OURS.optim_state_dict_to_load(model, optim, state, is_named_optimizer=True)
    assert named["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    expected = optim.state_dict()
    assert loadable["param_groups"] == expected["param_groups"]
    for key, entries in expected["state"].items():
        name = named["param_groups"][0]["params"][key]
        for entry, value in entries.items():
            for given in (loadable["state"][key], named["state"][name]):
                assert isinstance(given[entry], DTensor) == isinstance(value, DTensor)
                equal(given[entry], value)


@pytest.mark.parametrize("group", [False, True])
def test_rank_0_alone_may_have_the_optimizers_state(two_ranks: Ranks, group: bool) -> None:
    """It sends it to the others; by number, or by name for optimizers that know names."""
    two_ranks.run(check_from_rank_0, group)


def check_optim_misfits() -> None:
    model = made(OURS, 0)
    optim = optimizer(model)
    steps(model, optim, range(1))
    state = OURS.optim_state_dict(model, optim)
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(RuntimeError, match=r"no parameter group with embed\.weight"):
        state["param_groups"][0]["params"].remove("embed.weight")
        OURS.optim_state_dict_to_load(model, optim, state)
    OURS.optim_state_dict_to_load(model, fewer, state, load_directly=True)
    apart = OURS.optim_state_dict(model, optimizer(model, 2))
    with pytest.raises(RuntimeError, match=r"embed\.weight and .* in different parameter groups"):
        OURS.optim_state_dict_to_load(model, optim, apart)
    with pytest.raises(ValueError, match="nothing in it that is wrapped"):
        OURS.optim_state_dict(nn.Linear(2, 2), optim)


def test_parameters_that_the_optimizer_lacks_are_named(two_ranks: Ranks) -> None:
    two_ranks.run(check_optim_misfits)


class Partly(nn.Module):
    """Some of it is wrapped, in some of it a checkpoint is, and one parameter is frozen."""

    def __init__(self, fsdp: Any, has_more: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner, outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.wrapped = fsdp(nn.Sequential(checkpoint_wrapper(inner), fsdp(outer)))
        self.out = nn.Linear(5, 5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        if has_more:
            self.more = nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return self.out(self.wrapped(x))


def stepped(model: Any, optim: Any) -> Any:
    model(torch.linspace(-1, 1, 15).reshape(3, 5)).pow(2).sum().backward()
    optim.step()
    return optim


def check_other_order(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4)))
    unsharded = copy.deepcopy(model)
    expected = stepped(unsharded, torch.optim.Adam(unsharded.parameters()))
    with silenced():
        model = OURS(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), sharding_strategy=strategy)
    named = list(model.named_parameters())
    groups: Any = [{"params": named[:1]}, {"params": named[1:], "lr": 0.5}]
    if dist.get_rank() == 1:
        groups = [{"params": named[:0:-1], "lr": 0.5}, {"params": named[:1]}]
    optim = stepped(model, torch.optim.Adam(groups))
    before = copy.deepcopy(optim.state_dict())
    for kind, rank0_only in ((FULL, False), (FULL, True), (SHARDED, False), (LOCAL, False)):
        config = FullOptimStateDictConfig(rank0_only=rank0_only) if kind is FULL else None
        with OURS.state_dict_type(model, kind, optim_state_dict_config=config):
            saved = OURS.optim_state_dict(model, optim)
            for name, param in unsharded.named_parameters() if saved else ():
                assert isinstance(saved["state"][name]["exp_avg"], DTensor) == (kind is not FULL)
                torch.testing.assert_close(full(saved["state"][name]["exp_avg"]), expected.state[param]["exp_avg"])
            OURS.optim_state_dict_to_load(model, optim, saved, load_directly=True)
        after = optim.state_dict()
        assert after["param_groups"] == before["param_groups"], "also the names, which are in this rank's order"
        for number, entries in before["state"].items():
            equal(after["state"][number]["exp_avg"], entries["exp_avg"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_have_parameters_in_another_order(two_ranks: Ranks, strategy: ShardingStrategy) -> None:
    """And in other groups: states are those of the unsharded optimizer, and go back to where they were."""
    two_ranks.run(check_other_order, strategy)


def named_optimizer(fsdp: Any) -> Any:
    with silenced():
        model = Partly(fsdp)
    return model, _NamedOptimizer(model.named_parameters(), torch.optim.SGD, None, model, lr=0.1, momentum=0.9)


def check_named(kind: StateDictType) -> None:
    unsharded = Partly(lambda module: module)
    expected = stepped(unsharded, torch.optim.SGD(unsharded.parameters(), lr=0.1, momentum=0.9)).state
    values = {
        without_checkpointing(name): expected[param]
        for name, param in unsharded.named_parameters()
        if param in expected
    }
    seen = []
    for fsdp, cls in ((under_theirs, THEIRS), (OURS, OURS)):
        model, optim = named_optimizer(fsdp)
        stepped(model, optim)
        with silenced(), cls.state_dict_type(model, kind):
            saved = cls.optim_state_dict(model, optim)
            model, others = named_optimizer(fsdp)
            others.init_state()
            loadable = cls.optim_state_dict_to_load(model, others, saved, is_named_optimizer=True)
        seen.append((set(saved["state"]), saved["param_groups"], set(loadable["state"])))
    assert seen[0] == seen[1]
    assert seen[1][0] == {
        f"{module}.{name}" for module in ("wrapped.0", "wrapped.1", "out") for name in ("weight", "bias")
    }
    for name, state in saved["state"].items():
        assert isinstance(state["momentum_buffer"], DTensor) == (kind is not FULL and "wrapped" in name)
        torch.testing.assert_close(full(state["momentum_buffer"]), values[name]["momentum_buffer"])
    others.load_state_dict(loadable)
    before = optim.state_dict()["state"]
    for name, state in others.state_dict()["state"].items():
        if name != "frozen":  # init_state made one
            equal(state["momentum_buffer"], before[name]["momentum_buffer"])


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
def test_an_optimizer_may_have_names_for_keys(two_ranks: Ranks, kind: StateDictType) -> None:
    """Its state has names without wrappers, as under torch's FSDP1, where the root is not wrapped; and goes back."""
    two_ranks.run(check_named, kind)


def check_ranks_differ() -> None:
    is_first = dist.get_rank() == 0
    for fsdp, cls in ((under_theirs, THEIRS), (OURS, OURS)):
        model = made(fsdp, 0, use_orig_params=False)
        params = list(model.parameters())
        optim = optimizer(model) if is_first else torch.optim.AdamW(params[:-1])
        steps(model, optim, range(1))
        with silenced(), pytest.raises(RuntimeError, match="FSDP currently requires each rank to have at least the optimizer states needed") as raised:
            cls.optim_state_dict(model, optim)
    what = "exp_avg in torch.float32, exp_avg_sq in torch.float32"
    last = list(model.named_parameters())[-1][0]
    assert f"{last}: rank 0 has {what}; rank 1 has nothing." in str(raised.value)
    for kind in (FULL, SHARDED):
        with OURS.state_dict_type(model, kind):
            others = torch.optim.AdamW(params, amsgrad=is_first)
            steps(model, others, range(1))
            with pytest.raises(
                RuntimeError, match=f"rank 0 has {what}, max_exp_avg_sq in torch.float32; rank 1 has {what}"
            ):
                OURS.optim_state_dict(model, others)
            not_its_own = [nn.Parameter(torch.ones(2))]
            with pytest.raises(ValueError, match=r"shape \(2,\) that is not the model's"):
                OURS.optim_state_dict(model, torch.optim.AdamW(params if is_first else params + not_its_own))


def test_every_rank_raises_where_optimizers_differ(two_ranks: Ranks) -> None:
    """In their parameters, as under torch's FSDP1; in what they keep of each; and by parameters of another model."""
    two_ranks.run(check_ranks_differ)


def check_more_parameters() -> None:
    for fsdp, cls in ((under_theirs, THEIRS), (OURS, OURS)):
        with silenced():
            model, larger = Partly(fsdp), Partly(fsdp, has_more=True)
            optim = stepped(model, torch.optim.Adam(model.parameters()))
            saved = cls.optim_state_dict(model, optim)
            others = torch.optim.Adam(larger.parameters())
            loadable = cls.optim_state_dict_to_load(larger, others, saved)
        place = next(number for number, param in enumerate(larger.parameters()) if param is larger.more)
        (group,) = loadable["param_groups"]
        assert place not in loadable["state"]
        assert group["params"] == [number for number in range(8) if number != place]
    loadable["state"][place] = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.ones(())}
    group["params"].insert(place, place)
    others.load_state_dict(loadable)
    new = dict(larger.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            equal(others.state[new[name]]["exp_avg"], optim.state[param]["exp_avg"])


def test_a_parameter_that_the_state_lacks_is_left_out(two_ranks: Ranks) -> None:
    """One that is not sharded, as under torch's FSDP1. Code that manages it otherwise adds its entry, and can load."""
    two_ranks.run(check_more_parameters)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def check_checkpoint(folder: str) -> None:
    model = made(OURS, 0)
    optim = optimizer(model)
    steps(model, optim, range(2))
    OURS.set_state_dict_type(model, SHARDED)
    dcp.save({"model": model.state_dict(), "optim": OURS.optim_state_dict(model, optim)}, checkpoint_id=folder)
    expected = steps(model, optim, range(2, 4))
    for fsdp, cls in ((OURS, OURS), (under_theirs, THEIRS)):
        other = made(fsdp, 1, device_mesh=init_device_mesh("cpu", (2,)))
        optim = optimizer(other)
        steps(other, optim, range(1))  # so that it has a state to load into
        with silenced(), cls.state_dict_type(other, SHARDED):
            state = {"model": other.state_dict(), "optim": cls.optim_state_dict(other, optim)}
            dcp.load(state, checkpoint_id=folder)
            other.load_state_dict(state["model"])
            optim.load_state_dict(cls.optim_state_dict_to_load(other, optim, state["optim"]))
        torch.testing.assert_close(steps(other, optim, range(2, 4)), expected, atol=1e-6, rtol=1e-4)


def check_local_checkpoint(folder: str) -> None:
    first, second = made(OURS, 0), made(OURS, 1)
    optim, others = optimizer(first), optimizer(second)
    steps(first, optim, range(1))
    steps(second, others, range(1))
    for model in (first, second):
        OURS.set_state_dict_type(model, LOCAL)
    dcp.save({"model": first.state_dict(), "optim": OURS.optim_state_dict(first, optim)}, checkpoint_id=folder)
    torch.save(first.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    state = {"model": second.state_dict(), "optim": OURS.optim_state_dict(second, others)}
    dcp.load(state, checkpoint_id=folder)
    for saved in (state["model"], torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=True)):
        second.load_state_dict(saved)
        for ours, param in zip(second.parameters(), first.parameters(), strict=True):
            equal(ours, param)
            with torch.no_grad():
                ours.zero_()
    OURS.optim_state_dict_to_load(second, others, state["optim"], load_directly=True)
    for number, entries in optim.state_dict()["state"].items():
        for key, value in entries.items():
            equal(others.state_dict()["state"][number][key], value)


def test_a_local_checkpoint_has_all_ranks_rows(two_ranks: Ranks, tmp_path: Path) -> None:
    """LOCAL_STATE_DICT by ``torch.distributed.checkpoint``, and in a file for each rank."""
    two_ranks.run(check_local_checkpoint, str(tmp_path))


@pytest.mark.more
def test_a_sharded_checkpoint_is_loaded_by_ours_and_torchs(two_ranks: Ranks, tmp_path: Path) -> None:
    """``torch.distributed.checkpoint`` with SHARDED_STATE_DICT, model and optimizer."""
    two_ranks.run(check_checkpoint, str(tmp_path))
