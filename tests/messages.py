"""What torch's FSDP says to its user, and what ours says there: the phrase people look up, and what to do next.

test_messages.py runs them on both; MESSAGES.md says of the rest of torch's sentences why no test provokes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_compile
import fsdp_compile.fsdp1

CPU = torch.device("cpu")
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
NO_SHARD, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD


@dataclass(frozen=True)
class Api:
    """FSDP1 and FSDP2, torch's or ours."""

    fully_shard: Any
    replicate: Any
    register_fsdp_forward_method: Any
    share_comm_ctx: Any
    FSDP: Any
    ShardedGradScaler: Any

    def wrap(self, module: Any, **kwargs: Any) -> Any:
        """FSDP1's wrapper, on the CPU."""
        return self.FSDP(module, **{"device_id": CPU, "use_orig_params": True, **kwargs})


THEIRS = Api(
    torch_fsdp.fully_shard,
    replicate_with_fsdp.replicate,
    torch_fsdp.register_fsdp_forward_method,
    torch_fsdp.share_comm_ctx,
    torch_fsdp.FullyShardedDataParallel,
    ShardedGradScaler,
)
OURS = Api(
    fsdp_compile.fully_shard,
    fsdp_compile.replicate,
    fsdp_compile.register_fsdp_forward_method,
    fsdp_compile.share_comm_ctx,
    fsdp_compile.fsdp1.FullyShardedDataParallel,
    fsdp_compile.fsdp1.ShardedGradScaler,
)


@dataclass(frozen=True)
class Message:
    """A sentence that torch says on ``provoke``; ours has ``words`` as well, then ``says`` (names, what to do)."""

    situation: str
    words: str
    kind: type  # torch's; ours is the same or a subclass. A warning where it is one.
    provoke: Callable[[Api], Any]
    says: tuple[str, ...] = ()
    since: str = ""  # the first torch that says it so


# --- what provokes -------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A parameter called inner.bad."""

    def __init__(self, param: Tensor) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.bad = nn.Parameter(param)

    def forward(self, x: Tensor) -> Tensor:
        bad = self.inner.bad
        return x * (bad.full_tensor() if isinstance(bad, DTensor) else bad).sum()


class Does(nn.Linear):
    """Calls what it was told in its forward."""

    told: Any = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        self.told()
        return super().forward(x)


class Views(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


class Comm:
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any: ...

    def __call__(self, *args: Any) -> Any: ...


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def hsdp_mesh() -> DeviceMesh:
    return mesh(2, 2, names=("replicate", "shard"))


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def unit(api: Api, **kwargs: Any) -> Any:
    """One unit, whose first parameter is called 0.weight."""
    return api.fully_shard(nn.Sequential(nn.Linear(8, 6)), **{"mesh": mesh(4), **kwargs})


def stepped(model: Any) -> Any:
    model(torch.ones(2, 4)).sum().backward()
    return model


def nested(api: Api) -> Any:
    """A root around a unit, after a forward: FSDP2 knows its root from then on."""
    model = two()
    api.fully_shard(model[0], mesh=mesh(4))
    api.fully_shard(model, mesh=mesh(4))
    model(torch.ones(2, 4))
    return model


def by_hand(api: Api, **kwargs: Any) -> Any:
    model: Any = api.fully_shard(nn.Linear(4, 4), **{"mesh": mesh(4), **kwargs})
    model.set_manual_backward_finalization(True)
    return model


def pending(api: Api) -> tuple[Any, Any]:
    """A unit whose asynchronous finalization nobody waited for, and its handle."""
    model = stepped(by_hand(api))
    return model, model.finalize_backward(async_op=True)


def wait_after_reset(api: Api) -> None:
    model, handle = pending(api)
    model.reset_iter_state()
    handle.wait()


def forward_while_pending(api: Api) -> None:
    model, _handle = pending(api)
    model(torch.ones(2, 4))


def finalize_twice(api: Api) -> None:
    model, _handle = pending(api)
    model.finalize_backward()


def inside_backward(do: Callable[[Any], Any]) -> Callable[[Api], None]:
    """Does it with a unit when its backward begins."""

    def provoke(api: Api) -> None:
        model = by_hand(api)
        output = model(torch.ones(2, 4))
        output.register_hook(lambda grad: do(model))
        output.sum().backward()

    return provoke


def finalize_without_replicas(api: Api) -> None:
    model = by_hand(api, mesh=hsdp_mesh())
    model.set_requires_gradient_sync(False)
    stepped(model)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    model.finalize_backward()


def mode_after_backward(api: Api) -> None:
    stepped(by_hand(api)).set_manual_backward_finalization(False)


def stream_without_hook(api: Api) -> None:
    model: Any = api.fully_shard(nn.Linear(4, 4), mesh=mesh(4))
    model.set_all_reduce_hook(None, stream=object())
    stepped(model)


def custom(api: Api, **comms: Any) -> Any:
    model = unit(api)
    for name, comm in comms.items():
        getattr(model, name)(comm)
    return model


def two_meshes(api: Api) -> Any:
    both = mesh(2, 2, names=("a", "b"))
    if api is OURS:
        of_ours = [fsdp_compile.ShardPlacementResult(Shard(0), both[name]) for name in "ab"]
        return unit(api, mesh=both["a"], shard_placement_fn=lambda param: of_ours[param.ndim - 1])
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    results = [ShardPlacementResult(Shard(0), FSDPMeshInfo(both[name], shard_mesh_dim=0)) for name in "ab"]
    return unit(api, mesh=both["a"], shard_placement_fn=lambda param: results[param.ndim - 1])


def on_mesh(api: Api, its_mesh: DeviceMesh, placements: list[Any], **kwargs: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, its_mesh, placements))
    return api.fully_shard(model, **kwargs)


