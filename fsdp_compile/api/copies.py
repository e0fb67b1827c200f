"""``copy.deepcopy`` of sharded modules: the copy is sharded alike, and independent of the original.

    deepcopy(module) --> the first sharded module that it comes to, with what is inside
        prepare     a copy of each unit and of each parameter, its shard cloned, into deepcopy's memo
        copy        the modules, as their original classes: by nn.Module's rules, or by their own __deepcopy__
        attach      slots and reads of the copies; their units get generated classes, the original's where all is equal

The copy of a unit has the original's settings and is idle: nothing is gathered, no gradients are held back. A unit that
is copied without the unit around it becomes outermost. A module that is copied without its own unit becomes a unit. As
with plain parameters, gradients and hooks on parameters are not copied, nor is what ``module.compile()`` did.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, fsdp2
from ..core.accumulation import Held
from ..core.param import READS, ShardedParam, Slot
from ..core.unit import STATE, Unit, original_class, unit_of
from ..eager.reduction import Traffic
from ..eager.running import running
from ..graph.watch import UnitWatch
from .arguments import fqns_in
from .compiled import stand_before_wrappers
from .fsdp2_view import FSDP2View

OURS = "_fsdp_compile_"  # the prefix of our attributes of modules


def deep_copy(
    module: nn.Module,
    memo: dict[int, Any],
    refresh: Callable[[Unit], None],
) -> nn.Module:
    """Return a copy of ``module``, sharded alike; ``memo`` is that of ``copy.deepcopy``."""
    if autograd.backward_task() is not None:
        original = unit_of(module)
        raise RuntimeError(
            f"{original_class(module).__name__ if original is None else original.name}: a sharded module cannot be "
            "deep-copied while a backward runs. Copy it when backward has returned."
        )
    copies: _Copies = memo.setdefault(id(_Copies), _Copies())
    if module in copies.prepared:
        return _copy_as(original_class(module), module, memo)
    inside = [one for one in module.modules() if READS in one.__dict__ or STATE in one.__dict__]
    copies.prepare(module, inside, memo)
    copied = _copy_as(original_class(module), module, memo)
    for unit in copies.attach(module, inside, memo):
        refresh(unit)
    stand_before_wrappers(copied)
    return copied


def _copy_as(cls: type[nn.Module], module: Any, memo: dict[int, Any]) -> Any:
    """Return what ``copy.deepcopy`` makes of ``module`` as a plain instance of ``cls``."""
    generated = type(module)
    module.__class__ = cls
    try:
        return copy.deepcopy(module, memo)
    finally:
        module.__class__ = generated


@dataclass(eq=False)
class _Copies:
    """What one call of ``copy.deepcopy`` has copied: the copies, by the originals."""

    prepared: set[nn.Module] = field(default_factory=set)
    modules: dict[nn.Module, nn.Module] = field(default_factory=dict)
    units: dict[Unit, Unit] = field(default_factory=dict)
    # New units of modules that are copied without their own, by the outermost of these modules.
    adopters: dict[nn.Module, Unit] = field(default_factory=dict)
    params: dict[ShardedParam, ShardedParam] = field(default_factory=dict)
    owners: dict[ShardedParam, Unit] = field(default_factory=dict)
    traffics: dict[Traffic, Traffic] = field(default_factory=dict)
    prefetching: dict[Unit, None] = field(default_factory=dict)  # units with targets, which may be copied later

    def prepare(self, top: nn.Module, inside: list[nn.Module], memo: dict[int, Any]) -> None:
        """Put copies of the units and parameters inside ``top`` into ``memo``."""
        self.prepared.update(inside)
        for module in inside:
            original = unit_of(module)
            if original is None:
                continue
            if original not in self.units:
                self.units[original] = self._unit_like(original)
                if original.settings.forward_prefetch or original.settings.backward_prefetch:
                    self.prefetching[original] = None
            memo[id(fsdp2.fsdp2_state(module))] = FSDP2View(self.units[original])
        for module in inside:
            for param, owner, reader in module.__dict__.get(READS, {}).values():
                if param not in self.params:
                    self._copy_param(param, owner, reader, top, memo)
            for key, value in module.__dict__.items():
                if key.startswith(OURS) and not _is_everywhere(value):
                    memo.setdefault(id(value), key)  # a placeholder: ``attach`` makes these attributes anew

    def attach(self, top: nn.Module, inside: list[nn.Module], memo: dict[int, Any]) -> list[Unit]:
        """Make sharded modules of the copied modules; return the units that are to be refreshed."""
        touched: dict[Unit, None] = {}
        for module in inside:
            copied = memo.get(id(module))
            if not isinstance(copied, nn.Module):
                continue  # the module around it leaves it out when copied
            self.modules[module] = copied
            for key in [key for key in copied.__dict__ if key.startswith(OURS)]:
                del copied.__dict__[key]
            original = unit_of(module)
            if module in self.adopters:
                fsdp2.register_fsdp2_state(copied, FSDP2View(self.adopters[module]))
            unit = self.adopters.get(module) if original is None else self.units[original]
            if unit is not None:
                copied.__dict__[STATE] = unit
                touched.setdefault(unit)
            for name, (param, _, reader) in module.__dict__.get(READS, {}).items():
                copied_param = self.params[param]
                owner = self.owners[param]
                copied_param.slots.append(Slot(copied, name))
                reads = copied.__dict__.setdefault(READS, {})
                reads[name] = (copied_param, owner, self._reader(reader, top))
                touched.setdefault(owner)
        if top in self.adopters:
            self.adopters[top].modules = (self.modules[top],) if top in self.modules else ()
        for unit in touched:
            unit.params.sort(key=lambda one: one.order)
        copied_here = [unit for module in inside if (unit := unit_of(module)) is not None]
        touched.update(dict.fromkeys(self._relate(dict.fromkeys([*copied_here, *self.prefetching]))))
        return list(touched)

    def _relate(self, originals: Iterable[Unit]) -> list[Unit]:
        """Set the modules, outer units and prefetch targets of copied units; return those whose outer unit changed."""
        changed = []
        for original in originals:
            unit = self.units[original]
            unit.modules = tuple(self.modules[one] for one in original.modules if one in self.modules)
            said = original.settings
            unit.settings.forward_prefetch = [self.units[one] for one in said.forward_prefetch if one in self.units]
            unit.settings.backward_prefetch = [self.units[one] for one in said.backward_prefetch if one in self.units]
            outer = next((self.units[one] for one in original.around() if one in self.units), None)
            if outer is not unit.outer:
                unit.put_inside(outer)
                changed.append(unit)
            for around in unit.around():
                around.has_inner |= bool(unit.params)
        return changed

    def _unit_like(self, unit: Unit) -> Unit:
        """Return a new unit with the settings of ``unit``: outermost, idle, without modules and parameters."""
        said = unit.settings
        settings = dataclasses.replace(
            said,
            comms=dataclasses.replace(said.comms),
            reduce_groups=dict(said.reduce_groups),
            forward_prefetch=[],  # ``_relate`` sets them to copies
            backward_prefetch=[],
        )
        accumulation = dataclasses.replace(unit.accumulation, held=Held())
        copied = Unit(
            modules=(),
            label=unit.label,
            mesh=unit.mesh,
            mp_policy=unit.mp_policy,
            mixin=unit.mixin,
            ends=unit.ends,
            offload=unit.offload,
            pins=unit.pins,
            post_forward=unit.post_forward,
            may_slice=unit.may_slice,
            settings=settings,
            accumulation=accumulation,
        )
        copied.watch = UnitWatch(copied)
        around, own = running(unit).iteration, running(copied).own_iteration
        own.is_last_backward = around.is_last_backward
        own.manual_finalization = around.manual_finalization
        if unit.outer is None:  # if several roots share theirs, so do their copies
            own.traffic = self.traffics.setdefault(around.traffic, own.traffic)
        return copied

    def _copy_param(
        self, param: ShardedParam, owner: Unit, reader: Unit, top: nn.Module, memo: dict[int, Any]
    ) -> None:
        unit = self.units.get(owner)
        fqn, order = param.fqn, param.order
        if unit is None:  # the owner of this tied parameter is not copied: in the copy, the unit that reads it owns it
            unit = self._reader(reader, top)
            inside = fqns_in(reader.modules if reader in self.units else (top,))
            fqn = next((fqn for fqn, module, name in inside if Slot(module, name) in param.slots), param.fqn)
            order = len(unit.params) + (len(reader.params) if reader in self.units else 0)  # behind the unit's own
        if param.is_full:
            raise RuntimeError(
                f"{owner.name}: {param.fqn} is full, inside full_params, and a copy would have nothing sharded. Copy "
                "the model outside; to keep the values, take those of state_dict()."
            )
        registered: Any = param.param if param.is_cut(param.param) else param.shard
        copied = dataclasses.replace(
            param, fqn=fqn, order=order, slots=[], shard=_clone(registered)
        )
        copied.keep_grad_dtype()
        memo[id(registered)] = copied.shard
        self.params[param], self.owners[param] = copied, unit
        unit.params.append(copied)
        if param.fqn in owner.overrides:
            unit.overrides[fqn] = owner.overrides[param.fqn]

    def _reader(self, reader: Unit, top: nn.Module) -> Unit:
        """Return the copy of a unit, or the unit that ``top`` becomes if it is copied without it."""
        if reader in self.units:
            return self.units[reader]
        if top not in self.adopters:
            self.adopters[top] = self._unit_like(reader)
        return self.adopters[top]


def _is_everywhere(value: Any) -> bool:
    """Whether Python may use one object wherever this value occurs, so that its identity says nothing."""
    return isinstance(value, (bool, int, float, str, type(None))) or (isinstance(value, tuple) and not value)


def _clone(shard: DTensor) -> nn.Parameter:
    """Copy a shard as ``nn.Parameter`` copies itself: the data, and whether it trains. Pinned memory stays pinned."""
    with torch.no_grad():
        local = dtensors.local_tensor(shard).detach().clone()
        if dtensors.is_pinned(shard):
            local = local.pin_memory()
        return nn.Parameter(dtensors.dtensor_like(shard, local), requires_grad=shard.requires_grad)
