"""Our wrappers for ``torch.distributed.checkpoint.state_dict``, which asks FSDP1's class about a model by one name.

    get_state_dict(model, optim)
      FSDP.fsdp_modules(model)           in the place of FSDP, from the first wrapper of ours on:
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
        """A static method of FSDP1's class: the model that it is about comes first, or is called so."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            model = args[0] if args else kwargs["module" if "module" in kwargs else "model"]
            return getattr(_class_in(model), name)(*args, **kwargs)

        return ask


class Either(metaclass=_IsEither):
    """FSDP1's class, torch's or ours: the one that has wrapped something in the model that is asked about."""


def _class_in(model: nn.Module) -> Any:
    ours = wrappers_in(model)
    return type(ours[0]) if ours else fsdp1.TORCH_FSDP


def state_of_wrapper(module: nn.Module) -> Any:
    """What the helpers take for the state of a wrapped module: of ours, the wrapper itself, as FSDP1's is."""
    return module if isinstance(module, Wrapper) else fsdp1.TORCH_STATE_OF_WRAPPER(module)


def known_to_helpers() -> None:
    """Have the helpers know our wrappers beside torch's; where ``adopt()`` holds, they do."""
    fsdp1.tell_checkpoint_helpers(Either, state_of_wrapper)
