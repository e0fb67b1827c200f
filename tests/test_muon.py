"""Muon on sharded matrices has the numbers of torch.optim.Muon on the unsharded model, in two exchanges a bucket."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import fully_shard
from fsdp_compile.optim import Muon, Owners, muon_groups, owners
from tests.comparing import full
from tests.on_ranks import on_four_ranks
from tests.recording import Wire

SIZES = [(24, 16), (16, 24), (5, 16), (24, 16), (1, 3), (16, 16), (24, 16)]


def gradients(step: int, sizes: Sequence[tuple[int, ...]] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=generator) for size in sizes]


def matrices(sizes: Sequence[tuple[int, ...]] = SIZES) -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in gradients(-1, sizes)]


def placed(mesh: DeviceMesh, placements: list[Any], sizes: Sequence[tuple[int, ...]] = SIZES) -> list[nn.Parameter]:
    return [nn.Parameter(distribute_tensor(param.detach(), mesh, placements)) for param in matrices(sizes)]


PLACED: dict[str, tuple[tuple[int, ...], list[Any]] | None] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicas": ((2, 2), [Replicate(), Shard(0)]),
    "tensor parallel": ((2, 2), [Shard(0), Shard(1)]),
    "replicated": ((4,), [Replicate()]),
    "plain": None,
}


def matrices_on(case: str, sizes: Sequence[tuple[int, ...]] = SIZES) -> list[nn.Parameter]:
    """Return the matrices on four ranks, in one of the ways of PLACED."""
    how = PLACED[case]
    return matrices(sizes) if how is None else placed(init_device_mesh("cpu", how[0]), how[1], sizes)


def placed_like(grad: Tensor, param: Tensor) -> Tensor:
    return distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], num_steps: int = 3) -> None:
    for step in range(num_steps):
        for param, grad in zip(params, gradients(step)):
            param.grad = placed_like(grad, param)
        optimizer.step()


SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2, "nesterov": False, "ns_steps": 3}


@on_four_ranks
@pytest.mark.parametrize("case", PLACED)
def test_numbers_are_those_of_torch_on_unsharded_matrices(case: str) -> None:
    """To the bit: the parts of a matrix are put together before anything but elementwise ops is done with them."""
    for bucket, settings in ((owners._BUCKET_ELEMENTS, {}), (1, {**SETTINGS, "adjust_lr_fn": "match_rms_adamw"})):
        ours, theirs = matrices_on(case), matrices()
        with mock.patch.object(owners, "_BUCKET_ELEMENTS", bucket):
            train(Muon(ours, **settings), ours)
        train(torch.optim.Muon(theirs, **settings), theirs)
        for mine, other in zip(ours, theirs):
            assert torch.equal(full(mine), other)


class Parallel(nn.Module):
    """A matrix for each side of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)


@on_four_ranks
def test_strided_shards_of_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh.get_coordinate()  # type: ignore[misc]
    torch.manual_seed(0)
    model = Parallel()
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    for param, other, dim in zip(model.parameters(), reference.parameters(), (0, 1)):
        other.grad = torch.randn(other.shape)
        assert isinstance(param, DTensor)
        param.grad = DTensor.from_local(
            other.grad.chunk(2, dim)[tensor].chunk(2, 0)[data],  # tensor parallelism cuts first
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    Muon(model.parameters(), lr=0.1).step()
    torch.optim.Muon(reference.parameters(), lr=0.1).step()
    for (fqn, param), other in zip(model.named_parameters(), reference.parameters()):
        assert torch.equal(full(param), other), fqn


STACKS = [(3, 24, 16), (5, 4, 16), (1, 8, 8), (3, 16, 24)]
ADJUST = ["match_rms_adamw"]
if torch.torch_version.TorchVersion(torch.__version__) >= (2, 15):  # 2.11 does not have it
    ADJUST.append("spectral_unclamped")


@on_four_ranks
@pytest.mark.parametrize("case, adjust", [*((case, "original") for case in PLACED), *(("rows", one) for one in ADJUST)])
def test_a_stack_of_matrices_is_trained_as_each_of_them(case: str, adjust: str) -> None:
    """To the bit."""
    ours, theirs = matrices_on(case, STACKS), matrices(STACKS)
    slices = [nn.Parameter(one) for stack in theirs for one in stack.detach()]
    optimizer = Muon([{"params": ours, "algorithm": "muon"}], lr=0.05, adjust_lr_fn=adjust)
    other = torch.optim.Muon(slices, lr=0.05, adjust_lr_fn=adjust)
    for step in range(3):
        grads = gradients(step, STACKS)
        for param, grad in zip(ours, grads):
            param.grad = placed_like(grad, param)
        for one, grad in zip(slices, itertools.chain(*grads)):
            one.grad = grad
        optimizer.step()
        other.step()
    for mine, stack in zip(ours, theirs):
        assert torch.equal(full(mine), stack)


@on_four_ranks
def test_a_step_is_two_exchanges_and_each_matrix_is_computed_once() -> None:
    params = matrices_on("rows")
    computed: list[int] = []

    def compute(places: Any, wholes: Any) -> list[Tensor]:
        computed.extend(places)
        return [2 * whole for whole in wholes]

    with Wire() as wire:
        results = Owners(params).run(compute, [param.to_local() for param in params])
    assert wire.calls == {"all_to_all": 2}
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, computed)
    assert sorted(itertools.chain(*everybody)) == [*range(len(SIZES))]
    for param, result in zip(params, results):
        assert torch.equal(result, 2 * param.to_local())


def test_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "up": nn.Linear(4, 6), "head": nn.Linear(6, 7)})
    hidden, others = muon_groups(model)
    assert [name for name, _ in hidden["params"]] == ["up.weight"]
    assert [name for name, _ in others["params"]] == ["embed.weight", "up.bias", "head.weight", "head.bias"]
    optimizer = Muon(model.parameters(), adamw={"lr": 0.5, "betas": (0.8, 0.9)})
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(3, 1e-3), (2, 0.5)]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        ({"algorithm": "adam"}, {}, "algorithm is 'adam'. Choose one of"),
        ({"algorithm": "muon"}, {}, "the shape \\(3,\\). Put it into a group with algorithm='adamw'"),
        ({}, {"adjust_lr_fn": "mine"}, "adjust_lr_fn is 'mine'. Choose one of"),
        ({}, {"lr": -1.0}, "lr is -1.0. It cannot be negative"),
        ({}, {"ns_steps": 100}, "from 1 to 99 steps"),
    ],
)
def test_mistakes(given: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], **given}], **settings)


def test_settings_of_adamw_and_a_model_are_of_their_types() -> None:
    with pytest.raises(TypeError, match=r"adamw is of str\. Give AdamW's settings"):
        Muon([nn.Parameter(torch.zeros(3))], adamw="fused")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"muon_groups takes a module, but got list"):
        muon_groups([nn.Parameter(torch.zeros(3))])  # type: ignore[arg-type]
