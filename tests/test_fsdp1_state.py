"""FSDP1's state dicts on our core: of models and of optimizers, of each type, to and from torch's FSDP1."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as helpers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile._torch_compat.fsdp1 import without_checkpointing
from fsdp_compile.fsdp1.wrap import ModuleWrapPolicy
from tests.comparing import assert_same_grads, backward_on_both, batches, full, reference_backward, train_steps
from tests.compiling import compiled, num_graphs
from tests.fsdp1_scripts import OURS, THEIRS, Buffered, is_block, made, optimizer, plain, silenced, under_theirs
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.ranks import Ranks

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD)


def checkpointed(seed: int) -> Any:
    """Checkpointing is applied after wrapping."""
    model = made(OURS, seed)
    apply_activation_checkpointing(model, check_fn=is_block)
    assert any("_checkpoint_wrapped_module" in module._modules for module in model.modules())
    return model


def trained(model: Any) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, optim, (0,))
    return optim


def equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(full(ours.detach()), full(theirs.detach()), rtol=0, atol=0)


def same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names in their order, and values."""
    assert list(given) == list(expected)
    for name, value in expected.items():
        equal(given[name], value)


@on_two_ranks
def test_whole_state_dicts_go_to_and_from_torchs_fsdp1_and_plain_models() -> None:
    """Buffers are saved as they are, under their own names."""
    buffered = Buffered()
    expected = buffered.state_dict()
    with silenced():
        model = OURS(Buffered(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model.load_state_dict(expected)
    same(model.state_dict(), expected)
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in buffered.named_buffers()]

    unsharded = plain()
    ours, theirs = made(OURS, 0), made(under_theirs, 0)
    same(ours.state_dict(), theirs.state_dict())
    for target in (made(OURS, 1), made(under_theirs, 1), plain(1)):
        for source in (ours, theirs, unsharded):
            for param in target.parameters():
                with torch.no_grad():
                    param.zero_()
            target.load_state_dict(source.state_dict())
            same(target.state_dict(), unsharded.state_dict())


@pytest.mark.compat
@on_two_ranks
def test_rank_0_alone_may_get_it() -> None:
    """Others get nothing; and a module that is not wrapped passes wrapped ones' state on."""
    expected = plain().state_dict()
    model = made(OURS, 0)
    with OURS.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        first = model.state_dict()
    same(first, expected if dist.get_rank() == 0 else {})
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
    state = model.state_dict()  # FULL again, on every rank
    assert not any(isinstance(value, DTensor) for value in state.values())
    same(state, {name: value * 3 for name, value in expected.items()})


@on_two_ranks
def test_the_type_is_set_for_a_tree() -> None:
    """Defaults, which are torch's, what was said before, and contexts, also where they raise."""
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


@on_two_ranks
def test_what_is_missing_or_does_not_fit_is_named() -> None:
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
        same(model.state_dict(), state)
        with pytest.raises(RuntimeError, match="Call it outside"):
            model.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "strategy", "backend"),
    [
        *zip((FULL, LOCAL, SHARDED), STRATEGIES, 3 * [None]),
        pytest.param(SHARDED, STRATEGIES[0], "aot_eager", marks=pytest.mark.more),
    ],
)
@on_two_ranks
def test_training_goes_on_from_a_state_of_each_type(
    kind: StateDictType, strategy: ShardingStrategy, backend: str | None
) -> None:
    """Whole tensors or DTensors under names as before wrapping; losses go on bitwise, with two parameter groups."""
    expected = plain().state_dict()
    first = made(OURS, 0, sharding_strategy=strategy)
    with OURS.state_dict_type(first, kind):
        state = first.state_dict()
    assert list(state) == list(expected)
    shards = dict(first.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        assert isinstance(value, DTensor) == (kind is not FULL)
        equal(value, expected[name])
        if kind is not FULL:
            equal(value.to_local(), shards[name].to_local())

    run, optim = compiled(first, backend), optimizer(first, 2)
    train_steps(run, optim, range(2))
    for group in optim.param_groups:  # as a schedule does
        group["lr"] *= 0.5
    with OURS.state_dict_type(first, kind):
        state, optim_state = first.state_dict(), OURS.optim_state_dict(first, optim)
        # Not what the first one goes on to write to.
        state, optim_state = copy.deepcopy(state), copy.deepcopy(optim_state)
    graphs = num_graphs()
    assert graphs == (backend is not None)
    uninterrupted = train_steps(run, optim, range(2, 5))
    rates = [group["lr"] for group in optim.param_groups]
    second = made(OURS, 1, sharding_strategy=strategy)
    run, optim = compiled(second, backend), optimizer(second, 2)
    with OURS.state_dict_type(second, kind):
        result = second.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        loadable = OURS.optim_state_dict_to_load(second, optim, optim_state)
    assert second.head.weight is second.embed.weight
    optim.load_state_dict(loadable)
    assert [group["lr"] for group in optim.param_groups] == rates and rates[0] != rates[1]
    assert train_steps(run, optim, range(2, 5)) == uninterrupted
    same(dict(second.named_parameters()), dict(first.named_parameters()))
    assert num_graphs() == graphs, "saving and loading compile nothing"


@on_two_ranks
def test_an_optimizers_state_goes_to_and_from_torchs_fsdp1() -> None:
    """Names, groups and values are the same, and training goes on alike on either side."""
    trained = {}
    for name, fsdp, cls in (("ours", OURS, OURS), ("theirs", under_theirs, THEIRS)):
        model = made(fsdp, 0)
        optim = optimizer(model)
        train_steps(model, optim, range(2))
        # On the CPU, torch's .cpu() of what it gathered is no copy, and the next one is gathered over it.
        config = FullOptimStateDictConfig(offload_to_cpu=cls is OURS)
        with silenced(), cls.state_dict_type(model, FULL, optim_state_dict_config=config):
            trained[name] = (model.state_dict(), cls.optim_state_dict(model, optim))
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
        losses.append(train_steps(model, optim, range(2, 4)))
    for some in losses[1:]:
        torch.testing.assert_close(losses[0], some, atol=1e-5, rtol=1e-4)


@on_two_ranks
def test_parameters_that_the_optimizer_lacks_are_named() -> None:
    model = made(OURS, 0)
    optim = optimizer(model)
    train_steps(model, optim, range(1))
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_ranks_may_have_parameters_in_another_order(strategy: ShardingStrategy) -> None:
    """And in other groups: states are the unsharded optimizer's, and go back to where they were, from rank 0 too."""
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
            assert bool(saved) == (dist.get_rank() == 0 or not rank0_only)
            for name, param in unsharded.named_parameters() if saved else ():
                assert isinstance(saved["state"][name]["exp_avg"], DTensor) == (kind is not FULL)
                torch.testing.assert_close(full(saved["state"][name]["exp_avg"]), expected.state[param]["exp_avg"])
            for group in (None, dist.group.WORLD) if rank0_only else (None,):
                loadable = OURS.optim_state_dict_to_load(model, optim, saved, group=group)
                for number, entries in before["state"].items():
                    for name, value in entries.items():
                        assert isinstance(loadable["state"][number][name], DTensor) == isinstance(value, DTensor)
                        equal(loadable["state"][number][name], value)
            OURS.optim_state_dict_to_load(model, optim, saved, load_directly=True)
        after = optim.state_dict()
        assert after["param_groups"] == before["param_groups"], "also the names, which are in this rank's order"
        for number, entries in before["state"].items():
            equal(after["state"][number]["exp_avg"], entries["exp_avg"])


def named_optimizer(fsdp: Any) -> Any:
    with silenced():
        model = Partly(fsdp)
    return model, _NamedOptimizer(model.named_parameters(), torch.optim.SGD, None, model, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
@on_two_ranks
def test_an_optimizer_may_have_names_for_keys(kind: StateDictType) -> None:
    """Its state has names without wrappers, as under torch's FSDP1, where the root is not wrapped; and goes back."""
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


@on_two_ranks
def test_every_rank_raises_where_optimizers_differ() -> None:
    """In their parameters, as under torch's FSDP1; in what they keep of each; and by parameters of another model."""
    is_first = dist.get_rank() == 0
    for fsdp, cls in ((under_theirs, THEIRS), (OURS, OURS)):
        model = made(fsdp, 0, use_orig_params=False)
        params = list(model.parameters())
        optim = optimizer(model) if is_first else torch.optim.AdamW(params[:-1])
        train_steps(model, optim, range(1))
        with silenced(), pytest.raises(RuntimeError, match="FSDP currently requires each rank to have at least the optimizer states needed") as raised:
            cls.optim_state_dict(model, optim)
    what = "exp_avg in torch.float32, exp_avg_sq in torch.float32"
    last = list(model.named_parameters())[-1][0]
    assert f"{last}: rank 0 has {what}; rank 1 has nothing." in str(raised.value)
    for kind in (FULL, SHARDED):
        with OURS.state_dict_type(model, kind):
            others = torch.optim.AdamW(params, amsgrad=is_first)
            train_steps(model, others, range(1))
            with pytest.raises(
                RuntimeError, match=f"rank 0 has {what}, max_exp_avg_sq in torch.float32; rank 1 has {what}"
            ):
                OURS.optim_state_dict(model, others)
            not_its_own = [nn.Parameter(torch.ones(2))]
            with pytest.raises(ValueError, match=r"shape \(2,\) that is not the model's"):
                OURS.optim_state_dict(model, torch.optim.AdamW(params if is_first else params + not_its_own))


@on_two_ranks
def test_a_parameter_that_the_state_lacks_is_left_out() -> None:
    """One that is not sharded, as under torch's FSDP1. Code that manages it otherwise adds its entry, and can load."""
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


@on_two_ranks
def test_checkpointing_applied_after_wrapping_changes_no_name_and_no_value() -> None:
    unsharded, model = plain(), checkpointed(0)
    state = model.state_dict()
    assert sorted(state) == sorted(unsharded.state_dict())
    assert not any(isinstance(value, DTensor) for value in state.values())
    for name, value in unsharded.state_dict().items():
        assert torch.equal(state[name], value), name
    checkpointed(1).load_state_dict(state)
    made(OURS, 1).load_state_dict(state)
    again = checkpointed(2)
    again.load_state_dict(unsharded.state_dict())
    with OURS.summon_full_params(again):
        for (name, ours), theirs in zip(again.named_parameters(), unsharded.parameters()):
            assert not isinstance(ours, DTensor) and torch.equal(ours, theirs), name
    optim = trained(model)
    # Names are a plain model's, so checkpointing may be switched on and off between runs.
    saved = OURS.optim_state_dict(model, optim)
    assert sorted(saved["state"]) == sorted(name for name, _ in unsharded.named_parameters())
    other = made(OURS, 3)
    others = torch.optim.AdamW(other.parameters(), lr=1.0)
    others.load_state_dict(OURS.optim_state_dict_to_load(other, others, saved))
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(optim.state[ours]["exp_avg"].to_local(), others.state[theirs]["exp_avg"].to_local())


@on_four_ranks
def test_the_first_rank_of_a_subgroup_gets_what_rank_0_only_keeps_from_others() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    model = made(OURS, process_group=group)
    optim = trained(model)
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    optim_config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with OURS.state_dict_type(model, FULL, config, optim_config):
        state, optim_state = model.state_dict(), OURS.optim_state_dict(model, optim, group=group)
    with OURS.summon_full_params(model, writeback=False, rank0_only=True):
        whole = not isinstance(model.head.weight, DTensor)
        # Rank 0 has plain parameters here and others have shards: nobody gathers.
        inside = model.state_dict()
    if whole:
        assert torch.equal(inside["head.weight"], state["head.weight"])
    num, num_params = len(plain().state_dict()), len(list(plain().parameters()))
    expected = (num, num_params, True) if dist.get_rank() % 2 == 0 else (0, 0, False)
    assert (len(state), len(optim_state.get("state", {})), whole) == expected


HELPED: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "full, on rank 0": {"full_state_dict": True, "cpu_offload": True},
    "full, sent from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flat": {"flatten_optimizer_state_dict": True},
}


def check_helped(name: str, compiles: bool) -> None:
    asked = HELPED[name]
    options = helpers.StateDictOptions(**asked)

    def run_of(model: Any) -> Any:
        return torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model

    unsharded, model = plain(), checkpointed(0)
    run = run_of(model)
    optim = trained(run)
    reference_backward(unsharded, batches(0))
    reference = torch.optim.AdamW(unsharded.parameters(), lr=1e-2)
    reference.step()
    state, optim_state = helpers.get_state_dict(run, optim, options=options)
    whole = options.full_state_dict
    if not (asked.get("cpu_offload") and dist.get_rank() != 0):
        assert sorted(state) == sorted(unsharded.state_dict())
        for name, value in unsharded.state_dict().items():
            assert isinstance(state[name], DTensor) is not whole, name
            torch.testing.assert_close(full(state[name]) if not whole else state[name], value, atol=1e-5, rtol=1e-3)
        moments = {} if options.flatten_optimizer_state_dict else optim_state["state"]
        for name, param in unsharded.named_parameters() if moments else ():
            moment = moments[name]["exp_avg"]
            got = moment if whole else full(moment)
            torch.testing.assert_close(got, reference.state[param]["exp_avg"], atol=1e-6, rtol=1e-3)
    if asked.get("cpu_offload") or (compiles and asked.get("broadcast_from_rank0")):
        return  # what rank 0 alone has is loaded by no helper, nor what it sends by a compiled model's: under torch's too
    state, optim_state = copy.deepcopy(state), copy.deepcopy(optim_state)  # not what the first one goes on to write to
    other = checkpointed(1)
    run = run_of(other)
    others = torch.optim.AdamW(other.parameters(), lr=1.0)
    helpers.set_state_dict(run, others, model_state_dict=state, optim_state_dict=optim_state, options=options)
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(ours.to_local(), theirs.to_local())
        assert torch.equal(optim.state[ours]["exp_avg"].to_local(), others.state[theirs]["exp_avg"].to_local())
    assert others.param_groups[0]["lr"] == 1e-2
    assert all(isinstance(value, DTensor) == (key != "beside") for key, value in _around(other).items())


def _around(model: Any) -> dict[str, Any]:
    """What helpers see of a wrapper in a module of the user's."""
    around = nn.ModuleDict({"model": model})
    around.register_buffer("beside", torch.ones(2))
    state: dict[str, Any] = helpers.get_model_state_dict(around)
    assert sorted(state) == sorted(["beside", *(f"model.{name}" for name in plain().state_dict())])
    return state


@pytest.mark.parametrize(
    ("asked", "compiles"), [*((asked, False) for asked in HELPED), pytest.param("default", True, marks=pytest.mark.more)]
)
def test_helpers_of_checkpoints_know_our_class_by_its_import_alone(
    two_ranks: Ranks, asked: str, compiles: bool
) -> None:
    """torch's helpers know its own wrapper by class; ours, without ``adopt()``, by what it says of itself."""
    two_ranks.run(check_helped, asked, compiles)


@on_four_ranks
def test_a_mesh_without_names_is_replicas_of_shards() -> None:
    unsharded, mesh = plain(), init_device_mesh("cpu", (2, 2))
    model = made(OURS, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with OURS.state_dict_type(model, SHARDED):
        saved = model.state_dict()["head.weight"]
    assert saved.device_mesh == mesh  # the user's own, with which its other DTensors can be computed
    assert torch.equal((saved - distribute_tensor(full(saved), mesh, [Replicate(), Shard(0)])).full_tensor().unique(), torch.zeros(1))
    backward_on_both(model, unsharded, 0)
    assert_same_grads(model, unsharded)


@on_two_ranks
def test_what_was_saved_does_not_change_when_training_goes_on() -> None:
    model = made(OURS)
    optim = trained(model)
    optim.state["seen"] = {"tokens": 40}
    for kind in (FULL, SHARDED):
        with OURS.state_dict_type(model, kind):
            state, of_optim = model.state_dict(), OURS.optim_state_dict(model, optim)
            before = copy.deepcopy({name: full(value) for name, value in state.items()})
            trained(model)
            for group in optim.param_groups:
                for param in group["params"]:
                    optim.state[param]["step"].add_(7)
                    optim.state[param]["exp_avg"].to_local().add_(7)
            for name, value in state.items():
                assert torch.equal(full(value), before[name]), (kind, name)
            steps = {value["step"].item() for key, value in of_optim["state"].items() if key != "seen"}
            assert len(steps) == 1 and steps.pop() < optim.state[model.head.weight]["step"] - 6
            # What the optimizer keeps of no parameter is saved, and loaded.
            assert of_optim["state"]["seen"] == {"tokens": 40}
            loadable = OURS.optim_state_dict_to_load(model, optim, of_optim)
            assert loadable["state"]["seen"] == {"tokens": 40}
            del of_optim["param_groups"]
            assert "param_groups" not in OURS.optim_state_dict_to_load(model, optim, of_optim)


@on_two_ranks
def test_an_optimizers_state_keeps_its_dtype() -> None:
    model = OURS(nn.Linear(6, 5).to(torch.bfloat16))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exact = torch.randn(5, 6)
    given = {"state": {"weight": {"master": exact}}, "param_groups": [{"params": ["weight", "bias"], "lr": 0.1}]}
    with OURS.state_dict_type(model, FULL):
        loadable = OURS.optim_state_dict_to_load(model, optim, given)
    (state,) = loadable["state"].values()
    assert torch.equal(state["master"].full_tensor(), exact), "not rounded to the parameter's dtype"


class Versioned(nn.Linear):
    """A module that reads old state dicts in another way."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.version_loaded = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@on_two_ranks
def test_modules_see_the_version_that_they_were_saved_with() -> None:
    model = OURS(nn.Sequential(Versioned(4, 4), nn.ReLU()))
    model.load_state_dict(model.state_dict())
    assert model.module[0].version_loaded == 2
    unsharded = nn.Sequential(Versioned(4, 4), nn.ReLU())
    unsharded.load_state_dict(model.state_dict())
    assert unsharded[0].version_loaded == 2


@pytest.mark.parametrize("kind", [LOCAL, pytest.param(SHARDED, marks=pytest.mark.more)])
@on_two_ranks
def test_a_checkpoint_of_shards_is_loaded(kind: StateDictType, tmp_path: Path) -> None:
    """By ``torch.distributed.checkpoint``, SHARDED by torch's FSDP1 too; LOCAL also from a file for each rank."""
    model = made(OURS, 0)
    optim = optimizer(model)
    train_steps(model, optim, range(2))
    OURS.set_state_dict_type(model, kind)
    dcp.save({"model": model.state_dict(), "optim": OURS.optim_state_dict(model, optim)}, checkpoint_id=str(tmp_path))
    if kind is LOCAL:
        of_rank = tmp_path / f"{dist.get_rank()}.pt"
        torch.save(model.state_dict(), of_rank)
        other = made(OURS, 2)
        with OURS.state_dict_type(other, kind):
            other.load_state_dict(torch.load(of_rank, weights_only=True))
        same(dict(other.named_parameters()), dict(model.named_parameters()))

    expected = train_steps(model, optim, range(2, 4))
    for fsdp, cls in ((OURS, OURS), (under_theirs, THEIRS)) if kind is SHARDED else ((OURS, OURS),):
        other = made(fsdp, 1, **({"device_mesh": init_device_mesh("cpu", (2,))} if kind is SHARDED else {}))
        optim = optimizer(other)
        train_steps(other, optim, range(1))  # so that it has a state to load into
        with silenced(), cls.state_dict_type(other, kind):
            state = {"model": other.state_dict(), "optim": cls.optim_state_dict(other, optim)}
            dcp.load(state, checkpoint_id=str(tmp_path))
            other.load_state_dict(state["model"])
            optim.load_state_dict(cls.optim_state_dict_to_load(other, optim, state["optim"]))
        losses = train_steps(other, optim, range(2, 4))
        torch.testing.assert_close(losses, expected, atol=1e-6, rtol=1e-4)
        assert losses == expected or kind is SHARDED, "bit by bit"
