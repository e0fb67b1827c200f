"""FSDP1's methods on our core: full parameters, accumulation, clipping, communication hooks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compile
from fsdp_compile.core.unit import unit_of
from fsdp_compile.fsdp1.wrap import ModuleWrapPolicy
from tests.comparing import assert_same_grads, batches, full, loss_of, mine, reference_backward
from tests.compiling import compiled, no_kernels_built, num_graphs
from tests.fsdp1_scripts import (
    BLOCKS,
    OURS,
    THEIRS,
    assert_alike,
    made,
    mixed,
    plain,
    silenced,
    train,
    train_unsharded,
    under_theirs,
)
from tests.models import Block, BreakBlock, Stack
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.recording import Wire

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


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [*((strategy, None) for strategy in STRATEGIES), pytest.param(STRATEGIES[0], "aot_eager", marks=pytest.mark.slow)],
)
@on_two_ranks
def test_full_parameters_are_seen_and_written(strategy: ShardingStrategy, backend: str | None) -> None:
    """With gradients, kept or not; training goes on, and compiled code is that from before."""
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


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:offload_to_cpu=True and rank0_only=False")
@on_two_ranks
def test_full_parameters_of_one_wrapper_or_on_one_rank() -> None:
    """``recurse``, inner wrappers, modules that are none; ``rank0_only``; and an error inside."""
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

    with OURS.summon_full_params(model, recurse=False):
        assert whole() == {"embed.weight", "norm.weight", "norm.bias", "head.weight"}
        add(1.0, whole())
    shards_equal(model, unsharded)
    with OURS.summon_full_params(model.layers[1]):
        assert whole() == {f"layers.1.{name}" for name, _ in Block().named_parameters()}
        add(2.0, whole())
    shards_equal(model, unsharded)
    with OURS.summon_full_params(nn.Sequential(model.module.layers), offload_to_cpu=True):
        assert len(whole()) == 12 and model.layers[0].up.weight.device.type == "cpu"
        add(3.0, whole())
    shards_equal(model, unsharded)
    with pytest.raises(KeyError), OURS.summon_full_params(model):
        add(4.0, whole())
        raise KeyError
    shards_equal(model, unsharded)  # what was written before the error is kept, as torch's keeps it
    with OURS.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        there = whole()
        assert len(there) == (16 if dist.get_rank() == 0 else 0)
        with torch.no_grad():
            for name in there:
                model.get_parameter(name).zero_()
    shards_equal(model, unsharded)


@on_two_ranks
def test_apply_sees_full_parameters() -> None:
    unsharded, model = pair_of()

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
            assert not isinstance(module.weight, DTensor)

    for one in (unsharded, model):
        torch.manual_seed(3)
        assert one.apply(fill) is one
    shards_equal(model, unsharded)
    assert_alike(train(model), train_unsharded(unsharded))


@on_two_ranks
def test_what_is_frozen_inside_stays_frozen() -> None:
    model = made(OURS)
    with OURS.summon_full_params(model):
        for name, param in model.named_parameters():
            param.requires_grad_("head" in name or "embed" in name)
    assert [name for name, param in model.named_parameters() if param.requires_grad] == ["embed.weight"]
    with pytest.raises(ZeroDivisionError), OURS.summon_full_params(model):
        model.embed.weight.data.fill_(2.0)  # which no version counts
        raise ZeroDivisionError
    assert (full(model.embed.weight) == 2).all(), "FSDP1 writes back what an error leaves"


@on_two_ranks
def test_a_model_is_called_while_its_parameters_are_full() -> None:
    """As transformers' Seq2SeqTrainer generates; beside the forward outside."""
    model = made(OURS).eval()
    with torch.no_grad():
        expected = model(mine(0))
        for recurse in (True, False):
            for run in (model, model.module):
                with OURS.summon_full_params(model, recurse=recurse, writeback=False):
                    torch.testing.assert_close(run(mine(0)), expected)
        torch.testing.assert_close(model(mine(0)), expected)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


