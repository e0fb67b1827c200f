"""What FSDP1 has and FSDP2 lacks, around a step: clip_grad_norm_, full_params, and each inside of the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import MixedPrecisionPolicy, auto_shard, clip_grad_norm_, full_params, fully_shard
from tests.comparing import full, local_loss, mine
from tests.compiling import compiled, num_graphs
from tests.models import mesh_of, pair, twins
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.test_helpers import Split, Tied, assert_values, sharded_and_parallel, values

IDS = torch.arange(10).view(2, 5)


class Ops(TorchDispatchMode):
    """The ops that ran, but for those that run on no device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not torch.ops.aten.promote_types.default:
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def tied_and_sharded() -> tuple[Any, Any]:
    unsharded, model = twins(Tied)
    return unsharded, auto_shard(model, nn.Sequential)


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@on_four_ranks
def test_the_norm_is_over_all_meshes(norm_type: float) -> None:
    """Of one model: on two meshes, tensor parallel, on replicas, and not sharded at all."""
    unsharded, model = twins(Split)
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
        torch.testing.assert_close(full(ours.grad), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@on_four_ranks
def test_wide_and_complex_gradients_are_clipped(dtype: torch.dtype) -> None:
    unsharded, sharded = twins(lambda: nn.Linear(6, 4, dtype=dtype))
    fully_shard(sharded)
    x = torch.randn(3, 6, dtype=dtype)
    for model in (sharded, unsharded):
        model(x).abs().pow(2).sum().backward()
    norm = clip_grad_norm_(sharded, 0.05)
    expected = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.05)
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(sharded.parameters(), unsharded.parameters()):  # a row for each rank
        row = theirs.grad[dist.get_rank() : dist.get_rank() + 1]
        torch.testing.assert_close(ours.grad.to_local(), row)


@on_two_ranks
def test_a_norm_that_is_no_number_raises_on_every_rank_and_clips_nothing() -> None:
    """The largest gradient, too, is no number where one is none, on whichever rank."""
    _, model = pair()
    with pytest.warns(UserWarning, match="with no gradients"):
        assert clip_grad_norm_(model, 1.0) == 0
    for at in range(dist.get_world_size()):
        model.zero_grad()
        local_loss(model, 0).backward()
        if dist.get_rank() == at:
            model.embed.weight.grad.to_local()[:1] = float("nan")
        before = model.head.weight.grad.to_local().clone()
        for norm_type in (2.0, "inf"):
            with pytest.raises(RuntimeError, match="is nan, and scales nothing"):
                clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)  # type: ignore[arg-type]
        assert torch.equal(model.head.weight.grad.to_local(), before)
        assert clip_grad_norm_(model, 1.0, float("inf")).isnan()


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


def test_as_many_ops_are_launched_for_many_gradients_as_for_few(fake_group_of_four: None) -> None:
    def ops_for(num_layers: int) -> list[str]:
        model = fully_shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers))))
        model(torch.ones(2, 8)).sum().backward()
        with Ops() as ops:
            clip_grad_norm_(model, 0.1)
        return ops.seen

    assert ops_for(2) == ops_for(9)


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2).named_parameters(), None, [1, 2]], ids=["named", "None", "numbers"])
def test_what_is_no_parameter_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is no parameter\. Pass the model, .* such as model\.parameters\(\)"):
        clip_grad_norm_(wrong, 1.0)


