"""FSDP1's methods on our core: full parameters, accumulation, clipping, communication hooks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compile
from fsdp_compile.core.unit import unit_of
from fsdp_compile.fsdp1.wrap import CustomPolicy, ModuleWrapPolicy
from tests.comparing import assert_same_grads, batches, full, loss_of, mine, reference_backward
from tests.compiling import compiled, no_kernels_built, num_graphs
from tests.fsdp1_scripts import OURS, THEIRS, assert_alike, is_block, silenced, train, train_unsharded, under_theirs
from tests.models import Block, BreakBlock, Stack
from tests.ranks import Ranks
from tests.recording import Wire

BLOCKS = ModuleWrapPolicy({Block})
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD)


def pair_of(**kwargs: Any) -> tuple[Stack, Any]:
    """(unsharded, ours) with equal parameters."""
    torch.manual_seed(0)
    unsharded = Stack()
    with silenced():
        return unsharded, OURS(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, **kwargs)


def shards_equal(model: Any, unsharded: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        torch.testing.assert_close(full(param.detach()), unsharded.get_parameter(name).detach(), rtol=0, atol=0)


# --- summon_full_params --------------------------------------------------------------------------------------------


def check_summoned(strategy: ShardingStrategy, backend: str | None) -> None:
    unsharded, model = pair_of(sharding_strategy=strategy)
    run = compiled(model, backend)
    loss_of(run(mine())).backward()
    reference_backward(unsharded, batches(0))
    with OURS.summon_full_params(model, with_grads=True):
        seen = dict(model.named_parameters())
        assert list(seen) == [name for name, _ in unsharded.named_parameters()]
        for name, param in unsharded.named_parameters():
            assert type(seen[name]) is nn.Parameter and seen[name].requires_grad == param.requires_grad
            torch.testing.assert_close(seen[name], param, rtol=0, atol=0)
            torch.testing.assert_close(seen[name].grad, param.grad, atol=1e-6, rtol=1e-4)
        assert model.layers[0].up.weight is seen["layers.0.up.weight"]
        with torch.no_grad():
            for one in (model, unsharded):
                one.layers[0].up.weight.mul_(2)
                one.layers[1].norm.weight.grad.fill_(3)
                one.head.weight.grad = None
    shards_equal(model, unsharded)
    assert model.head.weight.grad is None
    assert_same_grads(model, unsharded)
    with torch.no_grad(), OURS.summon_full_params(model, writeback=False):
        model.layers[0].up.weight.zero_()
    shards_equal(model, unsharded)
    model.zero_grad()
    unsharded.zero_grad()
    graphs = num_graphs()
    assert_alike(train(model), train_unsharded(unsharded))
    run(mine())
    assert num_graphs() == graphs, "nothing is compiled again"


COMPILED = pytest.param(STRATEGIES[0], "aot_eager", marks=pytest.mark.more)


@pytest.mark.parametrize(("strategy", "backend"), [*((strategy, None) for strategy in STRATEGIES), COMPILED])
def test_full_parameters_are_seen_and_written(two_ranks: Ranks, strategy: ShardingStrategy, backend: str | None) -> None:
    """With gradients, kept or not; training goes on, and compiled code is that from before."""
    two_ranks.run(check_summoned, strategy, backend)


def check_partly_summoned() -> set[str]:
    unsharded, model = pair_of()

    def whole() -> set[str]:
        """What is full, with the values of the unsharded model."""
        found = {name: param for name, param in model.named_parameters() if not isinstance(param, DTensor)}
        for name, param in found.items():
            torch.testing.assert_close(param.detach(), unsharded.get_parameter(name).detach(), rtol=0, atol=0)
        return set(found)

    def add(number: float, names: set[str]) -> None:
        with torch.no_grad():
            for name in names:
                model.get_parameter(name).add_(number)
                unsharded.get_parameter(name).add_(number)

    def same_shards() -> None:
        assert whole() == set()
        for name, param in model.named_parameters():
            torch.testing.assert_close(full(param).detach(), unsharded.get_parameter(name).detach(), rtol=0, atol=0)

    with OURS.summon_full_params(model, recurse=False):
        assert whole() == {"embed.weight", "norm.weight", "norm.bias", "head.weight"}
        add(1.0, whole())
    same_shards()
    with OURS.summon_full_params(model.layers[1]):
        assert whole() == {f"layers.1.{name}" for name, _ in Block().named_parameters()}
        add(2.0, whole())
    same_shards()
    with OURS.summon_full_params(nn.Sequential(model.module.layers), offload_to_cpu=True):
        assert len(whole()) == 12 and model.layers[0].up.weight.device.type == "cpu"
        add(3.0, whole())
    same_shards()
    with pytest.raises(KeyError), OURS.summon_full_params(model):
        add(4.0, whole())
        raise KeyError
    same_shards()  # what was written before the error is kept, as torch's keeps it
    with OURS.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        there = whole()
        with torch.no_grad():
            for name in there:
                model.get_parameter(name).zero_()
    same_shards()
    return there


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:offload_to_cpu=True and rank0_only=False")
def test_full_parameters_of_one_wrapper_or_on_one_rank(two_ranks: Ranks) -> None:
    """``recurse``, inner wrappers, modules that are none; ``rank0_only``; and an error inside."""
    first, second = two_ranks.run(check_partly_summoned)
    assert len(first) == 16 and second == set()


def check_apply(backend: str | None) -> None:
    unsharded, model = pair_of()

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
            assert not isinstance(module.weight, DTensor)

    for one in (unsharded, model):
        torch.manual_seed(3)
        assert one.apply(fill) is one
    shards_equal(model, unsharded)
    assert_alike(train(model, backend), train_unsharded(unsharded))


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.more)])
def test_apply_sees_full_parameters(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(check_apply, backend)


# --- the tree ------------------------------------------------------------------------------------------------------


def check_tree() -> None:
    for fsdp, cls in ((OURS, OURS), (under_theirs, THEIRS)):
        model = fsdp(Stack(), auto_wrap_policy=BLOCKS)
        both = nn.ModuleList([model, fsdp(nn.Linear(2, 2))])
        assert len(cls.fsdp_modules(model)) == 3
        assert cls.fsdp_modules(both, root_only=True) == list(both)
        model(mine())  # FSDP1 knows its root from then on
        assert [one.check_is_root() for one in cls.fsdp_modules(model)] == [True, False, False]
        assert isinstance(model.module, Stack) and model.layers[0].module is model.module.layers[0].module
    copied = copy.deepcopy(OURS(Stack(), auto_wrap_policy=BLOCKS))
    train(copied, steps=1)
    assert [one.check_is_root() for one in OURS.fsdp_modules(copied)] == [True, False, False]


def test_wrappers_know_their_tree(two_ranks: Ranks) -> None:
    """``check_is_root``, ``fsdp_modules``, ``module``; copies too."""
    two_ranks.run(check_tree)


def check_names() -> str:
    model = OURS(Stack(1, block=BreakBlock), auto_wrap_policy=ModuleWrapPolicy({BreakBlock}))
    breaks = fsdp_compile.explain_breaks(model, mine())
    assert "layers.0 (BreakBlock)" in str(breaks) and "wrapped" not in str(breaks), str(breaks)
    assert unit_of(model.module).name == "(root) (Stack)"
    model = OURS(Stack(1), auto_wrap_policy=BLOCKS)
    run = torch.compile(model)
    with no_kernels_built(), fsdp_compile.inspect(run) as report:
        run(mine()).sum().backward()
    return str(report)


@pytest.mark.more
def test_reports_and_messages_leave_wrappers_out_of_names(two_ranks: Ranks) -> None:
    """``inspect``, ``explain_breaks``, and what errors call a unit."""
    for report in two_ranks.run(check_names):
        assert "layers.0 (Block)" in report and "wrapped" not in report


# --- no_sync -------------------------------------------------------------------------------------------------------


def check_no_sync(strategy: ShardingStrategy, backend: str | None) -> dict[str, int]:
    unsharded, model = pair_of(sharding_strategy=strategy)
    theirs = None
    if strategy is not ShardingStrategy.HYBRID_SHARD:  # which has no fast path on the CPU
        theirs = under_theirs(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
    run = compiled(model, backend)
    for step in range(2):
        for one, call in ((model, run), (theirs, theirs)):
            if one is None:
                continue
            with one.no_sync():
                loss_of(call(mine(3 * step))).backward()
                with Wire() as held:
                    loss_of(call(mine(3 * step + 1))).backward()
            with Wire() as wire:
                loss_of(call(mine(3 * step + 2))).backward()
            if one is model:
                counted = {"held": held.reductions, "reduced": wire.reductions}
        for micro in range(3):
            reference_backward(unsharded, batches(3 * step + micro))
        assert_same_grads(model, unsharded)
        if theirs is not None:
            with THEIRS.summon_full_params(theirs, with_grads=True):
                for name, param in theirs.named_parameters():
                    torch.testing.assert_close(param.grad, unsharded.get_parameter(name).grad, atol=1e-6, rtol=1e-4)
            theirs.zero_grad()
        model.zero_grad()
        unsharded.zero_grad()
    return counted


@pytest.mark.parametrize(("strategy", "backend"), [*((strategy, None) for strategy in STRATEGIES), COMPILED])
def test_no_sync_adds_up_and_sends_nothing(two_ranks: Ranks, strategy: ShardingStrategy, backend: str | None) -> None:
    for counted in two_ranks.run(check_no_sync, strategy, backend):
        assert counted["held"] == 0 < counted["reduced"]


# --- clip_grad_norm_ -----------------------------------------------------------------------------------------------


def mixed(unsharded: nn.Module, fsdp: Any) -> Any:
    """One block replicated, the other sharded, the head ignored."""
    model = copy.deepcopy(unsharded)

    def policy(module: nn.Module) -> Any:
        return is_block(module) and (module is model.layers[1] or {"sharding_strategy": ShardingStrategy.NO_SHARD})

    with silenced():
        return fsdp(model, auto_wrap_policy=CustomPolicy(policy), ignored_modules=[model.norm])


def check_clip(norm_type: float, backend: str | None) -> None:
    torch.manual_seed(0)
    unsharded = Stack()
    for make in (
        lambda fsdp: fsdp(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS),
        lambda fsdp: mixed(unsharded, fsdp),
        lambda fsdp: fsdp(copy.deepcopy(unsharded), sharding_strategy=ShardingStrategy.NO_SHARD),
    ):
        with silenced():
            ours, theirs = make(OURS), make(under_theirs)
        for max_norm in (0.1, 100.0):
            norms = []
            for model, call in ((ours, compiled(ours, backend)), (theirs, theirs)):
                model.zero_grad()
                loss_of(call(batches(0)[0])).backward()  # the same on both ranks: what is ignored agrees, too
                norms.append(model.clip_grad_norm_(max_norm, norm_type))
            unsharded.zero_grad()
            loss_of(unsharded(batches(0)[0])).backward()
            expected = nn.utils.clip_grad_norm_(unsharded.parameters(), max_norm, norm_type)
            assert type(norms[0]) is Tensor
            torch.testing.assert_close(norms[0], expected)
            torch.testing.assert_close(norms[0], norms[1])
            assert_same_grads(ours, unsharded)


@pytest.mark.parametrize(
    ("norm_type", "backend"),
    [(2.0, None), (1, None), (float("inf"), None), pytest.param(2.0, "aot_eager", marks=pytest.mark.more)],
)
def test_gradients_are_clipped_as_one_vector(two_ranks: Ranks, norm_type: float, backend: str | None) -> None:
    """Sharded, replicated and ignored ones together; the norm is torch's FSDP1's and the unsharded model's."""
    two_ranks.run(check_clip, norm_type, backend)


