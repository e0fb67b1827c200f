"""adopt(): rebind torch's names for FSDP (the functions of FSDP2, and the class of FSDP1) to ours.

    torch.distributed.fsdp.fully_shard -----------------+
    torch.distributed._composable.fsdp.fully_shard -----+---> fsdp_compile.fully_shard, until undo()
    any_module.fully_shard  (from ... import ...) ------+

    torch.distributed.fsdp.FullyShardedDataParallel ----+---> fsdp_compile.fsdp1.FullyShardedDataParallel, until undo()
    torch.distributed.checkpoint.state_dict.FSDP -------+

FSDP2's classes need no replacement: our FSDPModule and handles are subclasses of torch's. FSDP1's class is replaced in
torch's own modules as well: the helpers for state dicts ask it which modules are wrapped, and for the type of state.
"""

from __future__ import annotations

import gc
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

from ._torch_compat import fsdp1 as torch_fsdp1
from ._torch_compat import fsdp2 as torch_fsdp2
from .api.fully_shard import fully_shard, replicate
from .api.module import share_comm_ctx
from .api.unit_forward import register_fsdp_forward_method
from .fsdp1.grad_scaler import ShardedGradScaler
from .fsdp1.wrapper import FullyShardedDataParallel

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, eq=False)
class Binding:
    """A name in a module, with torch's object that it had and our object that it has now."""

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
    """The names that ``adopt`` rebound. The end of a ``with`` block, or ``undo()``, gives them back to torch."""

    def __init__(self, bindings: list[Binding]) -> None:
        self.bindings = bindings

    def __repr__(self) -> str:
        return f"Adoption({', '.join(map(str, self.bindings))})"

    def __enter__(self) -> Adoption:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Restore every name that ``adopt`` rebound, but for names that other code has rebound since."""
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
    """Replace torch's ``fully_shard``, ``replicate``, ``FullyShardedDataParallel`` and related names by this package's.

    This affects the whole process, also modules that have imported the names already; modules imported later find ours
    in torch. What torch's own functions made before stays torch's. Where wrappers or subclasses of torch's FSDP1 class
    exist, that class stays torch's, with a warning: its methods find one another, and their wrappers, by these names.
    """
    pairs: list[tuple[Any, Any]] = [
        (torch_fsdp2.TORCH_FULLY_SHARD, fully_shard),
        (torch_fsdp2.TORCH_REPLICATE, replicate),
        (torch_fsdp2.TORCH_REGISTER_FORWARD_METHOD, register_fsdp_forward_method),
        (torch_fsdp2.TORCH_SHARE_COMM_CTX, share_comm_ctx),
    ]
    in_use = _uses_of_torchs_class()
    if in_use:
        warnings.warn(
            f"fsdp_compile.adopt() leaves FullyShardedDataParallel as torch's: {in_use} there already, and would not "
            "go on working beside ours. Call adopt() before anything is wrapped. FSDP2's functions are adopted.",
            stacklevel=2,
        )
    else:
        pairs += [
            (torch_fsdp1.TORCH_FSDP, FullyShardedDataParallel),
            (torch_fsdp1.TORCH_GRAD_SCALER, ShardedGradScaler),
        ]
    ours = {id(theirs): (theirs, mine) for theirs, mine in pairs}
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


def _uses_of_torchs_class() -> str:
    """Describe the subclasses or the wrappers of torch's FSDP1 class that exist; return "" where there are none."""
    made_of_it = [cls.__qualname__ for cls in torch_fsdp1.TORCH_FSDP.__subclasses__()]
    if made_of_it:
        return f"its subclass {', '.join(made_of_it)} is"
    for collect in (lambda: 0, gc.collect):  # a wrapper that nothing refers to counts only until it is collected
        collect()
        num_wrappers = sum(issubclass(type(one), torch_fsdp1.TORCH_FSDP) for one in gc.get_objects())
        if not num_wrappers:
            return ""
    return f"{num_wrappers} of its wrappers are"
