"""State dicts of wrapped modules: names without wrappers, and values of the kind that was asked for.

    state_dict()            the module's own, with wrappers' names and DTensor shards
      hook of a wrapper  -> clean names; in its region FULL: full tensors, SHARDED: DTensors, LOCAL: local tensors
    load_state_dict(given)
      hook of a wrapper  -> wrappers' names; full and local tensors become shards
      hook at the end    -> clean names in what is said to be missing or unexpected
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .region import PREFIX, clean


def has_clean_state_dicts(wrapper: nn.Module) -> None:
    """Have the state dicts that ``wrapper`` gives and takes leave itself out of names."""
    wrapper.register_state_dict_post_hook(_save)
    wrapper.register_load_state_dict_pre_hook(_load)
    wrapper.register_load_state_dict_post_hook(_report)


def _save(wrapper: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    del local_metadata
    own = prefix + PREFIX
    for key in [key for key in state_dict if key.startswith(prefix)]:  # all of them, so that their order stays
        value = state_dict.pop(key)
        state_dict[prefix + key[len(own) :] if key.startswith(own) else key] = value
    for name, dtype in wrapper.saved_buffer_dtypes.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
    versions = getattr(state_dict, "_metadata", {})
    for path in [path for path in versions if f"{path}.".startswith(own)]:
        versions[clean(path)] = versions.pop(path)


def _load(wrapper: Any, state_dict: Any, prefix: str, *unused: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(prefix + PREFIX):
            state_dict[prefix + PREFIX + key[len(prefix) :]] = state_dict.pop(key)


def _report(wrapper: Any, incompatible: Any) -> None:
    for keys in incompatible:
        keys[:] = [clean(key) for key in keys]
