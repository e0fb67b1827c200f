"""A wrapper's region: the modules below it that no inner wrapper has, and the names under which users know them.

    FSDP                                   root's region: Model, Linear "head"
      _fsdp_wrapped_module: Model
        layers.0: FSDP                     its region: Block, and all in it
          _fsdp_wrapped_module: Block
        head: Linear

Names leave out ``_fsdp_wrapped_module``: what the model was called before it was wrapped, its state dict is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from ..core.unit import WRAPPED as WRAPPED

PREFIX = f"{WRAPPED}."


class Wrapper(nn.Module):
    """What stands around a wrapped module in the tree."""

    _fsdp_wrapped_module: nn.Module
    _ignored: Any  # ignored.Ignored


def clean(name: str) -> str:
    """The name without the wrappers in it."""
    return name.replace(PREFIX, "").removesuffix(f".{WRAPPED}").removesuffix(WRAPPED)


def region_of(module: nn.Module, left_out: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """``module`` and what is below it, by path, in every place; neither inner wrappers nor what is left out."""
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
    """Every wrapper from ``module`` on, outermost first."""
    return [one for one in module.modules() if isinstance(one, Wrapper)]


def tensors_of(
    module: nn.Module, left_out: Collection[nn.Module], params: bool = True, buffers: bool = True
) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The parameters and buffers of a region: (path in it, module, name, tensor)."""
    for path, one in region_of(module, left_out):
        held: list[dict[str, Any]] = [one._parameters] * params + [one._buffers] * buffers
        for name, tensor in ((name, tensor) for some in held for name, tensor in some.items()):
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), one, name, tensor
