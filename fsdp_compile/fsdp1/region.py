"""A wrapper's region: the modules below it that are in no inner wrapper, and the names by which users know them.

    FSDP                                   root's region: Model, Linear "head"
      _fsdp_wrapped_module: Model
        layers.0: FSDP                     its region: Block, and all in it
          _fsdp_wrapped_module: Block
        head: Linear

Names leave out ``_fsdp_wrapped_module``: a state dict has the names that the model had before it was wrapped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from ..core.unit import WRAPPED as WRAPPED

PREFIX = f"{WRAPPED}."


class Wrapper(nn.Module):
    """The module that has a wrapped module's place in the tree."""

    _fsdp_wrapped_module: nn.Module
    _ignored: Any  # ignored.Ignored


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


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    """Return every wrapper at and below ``module``, outermost first."""
    return [one for one in module.modules() if isinstance(one, Wrapper)]


def tensors_of(
    module: nn.Module, left_out: Collection[nn.Module], params: bool = True, buffers: bool = True
) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the parameters and buffers of a region: (path in it, module, name, tensor)."""
    for path, one in region_of(module, left_out):
        held: list[dict[str, Any]] = [one._parameters] * params + [one._buffers] * buffers
        for name, tensor in ((name, tensor) for some in held for name, tensor in some.items()):
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), one, name, tensor
