"""Gives a model values before its first step: new ones, those of one rank, or buffers in another dtype.

    materialize          meta tensors --memory--> --each module's own initialization, or rank 0's state dict--> values
    sync_module_states   the parameters and buffers of one rank --broadcast--> every rank
    cast_buffers         buffers in another dtype
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from .._torch_compat import dynamo, process_groups
from ..core.mesh import device_of_type, device_type_here
from ..core.param import READS, ShardedParam, Slot
from ..core.unit import original_class, units_in
from .exchange import send_values
from .fitting import loaded_from_first, mark_unwritten, require_alike, require_module, require_written
from .own_values import Own, initialize_all, own_slots

ModelT = TypeVar("ModelT", bound=nn.Module)


def materialize(
    model: ModelT,
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> ModelT:
    """Give memory and values to the parameters and buffers of ``model`` on the meta device; return ``model``.

    **device** is where they get memory; by default the device of the mesh, or else the accelerator, if there is one.

    **init_fn** is called with each module that has such parameters or buffers of its own, in the order of
    ``model.modules()``. The default calls ``module.reset_parameters()``. If a model around the module has a method
    ``_init_weights``, as Hugging Face models do, the default also calls that of the innermost one: from inside out, and
    for modules that write to modules inside them, too. While it runs, the parameters of the module's units are full,
    plain tensors, also those of tensor parallelism, and every rank draws the random numbers that rank 0 would: sharded
    or not, the weights are those of a model that was never sharded. It is an error if no call writes to a tensor.

    **state_dict**, given on rank 0 with full tensors, is loaded and sent to all ranks instead; other ranks leave it
    out. Then only buffers that are not saved are initialized. It has to fit the model; one name of tied weights is
    enough.

    Call it before or after ``fully_shard``, on every rank.
    """
    require_module("materialize", model)
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"materialize: init_fn is a {type(init_fn).__name__}. Pass a function of a module.")
    module = dynamo.behind_compile(model)
    if device is not None and torch.device(device).type == "meta":
        raise ValueError('materialize: device is "meta", where there are no values. Pass another one.')
    state_dict = loaded_from_first(module, state_dict)
    tensors = module.state_dict(keep_vars=True).values() if state_dict is not None else ()
    fill_in(module, {id(tensor) for tensor in tensors}, device, init_fn)
    if state_dict is not None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized(), strict=True)
        set_model_state_dict(module, state_dict, options=options)
    return model


def fill_in(
    module: nn.Module,
    loaded: Collection[int],
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Give meta tensors memory, and all but those that will be ``loaded`` (ids of tensors) their values."""
    units = units_in(module)
    of_units = units[0].mesh.device if units else device_of_type(device_type_here())
    to = of_units if device is None else torch.device(device)
    offloaded = {id(param.shard) for unit in units if unit.offload for param in unit.params}
    initialize = init_fn or Own(module)
    missing = list(_on_meta(module, loaded, initialize))
    slots = [
        Slot(one, name)
        for one in module.modules()
        for name, param in one._parameters.items()
        if param is not None and param.is_meta and id(param) not in loaded
    ]
    unwritten = _allocate(module, to, loaded, offloaded if device is None else ())
    with contextlib.ExitStack() as stack:
        for one in {to, *(unit.mesh.device for unit in units)}:  # full parameters are written where they are gathered
            stack.enter_context(random_numbers_of_first(one))
        if isinstance(initialize, Own):
            steps = list(initialize.steps(missing, slots))
        else:
            steps = [(one, own_slots(one)) for one in missing]
        initialize_all(units, steps, slots, initialize)
    require_written(module, unwritten)


def _on_meta(model: nn.Module, loaded: Collection[int], initialize: Any) -> Iterator[nn.Module]:
    """Yield modules with own tensors on the meta device that are not loaded; raise if nothing gives them values."""
    for path, module in model.named_modules():
        tensors = [*module._parameters.items(), *module._buffers.items()]
        names = [name for name, one in tensors if one is not None and one.is_meta and id(one) not in loaded]
        if not names:
            continue
        if isinstance(initialize, Own) and not initialize.knows(module):
            fqns = ", ".join(f"{path}.{name}" if path else name for name in names)
            raise ValueError(
                f"materialize: {fqns} on the meta device: {original_class(module).__name__} has no "
                "reset_parameters() to give values. Add that method, or pass init_fn."
            )
        yield module