def on_other_mesh(api: Api) -> None:
    other, whole = mesh(2, 2, names=("x", "y")), mesh(2, 2, names=("dp", "tp"))
    on_mesh(api, other, [Replicate(), Shard(0)], mesh=whole, dp_mesh_dims=dims(shard="dp"))


def sharded_on(api: Api, **roles: str) -> None:
    whole = mesh(2, 2, names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    weight = DTensor.from_local(torch.ones(4, 8), whole, [Shard(0), Replicate()], run_check=False)
    model[0].weight = nn.Parameter(weight)
    api.fully_shard(model, mesh=model[0].weight.device_mesh, dp_mesh_dims=dims(**roles))


def int_with_tensor_parallelism(api: Api) -> None:
    whole = mesh(4, 1, names=("dp", "tp"))
    inner = Holder(distribute_tensor(torch.ones(8, 8), whole["tp"], [Shard(0)]))
    api.fully_shard(inner, mesh=whole["dp"], reshard_after_forward=2)
    api.fully_shard(nn.Sequential(inner), mesh=whole["dp"])(torch.ones(2, 8))


def three_model_dims(api: Api) -> None:
    whole = mesh(1, 1, 2, 2, names=("dp", "a", "b", "c"))
    on_mesh(api, whole["a", "b", "c"], [Replicate(), Shard(0), Shard(1)], mesh=whole["dp"])


def dims(**roles: Any) -> Any:
    return fsdp_compile.DataParallelMeshDims(**roles)


def no_dims() -> Any:
    """What the constructor refuses."""
    empty = dims(shard="dp")
    object.__setattr__(empty, "shard", None)
    return empty


class Local(Tensor):
    pass


def extended(api: Api, **methods: Any) -> Any:
    """A forward of a unit whose weight's shard is a tensor subclass with these methods."""

    class Kind(Local):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    for name, method in methods.items():
        setattr(Kind, name, method)
    linear = nn.Linear(4, 4, bias=False)
    api.fully_shard(linear, mesh=mesh(4))
    shard: Any = linear._parameters["weight"]
    shard._local_tensor = shard._local_tensor.as_subclass(Kind)
    state = getattr(linear, "_get_fsdp_state", lambda: None)()
    for group in getattr(state, "_fsdp_param_groups", ()):
        for param in getattr(group, "fsdp_params", ()):
            param.reset_sharded_param()
            param._init_extensions()
    return linear(torch.ones(2, 4))


BOTH = {
    "fsdp_pre_all_gather": lambda self, mesh: ((self,), None),
    "fsdp_post_all_gather": lambda self, *args, **kwargs: None,
}
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def override(api: Api, returned: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    object.__setattr__(policy, "param_dtype_override_fn", lambda _: returned)  # a field since 2.15
    unit(api, mp_policy=policy)


def on_meta(api: Api) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    api.fully_shard(model, mesh=mesh(4))(torch.ones(2, 4))


def in_a_circle(api: Api) -> None:
    class Circle(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            found: list[Any] = [super().forward(x)]
            found.append(found)
            return found

    api.fully_shard(Circle(4, 4), mesh=mesh(4))(torch.ones(2, 4))


def unused_without_dtype(api: Api) -> None:
    linear = nn.Linear(4, 4)
    for param in linear.parameters():
        param.grad_dtype = None
    model = api.fully_shard(nn.Sequential(linear, nn.Linear(4, 4)), mesh=mesh(4))
    model.set_reduce_scatter_unused_params(True)
    stepped(model)


def gradients_of_gradients(api: Api) -> None:
    model = api.wrap(nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.backward(model(x).pow(2).sum(), create_graph=True)


def wrapped(api: Api, **kwargs: Any) -> Any:
    """A wrapper around two more, after a forward."""
    model = api.wrap(two(), auto_wrap_policy=always_wrap_policy, **kwargs)
    model(torch.ones(2, 4))
    return model


def put_in_place(api: Api, param: nn.Parameter) -> None:
    model = wrapped(api)
    model.module[0].module.weight = param
    model(torch.ones(2, 4))


def summon(api: Api, model: Any, **kwargs: Any) -> Any:
    return api.FSDP.summon_full_params(model, **kwargs)


def enter(make: Callable[[Api], Any]) -> Callable[[Api], Any]:
    def provoke(api: Api) -> None:
        with make(api):
            pass

    return provoke


def inside_summon(do: Callable[[Api, Any], Any]) -> Callable[[Api], Any]:
    def provoke(api: Api) -> None:
        model = wrapped(api)
        with summon(api, model), contextlib.ExitStack() as stack:
            context = do(api, model)
            if hasattr(context, "__enter__"):
                stack.enter_context(context)

    return provoke


def inside_forward(do: Callable[[Api, Any], Any]) -> Callable[[Api], Any]:
    def provoke(api: Api) -> None:
        inner = Does(4, 4)
        model = api.wrap(inner)
        inner.told = lambda: do(api, model)
        model(torch.ones(2, 4))

    return provoke


def two_types(then: Callable[[Api, Any], Any]) -> Callable[[Api], Any]:
    def provoke(api: Api) -> None:
        model = wrapped(api)
        api.FSDP.set_state_dict_type(model.module[0], SHARDED)
        then(api, model)

    return provoke


def hook(state: Any, gradient: Any, shard: Any = None) -> None: ...


def hooked(api: Api, model: Any, one: Any = hook) -> Any:
    model.register_comm_hook(default_hooks.DefaultState(model.process_group), one)
    return model


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rekey(api: Api, state: Any, kind: Any = OptimStateKeyType.PARAM_ID, **kwargs: Any) -> None:
    model = two()
    api.FSDP.rekey_optim_state_dict({"state": state, "param_groups": []}, kind, model, **kwargs)


def scaled(api: Api) -> None:
    scaler = api.ShardedGradScaler("cpu", process_group=torch.distributed.group.WORLD)
    scaler.scale(torch.ones(1))
    scaler.scale(3)


def unscaled_twice(api: Api) -> None:
    model = api.wrap(nn.Linear(4, 4))
    optim, scaler = sgd(model), api.ShardedGradScaler("cpu", process_group=torch.distributed.group.WORLD)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.unscale_(optim)
    scaler.unscale_(optim)


def no_reset_parameters(api: Api) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device="meta"))

    api.wrap(nn.Sequential(Buffered()))


MIXED = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.BatchNorm1d,))


