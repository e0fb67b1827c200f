"""``copy.deepcopy`` of sharded models: copies that are sharded alike and train by themselves."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compile
from fsdp_compile import FSDPModule, fully_shard
from fsdp_compile.core.spec import spec_of
from fsdp_compile.core.unit import unit_of
from fsdp_compile.eager.running import running
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    backward_on_both,
    batches,
    full,
    loss_of,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import compiled, num_graphs
from tests.models import Block, EvenBlock, Stack, mesh_of, pair, shard, twins
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.test_extension import Halved


def storages(model: nn.Module) -> set[int]:
    return {param.to_local().untyped_storage().data_ptr() for param in model.parameters() if param.to_local().numel()}


def units(model: nn.Module) -> list[Any]:
    return fsdp_compile.core.unit.units_in(model)


def train_on(x: Tensor, run: Any, twin: nn.Module, reference: nn.Module) -> None:
    """Take two steps, in which each rank trains on its own part of ``x``."""
    for _ in range(2):
        run(x[dist.get_rank()]).pow(2).mean().backward()
        for one in x:
            (reference(one).pow(2).mean() / len(x)).backward()
        assert_same_grads(twin, reference)
        for one in (twin, reference):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()


@pytest.mark.parametrize("path", ["eager", pytest.param("aot_eager", marks=pytest.mark.compat)])
@on_two_ranks
def test_a_copy_and_the_original_train_like_two_models(path: str) -> None:
    unsharded, model = pair(make=lambda: Stack(1, tied=True))
    theirs = copy.deepcopy(unsharded)
    run = compiled(model, path)
    loss_of(run(mine())).backward()
    grads = [full(param.grad).clone() for param in model.parameters()]
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and twin.layers[0] is not model.layers[0]
    assert twin.head.weight is twin.embed.weight and not storages(model) & storages(twin)
    assert all(param.grad is None for param in twin.parameters())  # as nn.Parameter copies itself
    before = num_graphs()
    train_and_compare(compiled(twin, path), twin, unsharded, steps=2)
    assert num_graphs() == before  # equal classes share them
    for param, grad in zip(model.parameters(), grads):
        torch.testing.assert_close(full(param.grad), grad, atol=0, rtol=0)
    model.zero_grad()
    train_and_compare(run, model, theirs, steps=2)
    assert_same_params(twin, unsharded, atol=1e-4, rtol=1e-3)


@on_two_ranks
def test_a_copy_has_the_settings_of_the_original() -> None:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Stack(3)
    kept = model.norm.bias
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard([model.norm, model.head], mp_policy=policy, ignored_params={kept})
    fully_shard(model, ignored_params={kept})
    first, second, third = model.layers
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([first])
    second.set_gradient_divide_factor(3.0)
    second.set_requires_gradient_sync(False)
    first.set_all_reduce_hook(print)
    first.weightless = first.up  # one more place for a module
    fsdp_compile.configure(model, bucketing="none", reduction="all_to_all")
    model.set_is_last_backward(False)
    model.layers[0].norm.weight.requires_grad_(False)
    twin = copy.deepcopy(model)

    theirs = [unit_of(layer) for layer in twin.layers]
    assert theirs[0].settings.forward_prefetch == theirs[1:] and theirs[2].settings.backward_prefetch == theirs[:1]
    assert [unit.settings.divide_factor for unit in theirs] == [None, 3.0, None]
    assert [unit.accumulation.sync for unit in theirs] == [True, False, True]
    assert theirs[0].settings.comms.all_reduce_hook is print
    assert theirs[0].settings.comms is not unit_of(first).settings.comms
    assert {unit.outer for unit in theirs} == {unit_of(twin)} and unit_of(twin).outer is None
    assert unit_of(twin.norm) is unit_of(twin.head) and unit_of(twin.head).modules == (twin.norm, twin.head)
    assert not running(unit_of(twin)).iteration.is_last_backward
    assert not isinstance(twin.norm.bias, torch.distributed.tensor.DTensor)
    assert not twin.layers[0].norm.weight.requires_grad and twin.layers[0].weightless is twin.layers[0].up
    for ours, unit in zip(units(model), units(twin), strict=True):
        assert unit is not ours and unit.settings is not ours.settings
        assert unit.accumulation is not ours.accumulation
        assert unit.mp_policy == ours.mp_policy and unit.mesh == ours.mesh
        for name in ("bucketing", "reduction", "reshard_after_forward"):
            assert getattr(unit.settings, name) == getattr(ours.settings, name), name
        for name in ("is_root", "regather", "label"):
            assert getattr(unit, name) == getattr(ours, name), name
        assert [param.fqn for param in unit.params] == [param.fqn for param in ours.params]
        assert [spec_of(unit, param) for param in unit.params] == [spec_of(ours, param) for param in ours.params]
        for view in (torch.distributed.fsdp.fully_shard.state(module) for module in unit.modules):
            assert view._comm_ctx is running(unit).iteration.traffic is not running(ours).iteration.traffic
    assert [type(one) for one in twin.modules()] == [type(one) for one in model.modules()]
    twin.layers[1].set_requires_gradient_sync(True)
    assert not unit_of(second).accumulation.sync


@on_two_ranks
def test_a_part_of_a_model_is_copied_as_a_model() -> None:
    unsharded, model = pair()
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    container = nn.Sequential(*model.layers)
    parts = {
        "an inner unit": (model.layers[0], unsharded.layers[0]),
        "a container of units": (container, nn.Sequential(*unsharded.layers)),
        "a module inside a unit": (model.layers[1].norm, unsharded.layers[1].norm),
    }
    for name, (part, reference) in parts.items():
        twin, reference = copy.deepcopy(part), copy.deepcopy(reference)
        assert units(twin) and all(unit.outer is None and unit.is_root for unit in units(twin)), name
        train_on(x, twin, twin, reference)
    train_and_compare(model, model, unsharded, steps=1)


@on_two_ranks
def test_tied_weights_are_tied_in_the_copy() -> None:
    unsharded, model = twins(lambda: Stack(1, tied=True))
    for module in (model.embed, model.head, model):
        fully_shard(module)
    head = copy.deepcopy(model.head)
    assert [param.fqn for param in unit_of(head).params] == ["weight"]
    both = copy.deepcopy(nn.ModuleDict({"head": model.head, "embed": model.embed}))
    assert both["head"].weight is both["embed"].weight and both["head"].weight is not model.head.weight
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    for run in (head, both["head"]):
        run(x[dist.get_rank()]).pow(2).mean().backward()
        unsharded.zero_grad()
        torch.stack([unsharded.head(one).pow(2).mean() for one in x]).mean().backward()
        torch.testing.assert_close(full(run.weight.grad), unsharded.head.weight.grad)
    torch.testing.assert_close(both["embed"](mine()), unsharded.embed(mine()))
    train_and_compare(copy.deepcopy(model), model, unsharded, steps=0)


@on_two_ranks
def test_a_copy_is_idle_whatever_the_original_does() -> None:
    unsharded, model = pair()
    refused: list[Any] = []

    def in_backward(grad: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"\(root\) \(Stack\): .* while a backward runs"):
            copy.deepcopy(model)
        refused.append(grad)

    twins: list[Any] = []
    handle = model.layers[1].register_forward_hook(lambda *_: twins.append(copy.deepcopy(model)))
    out = model(mine())
    handle.remove()
    out.register_hook(in_backward)
    with fsdp_compile.no_sync(model):
        loss_of(out).backward()
    assert refused
    twins[0].layers[1]._forward_hooks.clear()  # copied, as nn.Module does
    twins.append(copy.deepcopy(model))  # gradients wait in the original
    model.unshard()
    twins.append(copy.deepcopy(model))
    assert isinstance(twins[-1].head.weight, torch.distributed.tensor.DTensor)
    model.reshard()
    twins.append(copy.deepcopy(twins[-1]))
    for twin in twins:
        train_and_compare(twin, twin, copy.deepcopy(unsharded), steps=1)
    loss_of(model(mine())).backward()
    for _ in range(2):
        reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)


class Odd(nn.Module):
    """Copies itself in a way of its own, and has a list of its parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(16, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 16)

    def __deepcopy__(self, memo: dict[int, Any]) -> Odd:
        twin = type(self)()
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.num_copies = getattr(self, "num_copies", 0) + 1
        return twin

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rnn(x)[0]
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.out(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


@on_two_ranks
def test_modules_with_a_copy_of_their_own() -> None:
    torch.manual_seed(0)
    traced = torch.fx.symbolic_trace(Block())
    x = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(1))
    for unsharded in (Odd(), traced):
        reference = copy.deepcopy(unsharded)
        twin: Any = copy.deepcopy(fully_shard(unsharded))
        assert getattr(twin, "num_copies", 0) == getattr(reference, "num_copies", 0)
        train_on(x, twin, twin, reference)


