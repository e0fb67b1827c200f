"""load_pretrained: read a folder of safetensors straight into the shards.

    file --mapped--> a view of the whole tensor --this rank's rows--> the shard

A rank reads the pages of its own rows; the kernel keeps or drops mapped pages as it likes. A whole tensor is made only
where transformers merges several entries into one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..api.adapters import adapters_of, plain_model, plain_names
from ..api.classes import read_by
from ..api.fitting import listed, raised_on_all
from ..api.full_params import require_shards, swapped_in
from ..api.initialize import fill_in, random_numbers_of_first
from ..api.stream import Loader
from ..core.unit import original_class, saved_tensors, units_in
from .names import Source, as_built, may_be_more, sources
from .safetensors import File, files_in

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def load_pretrained(
    model: ModelT, folder: str | os.PathLike[str], *, strict: bool = True, device: torch.device | str | None = None
) -> ModelT:
    """Read the weights in a Hugging Face folder into the shards of ``model``, each its own rows, and return the model.

    Shapes must be the model's. Names are matched as ``from_pretrained`` matches them: with or without the base model's
    prefix, tied weights under one name, experts one by one. Values are cast to the parameters' dtype.

    ``generation_config.json`` is read with the weights, where the model has a ``generation_config``.

    Tensors on the meta device get memory on **device** (by default the mesh's). Those that the folder lacks (buffers
    that are not saved, adapters) are initialized as the model does it.

    **strict** raises where the model has parameters that the folder lacks, or the folder tensors that the model lacks.
    Every rank must call this and see the folder; no weights are sent. If one rank raises, all ranks raise.
    """
    inner = as_built(model)
    with raised_on_all("load_pretrained"):
        require_shards(units_in(model), "load weights")
        found = _find(model, inner, Path(folder))
        _check(Path(folder), model, inner, found, strict)
        generating = _generation_config(inner, Path(folder))
    adapters = _adapters_on_meta(model)
    fill_in(model, found.loaded, device)
    loader = Loader(saved_tensors(model))
    for source in found.sources:
        for short, value in source.make(found.tensor, inner).items():
            for name in found.names.get(short, ()):
                loader.write(name, value)
    _reset(model, adapters)
    if generating is not None:
        plain_model(model).generation_config = generating
    return model


@dataclass(frozen=True)
class _Found:
    """The entries of a folder, and the tensors of the model that they become."""

    entries: Mapping[str, File]
    sources: list[Source]
    shapes: Mapping[str, torch.Size]  # of the tensors that the sources make, by names in the plain model
    names: Mapping[str, list[str]]  # names in the plain model, to the model's own names
    loaded: set[int]  # ids of the model's tensors that are there, by any of their names

    def tensor(self, entry: str) -> Tensor:
        return self.entries[entry].tensor(entry)


def _find(model: nn.Module, inner: nn.Module, folder: Path) -> _Found:
    entries: dict[str, File] = {}
    for path in files_in(folder):
        file = File(path)
        for name in file.entries:
            if name in entries:
                raise ValueError(f"{name} is in {entries[name].path} and in {path}. Take one of them out.")
            entries[name] = file
    tensors = saved_tensors(model)
    names = plain_names(model, tensors)
    found = sources(inner, names, entries)
    made = [source.make(lambda one: entries[one].like(one), inner) for source in found]
    shapes = {short: like.shape for some in made for short, like in some.items()}
    loaded = {id(tensors[name]) for short in shapes for name in names.get(short, ())}
    return _Found(entries, found, shapes, names, loaded)


def _generation_config(model: nn.Module, folder: Path) -> Any:
    """Return the folder's generation config, if it has one: config.json, of which the model was made, lacks it."""
    made: Any = getattr(model, "generation_config", None)
    there = (folder / "generation_config.json").is_file()
    return made.from_pretrained(folder) if there and hasattr(made, "from_pretrained") else None


def _adapters_on_meta(model: nn.Module) -> list[nn.Module]:
    """Return the layers of PEFT whose own parameters have no values yet."""
    layers = [one for one in model.modules() if hasattr(one, "reset_lora_parameters")]
    return [one for one in layers if any(param.is_meta for name, param in one.named_parameters() if "lora_" in name)]


def _reset(model: nn.Module, adapters: list[nn.Module]) -> None:
    """Let adapters initialize themselves, some from base weights, with full parameters of one layer at a time."""
    configs = adapters_of(model)
    device = next((unit.mesh.device for unit in units_in(model)), next(model.parameters()).device)
    with random_numbers_of_first(device):
        for layer in adapters:
            with swapped_in(list(read_by(*layer.modules())), writeback=True):
                for name in layer.lora_A:  # type: ignore[union-attr]
                    layer.reset_lora_parameters(name, configs[name].init_lora_weights)  # type: ignore[operator]


def _check(folder: Path, model: nn.Module, inner: nn.Module, found: _Found, strict: bool) -> None:
    """Raise for shapes that differ; if ``strict``, also for names that the model or the folder lacks."""
    tensors = saved_tensors(model)
    for short, shape in found.shapes.items():
        for name in found.names.get(short, ()):
            if shape != tensors[name].shape:
                raise ValueError(
                    f"{name} has the shape {tuple(tensors[name].shape)}, and in {folder} {tuple(shape)}. Build the "
                    "model from the folder's config.json."
                )
    wanted = {name: tensors[name] for names in found.names.values() for name in names}
    # Older folders may lack buffers that the model has now.
    missing = [name for name, one in wanted.items() if isinstance(one, nn.Parameter) and id(one) not in found.loaded]
    ignored = may_be_more(inner)
    unexpected = [short for short in found.shapes if short not in found.names and not ignored(short)]
    said = [f"it lacks {listed(missing)}"] if missing else []
    said += [f"it has {listed(unexpected)}, which the model has not"] if unexpected else []
    if strict and said:
        raise ValueError(
            f"{folder} is not of a {original_class(inner).__name__} like this: {', and '.join(said)}. "
            "Build the model from the folder's config.json; or pass strict=False: what is missing is left as it is, or "
            "initialized where it is on the meta device."
        )
