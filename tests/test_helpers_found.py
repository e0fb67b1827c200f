"""What a user ran into who tried the helpers with no more than README.md, RECIPES.md and their docstrings at hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

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
from tests.compiling import num_graphs
from tests.ranks import Ranks


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


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


IDS = torch.arange(10).view(2, 5)


def tied_and_sharded(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    unsharded = Tied()
    return unsharded, auto_shard(copy.deepcopy(unsharded), nn.Sequential, **options)


def on_meta(make: Callable[[], nn.Module], policy: Any = nn.Linear) -> Any:
    with torch.device("meta"):
        model = make()
    return auto_shard(model, policy)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.state_dict().items()
    }


def assert_values(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in values(model).items():
        assert torch.equal(tensor, expected[name]), name


# --- auto_shard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "options", "error", "words"),
    [
        (nn.ModuleList, {}, ValueError, "layers is a ModuleList, which has no forward.* Choose what .*: BatchNorm1d, Linear, Seq"),
        (nn.Sequential, {"reshard": 1}, TypeError, "no option reshard. fully_shard takes .*reshard_after_forward"),
        (lambda module: {"reshard": 1} if isinstance(module, nn.Linear) else False, {}, ValueError, "returned reshard for layers.0.0"),
    ],
    ids=["a list", "an option", "a module's option"],
)  # fmt: skip
def test_nothing_is_sharded_before_all_is_known(
    fake_group_of_four: None, policy: Any, options: dict[str, Any], error: Any, words: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Blocks()) if policy is nn.Sequential else Blocks()
    with pytest.raises(error, match=words):
        auto_shard(model, policy, **options)
    assert not any(isinstance(one, FSDPModule) for one in model.modules())


def test_a_list_that_is_the_model_is_named(fake_group_of_four: None) -> None:
    model = nn.ModuleList([Blocks()])
    with pytest.raises(ValueError, match=r"the ModuleList itself is a ModuleList, .* Choose what stands in it: .*Blocks"):
        auto_shard(model, nn.Sequential)
    assert not any(isinstance(one, FSDPModule) for one in model.modules())


@pytest.mark.parametrize("policy", [lambda module: False, 10_000, [], nn.ReLU], ids=["function", "size", "empty", "no params"])
def test_a_policy_that_chooses_nothing_warns(fake_group_of_four: None, policy: Any) -> None:
    model = nn.Sequential(Blocks(), nn.ReLU())
    with pytest.warns(UserWarning, match=r"chose nothing with parameters inside Sequential.*choose from: BatchNorm1d, Blocks"):
        auto_shard(model, policy)
    assert isinstance(model, FSDPModule)


def test_one_name_is_not_taken_for_letters(fake_group_of_four: None) -> None:
    model = Blocks()
    model._no_split_modules = "Sequential"  # type: ignore[assignment]
    auto_shard(model)
    assert all(isinstance(layer, FSDPModule) for layer in model.layers)
    with pytest.raises(ValueError, match=r"Linear has no _no_split_modules .* no blocks: call fully_shard on it"):
        auto_shard(nn.Linear(2, 2))


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


# --- initialization ---------------------------------------------------------------------------------------------------


def _state_dicts_that_do_not_fit() -> None:
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
            materialize(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), "cpu",
                        state_dict=given if dist.get_rank() == 0 else None)  # type: ignore[arg-type] # fmt: skip
    with pytest.raises(ValueError, match=r"rank 1 passes state_dict, and rank 0.* does not"):
        materialize(on_meta(lambda: nn.Sequential(nn.Linear(3, 3))), state_dict=expected if dist.get_rank() == 1 else None)
    with pytest.raises(ValueError, match='device is "meta"'):
        materialize(on_meta(lambda: nn.Sequential(nn.Linear(3, 3))), "meta")
    with pytest.raises(TypeError, match=r"takes a module"):
        materialize([nn.Linear(3, 3)])  # type: ignore[type-var]


def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    two_ranks.run(_state_dicts_that_do_not_fit)


def _loaded_by_other_names() -> None:
    torch.manual_seed(0)
    expected = Tied()
    whole = expected.state_dict()
    for left_out in ("embed.weight", "head.weight"):
        model = on_meta(Tied, nn.Sequential)
        given = {name: one for name, one in whole.items() if name != left_out}
        materialize(model, "cpu", state_dict=given if dist.get_rank() == 0 else None)
        assert model.head.weight is model.embed.weight
        assert_values(model, whole)

    class NoReset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    make = lambda: nn.Sequential(nn.Linear(6, 6), NoReset())  # noqa: E731
    whole = make().state_dict()
    compiled = torch.compile(on_meta(make), backend="eager")
    assert materialize(compiled, state_dict=whole if dist.get_rank() == 0 else None) is compiled
    wrapped = on_meta(lambda: nn.Sequential(nn.Linear(6, 6), checkpoint_wrapper(NoReset())))
    materialize(wrapped, state_dict=whole if dist.get_rank() == 0 else None)
    dist.broadcast_object_list(mine := [whole])
    assert_values(compiled._orig_mod, mine[0])
    assert torch.equal(wrapped.get_parameter("1._checkpoint_wrapped_module.scale").full_tensor(), mine[0]["1.scale"])  # type: ignore[attr-defined]


def test_weights_are_loaded_by_one_name_of_several_and_through_wrappers(two_ranks: Ranks) -> None:
    two_ranks.run(_loaded_by_other_names)


def _initialized() -> None:
    torch.manual_seed(3)
    expected = Tied()
    torch.manual_seed(3)
    expected.embed.reset_parameters(), expected.inner[0].reset_parameters(), expected.inner[2].reset_parameters()  # type: ignore[operator]
    expected.head.reset_parameters()
    torch.manual_seed(3 + dist.get_rank())
    model = on_meta(Tied, nn.Embedding)  # the head's weight is the embedding's unit's, its bias the root's
    materialize(model, "cpu")
    assert_values(model, expected.state_dict())
    with torch.device("meta"):
        norms = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        norms[1].running_mean = norms[0].running_mean
    materialize(norms, "cpu")
    assert norms[1].running_mean is norms[0].running_mean and (norms[1].running_mean == 0).all()


def test_ties_over_units_and_of_buffers_hold_on_the_way_from_meta(two_ranks: Ranks) -> None:
    two_ranks.run(_initialized)


class Angles(nn.Module):
    """What a user's init_fn forgets: a buffer that no state dict has, in half precision and whole numbers too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6)
        for name, dtype in {"of_4": torch.float32, "of_2": torch.bfloat16, "whole": torch.int64, "complex": torch.complex64}.items():
            self.register_buffer(name, torch.arange(4).to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def _forgotten() -> None:
    whole = Angles().state_dict() if dist.get_rank() == 0 else None
    with pytest.raises(ValueError, match=r"of_4, of_2, whole, complex got no values.* Write them in init_fn"):
        materialize(on_meta(Angles), init_fn=lambda module: None, state_dict=whole)

    def forgets_bias(module: nn.Module) -> None:
        if isinstance(module, Angles):
            for buffer in module.buffers():
                buffer.zero_()
            nn.init.ones_(module.lin.weight)  # a parent may write what its children have

    with pytest.raises(ValueError, match=r"materialize: lin.bias got no values"):
        materialize(on_meta(Angles, lambda module: False), init_fn=forgets_bias)


class FromOutside(nn.Module):
    """Its own initialization writes to what is inside it; that of what is inside only to some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.table = Padded(6, 4)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.table.weight.data.fill_(3.0)


class Padded(nn.Embedding):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[0].zero_()


def _from_outside() -> None:
    with torch.device("meta"):
        model = FromOutside()
    fully_shard(model.table)
    materialize(fully_shard(model))
    torch.testing.assert_close(model.table.weight.full_tensor(), torch.tensor([[0.0] * 4, *[[3.0] * 4] * 5]))


def test_what_another_module_initialized_stays(two_ranks: Ranks) -> None:
    two_ranks.run(_from_outside)


@pytest.mark.filterwarnings("ignore:auto_shard. policy chose nothing")
def test_what_nothing_initialized_is_named(two_ranks: Ranks) -> None:
    two_ranks.run(_forgotten)


def _not_alike() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"rank 0 has weight of shape \(4, 3\) .*rank 1 has weight of shape \(5, 3\)"):
        sync_module_states(nn.Linear(3, 4 + rank))
    with pytest.raises(ValueError, match=r"of ranks 0 and 1, one has no bias"):
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


def test_ranks_that_built_other_models_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(_not_alike)


def test_a_buffer_in_two_places_stays_one() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    cast_buffers(model, torch.bfloat16)
    assert model[1].running_mean is model[0].running_mean and model[1].running_mean.dtype is torch.bfloat16
    with pytest.raises(TypeError, match=r"cast_buffers takes a module, but got list"):
        cast_buffers([model], torch.bfloat16)  # type: ignore[type-var]


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "error", "words"),
    [
        (1.0, 0.0, ValueError, "norm_type is 0.0. Pass a number above 0, or inf"),
        (1.0, -2.0, ValueError, "norm_type is -2.0"),
        (1.0, float("-inf"), ValueError, "norm_type is -inf"),
        (1.0, float("nan"), ValueError, "norm_type is nan"),
        (1.0, "two", TypeError, "norm_type is 'two'. Pass a number"),
        (-1.0, 2.0, ValueError, "max_norm is -1.0. Pass a number from 0 on"),
        (None, 2.0, TypeError, "max_norm is None"),
    ],
)
def test_orders_that_would_give_wrong_norms_are_refused(max_norm: Any, norm_type: Any, error: Any, words: str) -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    with pytest.raises(error, match=words):
        clip_grad_norm_(param, max_norm, norm_type)
    assert torch.equal(param.grad, torch.ones(3))


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2).named_parameters(), None, [1, 2]], ids=["named", "None", "numbers"])
def test_what_is_no_parameter_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is no parameter\. Pass the model, .* such as model\.parameters\(\)"):
        clip_grad_norm_(wrong, 1.0)


def _of_no_number() -> None:
    for at in range(dist.get_world_size()):
        model: Any = fully_shard(nn.Linear(4, 4))
        model(torch.ones(4)).sum().backward()
        if dist.get_rank() == at:
            model.weight.grad.to_local()[0] = float("nan")
        with pytest.raises(RuntimeError, match=r"is nan, and scales nothing"):
            clip_grad_norm_(model, 1.0, "inf", error_if_nonfinite=True)  # type: ignore[arg-type]
        assert clip_grad_norm_(model, 1.0, float("inf")).isnan()


def test_the_largest_gradient_is_no_number_where_one_is_none(two_ranks: Ranks) -> None:
    two_ranks.run(_of_no_number)


def _sparse() -> None:
    torch.manual_seed(0)
    unsharded: Any = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
    model = copy.deepcopy(unsharded)
    fully_shard(model[1])
    for one in (model, unsharded):
        one(torch.tensor([1, 2, 1])).pow(2).sum().backward()
    dense = [param.grad.to_dense() for param in unsharded.parameters()]
    expected = torch.stack([grad.norm() for grad in dense]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
    torch.testing.assert_close(model[0].weight.grad.to_dense(), dense[0] * 0.1 / expected)


def test_a_sparse_gradient_beside_sharded_ones_is_clipped(two_ranks: Ranks) -> None:
    two_ranks.run(_sparse)


# --- full parameters --------------------------------------------------------------------------------------------------


def _refused_inside() -> None:
    unsharded, model = tied_and_sharded()
    with full_params(model):
        with pytest.raises(RuntimeError, match=r"embed.weight is full already, by an outer full_params\. Leave that"), full_params(model):
            pass  # fmt: skip
        assert torch.equal(model.head.bias, unsharded.head.bias), "the outer one holds on"
        with pytest.raises(RuntimeError, match=r"is full, inside full_params.* Copy the model outside"):
            copy.deepcopy(model)
        assert torch.equal(model(IDS), unsharded(IDS))
        with pytest.raises(RuntimeError, match=r"backward of a forward that ran inside full_params.* Run both outside"):
            model(IDS).sum().backward()
        loss = model(IDS).sum()
    with pytest.raises(RuntimeError, match=r"backward of a forward that ran inside full_params"):
        loss.backward()
    for param in model.parameters():
        assert isinstance(param, DTensor) and param.grad is None
    for spoil, words in (
        (lambda: delattr(model.head, "bias"), "head.bias was taken away"),
        (lambda: setattr(model.head, "bias", None), "head.bias was taken away"),
        (lambda: setattr(model.head, "bias", nn.Parameter(torch.ones(2))), r"head.bias has shape \(11,\), but .*\(2,\)"),
    ):
        with pytest.raises(RuntimeError, match=words), full_params(model):
            spoil()
        assert isinstance(model.head.bias, DTensor)
    assert_values(model, unsharded.state_dict())
    model(IDS).sum().backward()
    unsharded(IDS).sum().backward()
    for ours, theirs in zip(model.parameters(), unsharded.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_full_parameters_refuse_what_would_be_lost(two_ranks: Ranks) -> None:
    two_ranks.run(_refused_inside)


def _stepped_inside() -> None:
    unsharded, model = tied_and_sharded()
    optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (unsharded, model)]
    for writeback in (True, False):
        for one in (unsharded, model):
            one.zero_grad()
            one(IDS).sum().backward()
        optims[0].step()
        if writeback:
            with pytest.raises(RuntimeError, match=r"shard was written to .* Step outside"), full_params(model):
                optims[1].step()
        else:
            with full_params(model, writeback=False):
                optims[1].step()
        for name, tensor in values(model).items():
            torch.testing.assert_close(tensor, unsharded.state_dict()[name])


def test_a_step_inside_is_kept_or_said_to_be_in_the_way(two_ranks: Ranks) -> None:
    two_ranks.run(_stepped_inside)


def _put_in_one_place() -> None:
    _, model = tied_and_sharded()
    with full_params(model):
        model.head.weight = nn.Parameter(torch.full((11, 6), 3.0))
    assert (model.embed.weight.full_tensor() == 3).all() and model.head.weight is model.embed.weight
    with pytest.raises(NotImplementedError, match=r"shared parameters .*embed.weight is tied, .* got another one"), full_params(model):
        model.head.weight = nn.Parameter(torch.full((11, 6), 4.0))
        model.embed.weight = nn.Parameter(torch.full((11, 6), 5.0))
    assert (model.embed.weight.full_tensor() == 3).all() and model.head.weight is model.embed.weight


def test_a_tied_weight_may_be_put_in_any_of_its_places(two_ranks: Ranks) -> None:
    two_ranks.run(_put_in_one_place)


def _gradients_of_some_ranks() -> None:
    _, model = tied_and_sharded()
    model(IDS).sum().backward()
    if dist.get_rank() == 1:
        model.inner[0].weight.grad = None
    words = r"Only some but not all ranks have a gradient: .*0.weight, 1 of 2.* Run backward on every rank, or set it to zeros"
    with pytest.raises(RuntimeError, match=words), full_params(model, with_grads=True):
        pass
    assert isinstance(model.embed.weight, DTensor)
    if dist.get_rank() == 1:
        model.inner[0].weight.grad = torch.zeros_like(model.inner[0].weight)
    with full_params(model, with_grads=True):
        assert (model.inner[0].weight.grad[3:] == 0).all() and model.inner[0].weight.grad.shape == (5, 6)


def test_gradients_that_some_ranks_lack_raise_on_all(two_ranks: Ranks) -> None:
    two_ranks.run(_gradients_of_some_ranks)


def _compiled(backend: str) -> None:
    unsharded, model = tied_and_sharded()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(IDS).sum().backward()
    before = num_graphs()
    for value in (2.0, 3.0):
        with full_params(compiled), torch.no_grad():
            compiled.head.weight.fill_(value)
        with torch.no_grad():
            unsharded.head.weight.fill_(value)
        output = compiled(IDS)
        torch.testing.assert_close(output, unsharded(IDS))
        output.sum().backward()
    assert num_graphs() == before, "nothing is compiled again"
    with full_params(compiled), torch.no_grad():
        torch.testing.assert_close(compiled(IDS), unsharded(IDS))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_a_compiled_model_reads_what_was_written_and_compiles_nothing_again(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(_compiled, backend)
