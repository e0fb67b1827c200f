"""Methods besides ``forward`` that gather a unit's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._torch_compat import dynamo, fsdp2
from ..core.shared import shared
from ..core.unit import CALLS, STATE, Unit, unit_of
from ..eager.around import eager_forward
from .unit_forward import as_given, as_taken, with_code_of_its_own

CALLS.add(__file__)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name`` a second forward: parameters are gathered before it and freed after it."""
    module = dynamo.behind_compile(module)  # where the wrapper looks for its methods
    if unit_of(module) is None:
        if isinstance(module, fsdp2.TORCH_FSDP_MODULE):
            raise TypeError(
                f"register_fsdp_forward_method({method_name!r}): this {type(module).__name__} was sharded by "
                "torch.distributed.fsdp.fully_shard before fsdp_compile.adopt(). Adopt first, then shard."
            )
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} does not have a method {method_name!r}. Define it before.")
    known = getattr(module, method_name)
    if getattr(known, "__func__", None) in _forwards:
        return  # registered before
    forward: Any
    if getattr(known, "__self__", None) is module:
        forward = _forward_by(known.__func__)
    else:
        forward = _made_by(lambda self, *args, **kwargs: known(*args, **kwargs))
    _forwards.add(forward)
    setattr(module, method_name, forward.__get__(module, type(module)))


# The functions that ``_made_by`` returned.
_forwards: weakref.WeakSet[Any] = weakref.WeakSet()


def _made_by(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does for ``method`` what ``unit_forward`` does for a forward."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = self.__dict__[STATE]
        args, kwargs = as_taken(unit, args, kwargs)
        try:
            if torch.compiler.is_dynamo_compiling():
                output = method(self, *args, **kwargs)
            else:
                output = eager_forward(unit, self, method, args, kwargs)
        except BaseException:
            raise
        return as_given(unit, output)

    return with_code_of_its_own(forward, getattr(method, "__qualname__", "forward"))


# One function for all modules that have the method, so that they can share compiled code.
_forward_by = shared(_made_by)