# --- the tables ----------------------------------------------------------------------------------------------------

M = Message
NEW = "2.15"

FSDP2 = (
    M("a ModuleList has no forward", "does not support containers that do not implement forward", ValueError, lambda api: api.fully_shard(nn.ModuleList(), mesh=mesh(4)), ("ModuleList", "list(module)")),
    M("replicate of a list", "does not support containers that do not implement forward", ValueError, lambda api: api.replicate(nn.ModuleList(), mesh=mesh(4)), ("replicate", "members")),
    M("a mesh of three dimensions", "fully_shard expects a 1D or 2D DeviceMesh but got", ValueError, lambda api: unit(api, mesh=mesh(1, 2, 2)), ("3 dimensions", "dp_mesh_dims")),
    M("a mesh of two dimensions without names", "Please init the 2D mesh for HSDP with mesh_dim_names specified", AssertionError, lambda api: unit(api, mesh=mesh(2, 2)), ("init_device_mesh",)),
    M("replicate over two dimensions", "replicate expects a 1D DeviceMesh but got", ValueError, lambda api: api.replicate(two(), mesh=hsdp_mesh()), ("fully_shard",)),
    M("replicate with dimensions to shard over", "replicate() with dp_mesh_dims requires replicate-only dims", ValueError, lambda api: api.replicate(two(), mesh=hsdp_mesh(), dp_mesh_dims=dims(shard="shard")), ("fully_shard",), NEW),
    M("DataParallelMeshDims of nothing", "At least one of shard or replicate must be set in DataParallelMeshDims", ValueError, lambda api: dims(), (), NEW),
    M("dp_mesh_dims with neither", "At least one of shard or replicate must be set in dp_mesh_dims", ValueError, lambda api: unit(api, mesh=mesh(4, names=("dp",)), dp_mesh_dims=no_dims()), ("Name",), NEW),
    M("dp_mesh_dims without names", "mesh must have mesh_dim_names when dp_mesh_dims is provided", ValueError, lambda api: unit(api, mesh=mesh(4), dp_mesh_dims=dims(shard="dp")), ("init_device_mesh",), NEW),
    M("dp_mesh_dims with an unknown name", "not found in mesh.mesh_dim_names", ValueError, lambda api: unit(api, mesh=mesh(4, names=("dp",)), dp_mesh_dims=dims(shard="x")), ("'x'", "dp"), NEW),
    M("dp_mesh_dims for plain tensors", "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh", ValueError, lambda api: unit(api, mesh=mesh(4, names=("dp",)), dp_mesh_dims=dims(shard="dp")), ("0.weight", "distribute_module"), NEW),
    M("a DTensor on another mesh", "Expected param's DTensor mesh to be the same mesh passed to fully_shard", ValueError, on_other_mesh, ("0.weight", "dp_mesh_dims"), NEW),
    M("a DTensor sharded over a dimension to shard over", "Expected Replicate() on DP shard dim", ValueError, lambda api: sharded_on(api, shard="dp"), ("0.weight", "'dp'"), NEW),
    M("a DTensor sharded over a dimension to replicate over", "Expected Replicate() on DP replicate dim", ValueError, lambda api: sharded_on(api, replicate="dp", shard="tp"), ("0.weight", "'dp'"), NEW),
    M("reshard_after_forward as a string", "reshard_after_forward should be a bool or an int representing the group size to reshard to, not", ValueError, lambda api: unit(api, reshard_after_forward="yes"), ("'yes'",)),
    M("reshard_after_forward that divides nothing", "If passing reshard_after_forward as an int, it should be a factor of", ValueError, lambda api: unit(api, reshard_after_forward=3), ("of 4, not 3", "1, 2, 4")),
    M("reshard_after_forward with dp_mesh_dims", "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)", NotImplementedError, lambda api: on_mesh(api, mesh(4, names=("dp",)), [Replicate()], mesh=mesh(4, names=("dp",)), dp_mesh_dims=dims(shard="dp"), reshard_after_forward=2), ("Pass True",), NEW),
    M("reshard_after_forward with tensor parallelism", "Resharding to smaller mesh", NotImplementedError, int_with_tensor_parallelism, ("inner.bad", "=2")),
    M("a scalar", "doesn't support scalar parameters", ValueError, lambda api: api.fully_shard(Holder(torch.tensor(1.0)), mesh=mesh(4)), ("Change inner.bad to a 1D tensor with numel equal to 1", "ignored_params")),
    M("not contiguous", "FSDP does not support non-contiguous parameters", NotImplementedError, lambda api: api.fully_shard(Holder(torch.ones(4, 8).t()), mesh=mesh(4)), ("inner.bad", "contiguous()")),
    M("three dimensions of model parallelism", "FSDP only supports 1D TP/EP or 2D EP+TP, not", NotImplementedError, three_model_dims, ("0.weight",)),
    M("placement that is no Shard", "Invalid shard_placement_fn result", ValueError, lambda api: unit(api, shard_placement_fn=lambda param: Replicate()), ("Replicate()", "0.weight", "Shard(0)"), NEW),
    M("placement on a missing dim", "is invalid for", AssertionError, lambda api: unit(api, shard_placement_fn=lambda param: Shard(param.ndim % 2)), ("Shard dim 1 is invalid for 1D tensor", "0.bias", "only dim 0")),
    M("uneven on another dim", "FSDP does not support uneven sharding on dim", NotImplementedError, lambda api: api.fully_shard(nn.Linear(6, 8, bias=False), mesh=mesh(4), shard_placement_fn=lambda param: Shard(1)), ("dim 1", "weight", "(8, 6)")),
    M("override with no dtype", "param_dtype_override_fn must return a torch.dtype or None but got", ValueError, lambda api: override(api, "bf16"), ("0.weight", "'bf16'"), NEW),
    M("override with a foreign dtype", "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got", ValueError, lambda api: override(api, torch.float16), ("0.weight", "float16"), NEW),
    M("applied twice", "Each distinct composable distributed API can only be applied to a module once", AssertionError, lambda api: api.fully_shard(unit(api), mesh=mesh(4)), ("Sequential", "already")),
    M("replicate of what is sharded", "Cannot apply `replicate()` on a Module already managed by `fully_shard`", RuntimeError, lambda api: api.replicate(unit(api), mesh=mesh(4)), ("Sequential",)),
    M("half an extension", "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined", AssertionError, lambda api: extended(api, fsdp_pre_all_gather=BOTH["fsdp_pre_all_gather"]), ("weight", "Kind", "Define fsdp_post_all_gather")),
    M("a release hook without its extension", f"{RELEASE} requires fsdp_pre_all_gather and fsdp_post_all_gather to be defined", AssertionError, lambda api: extended(api, **{RELEASE: lambda self: True}), ("weight", "Kind"), NEW),
    M("a release hook that returns no bool", f"{RELEASE} must return a bool, got", AssertionError, lambda api: extended(api, **BOTH, **{RELEASE: lambda self: "yes"}), ("weight", "'yes'"), NEW),
    M("a gather with two arguments", "Invalid fsdp_pre_all_gather", AssertionError, lambda api: extended(api, **BOTH | {"fsdp_pre_all_gather": lambda self, a, b: ((self,), None)}), ("weight", "2 arguments")),
    M("parameters on meta", "FSDP parameters should be materialized from meta device before training", RuntimeError, on_meta, ("0.weight", "to_empty")),
    M("zeros for unused parameters without a dtype", "Reducing unused parameters with grad_dtype=None requires an explicit MixedPrecisionPolicy.reduce_dtype", ValueError, unused_without_dtype, ("weight",), NEW),
    M("a circle in what a unit returns", "exceeded max depth", RuntimeError, in_a_circle, ("(root) (Circle)", "circular reference"), NEW),
    M("a unit returns a view", "returned a view tensor", UserWarning, lambda api: api.fully_shard(Views(4, 4), mesh=mesh(4))(torch.ones(2, 4)), ("Views", "copy"), NEW),
    M("set_reshard_after_forward with an int", "reshard_after_forward should be a bool, got", ValueError, lambda api: unit(api).set_reshard_after_forward(2), ("2",)),
    M("set_reshard_after_forward of what is replicated", "", AssertionError, lambda api: api.replicate(two(), mesh=mesh(4)).set_reshard_after_forward(True), ("(root) (Sequential)", "replicated")),
    M("finalization without the sum over replicas", "manual backward finalization requires all-reduce", RuntimeError, finalize_without_replicas, ("(root) (Linear)", "set_requires_all_reduce(True)"), NEW),
    M("finalization by hand of an inner unit", "set_manual_backward_finalization must be called on the root", RuntimeError, lambda api: nested(api)[0].set_manual_backward_finalization(True), ("0 (Linear)", "(root) (Sequential)"), NEW),
    M("finalization chosen inside a backward", "set_manual_backward_finalization cannot change mode during backward", RuntimeError, inside_backward(lambda model: model.set_manual_backward_finalization(False)), ("after",), NEW),
    M("finalization chosen after a backward", "set_manual_backward_finalization cannot change mode after backward starts", RuntimeError, mode_after_backward, ("finalize_backward()",), NEW),
    M("finalization of an inner unit", "finalize_backward must be called on the root", RuntimeError, lambda api: nested(api)[0].finalize_backward(), ("0 (Linear)", "(root) (Sequential)"), NEW),
    M("finalization without asking for it", "finalize_backward requires manual backward finalization", RuntimeError, lambda api: stepped(api.fully_shard(nn.Linear(4, 4), mesh=mesh(4))).finalize_backward(), ("set_manual_backward_finalization(True)",), NEW),
    M("finalization inside a backward", "finalize_backward must be called after backward completes", RuntimeError, inside_backward(lambda model: model.finalize_backward()), (), NEW),
    M("finalization before the last one's handle", "The previous gradient reduction must be waited on before finalizing backward again", RuntimeError, finalize_twice, ("wait()",), NEW),
    M("a forward before the handle", "The previous gradient reduction must be waited on before forward", RuntimeError, forward_while_pending, ("(root) (Linear)", "wait()"), NEW),
    M("a handle after a reset", "This gradient reduction handle was invalidated", RuntimeError, wait_after_reset, ("reset_iter_state",), NEW),
    M("resetting an inner unit", "reset_iter_state must be called on the root", RuntimeError, lambda api: nested(api)[0].reset_iter_state(), ("0 (Linear)", "(root) (Sequential)"), NEW),
    M("symmetric memory for a gather of one's own", "cannot call set_symm_mem() when all gather comm is custom", AssertionError, lambda api: custom(api, set_custom_all_gather=Comm()).set_symm_mem_for_comm(), ("(root) (Sequential)", "set_custom_all_gather"), NEW),
    M("symmetric memory with a reduction of one's own", "cannot call set_symm_mem() when reduce scatter comm is custom", AssertionError, lambda api: custom(api, set_custom_reduce_scatter=Comm()).set_symm_mem_for_comm(), ("set_custom_reduce_scatter",), NEW),
    M("the group's memory for a gather of one's own", "cannot call set_allocate_memory_from_process_group() when all gather comm is custom", AssertionError, lambda api: custom(api, set_custom_all_gather=Comm()).set_allocate_memory_from_process_group_for_comm(True), ("set_custom_all_gather",)),
    M("the group's memory with a reduction of one's own", "cannot call set_allocate_memory_from_process_group() when reduce scatter comm is custom", AssertionError, lambda api: custom(api, set_custom_reduce_scatter=Comm()).set_allocate_memory_from_process_group_for_comm(True), ("set_custom_reduce_scatter",)),
    M("a gather of one's own for several meshes", "set_custom_all_gather is not supported with multiple param groups", ValueError, lambda api: two_meshes(api).set_custom_all_gather(Comm()), ("(root) (Sequential)", "2 meshes"), NEW),
    M("a reduction of one's own for several meshes", "set_custom_reduce_scatter is not supported with multiple param groups", ValueError, lambda api: two_meshes(api).set_custom_reduce_scatter(Comm()), ("2 meshes",), NEW),
    M("a hook for several meshes", "set_all_reduce_hook is not supported with multiple param groups", ValueError, lambda api: two_meshes(api).set_all_reduce_hook(lambda summed: None), ("2 meshes",), NEW),
    M("a stream for a hook where replicas have one", "stream cannot be set when using native HSDP", ValueError, lambda api: unit(api, mesh=hsdp_mesh()).set_all_reduce_hook(lambda summed: None, stream=object()), ("(root) (Sequential)",)),
    M("a stream for no hook", "all reduce hook stream is specified but hook itself is missing", AssertionError, stream_without_hook, ("Pass both",)),
    M("a number of buffers that is none", "max_input_buffers must be an int, got", TypeError, lambda api: unit(api).set_reduce_scatter_max_input_buffers(True), ("True",), NEW),
    M("no buffers", "max_input_buffers must be a positive int, got", ValueError, lambda api: unit(api).set_reduce_scatter_max_input_buffers(0), ("got 0", "at least 1"), NEW),
    M("prefetching forward what is not sharded", "Expects FSDPModule but got", ValueError, lambda api: unit(api).set_modules_to_forward_prefetch([nn.Linear(2, 2)]), ("set_modules_to_forward_prefetch", "Linear")),
    M("prefetching backward what is not sharded", "Expects FSDPModule but got", ValueError, lambda api: unit(api).set_modules_to_backward_prefetch([nn.Linear(2, 2)]), ("set_modules_to_backward_prefetch", "Linear")),
    M("sharing a context with what is not sharded", "Expects list of FSDPModules but got", ValueError, lambda api: api.share_comm_ctx([nn.Linear(2, 2)]), ("Linear", "fully_shard")),
    M("a forward method that is missing", "does not have a method", ValueError, lambda api: api.register_fsdp_forward_method(unit(api), "generate"), ("'generate'", "Sequential")),
)