def _allocate(
    model: nn.Module, device: torch.device, loaded: Collection[int], on_cpu: Collection[int]
) -> list[str]:
    """Allocate meta tensors, and tie again what was tied; mark those to be initialized, and return their names."""

    def placed(tensor: Tensor) -> Tensor:
        place = torch.device("cpu") if id(tensor) in on_cpu else device
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor

    ties = _ties(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, tensor in named if tensor.is_meta and id(tensor) not in loaded]
    model._apply(placed)
    for (first, name), *others in ties:
        for registered, other in others:
            registered[other] = first[name]
    now = dict([*model.named_parameters(), *model.named_buffers()])
    return [name for name in names if name in now and mark_unwritten(now[name])]


def _ties(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Return where each unsharded meta tensor that has several places is registered. Sharded ones stay tied anyway."""
    places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        sharded = module.__dict__.get(READS, {})
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is not None and tensor.is_meta and name not in sharded:
                    places.setdefault(tensor, []).append((registered, name))
    return [some for some in places.values() if len(some) > 1]


@contextmanager
def random_numbers_of_first(device: torch.device) -> Iterator[None]:
    """Have every rank draw the random numbers of rank 0; after the block, other ranks go on with their own."""
    if not dist.is_initialized():
        yield
        return
    devices = [] if device.type in ("cpu", "meta") else [device]  # the CPU's own numbers are always forked
    kind = device.type if devices else "cpu"
    with torch.random.fork_rng(devices, enabled=dist.get_rank() != 0, device_type=kind):
        first = [torch.get_rng_state(), *(torch.get_device_module(one).get_rng_state(one) for one in devices)]
        dist.broadcast_object_list(first)
        torch.set_rng_state(first[0])
        for one, state in zip(devices, first[1:]):
            torch.get_device_module(one).set_rng_state(state, one)
        yield


@torch.no_grad()
def sync_module_states(model: ModelT, src: int = 0, group: dist.ProcessGroup | None = None) -> ModelT:
    """Give every rank of ``group`` the parameters and buffers of rank ``src``, in place; return the model.

    Call it before ``fully_shard``. Afterwards it sends buffers, unsharded parameters, and, if a mesh has replicas, the
    shards of the first replica: other shards are on one rank each. DTensors of other parallelisms stay as they are.
    """
    require_module("sync_module_states", model)
    group = group or dist.group.WORLD
    assert group is not None, "there is a default group"
    if dist.get_rank(group) < 0:
        raise ValueError("sync_module_states: this rank is not in the group. Call it on the ranks of the group alone.")
    ranks = dist.get_process_group_ranks(group)
    if src not in ranks:
        raise ValueError(f"sync_module_states: src={src!r} is not in the group, whose ranks are {ranks}.")
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(f"sync_module_states: {name} is on the meta device. Call fsdp_compile.materialize first.")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
            raise ValueError(
                f"sync_module_states: {name} is expanded, so that it cannot be written to. Register a clone() of it."
            )
    require_alike(named, src, group)
    sharded: dict[Tensor, ShardedParam] = {param.param: param for unit in units_in(model) for param in unit.params}
    for _, tensor in named:
        param = sharded.get(tensor)
        if not isinstance(tensor, DTensor):
            send_values(tensor, dist.get_group_rank(group, src), group)
        elif param is not None and param.mesh.replicate_group:
            send_values(tensor, 0, process_groups.process_group(param.mesh.replicate_group))
    return model


def cast_buffers(model: ModelT, dtype: torch.dtype) -> ModelT:
    """Cast the floating-point buffers inside ``model``; return it. ``MixedPrecisionPolicy`` casts parameters alone."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"cast_buffers: dtype is {dtype!r}. Pass a floating-point dtype, such as torch.bfloat16.")
    require_module("cast_buffers", model)
    cast: dict[Tensor, Tensor] = {}  # a buffer in two places stays one tensor
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = cast[buffer] = cast[buffer] if buffer in cast else buffer.to(dtype)
    return model
