"""Make ``torch.distributed.checkpoint.state_dict``, which asks the class that it has as ``FSDP``, know our wrappers.

    get_state_dict(model, optim)
      FSDP.fsdp_modules(model)           Either replaces FSDP when the first wrapper of ours is made:
      FSDP.state_dict_type(model, ...)     Either ---> ours, where the model has wrappers of ours
      isinstance(module, FSDP)                    ---> else torch's, as before
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .._torch_compat import fsdp1
from .region import Wrapper, wrappers_in


class _IsEither(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, (Wrapper, fsdp1.TORCH_FSDP))

    def __getattr__(cls, name: str) -> Any:
        """Return a function that calls this static method of the class that its model (an argument) is wrapped in."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            model = args[0] if args else kwargs["module" if "module" in kwargs else "model"]
            return getattr(_class_in(model), name)(*args, **kwargs)

        return ask


class Either(metaclass=_IsEither):
    """FSDP1's class: ours for a model that has wrappers of ours, torch's for any other."""


def _class_in(model: nn.Module) -> Any:
    ours = wrappers_in(model)
    return type(ours[0]) if ours else fsdp1.TORCH_FSDP


def state_of_wrapper(module: nn.Module) -> Any:
    """Return what the helpers use as a wrapped module's state: for ours, the wrapper itself, as in FSDP1."""
    return module if isinstance(module, Wrapper) else fsdp1.TORCH_STATE_OF_WRAPPER(module)