@pytest.mark.filterwarnings("ignore:.root. .Stack. runs eagerly inside compiled code")
@pytest.mark.parametrize("around", [checkpoint_wrapper, pytest.param(_compiled, marks=pytest.mark.slow)])
@on_two_ranks
def test_what_was_checkpointed_or_compiled_before_it_was_wrapped_is_known(around: Any) -> None:
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


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [(ShardingStrategy.NO_SHARD, None), (ShardingStrategy.FULL_SHARD, "aot_eager")],
)
@on_two_ranks
def test_full_parameters_are_seen_before_backward(strategy: ShardingStrategy, backend: str | None) -> None:
    """What was not written to is not written back: backward finds what forward saved."""
    unsharded, model = plain(), made(OURS, sharding_strategy=strategy)
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


@on_two_ranks
def test_wrappers_know_their_tree() -> None:
    """``check_is_root``, ``fsdp_modules``, ``module``; copies too."""
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


@pytest.mark.slow
@on_two_ranks
def test_reports_and_messages_leave_wrappers_out_of_names() -> None:
    """``inspect``, ``explain_breaks``, and what errors call a unit."""
    model = OURS(Stack(1, block=BreakBlock), auto_wrap_policy=ModuleWrapPolicy({BreakBlock}))
    breaks = fsdp_compile.explain_breaks(model, mine())
    assert "layers.0 (BreakBlock)" in str(breaks) and "wrapped" not in str(breaks), str(breaks)
    assert unit_of(model.module).name == "(root) (Stack)"
    model = OURS(Stack(1), auto_wrap_policy=BLOCKS)
    run = torch.compile(model)
    with no_kernels_built(), fsdp_compile.inspect(run) as report:
        run(mine()).sum().backward()
    assert "layers.0 (Block)" in str(report) and "wrapped" not in str(report)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@on_two_ranks
