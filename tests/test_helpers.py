"""What FSDP1 has and FSDP2 lacks, before the first step: auto_shard, materialize, sync_module_states, cast_buffers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compile import (
    FSDPModule,
    MixedPrecisionPolicy,
    auto_shard,
    cast_buffers,
    fully_shard,
    materialize,
    sync_module_states,
)
from fsdp_compile.core.unit import unit_of
from tests.comparing import full, mine
from tests.models import Block, Stack, mesh_of
from tests.on_ranks import on_four_ranks, on_two_ranks


class Blocks(nn.Module):
    """Batch norms, in training, with a width that no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tied(nn.Module):
    """A head with a bias of its own and the embedding's weight, around a width that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(11, 6), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(ids)
        return self.head(hidden + self.inner(hidden))


class Split(nn.Module):
    """Two products for tensor parallelism, between a norm and another product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.out = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(torch.relu(self.up(self.norm(x)))))


def units_by_path(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(one).detach().clone() for name, one in model.state_dict().items()}


def assert_values(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in values(model).items():
        assert torch.equal(tensor, expected[name]), name


# --- auto_shard -------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("names", [["Block", "EncoderBlock"], "Block"])
def test_models_say_themselves_what_not_to_split(fake_group_of_four: None, names: Any) -> None:
    model = Stack(2)
    model._no_split_modules = names
    assert units_by_path(auto_shard(model)) == LAYERS


def test_a_function_gives_options_for_each_module(fake_group_of_four: None) -> None:
    model = Stack(2)

    def options(module: nn.Module) -> Any:
        return {"reshard_after_forward": False} if module is model.layers[0] else module is model.layers[1]

    auto_shard(model, options, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    kept = [unit_of(layer).settings.reshard_after_forward for layer in model.layers]  # type: ignore[union-attr]
    assert kept == [False, None]
    assert {unit_of(one).mp_policy.param_dtype for one in (*model.layers, model)} == {torch.bfloat16}  # type: ignore[union-attr]


def test_what_was_sharded_stays_and_shared_modules_are_units_once(fake_group_of_four: None) -> None:
    model = Stack(2)
    fully_shard(model.layers[0], reshard_after_forward=False)
    inner = model.layers[1].up
    model.again = nn.ModuleList([inner])  # behind what it is in, and in front of it by order of visit
    auto_shard(model, {Block, nn.Linear})
    assert unit_of(model.layers[0]).settings.reshard_after_forward is False  # type: ignore[union-attr]
    assert [param.fqn for param in unit_of(inner).params] == ["weight", "bias"]  # type: ignore[union-attr]


def misspells(module: nn.Module) -> Any:
    """Chooses one module, and has an option for others that there is not."""
    return {"mesch": None} if isinstance(module, nn.Linear) else isinstance(module, nn.Embedding)


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (None, ValueError, "Stack has no _no_split_modules .* class of its blocks: Block, Embedding, LayerNorm, Linear"),
        ("Blok", ValueError, "no module in Stack is a Blok. It has: Block, "),
        (nn.Conv2d, ValueError, "no module in Stack is a Conv2d"),
        (nn.ModuleList, ValueError, "layers is a ModuleList, which has no forward.* Choose what .*: Block, Layer"),
        ([Block, 3], TypeError, "3 in policy is no class"),
        (Block(), TypeError, "policy is a Block module itself. Pass its class"),
        (0, ValueError, "has to be positive"),
        (2.5, TypeError, "policy is a float"),
        (misspells, ValueError, "policy returned mesch for layers.0.up. fully_shard takes .*mesh"),
        (lambda module: "yes", TypeError, "policy returned a str for embed"),
    ],
)
def test_wrong_policies_are_refused_before_anything_is_sharded(
    fake_group_of_four: None, policy: Any, error: Any, words: str
) -> None:
    model = Stack(2)
    with pytest.raises(error, match=words):
        auto_shard(model, policy)
    assert units_by_path(model) == []


def test_wrong_models_and_options_are_refused_before_anything_is_sharded(fake_group_of_four: None) -> None:
    model = nn.ModuleList([Stack()])
    with pytest.raises(TypeError, match="takes a module"):
        auto_shard([model], Block)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"the ModuleList itself is a ModuleList, .* Choose what .* in it: .*Stack"):
        auto_shard(model, Block)
    with pytest.raises(ValueError, match=r"Linear has no _no_split_modules .* no blocks: call fully_shard on it"):
        auto_shard(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"no option reshard. fully_shard takes .*reshard_after_forward"):
        auto_shard(model[0], Block, reshard=1)
    assert units_by_path(model) == []


