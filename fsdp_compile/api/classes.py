"""The generated classes whose properties read parameters.

    Block given to fully_shard      class FSDPBlock(FSDPModule, Block)
    Linear inside it                class Linear(ShardedModule, Linear):  weight = property(...); bias = property(...)

``_parameters`` still holds the shards (``api/registered.py``), so names, ``state_dict`` keys and ``parameters()`` do
not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors
from ..core.captures import refuse_script
from ..core.param import READS, ShardedParam, Slot, beside
from ..core.shared import shared
from ..core.spec import can_be_given, eager_only
from ..core.unit import INSIDE, Unit, original_class, unit_of
from ..eager.forward import eager_read, eager_write
from ..eager.running import running
from ..graph.read import getter
from ..graph.sink import arrange_edges, follow_mode, forget_edges
from .copies import deep_copy
from .registered import register
from .unit_forward import eager_forward_for, forward_inside, unit_forward, with_code_of_its_own

CHANGES = "_fsdp_compile_changes"  # the attribute of modules whose parameters ``nn.Module`` is replacing


class ShardedModule:
    """What every module with sharded parameters has: it holds shards of one rank, so it does not pickle.

    A new object of a generated class, as slicing an ``nn.Sequential`` makes one, is of the original class.
    """

    def __init_subclass__(cls, **unused: Any) -> None:
        """Nothing: a user's class that wants to be told of subclasses, or asks something of them, means its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._fsdp_compile_original(*args, **kwargs)  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # nn.Module's, found past torch's own FSDPModule, which looks for a state of its own.
        apply = self._fsdp_compile_original._apply  # type: ignore[attr-defined]
        if CHANGES in self.__dict__:
            return apply(self, fn, recurse)
        with _changed(list(self.modules()) if recurse else [self], fn):  # type: ignore[attr-defined]
            return apply(self, fn, recurse)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_leaf:  # what a read gave, which is no parameter for longer than a forward
            places = self._parameters if name in self.__dict__.get(READS, {}) else self.__dict__  # type: ignore[attr-defined]
            places[name] = param
            return
        super().register_parameter(name, param)  # type: ignore[misc]
        known = self.__dict__.get(READS, {}).get(name)
        if known is not None and param is not None:
            _take_or_refuse(*known, Slot(self, name))  # type: ignore[arg-type, call-arg]

    def __prepare_scriptable__(self) -> NoReturn:
        reads = self.__dict__.get(READS, {})
        name = next((param.fqn for param, _, _ in reads.values()), type(self).__name__)
        refuse_script(name)

    def _load_from_state_dict(self, *args: Any) -> None:
        state, prefix, metadata = args[:3]
        assigns = metadata.get("assign_to_params_buffers", False)
        if assigns:
            _require_shards(self, state, prefix)
        if assigns or torch.__future__.get_swap_module_params_on_conversion():
            let_go(self)
        self._fsdp_compile_original._load_from_state_dict(self, *args)  # type: ignore[attr-defined]
        take_back(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Not __deepcopy__: what torch.compile(model) returns would find that one here, and lose itself when copied.
        return _copied, (_Original(self),)


class _Original:
    """A sharded module on its way through ``copy`` or ``pickle``: it can be deep-copied, and that is all."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deep_copy(self.module, memo, refresh)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(self.module).__name__} is sharded and cannot be pickled. Save model.state_dict() with "
            "torch.distributed.checkpoint, and load it into a model built and sharded alike."
        )


@contextmanager
def _changed(modules: Sequence[Any], fn: Any) -> Iterator[None]:
    """Let ``nn.Module`` replace the parameters of ``modules``, and follow what they are then.

    It swaps DTensors, which must have no AccumulateGrad. All modules together, for edges are made a unit at a time.
    Gradients that a tensor without the parameter's ``grad_dtype`` refuses are kept until it has that again.
    """
    read: list[Any] = [one for one in modules if isinstance(one, ShardedModule)]
    owned = _read_by(*read)
    for owner, params in owned.items():
        _require_no_cast(owner, params, fn)
    aside = [(one, name, grad) for one in read for name, grad in _grads_of_other_dtypes(one)]
    for owner, params in owned.items():
        forget_edges(owner, params)
    for one in read:
        one.__dict__[CHANGES] = True
    for one, name, _ in aside:
        one._parameters[name].grad = None
    try:
        yield
    finally:
        for one in read:
            del one.__dict__[CHANGES]
        for owner, params in owned.items():
            refresh(owner, None if len(params) == len(owner.params) else params)
        for one, name, grad in aside:
            param = one._parameters[name]
            dtype = autograd.get_grad_dtype(param)
            with torch.no_grad():
                param.grad = fn(grad) if dtype is None else fn(grad).to(dtype)


def _grads_of_other_dtypes(module: Any) -> Iterator[tuple[str, Any]]:
    for name in module.__dict__.get(READS, {}):
        param = dict.get(module._parameters, name)
        if param is not None and param.grad is not None and param.grad.dtype != param.dtype:
            yield name, param.grad


def _copied(module: Any) -> Any:
    """What ``copy.deepcopy`` made of the original."""
    if isinstance(module, _Original):
        raise TypeError(
            f"{type(module.module).__name__} is sharded and cannot be copied by copy.copy, whose copies share their "
            "parameters with the original. Use copy.deepcopy."
        )
    return module


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """In place of the original class's own, which takes its turn within."""
    return deep_copy(self, memo, refresh)


def refresh(unit: Unit, only: Sequence[ShardedParam] | None = None) -> None:
    """Have reads of the unit's parameters go by how the unit is set up now.

    ``only`` these were replaced, and nothing else changed.
    """
    params = unit.params if only is None else only
    kinds = [type(param.local) for param in params]
    unit.version += 1
    unit.num_set_ups += only is None
    unit.watch.specs = None
    for param in params:
        _follow(unit, param)
    if only is not None and kinds != [type(param.local) for param in params]:
        only, params = None, unit.params  # an extension came or went, by which the whole unit goes
        unit.num_set_ups += 1
    if only is None:
        unit.eager_only = eager_only(unit)
        unit.gives_to_graphs = all(can_be_given(param) for param in unit.params)
    follow_mode(unit, only)
    arrange_edges(unit, only)
    if only is None:
        for module in dict.fromkeys([*unit.modules, *_readers(params)]):
            _set_class(module)
        unit.watch.say_unheeded()


def _follow(unit: Unit, param: ShardedParam) -> None:
    """Look at what is registered where the parameter is, and have beside it what reads of it ask."""
    param.tie()
    param.put_beside("watch", unit.watch)
    param.put_beside("fqn", param.fqn)
    if param.dtensor is not None:
        param.put_beside("mesh", param.dtensor.mesh)
    for registered in dict.fromkeys(slot.param for slot in param.slots if slot.param is not None):
        if unit.pins:
            dtensors.pin(registered)
        param.follow(registered)
        param.keep_grad_dtype()
    if unit.given is None:
        param.put_beside("full", None)  # guards look there before anybody gives


def _readers(params: Iterable[ShardedParam]) -> dict[nn.Module, None]:
    """The modules where these are registered."""
    return dict.fromkeys(slot.module for param in params for slot in param.slots)


def parts_of(unit: Unit) -> list[Any]:
    """Everything in which something of a unit is noted: what is to be kept to know how it was."""
    run = unit.running
    runs = [] if run is None else [run, run.own_iteration]
    sinks = [param.sink for param in unit.params if param.sink is not None]
    settings = [unit.settings, unit.settings.comms, unit.accumulation]
    return [unit, unit.watch, *runs, *settings, *unit.params, *sinks, *unit.modules, *_readers(unit.params)]


def _set_class(module: nn.Module) -> None:
    reads = tuple(sorted(module.__dict__.get(READS, {})))
    _require_our_class(module)
    absent = register(module) if reads else ()
    unit = unit_of(module)
    if unit is None:
        module.__class__ = sharded_class(original_class(module), None, None, reads, absent)
    else:
        module.__class__ = sharded_class(original_class(module), unit.mixin, unit.eager_only, reads, absent)


def let_go(module: Any) -> None:
    """Let nothing of ours hold the parameters that ``module`` reads."""
    for owner, params in _read_by(module).items():
        forget_edges(owner, params)


def _require_shards(module: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Raise where what is to be assigned to a module is not cut as its shards are."""
    for name, (param, _, _) in module.__dict__.get(READS, {}).items():
        shard, new = param.shard, state.get(prefix + name)
        if param.is_full or module._parameters.get(name) is not shard or not isinstance(new, torch.Tensor):
            continue
        if isinstance(new, DTensor) and (new.device_mesh, new.placements) == (shard.device_mesh, shard.placements):
            continue
        has = f"a DTensor with placements {new.placements}" if isinstance(new, DTensor) else f"a {type(new).__name__}"
        raise RuntimeError(
            f"{param.fqn}: load_state_dict(assign=True) would put {has} in the place of its shard, a DTensor with "
            f"placements {shard.placements} on {shard.device_mesh}. Give that of a sharded model's state_dict(), or "
            "have torch.distributed.checkpoint.state_dict.set_model_state_dict cut whole tensors."
        )


def _take_or_refuse(param: ShardedParam, owner: Unit, reader: Unit, slot: Slot) -> None:
    """Take what was put in a shard's place, or have the next forward refuse it.

    What is put there inside a forward goes when that ends.
    """
    if param.is_full or running(owner).runs_forward or running(reader).runs_forward:
        return
    owner.version += 1  # the eager path looks at it anew
    put, param.refused = slot.param, None
    shard: Any = param.shard
    if isinstance(put, DTensor):
        alike = (put.device_mesh, put.placements, put.shape) == (shard.device_mesh, shard.placements, shard.shape)
        if alike and put.dtype != shard.dtype:
            refresh(owner, [param])
    else:
        known = (shard.shape, shard.dtype, shard.device)
        alike = param.layout.num_shards == 1 and param.dtensor is None and (put.shape, put.dtype, put.device) == known
        if alike:  # no rank shares it out, so its values are the shard's
            shard.data = dtensors.dtensor_like(shard, put.detach())
            slot.register(shard.requires_grad_(put.requires_grad))
    if not alike:
        param.refused = put


def take_back(module: Any) -> None:
    """Have edges again, of other parameters where others came, of other dtypes perhaps."""
    for owner, params in _read_by(module).items():
        if any(param.has_other_data or any(slot.param is not param.shard for slot in param.slots) for param in params):
            refresh(owner, params)
        else:
            arrange_edges(owner, params)


def _read_by(*modules: Any) -> dict[Unit, list[ShardedParam]]:
    """The parameters that ``modules`` read, by the unit that owns them."""
    owned: dict[Unit, dict[ShardedParam, None]] = {}
    for module in modules:
        for param, owner, _ in module.__dict__.get(READS, {}).values():
            owned.setdefault(owner, {})[param] = None
    return {owner: list(params) for owner, params in owned.items()}


def _require_no_cast(unit: Unit, params: Sequence[ShardedParam], fn: Any) -> None:
    """Raise where ``fn`` casts a full parameter: what takes its place again is the shard, in its own dtype."""
    for param in params:
        if param.is_full and fn(torch.empty(0, dtype=param.shard.dtype)).dtype != param.shard.dtype:
            raise RuntimeError(
                f"{unit.name}: {param.fqn} is full, inside full_params, and its shard stays {param.shard.dtype}. "
                "Cast the model outside."
            )


def _require_our_class(module: nn.Module) -> None:
    cls = type(module)
    if issubclass(cls, ShardedModule) and "_fsdp_compile_original" not in cls.__dict__:
        fqns = ", ".join(param.fqn for param, _, _ in module.__dict__.get(READS, {}).values())
        raise RuntimeError(
            f"{fqns}: the class of their module changed to {cls.__name__} after fully_shard (parametrizations do "
            "that). Change it before fully_shard."
        )


@shared
def sharded_class(
    cls: type[nn.Module],
    mixin: type | None,
    eager_only: str | None,
    reads: tuple[str, ...],
    absent: tuple[str, ...],
) -> type[nn.Module]:
    """A subclass of ``cls`` whose properties read the parameters named ``reads``; modules with the same share one.

    ``mixin`` is a base for modules that are a unit, ``eager_only`` names what Dynamo must not trace them for.
    Parameters that are registered as None have the names ``absent``.
    """
    namespace: dict[str, Any] = {"_fsdp_compile_original": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    namespace.update({name: getter(name, eager_read, eager_write) for name in reads})
    namespace.update({name: property(_reads_beside(beside(name, "absent"))) for name in absent})
    if hasattr(cls, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    if mixin is None:
        # Its original's name, which code goes by and repr shows; a unit's begins with FSDP, as under FSDP2.
        return type(cls.__name__, (ShardedModule, cls), {**namespace, "__qualname__": cls.__qualname__})
    name = f"FSDP{cls.__name__}"
    namespace[INSIDE] = with_code_of_its_own(forward_inside, f"{name}._call_inside")
    if eager_only is None:
        namespace["_call_impl"] = with_code_of_its_own(unit_forward, f"{name}._call_impl")
    else:
        namespace["_call_impl"] = eager_forward_for(name, eager_only)
    return type(name, (mixin, cls), namespace)


def _reads_beside(attribute: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self, attribute)


def _flat_weights(self: nn.RNNBase) -> list[Any]:
    """nn.RNN and its kin keep a list of their parameters beside them: read them anew each time."""
    return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]
