"""The ``_parameters`` of a sharded module: its code finds there what it finds under the module's attributes.

    outside of forwards              the shards: names, state dicts, optimizers, hooks in backward
    while a forward of their unit    what ``module.weight`` gives, so that named_parameters(), ``_parameters["weight"]``
    runs, or is traced               and the like see full parameters, as with FSDP2
    what was found is written back   the shard is registered again: transformers' layers compute with local tensors of
                                     DTensors, which they put into ``_parameters`` for as long as their forward runs

If the forward of a parameter's unit does not run, other modules see the shard, as with FSDP2.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import dynamo, traced_frames
from ..core.extension import halves_of
from ..core.param import READS, ShardedParam, beside
from ..core.unit import Unit
from ..eager.forward import use_of
from . import unit_forward


class Registered(dict):  # type: ignore[type-arg]
    """The parameters of one module by name; ``dict``'s own methods return what is registered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self.module = module
        self.unit_runs = UnitRuns(module)
        self.absent = {name: beside(name, "absent") for name, value in dict.items(self) if value is None}
        self.replaced: dict[str, Any] = {}  # shards, while traced code has something else in their places

    def __getitem__(self, name: str) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._read_traced(name) if self.unit_runs.traced(name) else dict.__getitem__(self, name)
        return self.unit_runs.found(name, dict.__getitem__(self, name))

    def _read_traced(self, name: str) -> Any:
        full = getattr(self.module, name)
        if isinstance(full, Tensor) and full.requires_grad:
            full.register_post_accumulate_grad_hook = functools.partial(_hook_traced, full)  # type: ignore[method-assign]
        return full

    def __setitem__(self, name: str, value: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            value = self.unit_runs.shard_behind(name, value)
        elif self.unit_runs.traced_gave(name):
            value = self.replaced.pop(name, dict.get(self, name))
        elif self.unit_runs.traced(name):
            self._note_shard(name)
        dict.__setitem__(self, name, value)
        if name in self.absent:
            self.module.__dict__[self.absent[name]] = value

    def _note_shard(self, name: str) -> None:
        registered = dict.get(self, name)
        if self.module.__dict__[READS][name][0].is_cut(registered):  # and not another tensor in its place
            self.replaced[name] = registered

    def take_back_traced(self, name: str) -> None:
        """Register the shard again, if traced code put something else in its place."""
        if name in self.replaced:
            dict.__setitem__(self, name, self.replaced.pop(name))

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)  # without this method, ``dict(self)`` would pass over __getitem__

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> Any:
        return ItemsView(self) if self._gives_reads() else dict.items(self)

    def values(self) -> Any:
        return ValuesView(self) if self._gives_reads() else dict.values(self)

    def _gives_reads(self) -> bool:
        return torch.compiler.is_dynamo_compiling() or self.unit_runs.any()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def update(self, *others: Any, **values: Any) -> None:
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(dict.items(self)),)  # a copy's module is given one of its own


def register(module: nn.Module) -> tuple[str, ...]:
    """Give a module a ``Registered``; return the names that are registered as None, like many linear layers' bias.

    Their values are attributes of the module as well. If they were read from ``_parameters``, Dynamo would put guards
    on all parameters of the module.
    """
    if not isinstance(module._parameters, Registered):
        module.__dict__["_parameters"] = Registered(module)
    registered: Any = module._parameters
    absent = tuple(name for name in registered.absent if dict.get(registered, name) is None)
    for name in absent:
        module.__dict__[registered.absent[name]] = None
    return absent


