"""The decorator: validate, group, shard, swap the class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._eager_path import READS
from ._graph_path import install_passes
from ._group import ParamGroup
from ._mesh import shard_mesh
from ._module import original_class, refresh, refresh_owners
from ._param import STAMP, ShardedParam, Slot, layout_of, shard_param
from ._state import STATE, UnitState, state_of, states_in

ModuleT = TypeVar("ModuleT", bound="nn.Module | list[nn.Module] | tuple[nn.Module, ...]")


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> ModuleT:
    """Shard the parameters of ``module`` that no earlier call claimed over ``mesh``, in place, and return it.

    Call it bottom-up: on each block, then on the whole. One call is one unit: its parameters are gathered together
    before they are used and freed after it. With a list of modules, they form one unit.
    """
    given: tuple[Any, ...] = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not given:
        raise ValueError("fully_shard([]) has nothing to shard. Pass a module, or a list of at least one.")
    for one in given:
        _validate_module(one)
    modules = _roots_of_list(tuple(_behind_compile(one) for one in given))
    reshard = _validate_reshard(reshard_after_forward)
    _validate_offload(offload_policy)
    target = shard_mesh(mesh, dp_mesh_dims)

    # Nothing is changed before everything is validated: a refused call leaves the module as it was.
    ignored = set(ignored_params or ())
    managed = _managed_modules(modules)
    claimed, unclaimed = _parameter_slots(modules, managed, ignored)
    layouts, overrides = {}, {}
    for fqn, slots in unclaimed.items():
        _validate_param(fqn, slots[0].param)
        layouts[fqn] = layout_of(fqn, slots[0].param, target, shard_placement_fn)
        overrides.update(_dtype_override(fqn, slots[0].param, mp_policy))

    install_passes()
    for one in given:
        if isinstance(one, compat.OptimizedModule):
            _hide_wrapper_in_state_dict(one)
    _move_to_device(managed, unclaimed, target.device)
    group = ParamGroup(
        unit="+".join(original_class(one).__name__ for one in modules),
        mesh=target,
        mp_policy=mp_policy,
        overrides=overrides,
        reshard_after_forward=reshard,
    )
    state = UnitState(modules=modules, group=group, mp_policy=mp_policy)
    for one in modules:
        one.__dict__[STATE] = state
    for fqn, slots in unclaimed.items():
        param = shard_param(fqn, len(group.params), slots, layouts[fqn], target)
        group.params.append(param)
        for slot in slots:
            _register_read(slot, param, state, state)
    for slots in claimed.values():
        _adopt(slots, state)
    _demote_inner_roots(state)
    refresh(state)
    for one in modules:
        compat.recompile_call(one)
    return module


def _demote_inner_roots(state: UnitState) -> None:
    """What was the outermost unit so far is inside this one now, and FSDP2's rule for roots is this one's."""
    for module in state.modules:
        for inner in states_in(module):
            if inner is state:
                continue
            if inner.outer is None:
                inner.outer = state
            if inner.group.is_root:
                inner.group.is_root = False
                refresh(inner)


def _behind_compile(module: nn.Module) -> nn.Module:
    """The module itself, where the user compiled it first: its class is what must change."""
    return module._orig_mod if isinstance(module, compat.OptimizedModule) else module


def _hide_wrapper_in_state_dict(module: nn.Module) -> None:
    """Take ``_orig_mod.`` out of checkpoints, as FSDP2 users know them from ``module.compile()``."""

    def strip(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state_dict if key.startswith(f"{prefix}_orig_mod.")]:
            state_dict[prefix + key[len(prefix) + len("_orig_mod.") :]] = state_dict.pop(key)

    def restore(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if not key.startswith(f"{prefix}_orig_mod."):
                state_dict[f"{prefix}_orig_mod.{key[len(prefix) :]}"] = state_dict.pop(key)

    module.register_state_dict_post_hook(strip)
    module.register_load_state_dict_pre_hook(restore)


def _roots_of_list(modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """The members that no other member contains."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return tuple(dict.fromkeys(module for module in modules if id(module) not in inner))


def _validate_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes a module or a list of modules, but got {type(module).__name__}.")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and original_class(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard got a {type(module).__name__}, which has no forward to gather for. Apply it to its members, "
            "or pass list(module) to make them one unit."
        )
    if state_of(module) is not None:
        raise ValueError(
            f"fully_shard was applied to this {original_class(module).__name__} already. Apply it once to each module."
        )


