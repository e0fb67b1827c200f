"""What readers of FSDP1's surface found wrong in it: checkpointing after wrapping, subgroups, snapshots, meshes."""

from __future__ import annotations

import copy
import os
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as helpers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile.core.spec import spec_of
from fsdp_compile.fsdp1 import ShardedGradScaler
from fsdp_compile.fsdp1.wrap import ModuleWrapPolicy
from fsdp_compile.lookout.names import Namer
from fsdp_compile.passes.wire.ledger import Issued
from tests.comparing import assert_same_grads, batches, full, loss_of, mine, reference_backward
from tests.fsdp1_scripts import OURS, silenced, under_theirs
from tests.models import Block, Stack
from tests.ranks import Ranks

BLOCKS = ModuleWrapPolicy({Block})
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def made(seed: int = 0, checkpointed: bool = False, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    with silenced():
        model = OURS(Stack(2, tied=True), auto_wrap_policy=BLOCKS, **kwargs)
        if checkpointed:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def plain(seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(2, tied=True)


def trained(model: Any, steps: int = 1) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model(mine(step))).backward()
        optim.step()
        optim.zero_grad()
    return optim


def check_checkpointed() -> None:
    unsharded, model = plain(), made(checkpointed=True)
    assert "_checkpoint_wrapped_module" in dict(model.named_modules())["_fsdp_wrapped_module.layers.0"]._modules[
        "_fsdp_wrapped_module"
    ]._modules
    state = model.state_dict()
    assert sorted(state) == sorted(unsharded.state_dict())
    assert not any(isinstance(value, DTensor) for value in state.values())
    for name, value in unsharded.state_dict().items():
        assert torch.equal(state[name], value), name
    made(1, checkpointed=True).load_state_dict(state)
    made(1).load_state_dict(state)
    again = made(2, checkpointed=True)
    again.load_state_dict(unsharded.state_dict())
    with OURS.summon_full_params(again):
        for (name, ours), theirs in zip(again.named_parameters(), unsharded.parameters()):
            assert not isinstance(ours, DTensor) and torch.equal(ours, theirs), name
    optim = trained(model)
    reference_backward(unsharded, batches(0))
    torch.optim.AdamW(unsharded.parameters(), lr=1e-2).step()
    for ours, theirs in zip(model.parameters(), unsharded.parameters()):
        torch.testing.assert_close(full(ours), theirs, atol=1e-5, rtol=1e-3)
    # Names are a plain model's, so checkpointing may be switched on and off between runs.
    saved = OURS.optim_state_dict(model, optim)
    assert sorted(saved["state"]) == sorted(name for name, _ in unsharded.named_parameters())
    other = made(3)
    others = torch.optim.AdamW(other.parameters(), lr=1.0)
    others.load_state_dict(OURS.optim_state_dict_to_load(other, others, saved))
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(optim.state[ours]["exp_avg"].to_local(), others.state[theirs]["exp_avg"].to_local())


def test_checkpointing_applied_after_wrapping_changes_no_name_and_no_value(two_ranks: Ranks) -> None:
    two_ranks.run(check_checkpointed)


def check_subgroup() -> tuple[int, int, bool]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    model = made(process_group=group)
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
    return len(state), len(optim_state.get("state", {})), whole


def test_the_first_rank_of_a_subgroup_gets_what_rank_0_only_keeps_from_others(four_ranks: Ranks) -> None:
    num, num_params = len(plain().state_dict()), len(list(plain().parameters()))
    assert four_ranks.run(check_subgroup) == [(num, num_params, True), (0, 0, False)] * 2


HELPED: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "full, on rank 0": {"full_state_dict": True, "cpu_offload": True},
    "full, sent from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flat": {"flatten_optimizer_state_dict": True},
}


def check_helped(asked: dict[str, Any], compiles: bool) -> None:
    options = helpers.StateDictOptions(**asked)

    def run_of(model: Any) -> Any:
        return torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model

    unsharded, model = plain(), made(checkpointed=True)
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
    other = made(1, checkpointed=True)
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


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.more)])
@pytest.mark.parametrize("asked", HELPED)
def test_helpers_of_checkpoints_know_our_class_by_its_import_alone(
    two_ranks: Ranks, asked: str, compiles: bool
) -> None:
    """torch's helpers know its own wrapper by class; ours, without ``adopt()``, by what it says of itself."""
    two_ranks.run(check_helped, HELPED[asked], compiles)