def check_norm_dtype() -> None:
    for fsdp in (OURS, under_theirs):
        model = fsdp(nn.Linear(4, 4).bfloat16())
        with pytest.warns(UserWarning, match="gradient"):
            assert model.clip_grad_norm_(1.0) == 0
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        assert model.clip_grad_norm_(1.0).dtype == torch.bfloat16


def test_the_norms_dtype_is_that_of_the_gradients(two_ranks: Ranks) -> None:
    """And without gradients, it is zero, with a warning."""
    two_ranks.run(check_norm_dtype)


# --- communication hooks -------------------------------------------------------------------------------------------


class Counting(default_hooks.DefaultState):
    calls = 0


def mean_and_count(state: Counting, grad: Tensor, shard: Tensor | None = None) -> None:
    """The mean over ranks, by all-reduce, halved."""
    state.calls += 1
    dist.all_reduce(grad, group=state.process_group)
    grad.div_(2 * state.world_size)
    if shard is not None:
        shard.copy_(grad.view(state.world_size, -1)[dist.get_rank()])


def check_hook(strategy: ShardingStrategy, backend: str | None) -> None:
    torch.manual_seed(0)
    unsharded = Stack()
    seen = []
    for fsdp in (OURS, under_theirs):
        with silenced():
            model = fsdp(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
        state = Counting(model.process_group)
        model.register_comm_hook(state, mean_and_count)
        with silenced():  # compiled, it says that the unit runs eagerly
            seen.append(train(model, None if fsdp is under_theirs or backend is None else backend))
        assert state.calls >= 6
        with pytest.raises(AssertionError):
            model.register_comm_hook(state, mean_and_count)
    assert_alike(*seen)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_a_hook_reduces_in_the_place_of_ours(two_ranks: Ranks, strategy: ShardingStrategy) -> None:
    """``(state, gradients, shards)``, and ``(state, gradients)`` with NO_SHARD, as under torch's FSDP1."""
    two_ranks.run(check_hook, strategy, None)


def check_compiled_hook(strategy: ShardingStrategy) -> list[str]:
    torch.manual_seed(0)
    unsharded = Stack()
    seen = []
    for backend in (None, "aot_eager"):
        model = OURS(copy.deepcopy(unsharded), sharding_strategy=strategy)
        model.register_comm_hook(Counting(model.process_group), mean_and_count)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = torch.compile(model, backend=backend) if backend else model
            seen.append(train_by(model, run))
    assert_alike(*seen)
    return [str(one.message) for one in caught]


def train_by(model: Any, run: Any) -> Any:
    trained = train(model, steps=0)
    optim = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(2):
        loss = loss_of(run(mine(step)))
        loss.backward()
        trained.losses.append(loss.item())
        optim.step()
        optim.zero_grad()
    return trained


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy")
def test_a_compiled_model_with_a_hook_runs_eagerly_and_says_so(two_ranks: Ranks) -> None:
    for strategy, named in ((STRATEGIES[0], "set_custom_reduce_scatter"), (STRATEGIES[1], "register_comm_hook")):
        for texts in two_ranks.run(check_compiled_hook, strategy):
            assert any("runs eagerly inside compiled code" in text and named in text for text in texts), texts


def check_compressing_hook(name: str, backend: str | None) -> None:
    torch.manual_seed(0)
    unsharded = Stack()
    hook, dtype = {
        "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16),
        "fp16": (default_hooks.fp16_compress_hook, torch.float16),
        "none": (default_hooks.reduce_scatter_hook, None),
    }[name]
    model = OURS(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS)
    model.register_comm_hook(default_hooks.LowPrecisionState(model.process_group), hook)
    expected = OURS(
        copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, mixed_precision=MixedPrecision(reduce_dtype=dtype)
    )
    assert_alike(train(model, backend), train(expected), atol=1e-6)
    assert num_graphs() == (backend is not None)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("bf16", None), ("fp16", None), ("none", None), pytest.param("bf16", "aot_eager", marks=pytest.mark.more)],
)
def test_torchs_hooks_are_the_dtype_of_the_reduction(two_ranks: Ranks, name: str, backend: str | None) -> None:
    """So they are in the graph. (torch's own asks the CPU for streams that it has not.)"""
    two_ranks.run(check_compressing_hook, name, backend)


