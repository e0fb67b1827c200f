"""What helpers do inside of one another, and inside of models that have rules of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compile import MixedPrecisionPolicy, auto_shard, clip_grad_norm_, full_params, materialize
from tests.ranks import Ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.up(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class WithRules(Net):
    """As Hugging Face's models: one method for all modules, which is called from inside out."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()
        elif isinstance(module, Block):  # has no parameters of its own
            nn.init.constant_(module.up.weight, 3.0)
        elif isinstance(module, WithRules):  # over all units
            for layer in module.layers:
                layer.norm.bias.data.fill_(5.0)  # type: ignore[union-attr, operator]


X = torch.linspace(-1, 1, 24).view(4, 6)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def sharded(**options: Any) -> Any:
    torch.manual_seed(1)
    return auto_shard(Net(), Block, **options)


def parallel(model: Any, mesh: Any) -> Any:
    parallelize_module(model.first, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    return auto_shard(model, Block, mesh=mesh["dp"])


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


# --- materialize ------------------------------------------------------------------------------------------------------


def _by_rules(in_place: bool) -> None:
    model = on_meta(WithRules)
    if not in_place:
        auto_shard(model, Block)
    materialize(model, "cpu")
    for layer in model.layers:
        assert torch.equal(full(layer.up.weight), torch.full((6, 6), 3.0)), "the block's rule comes after the layer's"
        assert torch.equal(full(layer.norm.bias), torch.full((6,), 5.0)), "and the model's last"
    assert 0.5 < full(model.first.weight).std() < 1.5


@pytest.mark.parametrize("in_place", [True, False], ids=["whole", "sharded"])
def test_rules_of_what_is_around_a_module_hold(two_ranks: Ranks, in_place: bool) -> None:
    two_ranks.run(_by_rules, in_place)


def _beside_weights_that_are_there() -> None:
    model: Any = WithRules()
    expected = copy.deepcopy(model.state_dict())
    model.layers[0].norm = on_meta(lambda: nn.LayerNorm(6))
    materialize(auto_shard(model, Block), "cpu")
    for name, value in model.state_dict().items():
        if not name.startswith("layers.0.norm"):
            assert torch.equal(full(value), expected[name]), name


def test_rules_leave_alone_what_had_values(two_ranks: Ranks) -> None:
    two_ranks.run(_beside_weights_that_are_there)


def _gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    unsharded, model = GPT2LMHeadModel(config), auto_shard(on_meta(lambda: GPT2LMHeadModel(config)))
    materialize(model, "cpu")
    for name, value in unsharded.named_parameters():
        assert full(model.get_parameter(name)).std().item() == pytest.approx(value.std().item(), rel=0.15, abs=2e-3), name


@pytest.mark.more
def test_weights_of_gpt2_are_spread_as_its_own(two_ranks: Ranks) -> None:
    two_ranks.run(_gpt2)


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, unsharded = parallel(on_meta(Net), mesh), on_meta(Net)
    only_parallel = on_meta(Net)
    parallelize_module(only_parallel.first, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    for one in (unsharded, model, only_parallel):
        torch.manual_seed(3)
        materialize(one, "cpu")
    for name, value in unsharded.named_parameters():
        assert torch.equal(full(model.get_parameter(name)), value), name
        assert torch.equal(full(only_parallel.get_parameter(name)), value), name
    assert isinstance(only_parallel.first.weight, DTensor)


def test_tensor_parallel_ranks_do_not_draw_the_same_numbers(two_ranks: Ranks) -> None:
    two_ranks.run(_tensor_parallel)


def _one_rank_fails() -> None:
    rank = torch.distributed.get_rank()

    def init_fn(module: Any) -> None:
        if rank == 1 and isinstance(module, nn.LayerNorm):
            raise KeyError("mine")
        module.reset_parameters()

    error, words = (KeyError, "mine") if rank == 1 else (RuntimeError, "rank 1 raised .*LayerNorm: KeyError: 'mine'")
    with pytest.raises(error, match=words):
        materialize(auto_shard(on_meta(Net), Block), "cpu", init_fn=init_fn)


def test_an_error_of_one_rank_is_raised_on_all(two_ranks: Ranks) -> None:
    two_ranks.run(_one_rank_fails)


# --- full_params ------------------------------------------------------------------------------------------------------


def _forward_in_half(backend: str | None) -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    outside = run(X)
    for inside, recurse in ((model, True), (model, False), (model.layers[0], True)):
        with full_params(inside, recurse=recurse):
            assert all(param.dtype == torch.float32 for param in inside.parameters(recurse=False))
            torch.testing.assert_close(run(X), outside, rtol=0, atol=0 if backend != "inductor" else 2e-2)


@pytest.mark.parametrize("backend", [None, *(pytest.param(one, marks=pytest.mark.more) for one in ("aot_eager", "inductor"))])
def test_a_forward_inside_computes_as_one_outside(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(_forward_in_half, backend)


def _refused() -> None:
    model = sharded()
    with full_params(model), pytest.raises(RuntimeError, match=r"first.weight is full, .* stays torch.float32.*outside"):
        model.first.double()
    with full_params(model):
        model.to("cpu").float()  # neither casts anything
    model(X).sum().backward()
    words = r"first.weight.grad has shape \(6, 6\), .* one of shape \(3, 6\)"
    with pytest.raises(RuntimeError, match=words), full_params(model, with_grads=True):
        model.first.weight.grad.data = torch.ones(3, 6)
    model(X).sum().backward()


def test_casts_and_gradients_that_do_not_fit_are_refused_on_every_rank(two_ranks: Ranks) -> None:
    two_ranks.run(_refused)


def _plain_for_parallel() -> None:
    model = parallel(Net(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    value = torch.arange(36.0).view(6, 6)
    with full_params(model):
        model.first.weight = nn.Parameter(value.clone())
    assert torch.equal(full(model.first.weight), value)


def test_a_plain_tensor_may_be_put_in_the_place_of_a_parallel_one(two_ranks: Ranks) -> None:
    two_ranks.run(_plain_for_parallel)


def _trained() -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = auto_shard(Net(), Block)
    model(X).pow(2).mean().backward()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def _gradients_that_would_be_lost() -> None:
    model, optim = _trained()
    shards = list(model.parameters())
    before = [full(param.grad).clone() for param in shards]  # type: ignore[arg-type]

    def unchanged() -> None:
        assert all(torch.equal(full(param.grad), grad) for param, grad in zip(shards, before))  # type: ignore[arg-type]

    with full_params(model), pytest.raises(RuntimeError, match=r"first\.weight is a full parameter.*Leave that block"):
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
        model, optim = _trained()
        words = r"or its gradient was written to .* zero_grad there"
        with pytest.raises(RuntimeError, match=words), full_params(model, with_grads=True):
            optim.zero_grad(set_to_none=set_to_none)
        left = [param.grad for param in model.parameters()]
        assert all(grad is None if set_to_none else not full(grad).any() for grad in left)  # type: ignore[arg-type]

    # What lasts is done: full gradients that are written back, shards outside, and zero_grad where none are full.
    model, optim = _trained()
    unsharded = [nn.Parameter(grad.clone()) for grad in before]
    for param, grad in zip(unsharded, before):
        param.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(unsharded, 0.1)
    with full_params(model, with_grads=True):
        torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)
    for param, clipped in zip(model.parameters(), unsharded):
        torch.testing.assert_close(full(param.grad), clipped.grad)  # type: ignore[arg-type]
    with full_params(model):
        optim.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    model(X).pow(2).mean().backward()
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), expected)


def test_gradients_are_not_clipped_or_dropped_where_it_would_be_lost(two_ranks: Ranks) -> None:
    two_ranks.run(_gradients_that_would_be_lost)


def test_a_module_is_no_policy(fake_group_of_four: None) -> None:
    with pytest.raises(TypeError, match=r"policy is a Block module itself. Pass its class"):
        auto_shard(Net(), Block())
