"""load_pretrained: a folder of safetensors, read straight into the shards.

    file --mapped--> a view of the whole tensor --this rank's rows--> the shard

A rank reads the pages of its own rows; what is mapped is the kernel's to keep or to drop. No whole tensor is made but
where transformers makes one of several entries.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._torch_compat import dtensors
from ..api.full_params import part_of, require_idle, shard_of, swapped_in
from ..api.initialize import fill_in, random_numbers_of_first
from ..core.param import ShardedParam
from ..core.unit import original_class, units_in
from .names import may_be_more, plain_model, plain_names, saved_tensors, sharded_params, sources
from .safetensors import File, files_in, listed

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def load_pretrained(
    model: ModelT, folder: str | os.PathLike[str], *, strict: bool = True, device: torch.device | str | None = None
) -> ModelT:
    """Read the weights in a Hugging Face folder into ``model``, whose shards take their own rows of each; return it.

    Names and shapes are those that the model has, as ``from_pretrained`` finds them: with or without the base model's
    prefix, tied weights once, experts one by one. Values are cast to the parameters' dtype.

    What is on the meta device gets memory on **device** (by default that of the mesh); of that, what the folder does
    not have is initialized as the model does it: buffers that are not saved, adapters.

    **strict** raises where the model has parameters that the folder lacks, or the folder tensors that the model lacks.
    Call it on every rank, which all see the folder; nothing is sent.
    """
    path = Path(folder)
    units = units_in(model)
    try:
        require_idle(units, "load weights")
    except AssertionError as error:
        raise RuntimeError(*error.args) from None
    files = [File(one) for one in files_in(path)]
    entries = {name: file for file in files for name in file.entries}
    inner, plain = plain_model(model), plain_names(model, saved_tensors(model))
    found = sources(inner, plain, entries)
    shapes: dict[str, Tensor] = {}
    for source in found:
        shapes.update(source.make(lambda one: _look(entries, one), inner))
    _check(path, model, plain, shapes, strict)
    adapters = _adapters_on_meta(model)
    there = saved_tensors(model)
    fill_in(model, {id(there[plain[short]]) for short in shapes if short in plain}, device)
    tensors, sharded = saved_tensors(model), sharded_params(model)
    for source in found:
        for short, value in source.make(lambda one: entries[one].tensor(one), inner).items():
            if short in plain:
                _write(tensors[plain[short]], sharded.get(plain[short]), value)
    _reset(model, adapters)
    return model


def _adapters_on_meta(model: nn.Module) -> list[nn.Module]:
    """Layers of PEFT whose own parameters have no values yet."""
    layers = [one for one in model.modules() if hasattr(one, "reset_lora_parameters")]
    return [one for one in layers if any(param.is_meta for name, param in one.named_parameters() if "lora_" in name)]


def _reset(model: nn.Module, adapters: list[nn.Module]) -> None:
    """Have these initialize themselves, some from the base's weights, with full parameters of one unit at a time."""
    owner = {slot.module: unit for unit in units_in(model) for param in unit.params for slot in param.slots}
    configs: Any = getattr(getattr(model, "_orig_mod", model), "peft_config", {})
    with random_numbers_of_first(next(model.parameters()).device):
        for layer in adapters:
            units = {owner[one]: None for one in layer.modules() if one in owner}
            with swapped_in(list(units), writeback=True):
                for name in layer.lora_A:  # type: ignore[union-attr]
                    layer.reset_lora_parameters(name, configs[name].init_lora_weights)  # type: ignore[operator]


def _look(entries: Mapping[str, File], name: str) -> Tensor:
    entry = entries[name].entries[name]
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def _write(tensor: Tensor, param: ShardedParam | None, value: Tensor) -> None:
    if param is None:
        tensor.copy_(value)
        return
    local: Tensor = dtensors.local_tensor(tensor)  # type: ignore[arg-type]
    if param.dtensor is None:
        local.copy_(part_of(param, value))  # which makes nothing in between
    else:
        local.copy_(dtensors.local_tensor(shard_of(param, value, tensor.dtype)))


def _with_ties(model: nn.Module, names: Collection[str]) -> set[str]:
    """These names, and the others that their parameters have."""
    of: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        of.setdefault(id(param), set()).add(name)
    return set(names).union(*(some for some in of.values() if not some.isdisjoint(names)))


def _check(
    folder: Path, model: nn.Module, plain: Mapping[str, str], shapes: Mapping[str, Tensor], strict: bool
) -> None:
    """Raise for shapes that differ; if ``strict``, also for names of either that the other has not."""
    tensors = saved_tensors(model)
    for short, like in shapes.items():
        if short in plain and like.shape != tensors[plain[short]].shape:
            raise ValueError(
                f"{plain[short]} has the shape {tuple(tensors[plain[short]].shape)}, and in {folder} "
                f"{tuple(like.shape)}. Build the model from the folder's config.json."
            )
    there = _with_ties(model, {plain[short] for short in shapes if short in plain})
    params = dict(model.named_parameters(remove_duplicate=False))  # a buffer may be one that older folders lack
    missing = [name for name in plain.values() if name in params and name not in there]
    ignored = may_be_more(plain_model(model))
    unexpected = [short for short in shapes if short not in plain and not ignored(short)]
    said = [f"it lacks {listed(missing)}"] if missing else []
    said += [f"it has {listed(unexpected)}, which the model has not"] if unexpected else []
    if strict and said:
        raise ValueError(
            f"{folder} is not of a {original_class(plain_model(model)).__name__} like this: {', and '.join(said)}. "
            "Build the model from the folder's config.json; or pass strict=False: what is missing is left as it is, or "
            "initialized where it is on the meta device."
        )
