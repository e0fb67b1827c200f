"""What a folder calls a tensor, and what the model does.

    folder                                             model
    model.layers.0.mlp.up_proj.weight                  the same; or without "model.", or with it, for a base model
    ...experts.0.w1.weight, ...experts.1.w1.weight     ...experts.gate_up_proj: transformers makes one of many
    lm_head.weight is not there                        it is embed_tokens.weight, tied
    model.layers.0.self_attn.q_proj.weight             base_model.model.model....q_proj.base_layer.weight, under PEFT

transformers knows its models' mappings; they are asked for by their names in 5.x.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..core.param import ShardedParam
from ..core.unit import units_in


@dataclass
class Source:
    """Entries of a folder that become one tensor of the model, or, by a conversion of transformers', several."""

    target: str  # of a conversion, the first one
    entries: list[tuple[str, str | None]] = field(default_factory=list)  # each with the pattern that it was found by
    converter: Any = None

    def make(self, read: Callable[[str], Tensor], model: nn.Module) -> dict[str, Tensor]:
        """The tensors by their names in the model, of what ``read`` gives for the entries."""
        if self.converter is None:
            [(name, _)] = self.entries
            return {self.target: read(name)}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.entries:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        made = converter.convert(self.target, model=model, config=getattr(model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def plain_model(model: nn.Module) -> nn.Module:
    """The model of Hugging Face in what torch.compile, or PEFT, made of it."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    return model


def plain_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Names of the model's tensors as its base model has them, to those that it has; adapters' are left out."""
    inner = getattr(model, "_orig_mod", model)
    has_adapters = hasattr(inner, "peft_config")
    prefix = next((f"{path}." for path, one in inner.named_modules() if one is plain_model(inner) and path), "")
    found = {}
    for name in names:
        plain = name.removeprefix("_orig_mod.")
        if has_adapters:
            if not plain.startswith(prefix) or any(part.startswith("lora_") for part in plain.split(".")):
                continue
            plain = plain.removeprefix(prefix).replace(".base_layer.", ".")
        found[plain] = name
    return found


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and the buffers that are saved, by all their names."""
    return {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}


def sharded_params(model: nn.Module) -> dict[str, ShardedParam]:
    """The sharded parameters, by all their names."""
    place = {id(param.param): param for unit in units_in(model) for param in unit.params}
    named = model.named_parameters(remove_duplicate=False)
    return {name: place[id(param)] for name, param in named if id(param) in place}


def sources(model: nn.Module, expected: Collection[str], entries: Collection[str]) -> list[Source]:
    """What of the folder becomes which tensors of the model."""
    rename, converters = _mapping(model, expected)
    found: dict[str, Source] = {}
    for name in entries:
        target, pattern = rename(name)
        if pattern is None:
            found[name] = Source(target, [(name, None)])
        else:
            source = found.setdefault(f"-> {target}", Source(target, converter=converters[pattern]))
            source.entries.append((name, pattern))
    return list(found.values())


def _mapping(
    model: nn.Module, expected: Collection[str]
) -> tuple[Callable[[str], tuple[str, str | None]], dict[str, Any]]:
    """A function from an entry's name to the model's, with the pattern of its conversion, if there is one; those."""
    prefix = getattr(model, "base_model_prefix", "") or ""

    def by_prefix(name: str) -> tuple[str, str | None]:
        if name in expected or not prefix:
            return name, None
        without = name.removeprefix(f"{prefix}.")
        if without in expected:
            return without, None
        return (f"{prefix}.{name}" if f"{prefix}.{name}" in expected else name), None

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return by_prefix, {}
    if not hasattr(model, "config"):
        return by_prefix, {}
    mapping: list[Any] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    patterns = {pattern: one for one in converters for pattern in one.source_patterns}

    def by_transformers(name: str) -> tuple[str, str | None]:
        if name in expected:
            return name, None
        return rename_source_key(name, renamings, converters, prefix, dict.fromkeys(expected, True))

    return (by_transformers if mapping else by_prefix), patterns


def may_be_more(model: nn.Module) -> Callable[[str], bool]:
    """Whether the folder of such a model may have a tensor that it has not: older ones hold what is computed today."""
    said = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [r"rotary_emb\.inv_freq$", *([said] if isinstance(said, str) else said)]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def as_saved(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of the model as folders have it: by one name, or in several pieces."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {name: tensor}
    if not hasattr(model, "config"):
        return {name: tensor}
    return dict(revert_weight_conversion(model, {name: tensor}))  # type: ignore[arg-type]
