"""Users' mistakes: the exception's type, and the FQN and the remedy in its text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard, replicate
from fsdp_compile.fsdp1 import FullyShardedDataParallel, MixedPrecision
from tests.messages import Holder
from tests.models import PLAIN, Block, Stack, shard

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


def _linear(**kwargs: Any) -> None:
    fully_shard(nn.Sequential(nn.Linear(6, 8)), **kwargs)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _tensor_parallel() -> None:
    mesh = _mesh((4,))
    fully_shard(Holder(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])))


def _unit() -> Any:
    return fully_shard(nn.Linear(4, 4))


def _on_another_device() -> None:
    theirs = DeviceMesh("meta", [0, 1, 2, 3], mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    weight = DTensor.from_local(torch.ones(4, 4, device="meta"), theirs, [Replicate()], run_check=False)
    fully_shard(Holder(weight), mesh=_mesh((4,), ("dp",)))


def _change_a_policy() -> None:
    MixedPrecisionPolicy(param_dtype=torch.bfloat16).param_dtype = torch.float16  # type: ignore[misc]


Row = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "a ModuleDict has no forward": (lambda: fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), ValueError, ("list",)),
    "a list member without forward": (lambda: fully_shard([nn.ModuleList()]), ValueError, ("ModuleList",)),
    "nothing": (lambda: fully_shard([]), ValueError, ("at least one",)),
    "not a module": (lambda: fully_shard(torch.ones(2)), TypeError, ("Tensor",)),
    "a DTensor on the ranks to shard over": (_tensor_parallel, ValueError, ("inner.bad", "names")),
    "a DTensor on another kind of device": (_on_another_device, ValueError, ("inner.bad", "meta", "cpu")),
    "a policy is changed": (_change_a_policy, dataclasses.FrozenInstanceError, ("param_dtype",)),
    "placement far out of range": (
        lambda: _linear(shard_placement_fn=lambda param: Shard(-3)), AssertionError, ("0.weight", "dims 0 to 1")),
    "prefetching a list that is none": (
        lambda: _unit().set_modules_to_forward_prefetch(_unit()), TypeError, ("set_modules_to_forward_prefetch", "list")),
    "a divide factor of zero": (lambda: _unit().set_gradient_divide_factor(0), ValueError, ("0", "positive")),
    "a gather that cannot allocate": (
        lambda: _unit().set_custom_all_gather(len), TypeError, ("set_custom_all_gather", "allocate")),
    "a reduction that cannot allocate": (
        lambda: _unit().set_custom_reduce_scatter(len), TypeError, ("set_custom_reduce_scatter", "allocate")),
    "a hook that is no function for the all-reduce": (
        lambda: _unit().set_all_reduce_hook(3), TypeError, ("set_all_reduce_hook", "int")),
    "symmetric memory on the CPU": (lambda: _unit().set_symm_mem_for_comm(), RuntimeError, ("GPU", "cpu")),
    "an unknown bucketing": (
        lambda: fsdp_compile.configure(fully_shard(nn.Linear(4, 4)), bucketing="big"), ValueError, ("'big'", "size")),
    "an unknown reduction": (
        lambda: fsdp_compile.configure(fully_shard(nn.Linear(4, 4)), reduction="sum"), ValueError, ("'sum'",)),
    "a mesh that is none": (lambda: _linear(mesh=4), TypeError, ("fully_shard", "int", "init_device_mesh")),
    "a dtype as the policy": (lambda: _linear(mp_policy=torch.bfloat16), TypeError, ("bfloat16", "MixedPrecisionPolicy")),
    "no policy at all": (lambda: replicate(nn.Linear(2, 2), mp_policy=None), TypeError, ("replicate", "None")),  # type: ignore[arg-type]
    "offloading said with a bool": (lambda: _linear(offload_policy=True), TypeError, ("True", "CPUOffloadPolicy()")),
    "the class of an offload policy": (
        lambda: _linear(offload_policy=fsdp_compile.CPUOffloadPolicy), TypeError, ("CPUOffloadPolicy()",)),
    "a placement in the place of a function": (lambda: _linear(shard_placement_fn=Shard(0)), TypeError, ("function",)),
    "ignored parameters by name": (lambda: _linear(ignored_params={"0.weight"}), TypeError, ("0.weight", "names")),
    "an ignored module": (lambda: _linear(ignored_params={nn.Linear(2, 2)}), TypeError, ("'Linear'", "parameters")),
    "one ignored parameter": (
        lambda: _linear(ignored_params=nn.Parameter(torch.ones(2))), TypeError, ("Parameter", "set of parameters")),
    "options for a list": (lambda: fsdp_compile.configure([_unit()]), TypeError, ("list",)),  # type: ignore[arg-type]
    "no_sync of an unsharded model": (
        lambda: fsdp_compile.no_sync(nn.Linear(2, 2)).__enter__(), ValueError, ("Linear without sharded modules",)),
    "no_sync of nothing": (lambda: fsdp_compile.no_sync(None).__enter__(), TypeError, ("NoneType",)),  # type: ignore[arg-type]
    "options for an unsharded model": (
        lambda: fsdp_compile.configure(nn.Linear(4, 4), bucketing="size"), ValueError, ("Shard it first",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ROWS)
def test_a_mistake_is_named(mistake: str) -> None:
    provoke, exception, words = ROWS[mistake]
    with pytest.raises(exception) as failure:
        provoke()
    for word in words:
        assert word in str(failure.value)


def test_refused_options_leave_the_others_as_they_were() -> None:
    unit = _unit()
    with pytest.raises(ValueError, match="'sum'"):
        fsdp_compile.configure(unit, bucketing="none", reduction="sum")
    assert unit.__dict__["_fsdp_compile_state"].settings.bucketing == "size"


@pytest.mark.parametrize("name", PLAIN)
def test_names_stay_as_they_were(name: str) -> None:
    model = PLAIN[name].build()

    def names() -> list[list[str]]:
        tables = (model.named_parameters(), model.named_buffers(), model.named_modules())
        return [*([fqn for fqn, _ in table] for table in tables), list(model.state_dict())]

    before = names()
    for block in PLAIN[name].blocks(model):
        fully_shard(block)
    fully_shard(model)
    assert names() == before


def test_the_placement_function_is_called_once_a_parameter() -> None:
    seen: list[torch.Size] = []
    fully_shard(Block(), shard_placement_fn=lambda param: seen.append(param.shape))
    assert len(seen) == len(list(Block().parameters()))


def test_ignored_parameters_stay_whole() -> None:
    model = Stack(1)
    kept = {model.head.weight}
    shard(model, ignored_params=kept)
    assert not isinstance(model.head.weight, DTensor)
    assert sum(isinstance(param, DTensor) for param in model.parameters()) == len(list(model.parameters())) - 1


def test_shards_lie_as_torch_chunk_says() -> None:
    torch.manual_seed(0)
    for rows in (1, 2, 3, 4, 5, 7, 8):
        linear = nn.Linear(3, rows, bias=False)
        whole = linear.weight.detach().clone()
        fully_shard(linear)
        chunks = torch.chunk(whole, 4)
        local = linear.weight.to_local()
        assert torch.equal(local, chunks[0])  # rank 0 of 4
        assert linear.weight.shape == whole.shape


def test_root_keeps_and_the_others_regather_unless_told_otherwise() -> None:
    def regather(model: Stack) -> list[bool]:
        return [module.__dict__["_fsdp_compile_state"].regather for module in (model, *model.layers)]

    assert regather(shard(Stack(2))) == [False, True, True]
    assert regather(shard(Stack(2), reshard_after_forward=True)) == [True, True, True]
    assert regather(shard(Stack(2), reshard_after_forward=False)) == [False, False, False]
    model = shard(Stack(2))
    model.set_reshard_after_forward(False)  # type: ignore[operator]
    assert regather(model) == [False, False, False]


def test_equal_modules_share_a_class_and_indexing_keeps_the_original_one() -> None:
    model = shard(Stack(2))
    assert type(model.layers[0]) is type(model.layers[1])
    assert type(model).__name__ == "FSDPStack"
    assert isinstance(model.layers[0].up, nn.Linear)
    sharded = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert type(sharded[:1]) is nn.Sequential


# What people who move in get wrong at first.


@pytest.mark.parametrize("setting", ["param_dtype", "reduce_dtype", "the last one"])
@pytest.mark.parametrize("api", [fully_shard, replicate, FullyShardedDataParallel])
def test_a_dtype_by_name_is_refused_before_anything_is_sharded(api: Any, setting: str) -> None:
    named, argument, policy, last = api.__name__, "mp_policy", MixedPrecisionPolicy, "output_dtype"
    if api is FullyShardedDataParallel:
        named, argument, policy, last = "mixed_precision", "mixed_precision", MixedPrecision, "buffer_dtype"
    setting = last if setting == "the last one" else setting
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=rf"{named}.*{setting}='bf16'.*torch\.bfloat16"):
        api(model, **{argument: policy(**{setting: "bf16"})})
    assert type(model) is nn.Linear and not isinstance(model.weight, DTensor)


@pytest.mark.parametrize("dims", ["dp", ("dp",)])
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_mesh_dimensions_by_name_are_refused_with_what_to_pass(api: Any, dims: Any) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"dp_mesh_dims is .*'dp'.*DataParallelMeshDims\(shard="):
        api(model, mesh=_mesh((4,), ("dp",)), dp_mesh_dims=dims)
    assert not isinstance(model.weight, DTensor)
