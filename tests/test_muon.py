"""Muon on sharded matrices has the numbers of torch.optim.Muon on the unsharded model, in two exchanges a bucket."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import fully_shard
from fsdp_compile.optim import Muon, Owners, muon_groups, owners
from tests.comparing import assert_same_grads, batches, full, local_loss, reference_backward
from tests.models import Stack, shard, twins
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.recording import Wire

SIZES = [(24, 16), (16, 24), (5, 16), (24, 16), (1, 3), (16, 16), (24, 16)]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=generator) for size in SIZES]


def placed(mesh: DeviceMesh, placements: list[Any]) -> list[nn.Parameter]:
    return [nn.Parameter(distribute_tensor(param.detach(), mesh, placements)) for param in matrices()]


PLACED: dict[str, tuple[tuple[int, ...], list[Any]] | None] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicas": ((2, 2), [Replicate(), Shard(0)]),
    "tensor parallel": ((2, 2), [Shard(0), Shard(1)]),
    "replicated": ((4,), [Replicate()]),
    "plain": None,
}


def matrices_on(case: str) -> list[nn.Parameter]:
    """Return the matrices on four ranks, in one of the ways of PLACED."""
    how = PLACED[case]
    return matrices() if how is None else placed(init_device_mesh("cpu", how[0]), how[1])


def placed_like(grad: Tensor, param: Tensor) -> Tensor:
    return distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], num_steps: int = 3) -> None:
    for step in range(num_steps):
        for param, grad in zip(params, gradients(step)):
            param.grad = placed_like(grad, param)
        optimizer.step()


SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2, "nesterov": False, "ns_steps": 3}


@on_four_ranks
@pytest.mark.parametrize("settings", [{}, {**SETTINGS, "adjust_lr_fn": "match_rms_adamw"}], ids=["", "settings"])
@pytest.mark.parametrize("bucket", [owners._BUCKET_ELEMENTS, 1])
@pytest.mark.parametrize("case", PLACED)
def test_numbers_are_those_of_torch_on_unsharded_matrices(case: str, bucket: int, settings: dict[str, Any]) -> None:
    """To the bit: the parts of a matrix are put together before anything but elementwise ops is done with them."""
    owners._BUCKET_ELEMENTS, before = bucket, owners._BUCKET_ELEMENTS
    ours, theirs = matrices_on(case), matrices()
    train(Muon(ours, **settings), ours)
    train(torch.optim.Muon(theirs, **settings), theirs)
    owners._BUCKET_ELEMENTS = before
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


@on_two_ranks
@pytest.mark.parametrize("backend", ["inductor", pytest.param("eager", marks=pytest.mark.more)])
def test_a_compiled_model_trains_as_the_unsharded_one(backend: str) -> None:
    """Matrices of the blocks by Muon, the rest by AdamW, each at its own learning rate, which a schedule lowers."""
    model, reference = twins(Stack)
    shard(model)
    ours = Muon(muon_groups(model), lr=0.02, adamw={"lr": 3e-3})
    hidden, others = (group["params"] for group in muon_groups(reference))
    muon = torch.optim.Muon([param for _, param in hidden], lr=0.02)
    adamw = torch.optim.AdamW([param for _, param in others], lr=3e-3)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (ours, muon, adamw)]
    run = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(4):
        local_loss(run, step).backward()
        reference_backward(reference, batches(step))
        assert_same_grads(model, reference)
        for param, other in zip(model.parameters(), reference.parameters()):
            other.grad = full(param.grad).clone()  # Newton-Schulz makes much of the last bit
        for one in (ours, muon, adamw):
            one.step()
            one.zero_grad()
        for schedule in schedules:
            schedule.step()
    for (fqn, param), other in zip(model.named_parameters(), reference.parameters()):
        assert torch.equal(full(param), other), fqn


@on_two_ranks
def test_states_move_between_numbers_of_ranks_and_torchs_optimizer() -> None:
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, bias=False))
    sharded = copy.deepcopy(unsharded)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    whole = StateDictOptions(full_state_dict=True)

    def matrices_of(model: nn.Module) -> list[nn.Parameter]:
        return [param for param in model.parameters() if param.ndim == 2]

    def give_gradients(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for param, other in zip(matrices_of(sharded), matrices_of(unsharded)):
            other.grad = torch.randn(other.shape, generator=generator)
            assert isinstance(param, DTensor)
            param.grad = distribute_tensor(other.grad, param.device_mesh, param.placements)

    theirs, ours = torch.optim.Muon(matrices_of(unsharded)), Muon(matrices_of(sharded))
    give_gradients(0)
    theirs.step()
    for param, other in zip(matrices_of(sharded), matrices_of(unsharded)):
        param.data.copy_(distribute_tensor(other.data, param.device_mesh, param.placements))
    ours.zero_grad()  # torch initializes the state of an optimizer that has no gradients
    set_optimizer_state_dict(sharded, ours, get_optimizer_state_dict(unsharded, theirs, options=whole), options=whole)
    give_gradients(1)
    for one in (theirs, ours):
        one.step()
    back = get_optimizer_state_dict(sharded, ours, options=whole)
    expected = get_optimizer_state_dict(unsharded, theirs, options=whole)
    if dist.get_rank() == 0:
        assert [*back["state"]] == [*expected["state"]]
        for fqn, state in expected["state"].items():
            assert torch.equal(back["state"][fqn]["momentum_buffer"], state["momentum_buffer"])
    for param, other in zip(matrices_of(sharded), matrices_of(unsharded)):
        assert torch.equal(full(param), other)


@pytest.mark.more
@on_two_ranks
def test_a_step_inside_compiled_code_has_the_same_numbers() -> None:
    """It runs as it is, between the graphs."""
    ours, theirs = placed(init_device_mesh("cpu", (2,)), [Shard(0)]), matrices()
    ours_1d, theirs_1d = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    muon = Muon([*ours, ours_1d], adamw={"lr": 0.1})
    step = torch.compile(muon.step)
    others = torch.optim.Muon(theirs), torch.optim.AdamW([theirs_1d], lr=0.1)
    for number in range(3):
        for param, other, grad in zip(ours, theirs, gradients(number)):
            assert isinstance(param, DTensor)
            param.grad, other.grad = distribute_tensor(grad, param.device_mesh, param.placements), grad
        ours_1d.grad, theirs_1d.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
        step()
        for one in others:
            one.step()
    for param, other in zip(ours, theirs):
        assert torch.equal(full(param), other)
    torch.testing.assert_close(ours_1d, theirs_1d)


@on_two_ranks
def test_a_step_is_two_exchanges_and_each_matrix_is_computed_once() -> None:
    params = placed(init_device_mesh("cpu", (2,)), [Shard(0)])
    computed: list[int] = []

    def compute(places: Any, wholes: Any) -> list[Tensor]:
        computed.extend(places)
        return [2 * whole for whole in wholes]

    with Wire() as wire:
        results = Owners(params).run(compute, [param.to_local() for param in params])
    assert wire.calls == {"all_to_all": 2}
    everybody: list[Any] = [None] * 2
    dist.all_gather_object(everybody, computed)
    assert sorted(everybody[0] + everybody[1]) == [*range(len(SIZES))]
    for param, result in zip(params, results):
        assert torch.equal(result, 2 * param.to_local())


def test_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "up": nn.Linear(4, 6), "head": nn.Linear(6, 7)})
    hidden, others = muon_groups(model)
    assert [name for name, _ in hidden["params"]] == ["up.weight"]
    assert [name for name, _ in others["params"]] == ["embed.weight", "up.bias", "head.weight", "head.bias"]
    optimizer = Muon(model.parameters(), adamw={"lr": 0.5, "betas": (0.8, 0.9)})
    assert [(group["algorithm"], len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [
        ("muon", 3, 1e-3),
        ("adamw", 2, 0.5),
    ]
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
