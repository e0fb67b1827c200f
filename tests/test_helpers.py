"""What FSDP1 has and FSDP2 lacks, for models that fully_shard sharded: policies, initialization, clipping, full weights."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import (
    FSDPModule,
    MixedPrecisionPolicy,
    auto_shard,
    cast_buffers,
    clip_grad_norm_,
    full_params,
    fully_shard,
    materialize,
    sync_module_states,
)
from fsdp_compile.core.unit import unit_of
from tests.comparing import batches, loss_of, mine, reference_backward
from tests.models import Block, Stack, mesh_of, pair
from tests.ranks import Ranks

# --- auto_shard -------------------------------------------------------------------------------------------------------


def units_by_path(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


LAYERS = ["", "layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("policy", "paths"),
    [
        (Block, LAYERS),
        ("Block", LAYERS),
        ({Block, nn.Embedding}, ["", "embed", "layers.0", "layers.1"]),
        (ModuleWrapPolicy({Block}), LAYERS),
        (CustomPolicy(lambda module: isinstance(module, Block)), LAYERS),
        (lambda module: isinstance(module, Block), LAYERS),
        # Of 1 120 elements, a block has none to spare for what stands in it; the head is 496.
        (1000, LAYERS),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=1000), LAYERS),
        (490, ["", "embed", *(f"layers.{index}.{name}" for index in (0, 1) for name in ("up", "down")), "head"]),
    ],
    ids=["class", "name", "classes", "ModuleWrapPolicy", "CustomPolicy", "function", "size", "FSDP1 size", "small size"],
)
def test_a_policy_chooses_units(fake_group_of_four: None, policy: Any, paths: list[str]) -> None:
    model = auto_shard(Stack(2), policy)
    assert sorted(units_by_path(model)) == sorted(paths)
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_a_function_gives_options_for_each_module(fake_group_of_four: None) -> None:
    model = Stack(2)

    def options(module: nn.Module) -> Any:
        return {"reshard_after_forward": False} if module is model.layers[0] else module is model.layers[1]

    auto_shard(model, options, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    kept = [unit_of(layer).settings.reshard_after_forward for layer in model.layers]  # type: ignore[union-attr]
    assert kept == [False, None]
    assert {unit_of(one).mp_policy.param_dtype for one in (*model.layers, model)} == {torch.bfloat16}  # type: ignore[union-attr]


def test_models_say_themselves_what_not_to_split(fake_group_of_four: None) -> None:
    model = Stack(2)
    model._no_split_modules = ["Block", "EncoderBlock"]  # type: ignore[assignment]
    assert units_by_path(auto_shard(model)) == LAYERS


class Normed(nn.Module):
    """A batch norm, in training, with a width that no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU())
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


def _batch_norm() -> None:
    torch.manual_seed(0)
    model = auto_shard(Normed(), nn.Sequential, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert units_by_path(model) == ["", "inner", "inner.1"]
    seen = []
    model.inner[1].register_forward_hook(lambda module, args, output: seen.append((module.weight.dtype, output.dtype)))
    model(torch.randn(4, 6)).float().sum().backward()
    assert seen == [(torch.float32, torch.bfloat16)] and model.inner[1].running_mean.dtype is torch.float32
    assert model.inner[1].weight.grad is not None


def test_batch_norms_compute_as_they_are_stored(two_ranks: Ranks) -> None:
    two_ranks.run(_batch_norm)


def test_what_was_sharded_stays_and_shared_modules_are_units_once(fake_group_of_four: None) -> None:
    model = Stack(2)
    fully_shard(model.layers[0], reshard_after_forward=False)
    inner = model.layers[1].up
    model.again = nn.ModuleList([inner])  # behind what it is in, and in front of it by order of visit
    auto_shard(model, {Block, nn.Linear})
    assert unit_of(model.layers[0]).settings.reshard_after_forward is False  # type: ignore[union-attr]
    assert [param.fqn for param in unit_of(inner).params] == ["weight", "bias"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (None, ValueError, "Stack has no _no_split_modules .* class of its blocks: Block, Embedding, LayerNorm, Linear"),
        ("Blok", ValueError, "no module in Stack is a Blok. It has: Block, "),
        (nn.Conv2d, ValueError, "no module in Stack is a Conv2d"),
        ([Block, 3], TypeError, "3 in policy is no class"),
        (0, ValueError, "has to be positive"),
        (2.5, TypeError, "policy is a float"),
        (lambda module: {"mesch": None}, ValueError, "policy returned mesch for embed. fully_shard takes .*mesh"),
        (lambda module: "yes", TypeError, "policy returned a str for embed"),
    ],
)
def test_wrong_policies_are_refused(fake_group_of_four: None, policy: Any, error: Any, words: str) -> None:
    model = Stack(2)
    with pytest.raises(error, match=words):
        auto_shard(model, policy)
    assert units_by_path(model) == []
    with pytest.raises(TypeError, match="takes a module"):
        auto_shard([model], Block)  # type: ignore[type-var]