@on_four_ranks
def test_a_copy_is_on_the_meshes_of_the_original() -> None:
    for kind in ("replicas", "offload", "tensor parallel"):
        unsharded, model = twins(lambda: Stack(1, block=EvenBlock))
        place, places = dist.get_rank(), 4
        if kind == "replicas":
            shard(model, mesh=mesh_of("replicate", "shard"))
        elif kind == "offload":
            shard(model, offload_policy=fsdp_compile.CPUOffloadPolicy(), reshard_after_forward=2)
        else:
            mesh = mesh_of("dp", "tp")
            for layer in model.layers:
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            shard(model, mesh=mesh["dp"])
            place, places = dist.get_rank() // 2, 2
        twin = copy.deepcopy(model)
        assert [param.placements for param in twin.parameters()] == [param.placements for param in model.parameters()], kind
        train_and_compare(twin, twin, unsharded, steps=1, place=place, num_places=places)


@on_two_ranks
def test_a_copy_of_a_subclass_says_what_travels_too() -> None:
    unsharded, model = twins(lambda: Stack(1))
    model.layers[0].down.weight = nn.Parameter(Halved(model.layers[0].down.weight.detach()))
    with torch.no_grad():
        sent = unsharded.layers[0].down.weight / 2
        unsharded.layers[0].down.weight.copy_(sent.to(torch.bfloat16).float() * 2)
    twin = copy.deepcopy(shard(model))
    assert type(twin.layers[0].down.weight.to_local()) is Halved
    backward_on_both(twin, unsharded, 0)
    assert_same_grads(twin, unsharded)


