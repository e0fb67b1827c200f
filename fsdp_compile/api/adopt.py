"""adopt(): wherever code has torch's FSDP2 functions by name, it finds ours.

    torch.distributed.fsdp.fully_shard -----------------+
    torch.distributed._composable.fsdp.fully_shard -----+---> fsdp_compile.fully_shard, until undo()
    any_module.fully_shard  (from ... import ...) ------+

Classes need no replacement: FSDPModule and the handles are torch's by inheritance.
"""

from __future__ import annotations

import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

from .._torch_compat import fsdp2
from .forward_methods import register_fsdp_forward_method
from .fully_shard import fully_shard
from .module import share_comm_ctx
from .replicate import replicate

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, eq=False)
class Binding:
    """A name of a module that was torch's, and is ours."""

    module: types.ModuleType
    name: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"

    @property
    def holds(self) -> bool:
        return vars(self.module).get(self.name) is self.ours


class Adoption:
    """What ``adopt`` changed; at the end of a ``with`` block, or by ``undo()``, it is torch's again."""

    def __init__(self, bindings: list[Binding]) -> None:
        self.bindings = bindings

    def __repr__(self) -> str:
        return f"Adoption({', '.join(map(str, self.bindings))})"

    def __enter__(self) -> Adoption:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Give every name that was changed what it was; one that somebody else has changed since stays theirs."""
        bindings, self.bindings = self.bindings, []
        for binding in bindings:
            if binding.holds:
                setattr(binding.module, binding.name, binding.theirs)
        changed = [str(binding) for binding in bindings if vars(binding.module).get(binding.name) is not binding.theirs]
        if changed:
            warnings.warn(
                f"{', '.join(changed)} changed after fsdp_compile.adopt() and stays as it is: undo() restores what "
                "adopt() set.",
                stacklevel=2,
            )


def adopt() -> Adoption:
    """Have torch's ``fully_shard``, ``replicate`` and their like be this package's in the whole process.

    Also in modules that imported the names before; those imported later find ours in torch. Units that torch's own
    functions made before stay torch's.
    """
    ours = {
        id(theirs): (theirs, mine)
        for theirs, mine in (
            (fsdp2.TORCH_FULLY_SHARD, fully_shard),
            (fsdp2.TORCH_REPLICATE, replicate),
            (fsdp2.TORCH_REGISTER_FORWARD_METHOD, register_fsdp_forward_method),
            (fsdp2.TORCH_SHARE_COMM_CTX, share_comm_ctx),
        )
    }
    bindings = [
        Binding(module, name, *ours[id(value)])
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType) and not _is_ours(module)
        for name, value in list(vars(module).items())
        if id(value) in ours
    ]
    for binding in bindings:
        setattr(binding.module, binding.name, binding.ours)
    return Adoption(bindings)


def _is_ours(module: types.ModuleType) -> bool:
    return module.__name__ == _PACKAGE or module.__name__.startswith(f"{_PACKAGE}.")
