"""FSDP1: private names that its scripts use, and torch's own objects behind public names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as state_dict_helpers
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX, ActivationWrapper
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state_if_fully_sharded_module
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

# Torch's objects as they were when this package was imported: when they are used, the names may be ours (adopt).
TORCH_FSDP: Any = torch_fsdp.FullyShardedDataParallel

TORCH_GRAD_SCALER: Any = ShardedGradScaler

# By this checkpoint.state_dict finds the state of a wrapped module; to find none is an error there: 2.11 to 2.15.
TORCH_STATE_OF_WRAPPER: Any = _get_module_fsdp_state_if_fully_sharded_module

# ``_HYBRID_SHARD_ZERO2``: 2.11 to 2.15.
HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2


def classes_in_full_precision(mixed_precision: MixedPrecision | None) -> tuple[type[nn.Module], ...]:
    """Return classes that compute in their own dtype (``MixedPrecision._module_classes_to_ignore``: 2.11 to 2.15)."""
    return () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)


def is_policy(policy: Any) -> bool:
    """Whether ``policy`` decides on a whole tree of modules, as ``ModuleWrapPolicy`` and ``CustomPolicy`` do."""
    return hasattr(policy, "_run_policy")


def chosen_by_policy(
    policy: Any, root: nn.Module, ignored_modules: set[nn.Module], kwargs: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy wraps, with arguments for each (``wrap._Policy._run_policy``: 2.11 to 2.15)."""
    chosen: dict[nn.Module, dict[str, Any]] = policy._run_policy(root, ignored_modules, kwargs)
    return chosen


def without_checkpointing(name: str) -> str:
    """Return a name without the parts that checkpoint wrappers add to it (``_CHECKPOINT_PREFIX``: 2.11 to 2.15)."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def behind_checkpointing(module: Any) -> Any:
    """Return the module inside ``checkpoint_wrapper`` or ``offload_wrapper``, or the module given (2.11 to 2.15)."""
    return module._checkpoint_wrapped_module if isinstance(module, ActivationWrapper) else module


def dtype_of_hook(hook: Any) -> torch.dtype | str | None:
    """Return the dtype in which a hook of torch's own reduces, or ``"own"``, the gradient's; None for any other hook.

    ``distributed.algorithms._comm_hooks.default_hooks``: 2.11 to 2.15.
    """
    if hook is default_hooks.fp16_compress_hook:
        return torch.float16
    if hook is default_hooks.bf16_compress_hook:
        return torch.bfloat16
    return "own" if hook in (default_hooks.allreduce_hook, default_hooks.reduce_scatter_hook) else None


def tell_checkpoint_helpers(either: Any, state_of: Any) -> None:
    """Have ``checkpoint.state_dict``'s helpers use ``either`` and ``state_of`` in the place of torch's own for FSDP1.

    They replace its names ``FSDP`` and ``_get_module_fsdp_state_if_fully_sharded_module``: 2.11 to 2.15.
    """
    names = vars(state_dict_helpers)
    for name, theirs, both in (
        ("FSDP", TORCH_FSDP, either),
        ("_get_module_fsdp_state_if_fully_sharded_module", TORCH_STATE_OF_WRAPPER, state_of),
    ):
        if names.get(name) is theirs:
            names[name] = both


def rows_of_sharded_tensor(value: Any) -> torch.Tensor | None:
    """Return this rank's rows of a ShardedTensor, as FSDP1 once gave for shards; None for others (2.11 to 2.15)."""
    if not isinstance(value, ShardedTensor):
        return None
    shards = value.local_shards()
    return shards[0].tensor if len(shards) == 1 else None
