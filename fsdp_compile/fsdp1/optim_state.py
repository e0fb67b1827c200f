"""Convert an optimizer's state to one by parameters' names, and back.

    optim.state_dict()                                    optim_state(...)
      state         0: {exp_avg: DTensor, step}   -->       state         "layers.0.up.weight": {exp_avg: whole, step}
      param_groups  [{lr, params: [0, 1]}]        <--       param_groups  [{lr, params: ["layers.0.up.weight", ...]}]

Values shaped like their parameter are converted as parameters are (state_dicts.py); others, as ``step``, stay the same.
An optimizer may have its own order of parameters, and numbers or names for keys. So parameters are looked up by the
model's names, ranks compare which states they have, and all of them gather in the order of the names.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from .._torch_compat import fsdp1
from ..api.exchange import send_values
from ..api.fitting import from_all_ranks
from ..core.containers import map_tensors, tensors_in
from ..core.param import ShardedParam
from ..core.unit import units_in
from ..passes.ir.module_paths import plain_name
from .region import clean
from .state_dicts import loaded_as, rank0_only, saved_as

OptimState = dict[str, Any]

_NO_STATE = (
    '`optim_state_dict` must have the keys "state" and "param_groups" to be loaded. Pass what FSDP.optim_state_dict '
    "returned."
)


def optim_state(
    model: nn.Module,
    optim: Any,
    given: OptimState | None,
    settings: StateDictSettings,
    group: dist.ProcessGroup | None = None,
) -> OptimState:
    """Return the state of ``optim``, or of ``given`` in its place, by names; with ``rank0_only``, empty on other ranks.

    A state that belongs to no parameter keeps its key. All ranks of ``group`` call this.
    """
    given = optim.state_dict() if given is None else given
    config: Any = settings.optim_state_dict_config
    names = _OptimNames(model, optim)
    states = {names.of(key): state for key, state in given["state"].items()}
    _require_alike(names, states, group)
    gets_it = not rank0_only(config) or dist.get_rank(group) == 0

    def keep(value: Any) -> Any:  # with rank0_only, other ranks keep nothing of what was gathered
        if not gets_it:
            return None
        return value.cpu() if config.offload_to_cpu and isinstance(value, Tensor) else value

    def alone(value: Tensor) -> Tensor:  # a clone, for the optimizer goes on writing to it
        if isinstance(value, DTensor) and settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            return value.full_tensor()
        return value.detach().clone()

    saved = {name: dict(sorted(states[name].items())) for name in sorted(states.keys() & names.current.keys())}
    sharded: list[tuple[str, str]] = []
    for name, state in saved.items():
        for key, value in state.items():
            if _is_like(names.sharded.get(name), value):
                sharded.append((name, key))
            else:
                state[key] = keep(map_tensors(value, alone))
    values = saved_as(settings.state_dict_type, {f"{key} of {name}": saved[name][key] for name, key in sharded})
    for (name, key), value in zip(sharded, values, strict=True):
        saved[name][key] = keep(value)
    if not gets_it:
        return {}
    saved |= {key: state for key, state in states.items() if key not in names.current}
    if "param_groups" not in given:
        return {"state": saved}
    groups = [{**group, "params": [names.of(key) for key in group["params"]]} for group in given["param_groups"]]
    return {"state": saved, "param_groups": groups}


def optim_state_to_load(
    model: nn.Module,
    optim: Any,
    given: OptimState,
    settings: StateDictSettings,
    by_name: bool,
    group: dist.ProcessGroup | None,
) -> OptimState:
    """Convert a state by names for ``optim.load_state_dict``; with ``rank0_only``, rank 0 sends it to the others.

    ``by_name``: the optimizer's keys are the names that ``model.named_parameters()`` has.
    """
    if rank0_only(settings.optim_state_dict_config):
        given = _from_first(given, group)
    elif "state" not in given:
        raise ValueError(_NO_STATE)
    names = _OptimNames(model, optim)
    _require_own(names.foreign)
    keys = {name: names.current[name] for name in names.numbers} if by_name else names.numbers
    states: dict[Any, Any] = {}
    for key, state in given["state"].items():
        name = names.of_name(key)
        if name in keys:
            states[keys[name]] = {entry: _loaded(names.sharded.get(name), value) for entry, value in state.items()}
        elif name not in names.current:
            states[key] = state
    if "param_groups" not in given:
        return {"state": states}
    return {"state": states, "param_groups": _groups_to_load(names, optim, given["param_groups"], keys)}


def numbers_of(model: nn.Module, optim: Any) -> dict[str, int]:
    """Return the numbers of the optimizer's parameters in its state dict, by their names in the model."""
    names = _OptimNames(model, optim)
    _require_own(names.foreign)
    return names.numbers