def _validate_reshard(reshard_after_forward: Any) -> bool | None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if isinstance(reshard_after_forward, int):
        raise NotImplementedError(
            f"reshard_after_forward={reshard_after_forward}: resharding to a smaller group of ranks is not supported "
            "yet. Pass True, False or None."
        )
    raise ValueError(f"reshard_after_forward={reshard_after_forward!r} is neither a bool, an int nor None.")


def _validate_offload(offload_policy: OffloadPolicy) -> None:
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise NotImplementedError(
            f"offload_policy={offload_policy}: offloading shards to the CPU is not supported yet. Leave it out."
        )


def _managed_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules whose parameters this call takes: the subtrees, down to units of earlier calls."""
    managed: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in managed or state_of(module) is not None:
            return
        managed[module] = None
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(managed)


def _parameter_slots(
    modules: Sequence[nn.Module], managed: list[nn.Module], ignored: set[nn.Parameter]
) -> tuple[dict[str, list[Slot]], dict[str, list[Slot]]]:
    """Where each parameter is registered, by the FQN of its first place: (tied to an earlier call's, this call's)."""
    by_param: dict[nn.Parameter, tuple[str, list[Slot]]] = {}
    chosen = set(managed)
    for number, root in enumerate(modules):
        for path, module in root.named_modules():
            if module not in chosen:
                continue
            for name, param in module._parameters.items():
                if param is None or param in ignored or name in module.__dict__.get(READS, {}):
                    continue
                fqn = f"{path}.{name}" if path else name
                fqn = fqn.replace("_orig_mod.", "")
                # Members of a list have no common path: their place in it tells them apart.
                fqn = f"[{number}].{fqn}" if len(modules) > 1 else fqn
                by_param.setdefault(param, (fqn, []))[1].append(Slot(module, name))
    claimed: dict[str, list[Slot]] = {}
    unclaimed: dict[str, list[Slot]] = {}
    for param, (fqn, slots) in by_param.items():
        (claimed if hasattr(param, STAMP) else unclaimed)[fqn] = slots
    return claimed, unclaimed


def _validate_param(fqn: str, param: nn.Parameter) -> None:
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"{fqn} is a DTensor already (placements {param.placements}): combining fully_shard with tensor "
            "parallelism is not supported yet."
        )
    if param.ndim == 0:
        raise ValueError(f"{fqn} is a scalar and cannot be sharded. Give it shape (1,), or pass it in ignored_params.")


def _move_to_device(managed: Iterable[nn.Module], slots: dict[str, list[Slot]], device: torch.device) -> None:
    for places in slots.values():
        param = places[0].param
        if not param.is_meta and param.device != device:
            with torch.no_grad():
                param.data = param.data.to(device)
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _dtype_override(fqn: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> dict[str, torch.dtype]:
    """What the policy's ``param_dtype_override_fn`` (torch 2.15) says of one parameter."""
    override_fn = getattr(policy, "param_dtype_override_fn", None)
    dtype = None if override_fn is None else override_fn(param)
    if dtype is None:
        return {}
    if not isinstance(dtype, torch.dtype) or dtype not in (policy.param_dtype, param.dtype):
        raise ValueError(
            f"{fqn}: param_dtype_override_fn returned {dtype!r}. Return None, the policy's param_dtype "
            f"({policy.param_dtype}), or the parameter's own dtype ({param.dtype})."
        )
    return {fqn: dtype}


def _adopt(slots: list[Slot], reader: UnitState) -> None:
    """Tie the slots to a parameter that an earlier call sharded: one shard, one gather, one gradient."""
    param: ShardedParam = getattr(slots[0].param, STAMP)
    first = param.slots[0]
    _, owner, _ = first.module.__dict__[READS][first.name]
    for slot in slots:
        slot.register(param.shard)
        param.slots.append(slot)
        _register_read(slot, param, owner, reader)
    refresh(owner)


def _register_read(slot: Slot, param: ShardedParam, owner: UnitState, reader: UnitState) -> None:
    if READS not in slot.module.__dict__:
        slot.module.__dict__[READS] = {}
        # load_state_dict(assign=True) may bring another dtype.
        slot.module.register_load_state_dict_post_hook(lambda module, incompatible: refresh_owners(module))
    slot.module.__dict__[READS][slot.name] = (param, owner, reader)
