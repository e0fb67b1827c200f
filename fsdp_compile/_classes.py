"""The generated classes whose properties read parameters.

    Block given to fully_shard      class FSDPBlock(FSDPModule, Block)
    Linear inside it                class ShardedLinear(Linear):  weight = property(...); bias = property(...)

``_parameters`` still holds the shards, so names, ``state_dict`` keys and ``parameters()`` do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._accumulate import accumulator_for, delivers_in
from ._captures import refuse_script
from ._copy import deep_copy
from ._eager_path import READS
from ._edge import part_edges
from ._graph_path import getter
from ._param import ReadSpec, beside
from ._state import UnitState, eager_forward_for, state_of, unit_forward_for

_BY_MODE = "_fsdp_compile_classes"  # classes that a module had, by the one before and what changed


class ShardedModule:
    """What every module with sharded parameters has: it holds shards of one rank, so it does not pickle.

    A new object of a generated class, as slicing an ``nn.Sequential`` makes one, is of the original class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._fsdp_compile_original(*args, **kwargs)  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():  # type: ignore[attr-defined]
                child._apply(fn)
        forget_edges(self)  # nn.Module swaps DTensors, which must have no AccumulateGrad
        with _grads_of_other_dtypes_aside(self, fn):
            # nn.Module's, found past torch's own FSDPModule, which looks for a state of its own.
            applied = self._fsdp_compile_original._apply(self, fn, recurse=False)  # type: ignore[attr-defined]
            refresh_owners(self)  # .to(dtype) and .to_empty(device) change what markers say
        return applied

    def __prepare_scriptable__(self) -> NoReturn:
        reads = self.__dict__.get(READS, {})
        name = next((param.fqn for param, _, _ in reads.values()), type(self).__name__)
        refuse_script(name)

    def _load_from_state_dict(self, *args: Any) -> None:
        forget_edges(self)  # as above, where the user has load_state_dict swap
        self._fsdp_compile_original._load_from_state_dict(self, *args)  # type: ignore[attr-defined]
        renew_edges(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Not __deepcopy__: what torch.compile(model) returns would find that one here, and lose itself when copied.
        return _copied, (_Original(self),)


class _Original:
    """A sharded module on its way through ``copy`` or ``pickle``: it can be deep-copied, and that is all."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deep_copy(self.module, memo, original_class, refresh)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(self.module).__name__} is sharded and cannot be pickled. Save model.state_dict() with "
            "torch.distributed.checkpoint, and load it into a model built and sharded alike."
        )


@contextmanager
def _grads_of_other_dtypes_aside(module: Any, fn: Any) -> Iterator[None]:
    """Keep gradients that a tensor without the parameter's ``grad_dtype`` refuses, until it has that again."""
    aside = {}
    for name in module.__dict__.get(READS, {}):
        param = module._parameters.get(name)
        if param is not None and param.grad is not None and param.grad.dtype != param.dtype:
            aside[name], param.grad = param.grad, None
    try:
        yield
    finally:
        for name, grad in aside.items():
            param = module._parameters[name]
            dtype = compat.get_grad_dtype(param)
            with torch.no_grad():
                param.grad = fn(grad) if dtype is None else fn(grad).to(dtype)


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
    return deep_copy(self, memo, original_class, refresh)


def refresh(state: UnitState) -> None:
    """Give every module that reads the unit's parameters a class whose markers say how the group is set up now."""
    state.group.version += 1
    for param in state.group.params:
        for slot in param.slots:
            if slot.param is not None:
                param.follow(slot.param)
                param.keep_grad_dtype()
    for module in _readers(state):
        module.__dict__.pop(_BY_MODE, None)
        _set_class(module)
    if state.group.eager_only is not None:
        for module in state.modules:
            compat.recompile_call(module)  # module.compile() kept the method that it found


def refresh_mode(state: UnitState) -> None:
    """The same when no more than the mode of accumulation changed: that happens within steps, and classes are kept."""
    modes = tuple(state.group.mode_of(param) for param in state.group.params)
    for module in _readers(state):
        by_mode = module.__dict__.setdefault(_BY_MODE, {})
        key = (type(module), id(state), modes)
        if key in by_mode:
            module.__class__ = by_mode[key]
        else:
            _set_class(module)
            by_mode[key] = type(module)


def _readers(state: UnitState) -> dict[nn.Module, None]:
    """The unit's modules, and those where its parameters are registered."""
    owners = [slot.module for param in state.group.params for slot in param.slots]
    return dict.fromkeys([*state.modules, *owners])


def parts_of(state: UnitState) -> list[Any]:
    """Everything in which something of a unit is noted: what is to be kept to know how it was."""
    accumulators = [one for param in state.group.params for one in param.accumulators.values()]
    return [state, state._iteration, state.group, *state.group.params, *accumulators, *_readers(state)]


def _set_class(module: nn.Module) -> None:
    reads: list[tuple[str, ReadSpec]] = []
    for name, (param, owner, _) in sorted(module.__dict__.get(READS, {}).items()):
        spec = owner.group.spec_of(param)
        reads.append((name, spec))
        module.__dict__[beside(name, spec.mode)] = accumulator_for(owner, param, spec)
    _require_our_class(module, reads)
    unit = state_of(module)
    mixin = None if unit is None else unit.mixin
    eager_only = None if unit is None else unit.group.eager_only
    unheeded = () if unit is None else unit.unheeded_in_graphs
    original: Any = original_class(module)
    module.__class__ = sharded_class(original, mixin, eager_only, unheeded, tuple(reads))


def forget_edges(module: Any) -> None:
    """Let nothing of ours hold the parameters that ``module`` reads."""
    for param, owner, _ in module.__dict__.get(READS, {}).values():
        part_edges(owner.group)
        for accumulator in param.accumulators.values():
            accumulator.forget_edge()


def renew_edges(module: Any) -> None:
    """Have edges of what is registered now; a shard of another dtype gets one when its unit is refreshed."""
    for param, owner, _ in module.__dict__.get(READS, {}).values():
        now = param.param
        if isinstance(now, DTensor) and now.dtype == param.shard.dtype:
            param.follow(now)
            param.keep_grad_dtype()
            for mode, accumulator in param.accumulators.items():
                if delivers_in(mode):
                    accumulator.lead_to(owner.group, now)


def refresh_owners(module: Any) -> None:
    """Refresh the units that own what ``module`` reads."""
    reads = module.__dict__.get(READS, {}).values()
    for owner in dict.fromkeys(owner for _, owner, _ in reads):
        refresh(owner)


def _require_our_class(module: nn.Module, reads: list[tuple[str, ReadSpec]]) -> None:
    cls = type(module)
    if issubclass(cls, ShardedModule) and "_fsdp_compile_original" not in cls.__dict__:
        raise RuntimeError(
            f"{', '.join(spec.fqn for _, spec in reads)}: the class of their module changed to {cls.__name__} "
            "after fully_shard (parametrizations do that). Change it before fully_shard."
        )


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before fully_shard."""
    return getattr(type(module), "_fsdp_compile_original", type(module))


@functools.cache
def sharded_class(
    cls: type[nn.Module],
    mixin: type | None,
    eager_only: str | None,
    unheeded: tuple[str, ...],
    reads: tuple[tuple[str, ReadSpec], ...],
) -> type[nn.Module]:
    """A subclass of ``cls`` whose properties read the sharded parameters; equal modules share one.

    ``mixin`` is a base for modules that are a unit. ``eager_only`` names what Dynamo must not trace them for, and
    ``unheeded`` what has no effect where it does.
    """
    namespace: dict[str, Any] = {"_fsdp_compile_original": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    for name, spec in reads:
        namespace[name] = getter(name, spec)
    if hasattr(cls, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    if mixin is None:
        return type(f"Sharded{cls.__name__}", (ShardedModule, cls), namespace)
    name = f"FSDP{cls.__name__}"
    namespace["_call_impl"] = (
        unit_forward_for(name, unheeded) if eager_only is None else eager_forward_for(name, eager_only)
    )
    return type(name, (mixin, cls), namespace)


def _flat_weights(self: nn.RNNBase) -> list[Any]:
    """nn.RNN and its kin keep a list of their parameters beside them: read them anew each time."""
    return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]