@pytest.mark.parametrize("policy", [lambda module: False, 10_000, [], nn.ReLU], ids=["function", "size", "empty", "no params"])
def test_a_policy_that_chooses_nothing_warns(fake_group_of_four: None, policy: Any) -> None:
    model = nn.Sequential(Blocks(), nn.ReLU())
    with pytest.warns(UserWarning, match=r"chose nothing with parameters inside Sequential.*choose from: BatchNorm1d, Blocks"):
        auto_shard(model, policy)
    assert isinstance(model, FSDPModule)


def test_batch_norms_follow_the_options_of_the_module_around_them(fake_group_of_four: None) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    of_one, of_rest = Blocks(), Blocks()
    auto_shard(of_one, lambda module: {"mp_policy": half} if module is of_one.layers[0] else False)
    auto_shard(of_rest, lambda module: {"mp_policy": MixedPrecisionPolicy()} if module is of_rest.layers[0] else False,
               mp_policy=half, reshard_after_forward=False)  # fmt: skip
    for model, cast in ((of_one, 0), (of_rest, 1)):
        norms = [layer[1] for layer in model.layers]  # type: ignore[index]
        assert [isinstance(norm, FSDPModule) for norm in norms] == [index == cast for index in range(2)]
        assert unit_of(norms[cast]).mp_policy.param_dtype is None  # type: ignore[union-attr]
        assert unit_of(norms[cast]).mp_policy.reduce_dtype is torch.float32  # type: ignore[union-attr]
    assert unit_of(of_rest.layers[1][1]).settings.reshard_after_forward is False  # type: ignore[union-attr, index]


