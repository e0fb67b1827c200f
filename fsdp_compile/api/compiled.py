"""Units that are compiled by themselves, block by block: what runs between their caller and their graphs.

    layer(x) --> compiled_call --+-- inside a larger model that runs eagerly: the eager path runs around the graph
                                 |       gather, launch the next ... | graph(gathered weights) | ... free, hook outputs
                                 +-- outermost: the graph has markers, as that of a model compiled whole
                                 +-- traced into a larger graph: it is only the module's own call

    layer.compile()              compiled_call becomes layer._compiled_call_impl
    torch.compile(layer)         the wrapper's ``forward`` does the same, once the model around it is sharded or first
                                 called

The blocks' graphs take gathered weights as plain inputs and hold no collective. So the next block's gather overlaps
with this block's compute, in forward and in backward, and so do reductions. They overlap across graphs, where no pass
could put them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._torch_compat import dynamo
from ..core.unit import INSIDE, STATE, Unit, unit_of
from ..eager.around import can_give, forward_around_graph

_COMPILED = "_fsdp_compile_compiled"  # the attribute in which a module has its ``Compiled``


class Compiled:
    """One module, compiled both for use inside an eager model and by itself; Dynamo compiles each when first called."""

    def __init__(self, compiles: Callable[[Any], Any], whole: Callable[..., Any] | None = None) -> None:
        self._compiles = compiles
        self._given_whole = whole
        self._cls: type | None = None
        self._whole: Any = whole
        self._inside: Any = None

    def call(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Call the module, with the eager path around its graph or without."""
        self._follow(module)
        unit: Unit = module.__dict__[STATE]
        # The outermost unit's graph has all collectives, and the passes place them better than the eager path would.
        if unit.outer is not None and can_give(unit):
            return forward_around_graph(unit, module, self._inside, args, kwargs)
        return self._whole(*args, **kwargs)

    def _follow(self, module: Any) -> None:
        """Compile the functions of the class that the module has now, since settings change the class."""
        cls = type(module)
        if cls is self._cls:
            return
        self._cls = cls
        self._inside = self._compiles(getattr(cls, INSIDE))
        if self._given_whole is None:
            self._whole = self._compiles(module._call_impl)


for _skipped in (Compiled.call, Compiled._follow):
    dynamo.leave_to_python(_skipped)


def compiled_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled module, in the place of the call that torch.compile made."""
    if torch.compiler.is_dynamo_compiling():
        return self._call_impl(*args, **kwargs)
    return self.__dict__[_COMPILED].call(self, args, kwargs)


def stand_before(module: Any) -> None:
    """Put ``compiled_call`` in the place of what ``module.compile()`` compiled, if it was called."""
    compiles = None if module._compiled_call_impl is None else dynamo.compiles_with(module._compiled_call_impl)
    if compiles is not None:
        module.__dict__[_COMPILED] = Compiled(compiles)
        module._compiled_call_impl = types.MethodType(compiled_call, module)


def stand_before_wrappers(model: nn.Module) -> None:
    """Do the same for the units inside ``model`` that ``torch.compile(unit)`` wrapped."""
    for wrapper in model.modules():
        if isinstance(wrapper, dynamo.OptimizedModule) and unit_of(dynamo.behind_compile(wrapper)) is not None:
            _stand_before_wrapper(wrapper)


dynamo.leave_all_to_python(stand_before_wrappers)


def _stand_before_wrapper(wrapper: Any) -> None:
    if type(dynamo.behind_compile(wrapper)).__call__ is not nn.Module.__call__:
        return  # the class has a ``__call__`` of its own, which the wrapper compiled and must run
    compiles = dynamo.wrapper_compiles_with(wrapper)
    if compiles is None or getattr(wrapper.forward, "__name__", "") == _forward.__name__:
        return
    compiled = Compiled(compiles, whole=wrapper.forward)
    wrapper.forward = types.MethodType(_forward, (dynamo.behind_compile(wrapper), compiled))


def _forward(self: tuple[Any, Compiled], *args: Any, **kwargs: Any) -> Any:
    module, compiled = self
    return compiled.call(module, args, kwargs)