class _OptimNames:
    """The model's parameters by name, and an optimizer's keys for them.

    Names are those of the plain model, without wrappers. A tied parameter has the first of its names.
    """

    def __init__(self, model: nn.Module, optim: Any) -> None:
        named = list(model.named_parameters(remove_duplicate=False))
        current: dict[Any, str] = {}
        for name, param in named:
            current.setdefault(param, name)
        self.of_param = {param: _name(name) for param, name in current.items()}
        self.current = {_name(name): name for name in current.values()}  # the names with wrappers
        # torch's helpers leave the wrappers of torch.compile in some names, and take them out of others.
        self._by_any_name = {plain_name(name): self.of_param[param] for name, param in named}
        sharded = {one.param: one for unit in units_in(model) for one in unit.params}
        self.sharded = {name: sharded[param] for param, name in self.of_param.items() if param in sharded}
        ours = [param for group in optim.param_groups for param in group["params"]]
        self.numbers = {self.of_param[param]: number for number, param in enumerate(ours) if param in self.of_param}
        self._by_number = {number: name for name, number in self.numbers.items()}
        self.foreign = [tuple(param.shape) for param in ours if param not in self.of_param]

    def of(self, key: Any) -> Any:
        """Return the parameter's name for an optimizer's key, a number or a name; the key, if it is no parameter's."""
        return self._by_number.get(key, key) if isinstance(key, int) else self.of_name(key)

    def of_name(self, key: Any) -> Any:
        """Return the parameter's name for a name that may have wrappers in it; the key, if it is no parameter's."""
        return self._by_any_name.get(plain_name(key), key) if isinstance(key, str) else key


def _require_own(foreign: list[tuple[int, ...]]) -> None:
    if foreign:
        raise ValueError(
            f"The optimizer has a parameter of shape {foreign[0]} that is not the model's. Build it over "
            "model.parameters() after wrapping."
        )