def check_unnamed_mesh() -> None:
    unsharded, mesh = plain(), init_device_mesh("cpu", (2, 2))
    model = made(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with OURS.state_dict_type(model, SHARDED):
        saved = model.state_dict()["head.weight"]
    assert saved.device_mesh == mesh  # the user's own, with which its other DTensors can be computed
    assert torch.equal((saved - distribute_tensor(full(saved), mesh, [Replicate(), Shard(0)])).full_tensor().unique(), torch.zeros(1))
    loss_of(model(mine())).backward()
    reference_backward(unsharded, batches(0))
    for ours, theirs in zip(model.parameters(), unsharded.parameters()):
        torch.testing.assert_close(full(ours.grad), theirs.grad, atol=1e-6, rtol=1e-4)


def test_a_mesh_without_names_is_replicas_of_shards(four_ranks: Ranks) -> None:
    four_ranks.run(check_unnamed_mesh)


def check_snapshots() -> None:
    model = made()
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


def test_what_was_saved_does_not_change_when_training_goes_on(two_ranks: Ranks) -> None:
    two_ranks.run(check_snapshots)


def check_moments_of_another_dtype() -> None:
    torch.manual_seed(0)
    model = OURS(nn.Linear(6, 5).to(torch.bfloat16))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exact = torch.randn(5, 6)
    given = {"state": {"weight": {"master": exact}}, "param_groups": [{"params": ["weight", "bias"], "lr": 0.1}]}
    with OURS.state_dict_type(model, FULL):
        loadable = OURS.optim_state_dict_to_load(model, optim, given)
    (state,) = loadable["state"].values()
    assert torch.equal(state["master"].full_tensor(), exact), "not rounded to the parameter's dtype"


def test_an_optimizers_state_keeps_its_dtype(two_ranks: Ranks) -> None:
    two_ranks.run(check_moments_of_another_dtype)


class Versioned(nn.Linear):
    """A module that reads old state dicts in another way."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.version_loaded = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def check_versions() -> None:
    model = OURS(nn.Sequential(Versioned(4, 4), nn.ReLU()))
    model.load_state_dict(model.state_dict())
    assert model.module[0].version_loaded == 2
    unsharded = nn.Sequential(Versioned(4, 4), nn.ReLU())
    unsharded.load_state_dict(model.state_dict())
    assert unsharded[0].version_loaded == 2


def test_modules_see_the_version_that_they_were_saved_with(two_ranks: Ranks) -> None:
    two_ranks.run(check_versions)


def check_frozen_inside() -> None:
    model = made()
    with OURS.summon_full_params(model):
        for name, param in model.named_parameters():
            param.requires_grad_("head" in name or "embed" in name)
    assert [name for name, param in model.named_parameters() if param.requires_grad] == ["embed.weight"]
    with pytest.raises(ZeroDivisionError), OURS.summon_full_params(model):
        model.embed.weight.data.fill_(2.0)
        raise ZeroDivisionError
    assert (full(model.embed.weight) == 2).all(), "FSDP1 writes back what an error leaves"


def test_what_is_frozen_inside_stays_frozen(two_ranks: Ranks) -> None:
    two_ranks.run(check_frozen_inside)


def check_ties_on_meta() -> None:
    with torch.device("meta"):
        model = Stack(2, tied=True)
    policy = ModuleWrapPolicy({Block, nn.Embedding})
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight"):
        OURS(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    assert model.embed.weight is model.head.weight and model.embed.weight.is_meta


def test_ties_that_wrappers_would_cut_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(check_ties_on_meta)


def check_own_names() -> None:
    model = OURS(Stack(1))
    model.module.unit, model.module.device_mesh, model.module.ignored = "kelvin", "coarse", "none"
    assert (model.unit, model.device_mesh, model.ignored) == ("kelvin", "coarse", "none")


def test_the_wrapper_hides_no_attribute_of_the_users(two_ranks: Ranks) -> None:
    two_ranks.run(check_own_names)


def check_scaler() -> None:
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


def test_the_scaler_keeps_dtypes_and_takes_sparse_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(check_scaler)


def check_optimizer_from_before(backend: str | None) -> None:
    """Beside torch's, whose parameters stay the objects that they were."""
    losses: list[list[float]] = []
    for wrap in (under_theirs, OURS):
        torch.manual_seed(0)
        module = Stack(2, tied=True)
        optim = torch.optim.AdamW([{"params": [one]} for one in module.parameters()], lr=1e-2)
        with silenced():
            model = wrap(module, auto_wrap_policy=BLOCKS)
        run = torch.compile(model, backend=backend) if backend and wrap is OURS else model
        losses.append([])
        for step in range(3):
            loss = loss_of(run(mine(step)))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses[-1].append(loss.item())
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-4)
    # One that goes on by state of whole parameters cannot train shards, and says so.
    module = Stack(2)
    optim = torch.optim.AdamW(module.parameters())
    loss_of(module(mine(0))).backward()
    optim.step()
    with pytest.warns(UserWarning, match="had taken steps already"):
        OURS(module)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_an_optimizer_that_was_built_before_wrapping_trains_the_model(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(check_optimizer_from_before, backend)


def check_forward_inside() -> None:
    """As transformers' Seq2SeqTrainer generates; beside the forward outside."""
    model = made().eval()
    with torch.no_grad():
        expected = model(mine(0))
        for recurse in (True, False):
            for run in (model, model.module):
                with OURS.summon_full_params(model, recurse=recurse, writeback=False):
                    torch.testing.assert_close(run(mine(0)), expected)
        torch.testing.assert_close(model(mine(0)), expected)


def test_a_model_is_called_while_its_parameters_are_full(two_ranks: Ranks) -> None:
    two_ranks.run(check_forward_inside)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def check_wrapped_before(around: Any) -> None:
    unsharded = plain()
    inner = plain()
    inner.layers[0] = OURS(around(inner.layers[0]))
    model = OURS(around(inner))
    assert all(one._unit is not None for one in OURS.fsdp_modules(model))
    with OURS.summon_full_params(model):
        found = [param.detach().clone() for param in model.parameters()]
    torch.testing.assert_close(found, [param.detach() for param in unsharded.parameters()], atol=0, rtol=0)

    def clamp(module: nn.Module) -> None:
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                assert not isinstance(param, DTensor)
                param.clamp_(-0.1, 0.1)

    for one in (model, unsharded):
        one.apply(clamp)
    calls: list[int] = []

    def reduce(state: Any, grad: Tensor, shard: Tensor) -> None:
        calls.append(grad.numel())
        dist.reduce_scatter_tensor(shard, grad / dist.get_world_size())

    model.register_comm_hook(None, reduce)
    loss_of(model(mine())).backward()
    assert sum(calls) >= sum(param.numel() for param in unsharded.parameters()), "padded"
    reference_backward(unsharded, batches(0))
    for ours, theirs in zip(model.parameters(), unsharded.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


@pytest.mark.filterwarnings("ignore:.root. .Stack. runs eagerly inside compiled code")
@pytest.mark.parametrize("around", [checkpoint_wrapper, pytest.param(_compiled, marks=pytest.mark.more)])
def test_what_was_checkpointed_or_compiled_before_it_was_wrapped_is_known(two_ranks: Ranks, around: Any) -> None:
    two_ranks.run(check_wrapped_before, around)


# --- between forward and backward, wrapped again, in evaluation ----------------------------------------------------


def check_summoned_before_backward(strategy: ShardingStrategy, backend: str | None) -> None:
    unsharded, model = plain(), made(sharding_strategy=strategy)
    run = model if backend is None else torch.compile(model, backend=backend)
    losses = []
    for writeback in (True, False):
        losses.append(loss_of(run(mine())))
        with OURS.summon_full_params(model, writeback=writeback):
            assert model.head.weight.shape == unsharded.head.weight.shape
    sum(losses).backward()
    reference_backward(unsharded, batches(0))
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [(ShardingStrategy.NO_SHARD, None), (ShardingStrategy.FULL_SHARD, "inductor")],
)
def test_full_parameters_are_seen_before_backward(
    two_ranks: Ranks, strategy: ShardingStrategy, backend: str | None
) -> None:
    """What was not written to is not written back: backward finds what forward saved."""
    two_ranks.run(check_summoned_before_backward, strategy, backend)


def check_wrapped_again() -> None:
    unsharded = plain()
    with silenced():
        inner = plain()
        first = OURS(inner, auto_wrap_policy=BLOCKS)
        loss_of(first(mine())).backward()
        again = OURS(inner, device_id="cpu")
        loss_of(again(mine(1))).backward()
    assert list(again.state_dict()) == list(first.state_dict()) == list(unsharded.state_dict())
    for step in (0, 1):
        reference_backward(unsharded, batches(step))
    assert_same_grads(again, unsharded)
    of_blocks = {id(param) for param in inner.layers.parameters()}
    assert [id(param) for param in again.params] == [id(one) for one in inner.parameters() if id(one) not in of_blocks]
    with pytest.raises(AssertionError, match="sharded or replicated already"), silenced():
        OURS(inner, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def test_a_module_is_wrapped_again(two_ranks: Ranks) -> None:
    two_ranks.run(check_wrapped_again)


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("third", torch.full((4,), 1 / 3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.seen = [x.dtype, y.dtype, self.third.dtype]
        return y + self.third.to(y.dtype)


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def check_evaluation(cls: Any, asked: str) -> list[Any]:
    seen: list[Any] = []
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": asked}), silenced():
        model = cls(nn.Sequential(cls(WithBuffer(), mixed_precision=HALF), nn.Linear(4, 4)), mixed_precision=HALF)
    x = torch.linspace(0, 1, 8).reshape(2, 4)
    for trains in (True, False, True):
        out = model.train(trains)(x)
        seen.append((model.module[0].module.seen, out.dtype))
        out.float().sum().backward()
        model.zero_grad()
    if cls is OURS:
        run = torch.compile(model.eval(), backend="aot_eager")
        torch.testing.assert_close(run(x), model(x))
        assert model(x).dtype == (torch.float32 if asked == "1" else torch.bfloat16)
    return seen


def check_as_theirs(asked: str) -> None:
    torch.manual_seed(0)
    theirs = check_evaluation(under_theirs, asked)
    assert check_evaluation(OURS, asked) == theirs
    assert (theirs[1] != theirs[0]) == (asked == "1")


@pytest.mark.parametrize("asked", ["0", "1"])
def test_evaluation_in_full_precision_is_asked_for_by_the_environment(two_ranks: Ranks, asked: str) -> None:
    two_ranks.run(check_as_theirs, asked)


def check_ignoring_itself() -> None:
    inner = WithBuffer()
    with silenced():
        wrapped = OURS(inner, mixed_precision=HALF, ignored_modules=[inner])
        OURS(nn.Sequential(wrapped, nn.Linear(4, 4)), mixed_precision=HALF)
    assert torch.equal(inner.third, torch.full((4,), 1 / 3)) and inner.third.dtype == torch.float32


def test_a_wrapper_that_ignores_its_module_casts_no_buffer(two_ranks: Ranks) -> None:
    two_ranks.run(check_ignoring_itself)


def places_of_params() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """This rank ignores as many modules as its number, and one more."""
    rank = dist.get_rank()
    inner = nn.Sequential(*(nn.Linear(4, 4) for _ in range(rank + 3)))
    with silenced():
        model = OURS(nn.Sequential(inner), ignored_modules=list(inner)[1:-1])
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    unit = model._unit
    specs = [spec_of(unit, param) for param in unit.params]
    issued = Issued("all_gather", specs, unit.mesh.group, 0, None, weakref.ref(unit))
    (link,) = Namer().of_launch(issued).links
    return link.names, link.whose


def test_ranks_that_ignore_other_modules_agree_about_the_rest(two_ranks: Ranks) -> None:
    (names, places), (other_names, other_places) = two_ranks.run(places_of_params)
    assert names != other_names and places == other_places and len(places) == 4
