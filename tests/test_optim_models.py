"""Muon, WholeTensorOptimizer and StatesOnHost train models, however sharded, as the unsharded ones are: to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Optimizer

from fsdp_compile import CPUOffloadPolicy, ShardPlacementResult
from fsdp_compile.optim import Muon, StatesOnHost, WholeTensorOptimizer, muon_groups
from tests.comparing import assert_same_grads, assert_same_params, batches, full, loss_of, mine, reference_backward
from tests.fsdp1_scripts import CPU, OURS, ModuleWrapPolicy
from tests.models import Block, Stack, mesh_of, shard, twins
from tests.on_ranks import on_four_ranks, on_two_ranks

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.2}


class Mixed(Block):
    """A block with a stack of three matrices."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.experts = nn.Parameter(torch.randn(3, dim, dim + 1) / dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.einsum("btd,edf->btf", x, self.experts)[..., 1:]


def groups_of(model: nn.Module) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the named matrices, stacks of matrices and other parameters."""
    hidden, others = (group["params"] for group in muon_groups(model))
    return hidden, [one for one in others if one[1].ndim == 3], [one for one in others if one[1].ndim != 3]


def muon(model: nn.Module) -> Muon:
    hidden, stacks, others = groups_of(model)
    matrices = {"params": [*hidden, *stacks], "algorithm": "muon"}
    return Muon([matrices, {"params": others, "algorithm": "adamw"}], **MUON, adamw={"lr": 3e-3})


def torchs_muon(model: nn.Module) -> list[Optimizer]:
    """Return torch's Muon, which has each matrix of a stack as a parameter, and AdamW."""
    hidden, stacks, others = groups_of(model)
    slices = [(nn.Parameter(one), stack, place) for _, stack in stacks for place, one in enumerate(stack.detach())]
    named = [(f"slice {number}", one) for number, (one, _, _) in enumerate(slices)]
    optimizer = torch.optim.Muon([*hidden, *named], **MUON)

    def give_gradients(*_: Any) -> None:
        for one, stack, place in slices:
            one.grad = None if stack.grad is None else stack.grad[place]

    optimizer.register_step_pre_hook(give_gradients)
    return [optimizer, AdamW(others, lr=3e-3)]


class SmallStatesOnHost(StatesOnHost):
    """Small states are copied as well, in several buckets."""

    _least_bytes, _bucket_bytes = 0, 1024


#: What makes ours on a sharded model, and what makes the class's own on an unsharded one.
KINDS: dict[str, tuple[Callable[[nn.Module], Optimizer], Callable[[nn.Module], list[Optimizer]]]] = {
    "Muon": (muon, torchs_muon),
    "SOAP": (
        lambda model: WholeTensorOptimizer(model.named_parameters(), SOAP, lr=0.01, precondition_frequency=2),
        lambda model: [SOAP(model.named_parameters(), lr=0.01, precondition_frequency=2)],
    ),
    "on the host": (
        lambda model: SmallStatesOnHost(model.named_parameters(), AdamW, keep=500, lr=3e-3, amsgrad=True),
        lambda model: [AdamW(model.named_parameters(), lr=3e-3, amsgrad=True)],
    ),
}


def _offloaded(model: Any) -> Any:
    return shard(model, offload_policy=CPUOffloadPolicy())


def _on_two_meshes(model: Any) -> Any:
    """The experts are shared out over two of the four ranks, one by one; their gradients are averaged over the two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    experts = {layer.experts for layer in model.layers}
    placed = ShardPlacementResult(Shard(0), mesh["inner"])
    return shard(model, shard_placement_fn=lambda param: placed if param in experts else None)


def _replicas(model: Any) -> Any:
    return shard(model, mesh=mesh_of("dp", "fsdp"), shard_placement_fn=lambda param: Shard(int(param.ndim == 3)))


def _fsdp1(model: Any) -> Any:
    return OURS(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=CPU)


WAYS = {one.__name__[1:]: one for one in (_offloaded, _on_two_meshes, _replicas)}


def _steps_of(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
    def step(number: int) -> None:
        loss_of(model(mine(number))).backward()
        optimizer.step()

    return step


def _train(step: Callable[[int], Any], model: nn.Module, reference: nn.Module, others: list[Optimizer]) -> None:
    """Take three steps on both, with gradients of the sharded one: optimizers make much of the last bit."""
    for number in range(3):
        step(number)
        reference_backward(reference, batches(number))
        if len({param.device_mesh for param in model.parameters()}) == 1:  # otherwise, means are of different batches
            assert_same_grads(model, reference)
        for param, whole in zip(model.parameters(), reference.parameters()):
            whole.grad = full(param.grad).clone()
        for one in others:
            one.step()
        model.zero_grad()
        reference.zero_grad()
    assert_same_params(model, reference, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@on_four_ranks
def test_a_sharded_model_trains_as_the_unsharded_one(way: str, kind: str) -> None:
    reference, model = twins(lambda: Stack(1, block=Mixed))
    ours, theirs = KINDS[kind]
    model = WAYS[way](model)
    optimizer = ours(model)
    _train(_steps_of(model, optimizer), model, reference, theirs(reference))


@pytest.mark.parametrize("kind", KINDS)
@on_four_ranks
def test_an_optimizer_that_was_built_before_fsdp1_wrapped_its_model_has_the_shards(kind: str) -> None:
    reference, model = twins(lambda: Stack(1, block=Mixed))
    ours, theirs = KINDS[kind]
    optimizer = ours(model)
    model = _fsdp1(model)
    _train(_steps_of(model, optimizer), model, reference, theirs(reference))


@on_two_ranks
def test_a_compiled_step_trains_as_the_unsharded_model() -> None:
    """Python runs the optimizer's step, behind the graphs. All kinds inherit one ``step``, so one kind shows it for all."""
    reference, model = twins(lambda: Stack(1, block=Mixed))
    optimizer = muon(shard(model))

    @torch.compile(backend="aot_eager")
    def step(tokens: Tensor) -> None:
        loss_of(model(tokens)).backward()
        optimizer.step()

    _train(lambda number: step(mine(number)), model, reference, torchs_muon(reference))