def _require_alike(names: _OptimNames, states: OptimState, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where ranks that hold the same parameter have different states for it.

    They compare digests first: the names of 2,000 parameters from 1,000 ranks are 100 MB.
    """
    ranks_of: dict[Any, tuple[int, ...]] = {}  # `DeviceMesh.mesh` is computed each time: 0.5 ms (2.15)
    has: dict[tuple[int, ...], dict[str, str]] = {}
    for name, param in sorted(names.sharded.items()):
        mesh = param.shard.device_mesh  # type: ignore[attr-defined]
        if mesh not in ranks_of:
            ranks_of[mesh] = tuple(mesh.mesh.flatten().tolist())
        entries = [f"{key} in {one.dtype}" for key, one in states.get(name, {}).items() if _is_like(param, one)]
        has.setdefault(ranks_of[mesh], {})[name] = ", ".join(sorted(entries)) or "nothing"
    digests = {ranks: hashlib.sha256(repr(some).encode()).hexdigest()[:12] for ranks, some in has.items()}
    seen: dict[tuple[int, ...], set[str]] = {}
    for theirs, foreign in from_all_ranks((digests, names.foreign), group):
        _require_own(foreign)
        for ranks, digest in theirs.items():
            seen.setdefault(ranks, set()).add(digest)
    if all(len(some) == 1 for some in seen.values()):
        return
    of_ranks = from_all_ranks((dist.get_rank(), has), group)
    differing = []
    for ranks in seen:
        on = {rank: theirs[ranks] for rank, theirs in of_ranks if ranks in theirs}
        for name in sorted({name for some in on.values() for name in some}):
            first: dict[str, int] = {}
            for rank, some in on.items():
                first.setdefault(some.get(name, "no such parameter"), rank)
            if len(first) > 1:
                differing.append(f"{name}: " + "; ".join(f"rank {rank} has {what}" for what, rank in first.items()))
    raise RuntimeError(
        "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some "
        f"ranks are missing some of those states. {'. '.join(differing[:3])}{', ...' if len(differing) > 3 else ''}. "
        "Build the optimizer over the same parameters on every rank, and step it on all of them."
    )


def _is_like(param: ShardedParam | None, value: Any) -> bool:
    """Whether a value is sharded as its parameter is."""
    if param is None or not isinstance(value, DTensor) or not isinstance(param.shard, DTensor):
        return False
    return value.shape == param.shard.shape and value.placements == param.shard.placements


def _loaded(param: ShardedParam | None, value: Any) -> Any:
    """Return a value as a shard in its saved dtype: optimizers may keep more bits than parameters have, or fewer."""
    return value if param is None or not isinstance(value, Tensor) else loaded_as(param.param, value, value.dtype)


def _groups_to_load(names: _OptimNames, optim: Any, given: list[Any], keys: dict[str, Any]) -> list[Any]:
    """Return the given groups' settings, in the order in which the optimizer has groups and parameters.

    A parameter that is not sharded and is in no given group is left out, as under FSDP1: code that manages it by other
    means (expert parallelism) adds its entry.
    """
    group_of = {names.of_name(key): group for group in given for key in group["params"]}
    groups = []
    for group in optim.param_groups:
        ours = [names.of_param[param] for param in group["params"]]
        missing = [name for name in ours if name not in group_of and name in names.sharded]
        if missing:
            raise RuntimeError(
                f"The optimizer state to load has no parameter group with {', '.join(missing)}. Build the optimizer "
                "over the parameters that it was saved with."
            )
        ours = [name for name in ours if name in group_of]
        theirs = group_of[ours[0]] if ours else group  # an empty group keeps its settings
        apart = [name for name in ours if group_of[name] is not theirs]
        if apart:
            raise RuntimeError(
                f"The optimizer state to load has {ours[0]} and {apart[0]} in different parameter groups, but the "
                "optimizer has them in one, with one learning rate. Build it with the groups that it was saved with."
            )
        # Saved names may be in another order. Without any, torch.optim keeps the optimizer's own (2.11 to 2.15).
        kept = {key: value for key, value in theirs.items() if key != "param_names"}
        groups.append({**kept, "params": [keys[name] for name in ours]})
    return groups


def _name(name: str) -> str:
    """Return the name that a parameter has in the model's state dict. Of wrappers, it has torch.compile's alone."""
    return fsdp1.without_checkpointing(clean(name))


def _from_first(given: OptimState, group: dist.ProcessGroup | None) -> OptimState:
    """Return rank 0's state on every rank. It is broadcast as one object without values, then tensor by tensor."""
    first = dist.get_rank(group) == 0
    known: OptimState = {key: given[key] for key in ("state", "param_groups") if key in given}
    plan = [map_tensors(known, lambda one: one.to("meta")) if first and "state" in given else None]
    dist.broadcast_object_list(plan, group=group, group_src=0)
    if plan[0] is None:
        raise ValueError(f"{_NO_STATE} Rank 0 has none.")
    received: OptimState = known if first else map_tensors(plan[0], lambda one: torch.empty_like(one, device="cpu"))
    for tensor in tensors_in(received):
        send_values(tensor, 0, group)
    return received
