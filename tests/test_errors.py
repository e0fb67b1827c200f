"""Users' mistakes: the exception's type, and the FQN and the remedy in its text."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard, replicate
from tests.models import PLAIN, Block, Stack, shard

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


def inner() -> nn.Module:
    """A model whose offending parameter is called blocks.0.weight."""
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(6, 8, bias=False)])})


class Holder(nn.Module):
    def __init__(self, param: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.bad = nn.Parameter(param, requires_grad=param.is_floating_point())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _linear(**kwargs: Any) -> None:
    fully_shard(nn.Sequential(nn.Linear(6, 8)), **kwargs)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _twice() -> None:
    fully_shard(fully_shard(nn.Linear(4, 4)))


def _tensor_parallel() -> None:
    mesh = _mesh((4,))
    fully_shard(Holder(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])))


def _override(returned: Any) -> None:
    policy = SimpleNamespace(**vars(MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    policy.param_dtype_override_fn = lambda param: returned
    fully_shard(nn.Sequential(nn.Linear(4, 4)), mp_policy=policy)  # type: ignore[arg-type]


def _unit() -> Any:
    return fully_shard(nn.Linear(4, 4))


def _nested() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    return fully_shard(model)


class _Comm:
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any: ...

    def __call__(self, *args: Any) -> Any: ...


def _two_meshes() -> Any:
    mesh = _mesh((2, 2), ("a", "b"))

    def place(param: nn.Parameter) -> Any:
        return fsdp_compile.ShardPlacementResult(Shard(0), mesh["b"]) if param.ndim == 1 else None

    return fully_shard(nn.Linear(4, 4), mesh=mesh["a"], shard_placement_fn=place)


def _custom() -> Any:
    unit: Any = _unit()
    unit.set_custom_all_gather(_Comm())
    return unit


def _by_hand(**kwargs: Any) -> Any:
    unit: Any = fully_shard(nn.Linear(4, 4), **kwargs)
    unit.set_manual_backward_finalization(True)
    return unit


def _wait_after_reset() -> None:
    unit = _by_hand()
    handle = unit.finalize_backward(async_op=True)
    unit.reset_iter_state()
    handle.wait()


def _finalize_twice() -> None:
    unit = _by_hand()
    unit.finalize_backward(async_op=True)
    unit.finalize_backward()


def _finalize_without_replicas() -> None:
    unit = _by_hand(mesh=_mesh((2, 2), ("replicate", "shard")))
    unit.set_requires_all_reduce(False)
    unit.finalize_backward()


class Released(torch.Tensor):
    pass


def _with_local(**methods: Any) -> Any:
    """A unit whose weight's shard is a subclass with these methods."""
    unit: Any = fully_shard(nn.Linear(4, 4, bias=False))
    kind = type("Released", (Released,), methods)
    unit.weight._local_tensor = unit._parameters["weight"]._local_tensor.as_subclass(kind)
    return unit


def _release(answer: Any) -> None:
    hook = {"fsdp_should_release_all_gather_outputs_after_post_all_gather": lambda self: answer}
    extension = {} if answer is None else {
        "fsdp_pre_all_gather": lambda self, mesh: None, "fsdp_post_all_gather": lambda self, *args, **kwargs: None,
    }  # fmt: skip
    _with_local(**hook, **extension)(torch.ones(2, 4))


def _odd_extension() -> None:
    both = {"fsdp_pre_all_gather": lambda self, a, b: None, "fsdp_post_all_gather": lambda self, *args, **kwargs: None}
    _with_local(**both)(torch.ones(2, 4))


