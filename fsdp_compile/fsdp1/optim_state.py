"""The optimizer's state by parameters' names, and back.

    optim.state_dict()                                    optim_state(...)
      state         0: {exp_avg: DTensor, step}   -->       state         "layers.0.up.weight": {exp_avg: whole, step}
      param_groups  [{lr, params: [0, 1]}]        <--       param_groups  [{lr, params: ["layers.0.up.weight", ...]}]

What is shaped like its parameter travels as parameters do (state_dicts.py); the rest, as ``step``, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictSettings
from torch.distributed.tensor import DTensor

from .._torch_compat import fsdp1
from ..core.param import ShardedParam
from ..core.unit import units_in
from .region import clean
from .settings import rank0_only
from .state_dicts import loaded_as, saved_as

OptimState = dict[str, Any]


def optim_state(
    model: nn.Module,
    optim: Any,
    given: OptimState | None,
    settings: StateDictSettings,
    group: dist.ProcessGroup | None = None,
) -> OptimState:
    """The state of ``optim``, or the ``given`` one in its place, by names; nothing on ranks that get nothing.

    What an optimizer keeps of no parameter stays under its key.
    """
    given = optim.state_dict() if given is None else given
    config: Any = settings.optim_state_dict_config
    known = _sharded(model)
    gets_it = not rank0_only(config) or dist.get_rank(group) == 0
    names = {key: name for key, name, _ in _params_of(model, optim)}
    states = {}
    for key, name, param in _params_of(model, optim):
        state = given["state"].get(name if name in given["state"] else key)
        if state is None:
            continue
        saved = {
            entry: _saved(settings, known.get(param), param, value, config.offload_to_cpu)
            for entry, value in state.items()
        }
        if gets_it:  # on other ranks nothing of what was gathered is kept
            states[name] = saved
    if not gets_it:
        return {}
    states |= {key: value for key, value in given["state"].items() if key not in names and key not in states}
    if "param_groups" not in given:
        return {"state": states}
    groups = [{**group, "params": [names.get(key, key) for key in group["params"]]} for group in given["param_groups"]]
    return {"state": states, "param_groups": groups}


def optim_state_to_load(
    model: nn.Module,
    optim: Any,
    given: OptimState,
    settings: StateDictSettings,
    by_name: bool,
    group: dist.ProcessGroup | None,
) -> OptimState:
    """What ``optim.load_state_dict`` takes, of a state by names; where rank 0 alone has it, it sends it to others."""
    if rank0_only(settings.optim_state_dict_config):
        given = _from_first(given, group)
    given = _as_uncompiled(given)
    known = _sharded(model)
    states: dict[Any, Any] = {}
    for key, name, param in _params_of(model, optim):
        plain = _uncompiled(name)
        if plain not in given["state"]:
            continue
        sharded = known.get(param)
        states[name if by_name else key] = {
            entry: value if sharded is None else _loaded(settings, sharded, value)
            for entry, value in given["state"][plain].items()
        }
    of_params = {_uncompiled(_name(name)) for name, _ in model.named_parameters()}
    states |= {key: value for key, value in given["state"].items() if key not in of_params}
    if "param_groups" not in given:
        return {"state": states}
    groups = _groups_to_load(model, optim, given["param_groups"], by_name)
    return {"state": states, "param_groups": groups}


def numbers_of(model: nn.Module, optim: Any) -> dict[str, int]:
    """The optimizer's parameters: their numbers in its state dict, by their names in the model."""
    return {name: number for number, name, _ in _params_of(model, optim)}


def _saved(
    settings: StateDictSettings, sharded: ShardedParam | None, param: Any, value: Any, offload: bool
) -> Any:
    if isinstance(value, DTensor) and sharded is not None and value.shape == param.shape:
        value = saved_as(settings.state_dict_type, sharded, value)
    elif isinstance(value, Tensor):
        value = value.detach().clone()  # what the optimizer goes on writing to
    return value.cpu() if offload and isinstance(value, Tensor) else value