def test_no_sync_adds_up_and_sends_nothing(strategy: ShardingStrategy) -> None:
    unsharded, model = pair_of(sharding_strategy=strategy)
    theirs = under_theirs(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
    for step in range(2):
        for one in (theirs, model):
            with one.no_sync():
                loss_of(one(mine(3 * step))).backward()
                with Wire() as held:
                    loss_of(one(mine(3 * step + 1))).backward()
            with Wire() as wire:
                loss_of(one(mine(3 * step + 2))).backward()
        assert held.reductions == 0 < wire.reductions
        for micro in range(3):
            reference_backward(unsharded, batches(3 * step + micro))
        assert_same_grads(model, unsharded)
        with THEIRS.summon_full_params(theirs, with_grads=True):
            for name, param in theirs.named_parameters():
                torch.testing.assert_close(param.grad, unsharded.get_parameter(name).grad, atol=1e-6, rtol=1e-4)
        for one in (theirs, model, unsharded):
            one.zero_grad()


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_two_ranks
def test_gradients_are_clipped_as_one_vector(norm_type: float) -> None:
    """Sharded, replicated and ignored ones together; the norm is torch's FSDP1's and the unsharded model's."""
    unsharded = Stack()
    for make in (
        lambda fsdp: fsdp(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS),
        lambda fsdp: mixed(copy.deepcopy(unsharded), fsdp),
        lambda fsdp: fsdp(copy.deepcopy(unsharded), sharding_strategy=ShardingStrategy.NO_SHARD),
    ):
        with silenced():
            ours, theirs = make(OURS), make(under_theirs)
        for max_norm in (0.1, 100.0):
            norms = []
            for model in (ours, theirs):
                model.zero_grad()
                loss_of(model(batches(0)[0])).backward()  # the same on both ranks: what is ignored agrees, too
                norms.append(model.clip_grad_norm_(max_norm, norm_type))
            unsharded.zero_grad()
            loss_of(unsharded(batches(0)[0])).backward()
            expected = nn.utils.clip_grad_norm_(unsharded.parameters(), max_norm, norm_type)
            assert type(norms[0]) is Tensor
            torch.testing.assert_close(norms[0], expected)
            torch.testing.assert_close(norms[0], norms[1])
            assert_same_grads(ours, unsharded)


@on_two_ranks
def test_the_norms_dtype_is_that_of_the_gradients() -> None:
    """And without gradients, it is zero, with a warning."""
    for fsdp in (OURS, under_theirs):
        model = fsdp(nn.Linear(4, 4).bfloat16())
        with pytest.warns(UserWarning, match="gradient"):
            assert model.clip_grad_norm_(1.0) == 0
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        assert model.clip_grad_norm_(1.0).dtype == torch.bfloat16


class Counting(default_hooks.DefaultState):
    calls = 0


def mean_and_count(state: Counting, grad: Tensor, shard: Tensor | None = None) -> None:
    """The mean over ranks, by all-reduce, halved."""
    state.calls += 1
    dist.all_reduce(grad, group=state.process_group)
    grad.div_(2 * state.world_size)
    if shard is not None:
        shard.copy_(grad.view(state.world_size, -1)[dist.get_rank()])


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy")
@pytest.mark.parametrize(
    ("strategy", "named"), [(STRATEGIES[0], "set_custom_reduce_scatter"), (STRATEGIES[1], "register_comm_hook")]
)
@on_two_ranks
def test_a_hook_reduces_in_the_place_of_ours(strategy: ShardingStrategy, named: str) -> None:
    """``(state, gradients, shards)``, and ``(state, gradients)`` with NO_SHARD, as under torch's FSDP1.

    A compiled model runs eagerly then, and says so.
    """
    unsharded = Stack()
    seen = []
    for fsdp, policy, backend in ((under_theirs, BLOCKS, None), (OURS, BLOCKS, None), (OURS, None, "aot_eager")):
        with silenced():
            model = fsdp(copy.deepcopy(unsharded), auto_wrap_policy=policy, sharding_strategy=strategy)
        state = Counting(model.process_group)
        model.register_comm_hook(state, mean_and_count)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.append(train(model, backend, fullgraph=False))
        assert state.calls >= (6 if policy else 2)
    for ours in seen[1:]:
        assert_alike(ours, seen[0])
    texts = [str(one.message) for one in caught]
    assert any("runs eagerly inside compiled code" in text and named in text for text in texts), texts


@pytest.mark.parametrize(
    ("name", "backend"),
    [("bf16", None), ("fp16", None), ("none", None), pytest.param("bf16", "aot_eager", marks=pytest.mark.slow)],
)
@on_two_ranks
def test_torchs_hooks_are_the_dtype_of_the_reduction(name: str, backend: str | None) -> None:
    """So they are in the graph. (torch's own asks the CPU for streams that it has not.)"""
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


@on_two_ranks
def test_parameters_keep_their_shape_and_place_while_they_are_full() -> None:
    _, model = pair_of()
    with OURS.summon_full_params(model), pytest.raises(RuntimeError, match="inside summon_full_params"):
        model.double()
    with pytest.raises(RuntimeError, match=r"layers\.0 \(Block\): up\.weight has shape"), OURS.summon_full_params(model):
        model.layers[0].up.weight = nn.Parameter(torch.ones(2))
    model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float64}


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_four_ranks
def test_a_slice_of_a_mesh_leaves_tensor_parallelism_alone(backend: str | None) -> None:
    """Gradients, their norm over both dimensions, full parameters that are DTensors on the other one, whole states."""
    unsharded = Stack(1)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(unsharded)
    model.layers[0].up = nn.Linear(16, 34)
    model.layers[0].down = nn.Linear(34, 16)
    unsharded = copy.deepcopy(model)
    for layer in model.layers:
        parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = OURS(model, auto_wrap_policy=BLOCKS, device_mesh=both["dp"])
    state = model.state_dict()
    for name, value in state.items():
        assert not isinstance(value, DTensor)
        torch.testing.assert_close(value, unsharded.state_dict()[name], rtol=0, atol=0)
    unsharded.load_state_dict({name: 0.5 * value for name, value in state.items()})
    model.load_state_dict(unsharded.state_dict())
    for name, param in model.named_parameters():
        torch.testing.assert_close(full(param.detach()), unsharded.get_parameter(name).detach(), rtol=0, atol=0)

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