# --- mistakes ------------------------------------------------------------------------------------------------------


def check_moved() -> None:
    _, model = pair_of()
    with OURS.summon_full_params(model), pytest.raises(RuntimeError, match="inside summon_full_params"):
        model.double()
    with pytest.raises(RuntimeError, match=r"layers\.0 \(Block\): up\.weight has shape"), OURS.summon_full_params(model):
        model.layers[0].up.weight = nn.Parameter(torch.ones(2))
    model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float64}


def test_parameters_keep_their_shape_and_place_while_they_are_full(two_ranks: Ranks) -> None:
    two_ranks.run(check_moved)


# --- with tensor parallelism ---------------------------------------------------------------------------------------


def check_tensor_parallel(backend: str | None) -> None:
    torch.manual_seed(0)
    unsharded = Stack(1)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(unsharded)
    model.layers[0].up = nn.Linear(16, 34)
    model.layers[0].down = nn.Linear(34, 16)
    unsharded = copy.deepcopy(model)
    for layer in model.layers:
        parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = OURS(model, auto_wrap_policy=BLOCKS, device_mesh=both["dp"])
    run = compiled(model, backend)
    data = batches(0)[:2]
    loss_of(run(data[both.get_local_rank("dp")])).backward()
    reference_backward(unsharded, data)
    assert_same_grads(model, unsharded)
    norm = model.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(unsharded.parameters(), 0.1))
    assert_same_grads(model, unsharded)
    with OURS.summon_full_params(model, with_grads=True), torch.no_grad():
        weight = model.layers[0].up.weight
        assert weight.device_mesh == both["tp"]
        torch.testing.assert_close(weight.full_tensor(), unsharded.layers[0].up.weight)
        torch.testing.assert_close(weight.grad.full_tensor(), unsharded.layers[0].up.weight.grad)
        weight.mul_(2)
    torch.testing.assert_close(full(model.layers[0].up.weight.detach()), 2 * unsharded.layers[0].up.weight)


@pytest.mark.more
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_slice_of_a_mesh_leaves_tensor_parallelism_alone(four_ranks: Ranks, backend: str | None) -> None:
    """Gradients, their norm over both dimensions, and full parameters that are DTensors on the other one."""
    four_ranks.run(check_tensor_parallel, backend)
