"""A wrapper's region: the modules below it that are in no inner wrapper, what of it is not sharded, and its names.

    FSDP                                   root's region: Model, Linear "head"
      _fsdp_wrapped_module: Model
        layers.0: FSDP                     its region: Block, and all in it
          _fsdp_wrapped_module: Block
        head: Linear

What is ignored, modules with all that is in them or single parameters, is not sharded. The names by which users know
modules leave out ``_fsdp_wrapped_module``: a state dict has the names that the model had before it was wrapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.param import READS
from ..core.unit import WRAPPED as WRAPPED
from ..core.unit import unit_of

PREFIX = f"{WRAPPED}."
PARAMS, BUFFERS = "_parameters", "_buffers"  # the dicts of a module


@dataclass(frozen=True)
class Ignored:
    """The modules and parameters that a wrapper, or a wrapper inside it, does not shard."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]


class Wrapper(nn.Module):
    """The module that has a wrapped module's place in the tree."""

    _fsdp_wrapped_module: nn.Module
    _ignored: Ignored


def clean(name: str) -> str:
    """Return the name without the wrappers in it."""
    return name.replace(PREFIX, "").removesuffix(f".{WRAPPED}").removesuffix(WRAPPED)


def region_of(module: nn.Module, left_out: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and the modules below it with each of their paths, without inner wrappers and ``left_out``."""
    pending = [("", module)] if module not in left_out else []
    while pending:
        path, one = pending.pop()
        yield path, one
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in one._modules.items()
            if child is not None and not isinstance(child, Wrapper) and child not in left_out
        ]
        pending.extend(reversed(children))


def wrappers_in(module: nn.Module) -> list[Any]:
    """Return every wrapper at and below ``module``, outermost first."""
    return [one for one in module.modules() if isinstance(one, Wrapper)]


def region_tensors(module: nn.Module, ignored: Ignored, *kinds: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield a region's tensors that are neither ignored nor sharded, as (path in it, module, name, tensor)."""
    for path, one in region_of(module, ignored.modules):
        sharded = one.__dict__.get(READS, {})
        for kind in kinds:
            for name, tensor in getattr(one, kind).items():
                if tensor is not None and tensor not in ignored.params and name not in sharded:
                    yield (f"{path}.{name}" if path else name), one, name, tensor


def all_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Return what the two arguments name, with what the wrappers in ``module`` ignore."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Pass ignored_states, which takes "
            "either."
        )
    named: list[Any] = _listed("ignored_modules", ignored_modules) or _listed("ignored_states", ignored_states)
    if ignored_modules is not None:
        _require("ignored_modules", named, nn.Module)
    elif named:
        _require("ignored_states", named, nn.Parameter if isinstance(named[0], nn.Parameter) else nn.Module)
    tops = [one for one in named if isinstance(one, nn.Module)]
    for top in tops:
        if isinstance(top, Wrapper) or unit_of(top) is not None:
            raise ValueError(
                f"`ignored_modules` should not include FSDP modules, and a {type(top).__name__} among them is wrapped "
                "already. Name it where the wrapper around it is made, before it is wrapped itself."
            )
    modules = {one for top in tops for one in top.modules() if not isinstance(one, Wrapper)}
    if module in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored: nothing of this {type(module).__name__} is sharded. Leave it unwrapped "
            "instead.",
            stacklevel=4,
        )
    params = {one for one in named if isinstance(one, nn.Parameter)}
    params.update(param for one in modules for param in one.parameters(recurse=False))
    for inner in wrappers_in(module):
        modules |= inner._ignored.modules
        params |= inner._ignored.params
    return Ignored(frozenset(modules), frozenset(params))


def _listed(argument: str, given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, (nn.Module, nn.Parameter)) or not isinstance(given, Iterable):
        what = "modules" if argument == "ignored_modules" else "parameters or modules"
        raise TypeError(f"{argument} is a {type(given).__name__}, which is not iterable. Pass a list of {what}.")
    return list(given)


def _require(argument: str, named: list[Any], kind: type) -> None:
    others = sorted({type(one).__name__ for one in named if not isinstance(one, kind)})
    if others:
        what = "all nn.Parameter or all nn.Module list" if argument == "ignored_states" else "nn.Module list"
        beside = f" beside {kind.__name__}" if argument == "ignored_states" else ""
        raise ValueError(
            f"{argument} expects {what} elements but got types {', '.join(others)}{beside}. Leave those out."
        )