FSDP1 = (
    M("wrapping a list", "FSDP will not all-gather parameters for containers that do not implement forward", UserWarning, lambda api: api.wrap(nn.ModuleList(two())), ("one unit",)),
    M("a group of one rank", "FSDP is switching to use `NO_SHARD` instead of", UserWarning, lambda api: api.wrap(two(), process_group=torch.distributed.new_group([0])), ("FULL_SHARD since the world size is 1", "Pass it")),
    M("NO_SHARD", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning, lambda api: api.wrap(two(), sharding_strategy=NO_SHARD), ("fsdp_compile.replicate",)),
    M("both groups", "Cannot pass both process_group and device_mesh at the same time", ValueError, lambda api: api.wrap(two(), process_group=torch.distributed.group.WORLD, device_mesh=mesh(4)), ("Pass one",)),
    M("hybrid by hand without groups", "requires explicit specification of process group or device_mesh", ValueError, lambda api: api.wrap(two(), sharding_strategy=HYBRID), ("HYBRID_SHARD", "auto_wrap_policy")),
    M("hybrid with a 1-D mesh", "Expected device_mesh to have ndim=2 but got", ValueError, lambda api: api.wrap(two(), sharding_strategy=HYBRID, device_mesh=mesh(4)), ("HYBRID_SHARD",)),
    M("hybrid with one group", "Expected process_group to be passed in as either None or", ValueError, lambda api: api.wrap(two(), sharding_strategy=HYBRID, process_group=torch.distributed.group.WORLD), ("(shard, replicate)",)),
    M("ignored twice", "Cannot pass both ignored_modules and ignored_states at the same time", ValueError, lambda api: api.wrap(two(), ignored_modules=[], ignored_states=[]), ("Pass ignored_states",)),
    M("ignored is no list", "is not iterable", TypeError, lambda api: api.wrap(two(), ignored_modules=3), ("ignored_modules", "int", "Pass a list")),
    M("ignored is no module", "ignored_modules expects nn.Module list elements but got types", ValueError, lambda api: api.wrap(two(), ignored_modules=["head"]), ("str",)),
    M("ignored parameters and modules", "ignored_states expects all nn.Parameter or all nn.Module list elements but got types", ValueError, lambda api: api.wrap(two(), ignored_states=[nn.Parameter(torch.ones(2)), nn.Linear(2, 2)]), ("Linear beside Parameter",)),
    M("wrapped ones ignored", "`ignored_modules` should not include FSDP modules", ValueError, lambda api: api.wrap(two(), ignored_modules=[api.wrap(nn.Linear(2, 2))]), ("before it is wrapped",)),
    M("all ignored", "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all parameters being ignored", UserWarning, lambda api: api.wrap(one := two(), ignored_modules=[one]), ("Sequential",)),
    M("wrapped before a policy", "FSDP auto wrapping requires modules to not already have FSDP applied but found", ValueError, lambda api: api.wrap(nn.Sequential(api.wrap(nn.Linear(2, 2)), nn.Linear(2, 2)), auto_wrap_policy=always_wrap_policy), ("found 0", "by hand")),
    M("mixed precision leaves modules out", "Both mixed precision and an auto_wrap_policy were specified to FSDP", UserWarning, lambda api: api.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), auto_wrap_policy=always_wrap_policy, mixed_precision=MIXED), ("BatchNorm1d",)),
    M("init with no function", "to be callable but got", ValueError, lambda api: api.wrap(nn.Linear(2, 2, device="meta"), param_init_fn=3), ("param_init_fn", "int")),
    M("no reset_parameters", "reset_parameters", AttributeError, no_reset_parameters, ("Unable to call `reset_parameters()` for module on meta device", "0 (Buffered)", "param_init_fn")),
    M("a scalar, wrapped", "doesn't support scalar parameters", ValueError, lambda api: api.wrap(Holder(torch.tensor(1.0))), ("Change inner.bad to a 1D tensor with numel equal to 1", "ignored_states")),
    M("no_sync of an inner one", "`no_sync()` on inner FSDP instances is not supported", RuntimeError, enter(lambda api: wrapped(api).module[0].no_sync()), ("outermost",)),
    M("clipping an inner one", "should only be called on the root FSDP instance", RuntimeError, lambda api: wrapped(api).module[0].clip_grad_norm_(1.0), ("`clip_grad_norm_()`", "outermost")),
    M("clipping without gradients", "with no gradients -- returning the total norm in the default dtype", UserWarning, lambda api: wrapped(api).clip_grad_norm_(1.0), ("after backward",)),
    M("no_sync inside summon_full_params", "expected to be in states", ValueError, inside_summon(lambda api, model: model.no_sync()), ("SUMMON_FULL_PARAMS", "Leave")),
    M("clipping inside summon_full_params", "expected to be in states", ValueError, inside_summon(lambda api, model: model.clip_grad_norm_(1.0)), ("SUMMON_FULL_PARAMS", "Leave")),
    M("apply inside summon_full_params", "expected to be in states", ValueError, inside_summon(lambda api, model: model.apply(lambda module: None)), ("SUMMON_FULL_PARAMS", "Leave")),
    M("apply inside a forward", "expected to be in states", ValueError, inside_forward(lambda api, model: model.apply(lambda module: None)), ("FORWARD_BACKWARD", "between steps")),
    M("summon_full_params twice", "Cannot manually unshard parameters when already unsharding parameters", AssertionError, inside_summon(lambda api, model: summon(api, model)), ("outer",)),
    M("summon_full_params inside a forward", "Cannot manually unshard parameters during forward/backward", AssertionError, inside_forward(lambda api, model: summon(api, model).__enter__()), ("(root) (Does)", "between steps")),
    M("a parameter of another shape in a shard's place", "Cannot writeback when the parameter shape changes", RuntimeError, lambda api: put_in_place(api, nn.Parameter(torch.zeros(5, 5))), ("weight", "(4, 4)", "(5, 5)", "distribute_tensor")),
    M("summon_full_params written on one rank", "writeback=True and rank0_only=True is not supported", NotImplementedError, enter(lambda api: summon(api, wrapped(api), rank0_only=True)), ("Pass one",)),
    M("summon_full_params with gradients on the CPU", "offload_to_cpu=True is not supported", NotImplementedError, enter(lambda api: summon(api, wrapped(api), writeback=False, with_grads=True, offload_to_cpu=True)), ("with_grads=True",)),
    M("summon_full_params of NO_SHARD on the CPU", "offload_to_cpu=True and NO_SHARD is not supported", NotImplementedError, enter(lambda api: summon(api, wrapped(api, sharding_strategy=NO_SHARD), offload_to_cpu=True)), (".cpu()",)),
    M("summon_full_params on all CPUs", "offload_to_cpu=True and rank0_only=False may result in", UserWarning, enter(lambda api: summon(api, wrapped(api), offload_to_cpu=True)), ("rank0_only=True",)),
    M("another kind of state_dict_config", "Expected state_dict_config of type", RuntimeError, lambda api: api.FSDP.set_state_dict_type(wrapped(api), SHARDED, FullStateDictConfig()), ("FullStateDictConfig", "ShardedStateDictConfig")),
    M("another kind of optim_state_dict_config", "Expected optim_state_dict_config of type", RuntimeError, lambda api: api.FSDP.set_state_dict_type(wrapped(api), FULL, FullStateDictConfig(), ShardedOptimStateDictConfig()), ("FullOptimStateDictConfig",)),
    M("setting a type over two", "All FSDP modules should have the same state_dict_type", AssertionError, two_types(lambda api, model: api.FSDP.set_state_dict_type(model, FULL)), ("SHARDED_STATE_DICT",)),
    M("asking for one of two types", "All FSDP modules must have the same state dict settings", AssertionError, two_types(lambda api, model: api.FSDP.get_state_dict_type(model)), ("set_state_dict_type",)),
    M("a hook of an inner one", "register_comm_hook can only be called on a root instance", AssertionError, lambda api: hooked(api, wrapped(api).module[0]), ("outermost",)),
    M("a hook where replicas reduce as well", "Communication hook is not supported for hybrid strategies", AssertionError, lambda api: hooked(api, api.wrap(two(), sharding_strategy=HYBRID, device_mesh=hsdp_mesh())), ("HYBRID_SHARD",)),
    M("two hooks", "A communication hook is already registered", AssertionError, lambda api: hooked(api, hooked(api, wrapped(api))), ("once",)),
    M("a hook that is no function", "The communication hook must be callable but got", ValueError, lambda api: hooked(api, wrapped(api), 3), ("3", "function")),
    M("full_optim_state_dict", "is being deprecated and is replaced by", FutureWarning, lambda api: api.FSDP.full_optim_state_dict(model := wrapped(api), sgd(model)), ("full_optim_state_dict", "optim_state_dict")),
    M("optim_input", "The `optim_input` argument is deprecated", FutureWarning, lambda api: rekey(api, {}, optim_input=two().parameters()), ("optim=",)),
    M("rekeying to no kind of key", "Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got", AssertionError, lambda api: rekey(api, {}, 3), ("3",)),
    M("a state to load that is none", '`optim_state_dict` must have the keys "state"', ValueError, lambda api: api.FSDP.optim_state_dict_to_load(model := wrapped(api), sgd(model), {}), ("FSDP.optim_state_dict",)),
    M("names and numbers for keys", "Invalid parameter keys", ValueError, lambda api: rekey(api, {0: {}, "0.weight": {}}), ("0.weight",)),
    M("an optim_input that is no list", "Optimizer input should be an iterable of Tensors or dicts", TypeError, lambda api: rekey(api, {0: {}}, OptimStateKeyType.PARAM_NAME, optim_input=3), ("int", "optim=")),
    M("an optim_input of other things", "Optimizer input should be an iterable of Tensors or dicts", TypeError, lambda api: rekey(api, {0: {}}, OptimStateKeyType.PARAM_NAME, optim_input=["a"]), ("str",)),
    M("an optim_input of nothing", "Optimizer input should not be empty", ValueError, lambda api: rekey(api, {0: {}}, OptimStateKeyType.PARAM_NAME, optim_input=[]), ("optim=",)),
    M("an optim_input of groups without parameters", 'A parameter group should map "params" to a list of the parameters in the group', AssertionError, lambda api: rekey(api, {0: {}}, OptimStateKeyType.PARAM_NAME, optim_input=[{"lr": 1}]), ("optim=",)),
    M("scaling a number", "outputs must be a Tensor or an iterable of Tensors", ValueError, scaled, ("int",)),
    M("unscaling twice", "unscale_() has already been called on this optimizer since the last update()", RuntimeError, unscaled_twice),
    M("gradients of gradients", "FSDP does not support gradients of gradients", RuntimeError, gradients_of_gradients, ("create_graph=True",)),
)
MESSAGES = (*FSDP2, *FSDP1)