def _take_hooks(full: Tensor, fqn: str, owner: Unit) -> None:
    """Make a full parameter accept post-accumulate hooks. Under FSDP2 it is a leaf, which accepts them.

    transformers registers some in forward, to sum gradients over a tensor parallel group.
    """
    reference = weakref.ref(full)  # ``full`` holds the function that follows

    def register(hook: Callable[[Any], None]) -> Any:
        if dynamo.is_at_work() and owner.given is None:
            raise RuntimeError(
                f"{fqn}: register_post_accumulate_grad_hook was called in a forward that torch.compile compiles "
                "in parts, whose graphs have their own tensors for the parameter. Leave the module that calls it out "
                "of what is compiled: torch.compiler.disable(module)."
            )
        tensor: Any = reference()
        stand_in = tensor.detach()
        return tensor.register_hook(lambda grad: _hooked(stand_in, grad, hook))

    full.register_post_accumulate_grad_hook = register  # type: ignore[method-assign]


def _hook_traced(full: Tensor, hook: Callable[[Any], None]) -> Any:
    return full.register_hook(lambda grad: _hooked(full.detach(), grad, hook))


def _hooked(stand_in: Tensor, grad: Tensor, hook: Callable[[Any], None]) -> Tensor | None:
    """Run a post-accumulate hook as a tensor hook of a full parameter; return the gradient that it makes."""
    stand_in.grad = grad.clone()
    hook(stand_in)
    return stand_in.grad


class UnitRuns(dynamo.OpaqueBase):  # type: ignore[misc]
    """Tells whether a forward of the unit that owns a parameter runs; Dynamo takes the answers for constants."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = weakref.ref(module)  # Dynamo keeps objects of this class

    def any(self) -> bool:
        """Whether eager code finds anything but what is registered."""
        return any(use_of(owner) is not None for _, owner, _ in self._reads().values())

    def found(self, name: str, registered: Any) -> Any:
        """Return the tensor that eager code finds under ``name``. Dynamo's own code finds what is registered."""
        owner = self._owner(name)
        if owner is None or use_of(owner) is None or dynamo.is_tracing():
            return registered
        full = getattr(self._module(), name)
        if isinstance(full, Tensor) and full.requires_grad:
            _take_hooks(full, self._reads()[name][0].fqn, owner)
        return full

    def shard_behind(self, name: str, value: Any) -> Any:
        """Return the shard, if ``value`` is what a read gave the running forward; otherwise ``value``."""
        known = self._reads().get(name)
        use = None if known is None else use_of(known[1])
        if use is None or value is None:
            return value
        index: Any = use.gathered.index.get(known[0].fqn)
        was_given = any(value is use.tensors.get((index, recorded)) for recorded in (True, False))
        return use.gathered.shards[index] if was_given else value

    def traced(self, name: str) -> bool:
        """Whether a forward of the unit runs or is traced, while Dynamo traces the code that asks."""
        owner = self._owner(name)
        if owner is None:
            return False
        return use_of(owner) is not None or traced_frames.traces_call_of(owner.modules, unit_forward.__file__)

    def traced_gave(self, name: str) -> bool:
        """Whether traced code writes back to a parameter's name what a read of it gave."""
        known = self._reads().get(name)
        if known is None:
            return False
        param: ShardedParam = known[0]
        if any(halves_of(param.shard)):
            raise RuntimeError(
                f"{param.fqn} has an all-gather extension, and is written to in module._parameters by code that "
                "torch.compile traces. Leave that code out of what is compiled: torch.compiler.disable(module)."
            )
        return known[1].watch.gave(param.fqn, "value")  # type: ignore[no-any-return]

    def _reads(self) -> Any:
        module = self._module()
        return {} if module is None else module.__dict__.get(READS, {})

    def _owner(self, name: str) -> Unit | None:
        """Return the parameter's unit, if a shard is registered for it."""
        known = self._reads().get(name)
        if known is None or not known[0].is_cut(dict.get(self._module()._parameters, name)):
            return None
        return known[1]  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitRuns:
        return self  # Dynamo of torch 2.11 keeps a copy


def _nothing_to_guard(asked: UnitRuns) -> list[Any]:
    return []


dynamo.register_opaque(UnitRuns, guard=_nothing_to_guard, constant_methods=("traced", "traced_gave"))