def _on_another_device() -> None:
    theirs = DeviceMesh("meta", [0, 1, 2, 3], mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    weight = DTensor.from_local(torch.ones(4, 4, device="meta"), theirs, [Replicate()], run_check=False)
    fully_shard(Holder(weight), mesh=_mesh((4,), ("dp",)))


def _change_a_policy() -> None:
    MixedPrecisionPolicy(param_dtype=torch.bfloat16).param_dtype = torch.float16  # type: ignore[misc]


Row = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "a ModuleList has no forward": (lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ValueError, ("members",)),
    "a ModuleDict has no forward": (lambda: fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), ValueError, ("list",)),
    "a list member without forward": (lambda: fully_shard([nn.ModuleList()]), ValueError, ("ModuleList",)),
    "nothing": (lambda: fully_shard([]), ValueError, ("at least one",)),
    "not a module": (lambda: fully_shard(torch.ones(2)), TypeError, ("Tensor",)),
    "applied twice": (_twice, ValueError, ("Linear", "already")),
    "a mesh of three dimensions": (lambda: _linear(mesh=_mesh((1, 2, 2))), ValueError, ("3", "dp_mesh_dims")),
    "a mesh of two dimensions without names": (lambda: _linear(mesh=_mesh((2, 2))), ValueError, ("mesh_dim_names",)),
    "dp_mesh_dims with neither": (
        lambda: _linear(dp_mesh_dims=SimpleNamespace(shard=None, replicate=None)), ValueError, ("neither",)),
    "dp_mesh_dims without names": (
        lambda: _linear(mesh=_mesh((4,)), dp_mesh_dims=SimpleNamespace(shard="x", replicate=None)),
        ValueError, ("dimension names",)),
    "dp_mesh_dims with an unknown name": (
        lambda: _linear(mesh=_mesh((4,), ("dp",)), dp_mesh_dims=SimpleNamespace(shard=("x",), replicate=None)),
        ValueError, ("'x'", "dp")),
    "dp_mesh_dims for plain tensors": (
        lambda: _linear(mesh=_mesh((4,), ("dp",)), dp_mesh_dims=SimpleNamespace(shard="dp", replicate=None)),
        ValueError, ("0.weight", "dp_mesh_dims", "distribute_module")),
    "reshard_after_forward as a string": (lambda: _linear(reshard_after_forward="yes"), ValueError, ("'yes'",)),
    "reshard_after_forward that divides nothing": (
        lambda: _linear(reshard_after_forward=3), ValueError, ("=3", "1, 2, 4")),
    "a scalar": (lambda: fully_shard(Holder(torch.tensor(1.0))), ValueError, ("inner.bad", "(1,)")),
    "not contiguous": (lambda: fully_shard(Holder(torch.ones(4, 8).t())), NotImplementedError, ("inner.bad", "contiguous")),
    "a DTensor on the ranks to shard over": (_tensor_parallel, ValueError, ("inner.bad", "names")),
    "a DTensor on another kind of device": (_on_another_device, ValueError, ("inner.bad", "meta", "cpu")),
    "a policy is changed": (_change_a_policy, dataclasses.FrozenInstanceError, ("param_dtype",)),
    "placement on a missing dim": (
        lambda: _linear(shard_placement_fn=lambda param: Shard(param.ndim % 2)), ValueError, ("0.bias", "(8,)", "only dim 0")),
    "placement far out of range": (
        lambda: _linear(shard_placement_fn=lambda param: Shard(-3)), ValueError, ("0.weight", "dims 0 to 1")),
    "placement that is no Shard": (
        lambda: _linear(shard_placement_fn=lambda param: Replicate()), ValueError, ("0.weight", "Replicate()")),
    "uneven on another dim": (
        lambda: _linear(shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None),
        NotImplementedError, ("0.weight", "(8, 6)", "dim 1")),
    "override with no dtype": (lambda: _override("bf16"), ValueError, ("0.weight", "'bf16'")),
    "override with a foreign dtype": (lambda: _override(torch.float16), ValueError, ("0.weight", "float16")),
    "a shallow copy": (lambda: copy.copy(fully_shard(nn.Linear(4, 4))), TypeError, ("FSDPLinear", "copy.deepcopy")),
    "set_reshard_after_forward with an int": (
        lambda: fully_shard(nn.Linear(4, 4)).set_reshard_after_forward(2), ValueError, ("2", "bool")),  # type: ignore[operator]
    "set_reshard_after_forward of what is replicated": (
        lambda: replicate(nn.Linear(4, 4)).set_reshard_after_forward(True), ValueError, ("(root) (Linear)", "replicated")),
    "prefetching a list that is none": (
        lambda: _unit().set_modules_to_forward_prefetch(_unit()), TypeError, ("set_modules_to_forward_prefetch", "list")),
    "prefetching forward what is not sharded": (
        lambda: _unit().set_modules_to_forward_prefetch([nn.Linear(2, 2)]), ValueError, ("Linear", "fully_shard")),
    "prefetching backward what is not sharded": (
        lambda: _unit().set_modules_to_backward_prefetch([nn.Linear(2, 2)]), ValueError, ("Linear", "fully_shard")),
    "sharing a context with what is not sharded": (
        lambda: fsdp_compile.share_comm_ctx([nn.Linear(2, 2)]), ValueError, ("Linear", "share_comm_ctx")),
    "a forward method that is missing": (
        lambda: fsdp_compile.register_fsdp_forward_method(_unit(), "generate"), ValueError, ("'generate'", "Linear")),
    "a number of buffers that is none": (
        lambda: _unit().set_reduce_scatter_max_input_buffers(True), TypeError, ("True", "int")),
    "no buffers": (lambda: _unit().set_reduce_scatter_max_input_buffers(0), ValueError, ("0", "at least 1")),
    "a divide factor of zero": (lambda: _unit().set_gradient_divide_factor(0), ValueError, ("0", "positive")),
    "a gather that cannot allocate": (
        lambda: _unit().set_custom_all_gather(len), TypeError, ("set_custom_all_gather", "allocate")),
    "a reduction that cannot allocate": (
        lambda: _unit().set_custom_reduce_scatter(len), TypeError, ("set_custom_reduce_scatter", "allocate")),
    "a hook that is no function": (lambda: _unit().set_all_reduce_hook(3), TypeError, ("set_all_reduce_hook", "int")),
    "finalization without asking for it": (
        lambda: _unit().finalize_backward(), RuntimeError, ("set_manual_backward_finalization(True)",)),
    "finalization of an inner unit": (
        lambda: _nested()[0].finalize_backward(), RuntimeError, ("0 (Linear)", "(root) (Sequential)", "finalize_backward")),
    "finalization by hand of an inner unit": (
        lambda: _nested()[0].set_manual_backward_finalization(True), RuntimeError, ("0 (Linear)", "outermost")),
    "resetting an inner unit": (
        lambda: _nested()[0].reset_iter_state(), RuntimeError, ("0 (Linear)", "reset_iter_state")),
    "a stream for a hook where replicas have one": (
        lambda: fully_shard(nn.Linear(4, 4), mesh=_mesh((2, 2), ("replicate", "shard"))).set_all_reduce_hook(  # type: ignore[operator]
            lambda summed: None, stream=object()), ValueError, ("(root) (Linear)", "stream=")),
    "a gather of one's own for several meshes": (
        lambda: _two_meshes().set_custom_all_gather(_Comm()), ValueError, ("(root) (Linear)", "2 meshes", "set_custom_all_gather")),
    "a reduction of one's own for several meshes": (
        lambda: _two_meshes().set_custom_reduce_scatter(_Comm()), ValueError, ("2 meshes", "set_custom_reduce_scatter")),
    "a hook for several meshes": (
        lambda: _two_meshes().set_all_reduce_hook(lambda summed: None), ValueError, ("2 meshes", "set_all_reduce_hook")),
    "the group's memory for a gather of one's own": (
        lambda: _custom().set_allocate_memory_from_process_group_for_comm(True), RuntimeError, ("set_custom_all_gather",)),
    "symmetric memory for a gather of one's own": (
        lambda: _custom().set_symm_mem_for_comm(), RuntimeError, ("set_custom_all_gather",)),
    "a handle after a reset": (_wait_after_reset, RuntimeError, ("reset_iter_state",)),
    "finalization before the last one's handle": (_finalize_twice, RuntimeError, ("wait()",)),
    "finalization without the sum over replicas": (
        _finalize_without_replicas, RuntimeError, ("(root) (Linear)", "set_requires_all_reduce(True)")),
    "a release hook without its extension": (lambda: _release(None), RuntimeError, ("weight", "Released", "fsdp_pre_all_gather")),
    "a release hook that returns no bool": (lambda: _release("yes"), TypeError, ("weight", "'yes'")),
    "a gather with two arguments": (_odd_extension, TypeError, ("weight", "takes 2 arguments")),
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


def test_a_refused_call_leaves_the_module_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Holder(torch.tensor(1.0)))
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"1\.inner\.bad"):
        fully_shard(model)
    assert all(before[fqn] is param for fqn, param in model.named_parameters())
    assert type(model) is nn.Sequential
    with pytest.raises(ValueError, match=r"0\.bias"):
        fully_shard(model[0:1], shard_placement_fn=lambda param: Shard(1) if param.ndim == 1 else None)
    assert type(model[0]) is nn.Linear and not isinstance(model[0].weight, DTensor)


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
