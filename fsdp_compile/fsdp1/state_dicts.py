"""State dicts of wrapped modules: names without wrappers, and values of the type that was set.

    state_dict_type        a parameter, and its optimizer's state         configurations
    FULL_STATE_DICT        whole tensors; the default                     offload_to_cpu, rank0_only
    SHARDED_STATE_DICT     DTensors                                       offload_to_cpu
    LOCAL_STATE_DICT       the same                                       offload_to_cpu

The type is set for a whole tree of wrappers, and is the same in all of them.

    state_dict()            the module's own, with wrappers' names and DTensor shards
      hook of a wrapper  -> clean names; in its region FULL: whole tensors, SHARDED and LOCAL: DTensors
    load_state_dict(given)
      hook of a wrapper  -> wrappers' names; whole tensors become shards
      hook at the end    -> clean names in the lists of missing and unexpected keys
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensors, fsdp1
from ..api.exchange import gathered
from ..core.param import READS, ShardedParam
from ..core.parts import local_of, write_part
from .region import PREFIX, clean, region_of

_CONFIGS: dict[StateDictType, tuple[type, type]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def settings_of(kind: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """Return a type with its configurations, by default its own; raise where they belong to another type."""
    if kind not in _CONFIGS:
        raise TypeError(f"state_dict_type is {kind!r}. Pass a StateDictType.")
    given: list[Any] = []
    for name, one, cls in zip(("state_dict_config", "optim_state_dict_config"), (config, optim_config), _CONFIGS[kind]):
        if one is not None and type(one) is not cls:
            raise RuntimeError(
                f"Expected {name} of type {cls.__name__} but got {type(one).__name__}. Pass one that goes with "
                f"{kind.name}."
            )
        given.append(cls() if one is None else one)
    return StateDictSettings(kind, *given)


def default_settings() -> StateDictSettings:
    """Return the default: whole tensors, on the parameters' device, on all ranks."""
    return settings_of(StateDictType.FULL_STATE_DICT)


def common(settings: Sequence[StateDictSettings]) -> StateDictSettings | None:
    """Return the settings that all have in common; raise where they differ."""
    for one in settings[1:]:
        if one != settings[0]:
            raise AssertionError(
                f"All FSDP modules must have the same state dict settings. Got {settings[0]} and {one}. Call "
                "set_state_dict_type on the outermost module, before it was called on one inside."
            )
    return settings[0] if settings else None


def first_of_one_type(settings: Sequence[StateDictSettings]) -> StateDictSettings | None:
    """Return the settings of the outermost wrapper; raise where an inner wrapper has another type."""
    for one in settings[1:]:
        if one.state_dict_type is not settings[0].state_dict_type:
            raise AssertionError(
                f"All FSDP modules should have the same state_dict_type. Got {settings[0].state_dict_type} and "
                f"{one.state_dict_type}. Set the same one inside before."
            )
    return settings[0] if settings else None


def rank0_only(config: Any) -> bool:
    """Whether ranks other than rank 0 get an empty state dict."""
    return bool(getattr(config, "rank0_only", False))


def has_clean_state_dicts(wrapper: Any) -> None:
    """Register the hooks with which ``wrapper`` saves and loads clean names, and values of the type that was set."""
    wrapper.register_state_dict_post_hook(_save)
    wrapper.register_load_state_dict_pre_hook(_load)
    wrapper.register_load_state_dict_post_hook(_report)


@torch.no_grad()
def saved_as(kind: StateDictType, values: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield copies of named DTensors as a type of state dict has them, one after another; training goes on."""
    if kind is StateDictType.FULL_STATE_DICT:
        return gathered(values.items())
    return (value.detach().clone() for value in values.values())


@torch.no_grad()
def loaded_as(shard: Any, value: Any, dtype: torch.dtype | None = None) -> Any:
    """Convert a parameter's value in a state dict to a DTensor like its shard; return it as it is if it does not fit.

    The result has the shard's dtype, unless another is given. DTensors are returned as they are.
    """
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    local = local_of(shard)
    own_rows = fsdp1.rows_of_sharded_tensor(value)
    if own_rows is not None and own_rows.shape == local.shape:
        value = dtensors.dtensor_like(shard, own_rows)
    elif value.shape != shard.shape:
        return value
    made = torch.empty(local.shape, dtype=dtype or shard.dtype, device=local.device)
    loaded = dtensors.dtensor_like(shard, made)
    write_part(loaded, value)
    return loaded


def _params_in(wrapper: Any, prefix: str) -> Iterator[tuple[str, ShardedParam]]:
    """Yield a wrapper's own sharded parameters by key; wrappers for checkpointing have left themselves out of keys."""
    for path, module in region_of(wrapper._fsdp_wrapped_module):
        for name, (param, _, _) in module.__dict__.get(READS, {}).items():
            yield prefix + fsdp1.without_checkpointing(f"{path}.{name}" if path else name), param


def _save(wrapper: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    del local_metadata
    for key in _last_below(state_dict, prefix):  # all keys, so that they keep their order
        value = state_dict.pop(key)
        state_dict[prefix + clean(key[len(prefix) :])] = value
    versions = getattr(state_dict, "_metadata", {})
    for path in _last_below(versions, prefix):
        versions[clean(path)] = versions[path]  # beside the wrapped name, which a model looks for before any hook

    settings: StateDictSettings = wrapper._state_dict_settings
    kind = settings.state_dict_type
    sharded = [key for key, param in _params_in(wrapper, prefix) if not param.is_full]
    saved = {key: state_dict[key] for key in sharded if isinstance(state_dict.get(key), DTensor)}
    state_dict.update(zip(saved, saved_as(kind, saved)))
    for name, dtype in wrapper._saved_buffer_dtypes.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
    for key in _last_below(state_dict, prefix):
        if rank0_only(settings.state_dict_config) and wrapper.rank != 0:
            del state_dict[key]
        elif settings.state_dict_config.offload_to_cpu and isinstance(state_dict[key], Tensor):
            state_dict[key] = state_dict[key].cpu()


def _last_below(saved: dict[str, Any], prefix: str) -> list[str]:
    """Return the keys that a module and the modules in it have just added, which are the last."""
    return list(itertools.takewhile(lambda key: f"{key}.".startswith(prefix), reversed(saved)))[::-1]


def _load(wrapper: Any, state_dict: Any, prefix: str, *unused: Any) -> None:
    if wrapper._has_full_params:
        raise RuntimeError(
            "load_state_dict was called inside summon_full_params. Call it outside: it takes whole tensors as they are."
        )
    for key, param in _params_in(wrapper, prefix):
        if key in state_dict:
            state_dict[key] = loaded_as(param.param, state_dict[key])
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(prefix + PREFIX):
            state_dict[prefix + PREFIX + key[len(prefix) :]] = state_dict.pop(key)


def _report(wrapper: Any, incompatible: Any) -> None:
    for keys in incompatible:
        keys[:] = [clean(key) for key in keys]
