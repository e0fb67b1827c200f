"""Map the names of a folder's tensors to the names of the model's.

    folder                                             model
    model.layers.0.mlp.up_proj.weight                  the same; or without "model.", or with it, for a base model
    ...experts.0.w1.weight, ...experts.1.w1.weight     ...experts.gate_up_proj: transformers merges them
    lm_head.weight is not there                        it is embed_tokens.weight, tied
    model.layers.0.self_attn.q_proj.weight             base_model.model.model....q_proj.base_layer.weight, under PEFT
    model.layers.0.mlp.up_proj.weight                  model.layers.0._orig_mod.mlp...: wrappers are left out

transformers knows its models' mappings; we ask for them by their names in transformers 5.x.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..api.adapters import plain_model
from ..core.unit import original_class


@dataclass
class Source:
    """Entries of a folder that become one tensor of the model or, by a conversion of transformers, several."""

    target: str  # with a conversion, the first of its tensors
    entries: list[tuple[str, str | None]] = field(default_factory=list)  # each with the conversion's pattern for it
    converter: Any = None

    def make(self, read: Callable[[str], Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Make the tensors, by their names in the model, from what ``read`` returns for the entries."""
        if self.converter is None:
            [(name, _)] = self.entries
            return {self.target: read(name)}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.entries:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        made = converter.convert(self.target, model=model, config=getattr(model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def as_built(model: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Return the model without wrappers and with its original classes: transformers finds mappings by class names.

    FSDPGPTNeoXForCausalLM(WRAPPED: FSDPGPTNeoXModel)     GPTNeoXForCausalLM(GPTNeoXModel), with the same parameters

    ``made`` has the modules that were built already.
    """
    module, made = plain_model(model), {} if made is None else made
    if module in made:
        return made[module]
    before = {name: child for name, child in module._modules.items() if child is not None}
    children = {name: as_built(child, made) for name, child in before.items()}
    built, kind = module, original_class(module)
    of_sharded_class = kind is not type(module) and hasattr(module, "config")
    if of_sharded_class or any(child is not before[name] for name, child in children.items()):
        built = object.__new__(kind)
        built.__dict__.update(module.__dict__)
        built.__dict__["_modules"] = {**module._modules, **children}
    made[module] = built
    return built


def sources(model: nn.Module, expected: Collection[str], entries: Collection[str]) -> list[Source]:
    """Return which entries of the folder become which tensors of the model."""
    rename, converters = _mapping(model, expected)
    found: dict[str, Source] = {}
    for name in sorted(entries, key=_natural):  # experts are merged in this order
        target, pattern = rename(name)
        if pattern is None:
            found[name] = Source(target, [(name, None)])
        else:
            source = found.setdefault(f"-> {target}", Source(target, converter=converters[pattern]))
            source.entries.append((name, pattern))
    return list(found.values())


def _natural(name: str) -> list[Any]:
    """Return a key that sorts numbers in names by value: a file has experts.10 before experts.2."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _mapping(
    model: nn.Module, expected: Collection[str]
) -> tuple[Callable[[str], tuple[str, str | None]], dict[str, Any]]:
    """Return a function from an entry's name to the model's and its converter's pattern, if any, and the converters."""
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

    known = dict.fromkeys(expected, True)

    def by_transformers(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        # The model's own names stay. A converter may keep a name: experts that a folder has transposed, or not.
        return (name, None) if name in known and name != target else (target, pattern)

    return (by_transformers if mapping else by_prefix), patterns


def may_be_more(model: nn.Module) -> Callable[[str], bool]:
    """Return whether a folder may have a tensor that the model lacks: older folders hold what is computed today."""
    said = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [r"rotary_emb\.inv_freq$", *([said] if isinstance(said, str) else said)]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def as_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of the model to a folder's: by the same names or others, in several pieces, or merged."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return dict(tensors)
    if not hasattr(model, "config"):
        return dict(tensors)
    return dict(revert_weight_conversion(model, dict(tensors)))  # type: ignore[arg-type]


def groups_of_entries(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Group the tensors of the model that make the same entries of a folder, in order; nearly all groups have one."""
    group_of: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        members = [name]
        for entry in as_saved(model, {name: tensor}):
            others = group_of.get(entry, [])
            members = others + [one for one in members if one not in others]
            group_of.update({known: members for known, some in group_of.items() if some is others})
            group_of[entry] = members
    return list(dict.fromkeys(tuple(members) for members in group_of.values()))