@on_two_ranks
def test_batch_norms_compute_as_they_are_stored() -> None:
    torch.manual_seed(0)
    model = auto_shard(Blocks(), nn.Sequential, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert units_by_path(model) == ["", "layers.0", "layers.0.1", "layers.1", "layers.1.1"]
    norm: Any = model.layers[0][1]  # type: ignore[index]
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    norm.register_forward_hook(lambda module, args, output: seen.append((module.weight.dtype, output.dtype)))
    model(torch.randn(4, 7)).float().sum().backward()
    assert seen == [(torch.float32, torch.bfloat16)] and norm.running_mean.dtype is torch.float32
    assert norm.weight.grad is not None


# --- materialize ------------------------------------------------------------------------------------------------------


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def reset(model: nn.Module, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@on_two_ranks
def test_meta_weights_become_those_of_an_unsharded_model(when: str) -> None:
    """A tied model, and one with buffers; ranks with other seeds draw what rank 0 draws, and go on where they were."""
    for make, policy in ((functools.partial(Stack, 2, tied=True), 100), (Blocks, nn.Sequential)):
        model = on_meta(make)
        if when == "after":
            auto_shard(model, policy)
        torch.manual_seed(5 + dist.get_rank())
        before = torch.get_rng_state()
        materialize(model, init_fn=None if when == "after" else lambda module: module.reset_parameters())
        assert torch.equal(torch.get_rng_state(), before) == (dist.get_rank() == 1)
        if when == "before":
            auto_shard(model, policy)
        assert_values(model, reset(make()).state_dict())
        if isinstance(model, Stack):
            assert model.head.weight is model.embed.weight
            model(mine()).sum().backward()
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@on_two_ranks
def test_ties_over_units_and_of_buffers_hold_on_the_way_from_meta() -> None:
    expected = reset(Tied(), seed=3)
    torch.manual_seed(3 + dist.get_rank())
    model = auto_shard(on_meta(Tied), nn.Embedding)  # the head's weight is the embedding's unit's, its bias the root's
    materialize(model, "cpu")
    assert_values(model, expected.state_dict())
    norms = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    norms[1].running_mean = norms[0].running_mean
    materialize(norms, "cpu")
    assert norms[1].running_mean is norms[0].running_mean and (norms[1].running_mean == 0).all()


class Angles(nn.Module):
    """Buffers that no state dict has, which a user's init_fn may forget; in half precision and whole numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6)
        for name, dtype in {"of_4": torch.float32, "of_2": torch.bfloat16, "whole": torch.int64, "complex": torch.complex64}.items():
            self.register_buffer(name, torch.arange(4).to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@on_two_ranks
def test_a_state_dict_of_rank_0_is_sent_to_all_and_what_nothing_initialized_is_named() -> None:
    expected = reset(Angles())
    state = expected.state_dict() if dist.get_rank() == 0 else None
    model = fully_shard(on_meta(Angles))
    words = r"materialize: of_4, of_2, whole, complex on the meta device: Angles has no reset_parameters\(\)"
    with pytest.raises(ValueError, match=words):
        materialize(model, state_dict=state)
    assert model.of_4.is_meta and model.lin.weight.is_meta, "nothing has changed"
    with pytest.raises(ValueError, match=r"of_4, of_2, whole, complex got no values.* Write them in init_fn"):
        materialize(auto_shard(on_meta(Angles), nn.Linear), init_fn=lambda module: None, state_dict=state)

    def forgets_bias(module: nn.Module) -> None:
        if isinstance(module, Angles):
            for buffer in module.buffers():
                buffer.zero_()
            nn.init.ones_(module.lin.weight)  # a parent may write what its children have

    with pytest.raises(ValueError, match=r"materialize: lin.bias got no values"):
        materialize(fully_shard(on_meta(Angles)), init_fn=forgets_bias)

    def angles(module: nn.Module) -> None:
        for buffer in module.buffers():
            buffer.copy_(torch.arange(4))

    materialize(model, init_fn=angles, state_dict=state)
    assert_values(model, expected.state_dict())
    assert all(torch.equal(*both) for both in zip(model.buffers(), expected.buffers(), strict=True))


@on_two_ranks
def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank() -> None:
    def made() -> nn.Module:
        return auto_shard(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), nn.Linear)

    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict()
    cases = [
        ({name: one for name, one in expected.items() if name != "1.bias"}, r"lacks 1\.bias\. Add"),
        ({**expected, "2.x": torch.ones(3)}, r"has 2\.x, which the model does not have"),
        ({**expected, "1.bias": torch.ones(4)}, r"has shape \(4,\) for 1\.bias, whose shape in the model is \(3,\)"),
        ({**expected, "1.bias": 3}, r"has a int for 1\.bias"),
        ([1], r"is a list\. Pass what model\.state_dict\(\)"),
    ]
    for given, words in cases:  # on both ranks, of which one alone has it
        with pytest.raises(ValueError, match=r"state_dict " + words):
            materialize(made(), "cpu", state_dict=given if dist.get_rank() == 0 else None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank 1 passes state_dict, and rank 0.* does not"):
        materialize(made(), state_dict=expected if dist.get_rank() == 1 else None)
    with pytest.raises(ValueError, match='device is "meta"'):
        materialize(made(), "meta")
    with pytest.raises(TypeError, match=r"takes a module"):
        materialize([nn.Linear(3, 3)])  # type: ignore[type-var]


class NoReset(nn.Module):
    """Has a parameter, and no way to initialize it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@on_two_ranks
def test_weights_are_loaded_by_one_name_of_several_and_through_wrappers() -> None:
    torch.manual_seed(0)
    whole = Tied().state_dict()
    for left_out in ("embed.weight", "head.weight"):
        model = auto_shard(on_meta(Tied), nn.Sequential)
        given = {name: one for name, one in whole.items() if name != left_out}
        materialize(model, "cpu", state_dict=given if dist.get_rank() == 0 else None)
        assert model.head.weight is model.embed.weight
        assert_values(model, whole)

    def made(wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), wrap(NoReset()))

    whole = made().state_dict()
    compiled = torch.compile(auto_shard(on_meta(made), nn.Linear), backend="eager")
    assert materialize(compiled, state_dict=whole if dist.get_rank() == 0 else None) is compiled
    wrapped = auto_shard(on_meta(lambda: made(checkpoint_wrapper)), nn.Linear)
    materialize(wrapped, state_dict=whole if dist.get_rank() == 0 else None)
    dist.broadcast_object_list(firsts := [whole])
    assert_values(compiled._orig_mod, firsts[0])
    assert torch.equal(full(wrapped.get_parameter("1._checkpoint_wrapped_module.scale")), firsts[0]["1.scale"])


class WithRules(Stack):
    """As Hugging Face's models: one method for all modules, which is called from inside out."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()
        elif isinstance(module, Block):  # has no parameters of its own
            nn.init.constant_(module.up.weight, 3.0)
        elif isinstance(module, WithRules):  # over all units
            for layer in module.layers:
                layer.norm.bias.data.fill_(5.0)


@on_two_ranks
def test_rules_of_what_is_around_a_module_hold_and_leave_alone_what_had_values() -> None:
    for model in (on_meta(WithRules), auto_shard(on_meta(WithRules), Block)):
        materialize(model, "cpu")
        for layer in model.layers:
            assert (full(layer.up.weight) == 3).all(), "the block's rule comes after the layer's"
            assert (full(layer.norm.bias) == 5).all(), "and the model's last"
        assert 0.5 < full(model.head.weight).std() < 1.5
    torch.manual_seed(0)  # what was drawn so far differs between ranks
    model = WithRules()
    expected = copy.deepcopy(model.state_dict())
    model.layers[0].norm = on_meta(lambda: nn.LayerNorm(16))
    materialize(auto_shard(model, Block), "cpu")
    for name, value in values(model).items():
        assert name.startswith("layers.0.norm") or torch.equal(value, expected[name]), name


class Padded(nn.Embedding):
    """Its own initialization writes to some of it."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[0].zero_()


class FromOutside(nn.Module):
    """Its own initialization writes to what is inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.table = Padded(6, 4)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.table.weight.data.fill_(3.0)


@on_two_ranks
def test_what_another_module_initialized_stays() -> None:
    model = on_meta(FromOutside)
    fully_shard(model.table)
    materialize(fully_shard(model))
    torch.testing.assert_close(full(model.table.weight), torch.tensor([[0.0] * 4, *[[3.0] * 4] * 5]))


def tensor_parallel(model: Split, mesh: Any) -> Split:
    parallelize_module(model.up, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    return model


def sharded_and_parallel(model: Split) -> Split:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return auto_shard(tensor_parallel(model, mesh), nn.LayerNorm, mesh=mesh["dp"])


@on_two_ranks
def test_tensor_parallel_ranks_do_not_draw_the_same_numbers() -> None:
    unsharded, model = on_meta(Split), sharded_and_parallel(on_meta(Split))
    only_parallel = tensor_parallel(on_meta(Split), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    for one in (unsharded, model, only_parallel):
        torch.manual_seed(3)
        materialize(one, "cpu")
    for one in (model, only_parallel):
        assert_values(one, unsharded.state_dict())
    assert isinstance(only_parallel.up.weight, DTensor)


@on_two_ranks
def test_an_error_of_one_rank_is_raised_on_all() -> None:
    rank = dist.get_rank()

    def init_fn(module: Any) -> None:
        if rank == 1 and isinstance(module, nn.LayerNorm):
            raise KeyError("mine")
        module.reset_parameters()

    error, words = (KeyError, "mine") if rank == 1 else (RuntimeError, "rank 1 raised .*LayerNorm: KeyError: 'mine'")
    with pytest.raises(error, match=words):
        materialize(auto_shard(on_meta(Stack), Block), "cpu", init_fn=init_fn)


# --- the values of one rank, and buffers in another dtype -------------------------------------------------------------


@on_four_ranks
def test_one_rank_sends_what_it_has() -> None:
    model = reset(Blocks(), seed=dist.get_rank())
    model.layers[0][1].running_mean.fill_(dist.get_rank())  # type: ignore[index, union-attr]
    sync_module_states(model, src=3)
    expected = reset(Blocks(), seed=3)
    expected.layers[0][1].running_mean.fill_(3)  # type: ignore[index, union-attr]
    assert_values(model, expected.state_dict())
    # Copies of shards: those of the first replica.
    again = fully_shard(Blocks(), mesh=mesh_of("replicate", "shard"))
    replica = dist.get_rank() // 2
    with torch.no_grad():
        for param in again.parameters():
            param.to_local().fill_(replica + 1)
    sync_module_states(again)
    assert all((param.to_local() == 1).all() for param in again.parameters())
    with pytest.raises(ValueError, match="src=7 is not in the group"):
        sync_module_states(again, src=7)
    with pytest.raises(ValueError, match=r"layers.0.0.weight is on the meta device. Call .*materialize"):
        sync_module_states(on_meta(Blocks))


@on_two_ranks
def test_ranks_that_built_other_models_are_told() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"rank 0 has weight of shape \(4, 3\) .*rank 1 has weight of shape \(5, 3\)"):
        sync_module_states(nn.Linear(3, 4 + rank))
    with pytest.raises(ValueError, match=r"rank 0 has bias of shape \(4,\) .* rank 1 has nothing there"):
        sync_module_states(nn.Linear(3, 4, bias=rank == 0))
    model = nn.Linear(3, 4)
    model.register_buffer("seen", torch.full((1,), float(rank)).expand(5))
    with pytest.raises(ValueError, match=r"seen is expanded.* Register a clone\(\)"):
        sync_module_states(model)
    alone = dist.new_group([0])
    if rank == 0:
        sync_module_states(nn.Linear(2, 2), group=alone)
    else:
        with pytest.raises(ValueError, match=r"this rank is not in the group"):
            sync_module_states(nn.Linear(2, 2), group=alone)
    with pytest.raises(TypeError, match=r"sync_module_states takes a module, but got list"):
        sync_module_states([model])  # type: ignore[type-var]


def test_buffers_are_cast_and_parameters_are_not_and_a_buffer_in_two_places_stays_one() -> None:
    model = Blocks()
    first, last = (layer[1] for layer in model.layers)  # type: ignore[index]
    last.running_mean = first.running_mean
    cast_buffers(model, torch.bfloat16)
    assert last.running_mean is first.running_mean
    assert {buffer.dtype for buffer in model.buffers()} == {torch.bfloat16, torch.int64}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    with pytest.raises(TypeError, match="floating-point dtype"):
        cast_buffers(model, torch.int8)
    with pytest.raises(TypeError, match=r"cast_buffers takes a module, but got list"):
        cast_buffers([model], torch.bfloat16)  # type: ignore[type-var]
