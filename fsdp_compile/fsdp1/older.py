"""The optimizer-state functions that FSDP1 had before ``optim_state_dict``, which scripts still call.

    full_optim_state_dict, sharded_optim_state_dict                              optim_state_dict, of one type
    shard_full_..., scatter_full_..., flatten_sharded_optim_state_dict           optim_state_dict_to_load, of one type
    rekey_optim_state_dict                                                       numbers to names, and back

They accept ``optim`` or, older still, ``optim_input``: the parameters that the optimizer was made from, by default
``model.parameters()``.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateKeyType, StateDictSettings, StateDictType

from .optim_state import OptimState, numbers_of, optim_state, optim_state_to_load
from .state_dicts import settings_of


class OlderOptimState:
    """These functions, as static methods of FullyShardedDataParallel."""

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Any, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> OptimState:
        """Return the optimizer's state by names, in whole tensors on the CPU; by default on rank 0 alone."""
        _warn("full_optim_state_dict", "optim_state_dict")
        _warn_of_input(optim_input)
        return optim_state(model, optim, None, _full(rank0_only), group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Any, group: Any = None) -> OptimState:
        """Return the optimizer's state by names, in DTensors."""
        _warn("sharded_optim_state_dict", "optim_state_dict")
        return optim_state(model, optim, None, settings_of(StateDictType.SHARDED_STATE_DICT), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: OptimState, model: nn.Module, optim_input: Any = None, optim: Any = None
    ) -> OptimState:
        """Convert a state of whole tensors that every rank has for ``optim.load_state_dict``."""
        _warn("shard_full_optim_state_dict", "optim_state_dict_to_load")
        optim = _optimizer(model, optim, optim_input)
        return optim_state_to_load(model, optim, full_optim_state_dict, _full(False), False, None)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: OptimState | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Any = None,
        group: Any = None,
    ) -> OptimState:
        """Convert a state of whole tensors that rank 0 has for ``optim.load_state_dict``."""
        _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        optim = _optimizer(model, optim, optim_input)
        return optim_state_to_load(model, optim, full_optim_state_dict or {}, _full(True), False, group)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: OptimState, model: nn.Module, optim: Any
    ) -> OptimState:
        """Convert a state of DTensors for ``optim.load_state_dict``."""
        _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        settings = settings_of(StateDictType.SHARDED_STATE_DICT)
        return optim_state_to_load(model, optim, sharded_optim_state_dict, settings, False, None)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: OptimState,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Any = None,
    ) -> OptimState:
        """Return the same state with names for keys (PARAM_NAME), or with numbers for keys (PARAM_ID)."""
        if optim_state_key_type not in tuple(OptimStateKeyType):
            raise AssertionError(
                f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {optim_state_key_type!r}. Pass "
                "either."
            )
        numbers = numbers_of(model, _optimizer(model, optim, optim_input))
        has_names = {isinstance(key, str) for key in optim_state_dict["state"]}
        if len(has_names) > 1:
            raise ValueError(
                f"Invalid parameter keys: {list(optim_state_dict['state'])} are names and numbers. Pass a state that "
                "has either."
            )
        to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        keys: dict[Any, Any] = {number: name for name, number in numbers.items()} if to_names else dict(numbers)
        if has_names == {to_names}:
            return optim_state_dict
        rekeyed: OptimState = {"state": {keys[key]: state for key, state in optim_state_dict["state"].items()}}
        if "param_groups" in optim_state_dict:
            rekeyed["param_groups"] = [
                {**group, "params": [keys.get(key, key) for key in group["params"]]}
                for group in optim_state_dict["param_groups"]
            ]
        return rekeyed


def _full(rank0_only: bool) -> StateDictSettings:
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return settings_of(StateDictType.FULL_STATE_DICT, None, config)


def _optimizer(model: nn.Module, optim: Any, optim_input: Any) -> Any:
    """Return the optimizer, or a stand-in that has only its parameter groups."""
    if optim is not None and optim_input is not None:
        raise ValueError("Both optim and optim_input were given. Pass optim.")
    if optim is not None:
        return optim
    _warn_of_input(optim_input)
    given: list[Any] = list(model.parameters()) if optim_input is None else _listed(optim_input)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return types.SimpleNamespace(param_groups=[{**group, "params": list(group["params"])} for group in groups])


def _listed(optim_input: Any) -> list[Any]:
    """Return ``optim_input`` as a list of parameters, or of parameter groups."""
    given = list(optim_input) if isinstance(optim_input, Iterable) else []
    if not isinstance(optim_input, Iterable) or not (_all_are(Tensor, given) or _all_are(dict, given)):
        kinds = ", ".join(sorted({type(one).__name__ for one in given})) or type(optim_input).__name__
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {kinds}. Pass optim= instead."
        )
    if not given:
        raise ValueError("Optimizer input should not be empty. Pass optim= instead.")
    if any(isinstance(one, dict) and "params" not in one for one in given):
        raise AssertionError(
            'A parameter group should map "params" to a list of the parameters in the group. Pass optim= instead.'
        )
    return given


def _all_are(kind: type, given: list[Any]) -> bool:
    return all(isinstance(one, kind) for one in given)


def _warn_of_input(optim_input: Any) -> None:
    if optim_input is not None:
        text = "The `optim_input` argument is deprecated in FSDP1. Pass optim= instead."
        warnings.warn(text, FutureWarning, stacklevel=4)


def _warn(older: str, newer: str) -> None:
    warnings.warn(
        f"FullyShardedDataParallel.{older} is being deprecated and is replaced by {newer}, which does the same. Call "
        "that.",
        FutureWarning,
        stacklevel=3,
    )
