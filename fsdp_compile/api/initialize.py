"""Values for a model before its first step: from nothing, from one rank, in another dtype.

    materialize          meta tensors --memory--> --each module's own initialization, or rank 0's state dict--> values
    sync_module_states   what one rank has of parameters and buffers --broadcast--> every rank
    cast_buffers         buffers in another dtype
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensors, process_groups
from ..core.param import READS, ShardedParam
from ..core.unit import Unit, original_class, units_in
from .full_params import swapped_in

ModelT = TypeVar("ModelT", bound=nn.Module)


def materialize(
    model: ModelT,
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> ModelT:
    """Give the parameters and buffers of ``model`` that are on the meta device memory and values; return it.

    **device** where; by default that of the mesh, or of the accelerator that there is.

    **init_fn** is called with each module that has such parameters or buffers of its own, in the order of
    ``model.modules()``; by default it is ``module.reset_parameters()``, and what a model that it is in has as
    ``_init_weights(module)``, as those of Hugging Face do. Full parameters are there while it runs, those
    of one unit at a time, and every rank draws the random numbers that rank 0 would: sharded or not, the weights are
    those of a model that was never sharded.

    **state_dict** of rank 0, with full tensors, is loaded and sent to all in place of that; other ranks leave it out.
    Only what it does not have, such as buffers that are not saved, is initialized.

    Call it before or after ``fully_shard``, on every rank.
    """
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"materialize: init_fn is a {type(init_fn).__name__}. Pass a function of a module.")
    everywhere = dist.is_available() and dist.is_initialized()
    given = [None if state_dict is None else set(state_dict)]
    if everywhere:
        dist.broadcast_object_list(given)
    (loaded,) = given
    fill_in(model, loaded or set(), device, init_fn)
    if loaded is not None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=everywhere, strict=True)
        set_model_state_dict(model, dict(state_dict or {}), options=options)
    return model


def fill_in(
    model: nn.Module,
    loaded: Collection[str],
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Give what is on the meta device memory, and values but for what will be ``loaded``: names of the model's."""
    units = units_in(model)
    to = torch.device(device) if device is not None else _device_for(units)
    initialize = init_fn or _Own(model)
    missing = list(_on_meta(model, loaded, initialize))
    _allocate(model, to)
    with random_numbers_of_first(to):
        _initialize(units, missing, initialize)


class _Own:
    """Has a module give its own values, and the innermost model around it that knows how, as a second step."""

    def __init__(self, model: nn.Module) -> None:
        self._around: dict[nn.Module, nn.Module] = {}
        for one in model.modules():
            if callable(getattr(one, "_init_weights", None)):
                self._around.update(dict.fromkeys(one.modules(), one))

    def knows(self, module: nn.Module) -> bool:
        return module in self._around or callable(getattr(module, "reset_parameters", None))

    def __call__(self, module: nn.Module) -> None:
        own = [one for some in (module._parameters, module._buffers) for one in some.values() if one is not None]
        has_reset = callable(getattr(module, "reset_parameters", None))
        if has_reset:
            module.reset_parameters()  # type: ignore[operator]
        if module not in self._around:
            return
        floats = [] if has_reset else [one for one in own if one.is_floating_point()]
        for tensor in floats:
            tensor.fill_(float("nan"))
        around = self._around[module]
        around._init_weights(module)  # type: ignore[operator]
        if any(bool(tensor.isnan().any()) for tensor in floats):
            raise ValueError(
                f"{original_class(around).__name__}._init_weights gives a {original_class(module).__name__} on the "
                "meta device no values, and it has no reset_parameters() either. Add that method, or pass init_fn."
            )