@on_two_ranks
def test_a_sparse_gradient_beside_sharded_ones_is_clipped() -> None:
    unsharded, model = twins(lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)))
    fully_shard(model[1])
    for one in (model, unsharded):
        one(torch.tensor([1, 2, 1])).pow(2).sum().backward()
    dense = [param.grad.to_dense() for param in unsharded.parameters()]
    expected = torch.stack([grad.norm() for grad in dense]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
    torch.testing.assert_close(model[0].weight.grad.to_dense(), dense[0] * 0.1 / expected)


# --- full parameters --------------------------------------------------------------------------------------------------


@on_two_ranks
def test_full_parameters_refuse_wrong_orders_casts_shapes_and_the_middle_of_a_step() -> None:
    _, model = pair()
    with pytest.raises(ValueError, match="was not given to fully_shard"), full_params(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match="writeback=True, rank0_only=True"), full_params(model, rank0_only=True):
        pass
    words = r"embed.weight is full, .* stays torch.float32.*outside"
    with full_params(model), pytest.raises(RuntimeError, match=words):
        model.embed.double()
    with full_params(model):
        model.to("cpu").float()  # neither casts anything
    local_loss(model, 0).backward()
    words = r"embed.weight.grad has shape \(31, 16\), .* one of shape \(3, 6\)"
    with pytest.raises(RuntimeError, match=words), full_params(model, with_grads=True):
        model.embed.weight.grad.data = torch.ones(3, 6)
    local_loss(model, 0).backward()
    model.layers[0].up.register_forward_hook(lambda *args: full_params(model).__enter__())
    with pytest.raises(RuntimeError, match=r"during forward/backward.* Do it between steps"):
        model(mine())


@on_two_ranks
def test_full_parameters_refuse_what_would_be_lost() -> None:
    unsharded, model = tied_and_sharded()
    with full_params(model):
        with pytest.raises(RuntimeError, match=r"while embed.weight is a full parameter\. Do it outside"), full_params(model):
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
        torch.testing.assert_close(full(ours.grad), theirs.grad)


@on_two_ranks
def test_a_step_inside_is_kept_or_said_to_be_in_the_way() -> None:
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


@on_two_ranks
def test_a_tied_weight_may_be_put_in_any_of_its_places() -> None:
    _, model = tied_and_sharded()
    with full_params(model):
        model.head.weight = nn.Parameter(torch.full((11, 6), 3.0))
    assert (full(model.embed.weight) == 3).all() and model.head.weight is model.embed.weight
    with pytest.raises(NotImplementedError, match=r"shared parameters .*embed.weight is tied, .* got another one"), full_params(model):
        model.head.weight = nn.Parameter(torch.full((11, 6), 4.0))
        model.embed.weight = nn.Parameter(torch.full((11, 6), 5.0))
    assert (full(model.embed.weight) == 3).all() and model.head.weight is model.embed.weight


@on_two_ranks
def test_a_plain_tensor_may_be_put_in_the_place_of_a_parallel_one() -> None:
    model = sharded_and_parallel(Split())
    value = torch.arange(48.0).view(8, 6)
    with full_params(model):
        model.up.weight = nn.Parameter(value.clone())
    assert torch.equal(full(model.up.weight), value)


@on_two_ranks
def test_gradients_that_some_ranks_lack_raise_on_all() -> None:
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


@on_two_ranks
def test_a_compiled_model_reads_what_was_written_and_compiles_nothing_again() -> None:
    unsharded, model = tied_and_sharded()
    run = compiled(model, "aot_eager")
    run(IDS).sum().backward()
    shards, before = list(model.parameters()), num_graphs()
    for value in (2.0, 3.0):
        with full_params(run), torch.no_grad():
            run.head.weight.fill_(value)
        with torch.no_grad():
            unsharded.head.weight.fill_(value)
        output = run(IDS)
        torch.testing.assert_close(output, unsharded(IDS))
        output.sum().backward()
    assert num_graphs() == before, "nothing is compiled again"
    assert all(now is shard for now, shard in zip(model.parameters(), shards, strict=True))
    with full_params(run), torch.no_grad():
        torch.testing.assert_close(run(IDS), unsharded(IDS))
    for rank0_only in (True, False):
        with full_params(model, writeback=False, rank0_only=rank0_only, offload_to_cpu=True):
            assert isinstance(model.head.weight, DTensor) == (rank0_only and dist.get_rank() != 0)


@pytest.mark.parametrize("path", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@on_two_ranks
def test_a_forward_inside_computes_as_one_outside(path: str) -> None:
    """In the dtype of the policy, though full parameters have their own."""
    _, model = pair(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    run = compiled(model, path)
    outside = run(mine())
    for inside, recurse, num_full in ((model, True, 16), (model, False, 4), (model.layers[0], True, 6)):
        with full_params(inside, recurse=recurse):
            assert sum(not isinstance(param, DTensor) for param in model.parameters()) == num_full
            assert all(param.dtype == torch.float32 for param in inside.parameters())
            torch.testing.assert_close(run(mine()), outside, rtol=0, atol=0)


# --- clipping inside of full_params -----------------------------------------------------------------------------------


@on_two_ranks
def test_gradients_are_not_clipped_or_dropped_where_it_would_be_lost() -> None:
    def trained() -> tuple[Any, Any]:
        _, model = pair()
        local_loss(model, 0).backward()
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    model, optim = trained()
    shards = list(model.parameters())
    before = [full(param.grad).clone() for param in shards]

    def unchanged() -> None:
        assert all(torch.equal(full(param.grad), grad) for param, grad in zip(shards, before))

    with full_params(model), pytest.raises(RuntimeError, match=r"embed\.weight is a full parameter.*Leave that block"):
        clip_grad_norm_(model, 0.1)
    unchanged()
    both: list[Any] = [model, shards]
    for given in both:  # one rank would wait for the other
        with full_params(model, writeback=False, rank0_only=True), pytest.raises(RuntimeError, match="Leave that block"):
            clip_grad_norm_(given, 0.1)
    with full_params(model, with_grads=True), pytest.raises(RuntimeError, match="will be the shard's"):
        clip_grad_norm_(shards, 0.1)
    with full_params(model, writeback=False, with_grads=True), pytest.raises(RuntimeError, match="writeback=False:"):
        clip_grad_norm_(model, 0.1)
    unchanged()
    for set_to_none in (True, False):
        model, optim = trained()
        words = r"or its gradient was written to .* zero_grad there"
        with pytest.raises(RuntimeError, match=words), full_params(model, with_grads=True):
            optim.zero_grad(set_to_none=set_to_none)
        left = [param.grad for param in model.parameters()]
        assert all(grad is None if set_to_none else not full(grad).any() for grad in left)

    # What lasts is done: full gradients that are written back, shards outside, and zero_grad where none are full.
    model, optim = trained()
    unsharded = [nn.Parameter(grad.clone()) for grad in before]
    for param, grad in zip(unsharded, before):
        param.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(unsharded, 0.1)
    with full_params(model, with_grads=True):
        torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
    for param, clipped in zip(model.parameters(), unsharded):
        torch.testing.assert_close(full(param.grad), clipped.grad)
    with full_params(model):
        optim.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    local_loss(model, 0).backward()
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
