"""The type of the wrappers' state dicts: it is set for a whole tree of wrappers, and is the same in all of them.

    state_dict_type        a parameter, and its optimizer's state         configurations
    FULL_STATE_DICT        whole tensors; the default                     offload_to_cpu, rank0_only
    SHARDED_STATE_DICT     DTensors                                       offload_to_cpu
    LOCAL_STATE_DICT       the same                                       offload_to_cpu
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
