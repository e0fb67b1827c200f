"""The base model inside the adapters of PEFT: its tensors' names, and its weights with the adapters merged into them.

    base_model.model.model...q_proj.base_layer.weight       model...q_proj.weight, with what the adapters add to it
    base_model.model.model...q_proj.lora_A.default.weight   part of an adapter, left out
    ...score.modules_to_save.default.weight                 ...score.weight: the copy that is trained
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import dynamo, fsdp1
from ..core.unit import WRAPPED
from ..passes.ir.module_paths import plain_name
from .classes import read_by
from .exchange import gathered
from .full_params import in_place_of_shards

# The parts that PEFT puts into the names of a module's weights; modules_to_save is the copy that it trains.
_BETWEEN = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's configurations of the model's adapters, by name."""
    found: dict[str, Any] = getattr(dynamo.behind_compile(model), "peft_config", None) or {}
    return found


def plain_model(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside the wrappers of torch.compile, checkpointing, FSDP1's class and PEFT."""
    while True:
        inner = fsdp1.behind_checkpointing(dynamo.behind_compile(model))
        inner = inner._modules.get(WRAPPED) or inner
        if adapters_of(inner) and hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        if inner is model:
            return model
        model = inner


def _base_path(model: nn.Module) -> str:
    """Return the path of the plain model in the model, with a dot behind it; "" if it is the model."""
    inner = plain_model(model)
    path = next(plain_name(path) for path, one in model.named_modules() if one is inner)
    return f"{path}." if path else ""


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Map the base model's names of tensors to the model's own names; tensors of adapters are left out."""
    if not adapters_of(model):
        return {name: [name] for name in names}
    prefix = _base_path(model)
    found: dict[str, list[str]] = {}
    for name in names:
        is_of_adapter = any(part.startswith("lora_") for part in name.split("."))
        if name.startswith(prefix) and not is_of_adapter:
            found.setdefault(_BETWEEN.sub("", name.removeprefix(prefix)), []).append(name)
    return found


def merged_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base model's tensors by its own names; of modules that PEFT copied, the active copy's."""
    kept: dict[str, str] = {}  # paths of PEFT's layers, and where the base model's tensors are in each
    for path, module in model.named_modules():
        path = plain_name(path)
        if "base_layer" in module._modules:
            kept[f"{path}."] = f"{path}.base_layer."
        elif isinstance(module._modules.get("modules_to_save"), nn.ModuleDict):
            active: Any = module.active_adapters
            copied = [one for one in active if one in module.modules_to_save]  # type: ignore[operator]
            kept[f"{path}."] = f"{path}.modules_to_save.{copied[0]}." if copied else f"{path}.original_module."
    prefix = _base_path(model)
    return {
        _BETWEEN.sub("", name.removeprefix(prefix)): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and all(name.startswith(kept[path]) for path in kept if name.startswith(path))
    }


def merges(model: nn.Module) -> dict[int, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Return what makes the merged tensors of the base model, by the ids of those that adapters add to.

    With each comes what it is made of.
    """
    found: dict[int, tuple[Callable[[], Tensor], list[Tensor]]] = {}
    for layer in model.modules():
        if "base_layer" in layer._modules and hasattr(layer, "merge"):
            changed = ["weight", "bias"] if any(getattr(layer, "lora_bias", {}).values()) else ["weight"]
            for name in changed:
                tensor = layer.get_base_layer()._parameters.get(name)  # type: ignore[operator]
                if tensor is not None:
                    found[id(tensor)] = partial(merged, layer, name), list(layer.parameters())
    return found


@torch.no_grad()
def merged(layer: Any, name: str) -> Tensor:
    """Return a full tensor of a layer's base with its adapters merged; every rank calls this.

    PEFT merges, so that all that it can merge is merged, into full parameters that are there for that alone.
    """
    params = [param for its in read_by(*layer.modules()).values() for param in its]
    fulls = gathered([(param.fqn, param.param) for param in params])
    base, were_merged, before = layer.get_base_layer(), [*layer.merged_adapters], {}
    try:
        with in_place_of_shards({param: nn.Parameter(full, False) for param, full in zip(params, fulls, strict=True)}):
            before = {one: one.data for one in base.parameters(recurse=False)}
            layer.merge(safe_merge=True)  # which writes to a copy
            found: Tensor = getattr(base, name).data
    finally:
        layer.merged_adapters[:] = were_merged
        for one, data in before.items():
            one.data = data
    return found