# --- initialization ---------------------------------------------------------------------------------------------------


def reset(model: nn.Module, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, theirs[name]), name


def _materialized(when: str) -> None:
    """A tied model, and one with buffers; ranks with other seeds draw what rank 0 draws, and go on where they were."""
    for make in (lambda: Stack(2, tied=True), Normed):
        with torch.device("meta"):
            model: Any = make()
        if when == "after":
            auto_shard(model, 100)
        torch.manual_seed(5 + dist.get_rank())
        before = torch.get_rng_state()
        materialize(model, init_fn=None if when == "after" else lambda module: module.reset_parameters())
        assert torch.equal(torch.get_rng_state(), before) == (dist.get_rank() == 1)
        if when == "before":
            auto_shard(model, 100)
        assert_same_values(model, reset(make()))
        if isinstance(model, Stack):
            assert model.head.weight is model.embed.weight
            model(mine()).sum().backward()
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:auto_shard. policy chose nothing")
def test_meta_weights_become_those_of_an_unsharded_model(two_ranks: Ranks, when: str) -> None:
    two_ranks.run(_materialized, when)


class Rotary(nn.Module):
    """A buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.angles)


def _from_rank_0() -> None:
    expected = reset(Rotary())
    with torch.device("meta"):
        model = fully_shard(Rotary())
    state = expected.state_dict() if dist.get_rank() == 0 else None
    with pytest.raises(ValueError, match=r"materialize: angles on the meta device: Rotary has no reset_parameters\(\)"):
        materialize(model, state_dict=state)
    assert model.angles.is_meta and model.lin.weight.is_meta, "nothing has changed"

    def angles(module: nn.Module) -> None:
        module.angles.copy_(torch.arange(4.0))  # type: ignore[operator, union-attr]

    materialize(model, init_fn=angles, state_dict=state)
    assert_same_values(model, expected)
    assert torch.equal(model.angles, expected.angles)  # type: ignore[arg-type]


def test_a_state_dict_of_rank_0_is_sent_to_all(two_ranks: Ranks) -> None:
    two_ranks.run(_from_rank_0)


def _synced() -> None:
    model = reset(Normed(), seed=dist.get_rank())
    model.inner[1].running_mean.fill_(dist.get_rank())  # type: ignore[index, union-attr]
    sync_module_states(model, src=3)
    expected = reset(Normed(), seed=3)
    expected.inner[1].running_mean.fill_(3)  # type: ignore[index, union-attr]
    assert_same_values(model, expected)
    # Copies of shards: those of the first replica.
    again = fully_shard(Normed(), mesh=mesh_of("replicate", "shard"))
    replica = dist.get_rank() // 2
    with torch.no_grad():
        for param in again.parameters():
            param.to_local().fill_(replica + 1)
    sync_module_states(again)
    assert all((param.to_local() == 1).all() for param in again.parameters())
    with pytest.raises(ValueError, match="src=7 is not in the group"):
        sync_module_states(again, src=7)
    with torch.device("meta"), pytest.raises(ValueError, match=r"inner.0.weight is on the meta device. Call .*materialize"):
        sync_module_states(Normed())


def test_one_rank_sends_what_it_has(four_ranks: Ranks) -> None:
    four_ranks.run(_synced)


def test_buffers_are_cast_and_parameters_are_not() -> None:
    model = cast_buffers(Normed(), torch.bfloat16)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.bfloat16, torch.int64}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    with pytest.raises(TypeError, match="floating-point dtype"):
        cast_buffers(model, torch.int8)


# --- clipping ---------------------------------------------------------------------------------------------------------


class Split(nn.Module):
    """Two products for tensor parallelism, between a norm and another product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.out = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(torch.relu(self.up(self.norm(x)))))


