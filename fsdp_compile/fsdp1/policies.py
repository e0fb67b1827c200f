"""Which modules below a root are wrapped, and with which arguments: a policy's choice, and mixed precision's additions.

    policy                                    when it is asked
    ModuleWrapPolicy, CustomPolicy, ...       once, for the whole tree
    a function (module, recurse,              from the root down: recurse=True, whether to look inside;
      nonwrapped_numel) -> bool               on the way up: recurse=False, whether to wrap
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from .._torch_compat import fsdp1
from ..api.auto_shard import Chosen, ask_from_root_down, inside_out
from ..core.unit import unit_of
from .region import Ignored, Wrapper


def modules_to_wrap(
    root: nn.Module, policy: Any, ignored: Ignored, kwargs: dict[str, Any]
) -> tuple[Chosen, set[nn.Module]]:
    """Return the modules to wrap with their arguments, and those among them that compute in their own dtype."""
    for path, module in root.named_modules():
        if isinstance(module, Wrapper) or unit_of(module) is not None:
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{path or 'the module itself'} wrapped already. Wrap all by auto_wrap_policy, or all by hand."
            )
    if fsdp1.is_policy(policy):
        chosen = fsdp1.chosen_by_policy(policy, root, set(ignored.modules), kwargs)
    elif callable(policy):
        chosen = {}
        ask_from_root_down(root, policy, ignored.params, ignored.modules, kwargs, chosen)
    else:
        raise TypeError(f"auto_wrap_policy is a {type(policy).__name__}. Pass a function, or a ModuleWrapPolicy.")
    chosen.pop(root, None)  # the root's wrapper is the one being made
    classes = fsdp1.classes_in_full_precision(kwargs["mixed_precision"])
    exact = {
        module
        for module in root.modules()
        if isinstance(module, classes) and module is not root and module not in ignored.modules
    }
    if exact:
        names = ", ".join(sorted({type(module).__name__ for module in exact}))
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, and mixed_precision leaves "
            f"{names} in the dtype of their parameters: each is wrapped by itself, without mixed precision, and gives "
            "outputs in the dtype of its inputs. To cast them, leave them out of _module_classes_to_ignore.",
            stacklevel=4,
        )
    for module in exact:
        chosen[module] = {**chosen.get(module, kwargs), "mixed_precision": None}
    return chosen, exact


def wrap_children(root: nn.Module, chosen: Chosen, wrap: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> None:
    """Put a wrapper around each chosen module, inner modules first, in every place where the module is registered."""
    wrappers: dict[nn.Module, nn.Module] = {}
    for module in list(inside_out(root)):
        for name, child in list(module._modules.items()):
            if child is not None and child in chosen:
                if child not in wrappers:
                    wrappers[child] = wrap(child, chosen[child])
                setattr(module, name, wrappers[child])
