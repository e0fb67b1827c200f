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

from .._torch_compat import dtensors
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
from .unit_forward import eager_forward_for, forward_by, forward_inside, unit_forward, with_code_of_its_own

_GENERATE = ("transformers", "peft")  # packages whose models have a method ``generate``
CHANGES = "_fsdp_compile_changes"  # set on modules while ``nn.Module`` replaces their parameters


class ShardedModule:
    """Base class of every module with sharded parameters: it holds shards of one rank, so it does not pickle.

    Calling a generated class, as slicing an ``nn.Sequential`` does, makes an object of the original class.
    """

    def __init_subclass__(cls, **unused: Any) -> None:
        """Do nothing: a user's class whose ``__init_subclass__`` notes or checks subclasses means the user's own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._fsdp_compile_original(*args, **kwargs)  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The original class's method: that of torch's FSDPModule would look for FSDP2's own state.
        apply = self._fsdp_compile_original._apply  # type: ignore[attr-defined]
        if CHANGES in self.__dict__:
            return apply(self, fn, recurse)
        with _changed(list(self.modules()) if recurse else [self], fn):  # type: ignore[attr-defined]
            return apply(self, fn, recurse)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_leaf:  # what a read gave: a parameter only until the forward ends
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
            for owner, params in read_by(self).items():  # drop our references, so that they can be replaced
                forget_edges(owner, params)
        self._fsdp_compile_original._load_from_state_dict(self, *args)  # type: ignore[attr-defined]
        take_back(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Not __deepcopy__: the wrapper of torch.compile(model) would find it here, and its copy would not be a wrapper.
        return _copied, (_Original(self),)


class _Original:
    """Stands for a sharded module in ``copy`` and ``pickle``: it can be deep-copied, and nothing else."""

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
    """Let ``nn.Module`` replace the parameters of ``modules``, and follow the replacements.

    ``nn.Module`` swaps DTensors, which must have no AccumulateGrad, so their edges are forgotten first: for all modules
    together, since edges are made a unit at a time. A new parameter refuses gradients of another dtype until it has the
    old ``grad_dtype`` again, so these are set aside until then.
    """
    read: list[Any] = [one for one in modules if isinstance(one, ShardedModule)]
    owned = read_by(*read)
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
            dtype = param.grad_dtype
            with torch.no_grad():
                param.grad = fn(grad) if dtype is None else fn(grad).to(dtype)


def _grads_of_other_dtypes(module: Any) -> Iterator[tuple[str, Any]]:
    for name in module.__dict__.get(READS, {}):
        param = dict.get(module._parameters, name)
        if param is not None and param.grad is not None and param.grad.dtype != param.dtype:
            yield name, param.grad


def _copied(module: Any) -> Any:
    """Return what ``copy.deepcopy`` made of the original; raise for ``copy.copy``, which passes an ``_Original``."""
    if isinstance(module, _Original):
        raise TypeError(
            f"{type(module.module).__name__} is sharded and cannot be copied by copy.copy, whose copies share their "
            "parameters with the original. Use copy.deepcopy."
        )
    return module


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Take the place of the original class's ``__deepcopy__``, which ``deep_copy`` calls in turn."""
    return deep_copy(self, memo, refresh)


def refresh(unit: Unit, only: Sequence[ShardedParam] | None = None) -> None:
    """Have reads of the unit's parameters follow the unit's present settings.

    With ``only``, these parameters were replaced, and nothing else changed.
    """
    params = unit.params if only is None else only
    kinds = [type(param.local) for param in params]
    unit.version += 1
    unit.num_set_ups += only is None
    unit.watch.specs = None
    for param in params:
        _follow(unit, param)
    if only is not None and kinds != [type(param.local) for param in params]:
        only, params = None, unit.params  # an extension came or went, which concerns the whole unit
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
    """Follow what is registered in the parameter's places, and put beside it what reads of it need."""
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
        param.put_beside("full", None)  # guards look there before the eager path gives a full parameter


def _readers(params: Iterable[ShardedParam]) -> dict[nn.Module, None]:
    """Return the modules where these parameters are registered."""
    return dict.fromkeys(slot.module for param in params for slot in param.slots)


def parts_of(unit: Unit) -> list[Any]:
    """Return all objects that hold state of a unit, so that a caller can save and restore them."""
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


def _require_shards(module: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Raise if a tensor that is to be assigned to a module is not sharded as the module's shard is."""
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
    """Take a tensor that was put in a shard's place, or have the next forward refuse it.

    A tensor that is put there inside a forward is left alone, since the shard returns when the forward ends.
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
        if alike:  # the parameter is not sharded, so the shard takes its values
            shard.data = dtensors.dtensor_like(shard, put.detach())
            slot.register(shard.requires_grad_(put.requires_grad))
    if not alike:
        param.refused = put


def take_back(module: Any) -> None:
    """Make edges again after ``forget_edges``, for new parameters if they were replaced, perhaps in other dtypes."""
    for owner, params in read_by(module).items():
        if any(param.has_other_data or any(slot.param is not param.shard for slot in param.slots) for param in params):
            refresh(owner, params)
        else:
            arrange_edges(owner, params)


def read_by(*modules: Any) -> dict[Unit, list[ShardedParam]]:
    """Return the parameters that ``modules`` read, by the unit that owns them."""
    owned: dict[Unit, dict[ShardedParam, None]] = {}
    for module in modules:
        for param, owner, _ in module.__dict__.get(READS, {}).values():
            owned.setdefault(owner, {})[param] = None
    return {owner: list(params) for owner, params in owned.items()}


def _require_no_cast(unit: Unit, params: Sequence[ShardedParam], fn: Any) -> None:
    """Raise if ``fn`` casts a full parameter: the shard takes its place again later, in its own dtype."""
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
    """Return a subclass of ``cls`` whose properties read the parameters ``reads``; equal arguments give one class.

    ``mixin`` is the base class for modules that are a unit. ``eager_only`` names the setting for which Dynamo must not
    trace them. ``absent`` names parameters that are registered as None.
    """
    namespace: dict[str, Any] = {"_fsdp_compile_original": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    namespace.update({name: getter(name, eager_read, eager_write) for name in reads})
    namespace.update({name: property(_reads_beside(beside(name, "absent"))) for name in absent})
    if hasattr(cls, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    if mixin is None:
        # It has the original's name, which code relies on and repr shows; a unit's begins with FSDP, as under FSDP2.
        return type(cls.__name__, (ShardedModule, cls), {**namespace, "__qualname__": cls.__qualname__})
    name = f"FSDP{cls.__name__}"
    namespace[INSIDE] = with_code_of_its_own(forward_inside, f"{name}._call_inside")
    forward = unit_forward(cls._call_impl, f"{name}._call_impl")
    namespace["_call_impl"] = forward if eager_only is None else eager_forward_for(forward, name, eager_only)
    generate: Any = getattr(cls, "generate", None)
    if getattr(generate, "__module__", "").startswith(_GENERATE):  # it calls modules inside, such as an encoder
        namespace["generate"] = forward_by(generate, generate.__qualname__)
    return type(name, (mixin, cls), namespace)


def _reads_beside(attribute: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self, attribute)


def _flat_weights(self: nn.RNNBase) -> list[Any]:
    """Read the parameters anew, in place of the list of parameters that nn.RNN and its kin keep."""
    return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]