def _clipped(norm_type: float) -> None:
    """Of one model: on two meshes, tensor parallel, on replicas, and not sharded at all."""
    torch.manual_seed(0)
    unsharded = Split()
    model = copy.deepcopy(unsharded)
    both = mesh_of("dp", "tp")
    parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for inner in (model.up, model.down):
        fully_shard(inner, mesh=both["dp"])
    fully_shard(model.out, mesh=mesh_of("replicate", "shard"))
    x = torch.randn(2, 6)  # the same on all ranks: what is not sharded has the mean's gradient
    for one in (model, unsharded):
        one(x).pow(2).sum().backward()
    norm = clip_grad_norm_(model.parameters(), 0.05, norm_type)
    expected = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.05, norm_type)
    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm, expected)
    for (name, ours), theirs in zip(model.named_parameters(), unsharded.parameters()):
        full = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(full, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
def test_the_norm_is_over_all_meshes(four_ranks: Ranks, norm_type: float) -> None:
    four_ranks.run(_clipped, norm_type)


def _clipped_wide(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    unsharded = nn.Linear(6, 4, dtype=dtype)
    sharded = fully_shard(copy.deepcopy(unsharded))
    x = torch.randn(3, 6, dtype=dtype)
    for model in (sharded, unsharded):
        model(x).abs().pow(2).sum().backward()
    norm = clip_grad_norm_(sharded, 0.05)
    expected = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.05)
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(sharded.parameters(), unsharded.parameters()):  # a row for each rank
        row = theirs.grad[dist.get_rank() : dist.get_rank() + 1]
        torch.testing.assert_close(ours.grad.to_local(), row)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_wide_and_complex_gradients_are_clipped(four_ranks: Ranks, dtype: torch.dtype) -> None:
    four_ranks.run(_clipped_wide, dtype)


def _not_clipped() -> None:
    _, model = pair()
    with pytest.warns(UserWarning, match="with no gradients"):
        assert clip_grad_norm_(model, 1.0) == 0
    loss_of(model(mine())).backward()
    grad = model.embed.weight.grad.to_local()
    grad[:1] = float("nan") if dist.get_rank() == 0 else grad[:1]
    before = model.head.weight.grad.to_local().clone()
    with pytest.raises(RuntimeError, match="is nan, and scales nothing"):  # on both ranks
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert torch.equal(model.head.weight.grad.to_local(), before)


def test_a_norm_that_is_no_number_raises_on_every_rank(two_ranks: Ranks) -> None:
    two_ranks.run(_not_clipped)


# --- full parameters --------------------------------------------------------------------------------------------------


def _looked_at() -> None:
    unsharded, model = pair()
    reference_backward(unsharded, batches(0))
    loss_of(model(mine())).backward()
    shards = list(model.parameters())
    with full_params(model, with_grads=True):
        for (name, full), expected in zip(model.named_parameters(), unsharded.parameters()):
            assert not isinstance(full, DTensor) and torch.equal(full, expected), name
            torch.testing.assert_close(full.grad, expected.grad)
        with torch.no_grad():
            model.head.weight.fill_(3.0)
            model.layers[0].up.bias.grad.mul_(2)
    assert all(now is before for now, before in zip(model.parameters(), shards))
    assert (model.head.weight.full_tensor() == 3).all()
    torch.testing.assert_close(model.layers[0].up.bias.grad.full_tensor(), 2 * unsharded.layers[0].up.bias.grad)
    with full_params(model, writeback=False, recurse=False):
        assert isinstance(model.layers[0].up.weight, DTensor) and not isinstance(model.head.weight, DTensor)
        model.head.weight.data.zero_()
    assert (model.head.weight.full_tensor() == 3).all()
    with full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert isinstance(model.head.weight, DTensor) == (dist.get_rank() != 0)
    with pytest.raises(ZeroDivisionError), full_params(model):
        model.head.weight.data.zero_()
        raise ZeroDivisionError
    assert (model.head.weight.full_tensor() == 0).all(), "an error does not undo what was written before it"


def test_full_parameters_are_looked_at_and_written(two_ranks: Ranks) -> None:
    two_ranks.run(_looked_at)


def _refused() -> None:
    _, model = pair()
    with pytest.raises(ValueError, match="was not given to fully_shard"), full_params(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match="writeback=True, rank0_only=True"), full_params(model, rank0_only=True):
        pass
    model.layers[0].up.register_forward_hook(lambda *args: full_params(model).__enter__())
    with pytest.raises(RuntimeError, match=r"during forward/backward.* Do it between steps"):
        model(mine())


def test_full_parameters_are_not_for_the_middle_of_a_step(two_ranks: Ranks) -> None:
    two_ranks.run(_refused)