def _on_meta(model: nn.Module, loaded: Collection[str], initialize: Any) -> Iterator[nn.Module]:
    """Modules with tensors of their own on the meta device that are not loaded; raises where nothing gives values."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        tensors = {f"{prefix}{name}": tensor for some in (module._parameters, module._buffers)
                   for name, tensor in some.items()}  # fmt: skip
        fqns = [fqn for fqn, tensor in tensors.items() if tensor is not None and tensor.is_meta and fqn not in loaded]
        if not fqns:
            continue
        if isinstance(initialize, _Own) and not initialize.knows(module):
            raise ValueError(
                f"materialize: {', '.join(fqns)} on the meta device: {original_class(module).__name__} has no "
                "reset_parameters() to give values. Add that method, or pass init_fn."
            )
        yield module


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for what is on the meta device; what was tied stays so."""
    ties = _ties(model)
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for (first, name), *others in ties:
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _device_for(units: list[Unit]) -> torch.device:
    if units:
        return torch.device("cpu") if units[0].offload else units[0].mesh.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that has several and is not sharded: those that are stay tied by themselves."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta and name not in module.__dict__.get(READS, {}):
                places.setdefault(param, []).append((module, name))
    return [some for some in places.values() if len(some) > 1]


@contextmanager
def random_numbers_of_first(device: torch.device) -> Iterator[None]:
    """Every rank draws what rank 0 draws; other ranks then go on where they were."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    on_device = device.type not in ("cpu", "meta")
    module = torch.get_device_module(device) if on_device else None
    own: list[Any] = [torch.get_rng_state(), None if module is None else module.get_rng_state(device)]
    first = list(own)
    dist.broadcast_object_list(first)
    torch.set_rng_state(first[0])
    if module is not None:
        module.set_rng_state(first[1], device)
    try:
        yield
    finally:
        if dist.get_rank() != 0:
            torch.set_rng_state(own[0])
            if module is not None:
                module.set_rng_state(own[1], device)


@torch.no_grad()
def _initialize(units: list[Unit], modules: list[nn.Module], initialize: Callable[[nn.Module], Any]) -> None:
    """Have each module write its values, with the full parameters of one unit in the place of its shards."""
    owner = {slot.module: unit for unit in units for param in unit.params for slot in param.slots}
    there: Unit | None = None
    with ExitStack() as scope:
        for module in modules:
            its = owner.get(module)
            if its is not None and its is not there:
                scope.close()
                scope.enter_context(swapped_in([its], writeback=True))
                there = its
            initialize(module)


@torch.no_grad()
def sync_module_states(model: ModelT, src: int = 0, group: dist.ProcessGroup | None = None) -> ModelT:
    """Give every rank of ``group`` the parameters and buffers of rank ``src``, in place; return the model.

    Call it before ``fully_shard``. Afterwards it sends buffers, what is not sharded, and, where a mesh has replicas,
    the shards of the first ones: other shards are of one rank each. DTensors of other parallelisms stay as they are.
    """
    group = group or dist.group.WORLD
    assert group is not None, "there is a default group"
    ranks = dist.get_process_group_ranks(group)
    if src not in ranks:
        raise ValueError(f"sync_module_states: src={src} is not in the group, whose ranks are {ranks}.")
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(f"sync_module_states: {name} is on the meta device. Call fsdp_compile.materialize first.")
    sharded: dict[Tensor, ShardedParam] = {param.param: param for unit in units_in(model) for param in unit.params}
    for _, tensor in named:
        param = sharded.get(tensor)
        if not isinstance(tensor, DTensor):
            _send(tensor, dist.get_group_rank(group, src), group)
        elif param is not None and param.mesh.replicate_group:
            local = dtensors.local_tensor(tensor)
            _send(local, 0, process_groups.process_group(param.mesh.replicate_group))
    return model


def _send(tensor: Tensor, first: int, group: Any) -> None:
    """From the rank of that place in the group, by way of a device that its backend sends from."""
    sent = tensor.detach()
    if sent.device.type == "cpu" and dist.get_backend(group) == "nccl":
        sent = sent.to("cuda")
    sent = sent.contiguous()
    dist.broadcast(sent, group=group, group_src=first)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def cast_buffers(model: ModelT, dtype: torch.dtype) -> ModelT:
    """Cast the floating-point buffers inside ``model``; return it. ``MixedPrecisionPolicy`` casts parameters alone."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"cast_buffers: dtype is {dtype!r}. Pass a floating-point dtype, such as torch.bfloat16.")
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
    return model