@on_two_ranks
def test_copies_of_compiled_models_are_what_torch_makes_of_plain_ones() -> None:
    unsharded, model = pair(make=lambda: Stack(1))
    wrapper = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss_of(wrapper(mine())).backward()
    before = num_graphs()
    twin = copy.deepcopy(wrapper)
    assert type(twin) is type(copy.deepcopy(torch.compile(nn.Linear(2, 2))))  # a wrapper of the copy
    assert list(twin.state_dict()) == list(wrapper.state_dict())
    assert [key for key, _ in twin.named_parameters()] == [key for key, _ in wrapper.named_parameters()]
    train_and_compare(twin, twin._orig_mod, copy.deepcopy(unsharded), steps=1)

    model.compile(backend="aot_eager", fullgraph=True)
    plain = nn.Linear(2, 2)
    plain.compile()
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None and copy.deepcopy(plain)._compiled_call_impl is None
    twin.compile(backend="aot_eager", fullgraph=True)
    train_and_compare(twin, twin, copy.deepcopy(unsharded), steps=1)
    assert num_graphs() <= before + 1


@on_two_ranks
def test_pickle_and_shallow_copies_say_what_to_do_instead() -> None:
    _, sharded = pair(make=lambda: Stack(1))
    assert isinstance(sharded, FSDPModule) and isinstance(sharded, Stack)
    for one in (sharded, sharded.layers[0].up):
        with pytest.raises(RuntimeError, match="state_dict"):
            pickle.dumps(one)
        with pytest.raises(RuntimeError, match="state_dict"):
            torch.save(one, io.BytesIO())
        with pytest.raises(TypeError, match=rf"{type(one).__name__}.*copy\.deepcopy"):
            copy.copy(one)