def _loaded(settings: StateDictSettings, sharded: ShardedParam, value: Any) -> Any:
    """In the dtype in which it was saved: optimizers may keep more bits than parameters have, or fewer."""
    return loaded_as(settings.state_dict_type, sharded, value, value.dtype) if isinstance(value, Tensor) else value


def _groups_to_load(model: nn.Module, optim: Any, given: list[Any], by_name: bool) -> list[Any]:
    """The given groups' settings, in the order in which the optimizer has groups and parameters."""
    group_of = {name: group for group in given for name in group["params"]}
    keys = numbers_of(model, optim)
    names = {param: name for _, name, param in _params_of(model, optim)}
    groups = []
    for group in optim.param_groups:
        ours = [names[param] for param in group["params"]]
        missing = [name for name in ours if _uncompiled(name) not in group_of]
        if missing:
            raise RuntimeError(
                f"The optimizer state to load has no parameter group with {', '.join(missing)}. Build the optimizer "
                "over the parameters that it was saved with."
            )
        theirs = group_of[_uncompiled(ours[0])] if ours else group  # an empty one keeps its settings
        groups.append({**theirs, "params": ours if by_name else [keys[name] for name in ours]})
    return groups


def _params_of(model: nn.Module, optim: Any) -> Iterator[tuple[int, str, Any]]:
    """The optimizer's parameters: (number in its state dict, name in the model, parameter)."""
    names = {param: _name(name) for name, param in model.named_parameters()}
    number = 0
    for group in optim.param_groups:
        for param in group["params"]:
            if param not in names:
                raise ValueError(
                    f"The optimizer has a parameter of shape {tuple(param.shape)} that is not the model's. Build it "
                    "over model.parameters() after wrapping."
                )
            yield number, names[param], param
            number += 1


def _name(name: str) -> str:
    """Without any wrappers, as a plain model's parameter is called."""
    return fsdp1.without_checkpointing(clean(name))


def _uncompiled(name: Any) -> Any:
    """Without torch.compile's wrappers, which torch's helpers put into some names and not into others."""
    return name.replace("_orig_mod.", "") if isinstance(name, str) else name


def _as_uncompiled(given: OptimState) -> OptimState:
    plain = {**given, "state": {_uncompiled(key): value for key, value in given["state"].items()}}
    if "param_groups" in given:
        groups = given["param_groups"]
        plain["param_groups"] = [{**one, "params": [_uncompiled(key) for key in one["params"]]} for one in groups]
    return plain


def _sharded(model: nn.Module) -> dict[Any, ShardedParam]:
    return {param.param: param for unit in units_in(model) for param in unit.params}


def _from_first(given: OptimState, group: dist.ProcessGroup | None) -> OptimState:
    """Rank 0's, on every rank: its plan as an object, tensors one after another."""
    first = dist.get_rank(group) == 0
    source = dist.get_global_rank(group, 0) if group is not None else 0
    plan: list[Any] = [None]
    if first and "state" in given:
        states = given["state"].items()
        described = {name: {key: _described(one) for key, one in state.items()} for name, state in states}
        plan = [{"state": described, **{key: given[key] for key in ("param_groups",) if key in given}}]
    dist.broadcast_object_list(plan, src=source, group=group)
    if plan[0] is None:
        raise ValueError("Rank 0 has no optimizer state to load: it is a dict with state and param_groups.")
    received: OptimState = plan[0]
    device = torch.device("cpu") if "gloo" in str(dist.get_backend(group)) else torch.accelerator.current_accelerator()
    for name, state in received["state"].items():
        for key, value in state.items():
            if isinstance(value, _Described):
                there = given["state"][name][key] if first else torch.empty(value.shape, dtype=value.dtype)
                sent = there.to(device).contiguous()
                dist.broadcast(sent, src=source, group=group)
                state[key] = sent.to(there.device)
    return received


class _Described:
    """A tensor that is on its way."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _described(value: Any) -> Any:
    return _Described(value) if isinstance(value, Tensor) else value
