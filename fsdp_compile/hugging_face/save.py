"""save_pretrained: write shards as the folder of a model that was never sharded.

    parameters, in order     a  b  c  d  e
    files, by size           [a  b  c]  [d  e]        00001-of-00002 is rank 0's to write, 00002-of-00002 is rank 1's
    each parameter           sent to the rank that writes it, written, freed

A rank has one whole parameter in memory at a time, or the few that transformers merges into one entry, beside the
window of the stream that is on its way.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..api.adapters import adapters_of
from ..api.exchange import Slab, as_whole, cast_to, this_rank
from ..api.fitting import from_all_ranks, raised_on_all
from ..api.full_params import require_shards
from ..api.stream import stream_wholes
from ..api.together import Ranks
from ..core.unit import original_class, saved_tensors, units_in
from ..passes.budget.budget import bytes_of
from .names import as_built, as_saved, groups_of_entries
from .safetensors import Writer, name_of

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_STREAM_BYTES = 256 << 20  # at most: twice the largest parameter
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# The names of files that we, or transformers, wrote into the folder before.
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.partial)?")


@dataclass(frozen=True)
class _Group:
    """Tensors of the model and the entries that they make: one makes one, unless transformers converts them."""

    members: tuple[str, ...]
    entries: Sizes

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.entries.values())


Files = dict[str, list[_Group]]  # what each file has, by the file's name


@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights and the configuration of ``model`` to a folder for ``from_pretrained`` or ``load_pretrained``.

    Names are those of the model that was never sharded, compiled or not; tied weights are written once.
    **max_shard_size** limits the size of a file, **dtype** casts the weights. Each rank writes some of the files, so
    every rank must call this and see the folder. Its former content loads until all files are written. Then the files
    replace it, and a reader in between finds nothing that loads.
    """
    path, inner = Path(folder), as_built(model)
    with raised_on_all("save_pretrained"):
        _refuse_adapters(model, inner)
        require_shards(units_in(model), "save weights")
        tensors = _to_save(model)
        split = _split(_groups(inner, tensors, dtype), bytes_of("max_shard_size", max_shard_size))
    _require_one_model([group.entries for groups in split for group in groups])
    with raised_on_all("save_pretrained"):
        if this_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05}-of-{len(split):05}.safetensors" for number in range(1, len(split) + 1)]
    files = dict(zip([_SINGLE] if len(split) == 1 else names, split))
    wholes = [
        as_whole([name], tensors[name], dtype, number % _world())
        for number, groups in enumerate(split)
        for group in groups
        for name in group.members
    ]
    most = min(_STREAM_BYTES, 2 * max(one.num_bytes for one in wholes))
    with raised_on_all("save_pretrained"):
        _write(path, inner, files, stream_wholes(wholes, Ranks.of(model, "save_pretrained"), most))
    with raised_on_all("save_pretrained"):
        if this_rank() == 0:
            _put_in_place(path, inner, files)


def _refuse_adapters(model: nn.Module, inner: nn.Module) -> None:
    if adapters_of(model) or adapters_of(inner):
        raise ValueError(
            "save_pretrained: the model has adapters of PEFT, and base weights alone would be written. Give "
            "model.save_pretrained(folder, state_dict=...) what get_model_state_dict gives with "
            "StateDictOptions(full_state_dict=True), on every rank; or merge the adapters before sharding."
        )


def _require_one_model(entries: list[Sizes]) -> None:
    for rank, theirs in enumerate(from_all_ranks(entries)):
        if theirs != entries:
            raise ValueError(
                f"save_pretrained: ranks {this_rank()} and {rank} have different models, of which one folder would be "
                "written. Of pipeline stages, save get_model_state_dict(...) with torch.distributed.checkpoint."
            )


def _write(path: Path, model: nn.Module, files: Files, stream: Iterator[tuple[Slab, Tensor | None]]) -> None:
    """Write the files of this rank as their tensors come; raise after the last one, since all ranks read the stream."""
    failed: Exception | None = None
    for number, (file, groups) in enumerate(files.items()):
        coming = _as_they_come(groups, stream)
        try:
            if number % _world() == this_rank() and failed is None:
                announced = {name: said for one in groups for name, said in one.entries.items()}
                with contextlib.closing(Writer(path / f"{file}.partial", announced)) as writer:
                    for group, wholes in coming:
                        made = as_saved(model, wholes)
                        for name in group.entries:
                            writer.write(made[name])
                        del made, wholes  # before the next ones are made
        except Exception as error:
            failed = error
        deque(coming, maxlen=0)  # the tensors of other ranks' files, and those behind an error
    next(stream, None)  # all ranks have read it
    if failed is not None:
        raise failed


def _as_they_come(
    groups: Sequence[_Group], stream: Iterator[tuple[Slab, Tensor | None]]
) -> Iterator[tuple[_Group, dict[str, Any]]]:
    for group in groups:
        yield group, dict(zip(group.members, (whole for _, whole in itertools.islice(stream, len(group.members)))))


def _put_in_place(path: Path, model: nn.Module, files: Files) -> None:
    """Rename the files to their final names; the index, or the only file, comes last."""
    for before in (_INDEX, *([_SINGLE] if len(files) > 1 else [])):
        (path / before).unlink(missing_ok=True)
    _write_configuration(model, path, files)
    for file in files:
        os.replace(path / f"{file}.partial", path / file)
    for old in path.iterdir():
        if _WRITTEN.fullmatch(old.name) and old.name not in files:
            old.unlink()
    if len(files) == 1:
        return
    weight_map = {name: file for file, groups in files.items() for one in groups for name in one.entries}
    total = sum(one.num_bytes for groups in files.values() for one in groups)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    partial = path / f"{_INDEX}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, path / _INDEX)


def _write_configuration(model: nn.Module, path: Path, files: Files) -> None:
    dtypes = [dtype for groups in files.values() for one in groups for dtype, _ in one.entries.values()]
    saved_as = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    for name in ("config", "generation_config"):
        config: Any = copy.deepcopy(getattr(model, name, None))
        if hasattr(config, "save_pretrained"):
            if name == "config":
                config.architectures = [original_class(model).__name__]
                if saved_as is not None and hasattr(config, "dtype"):
                    config.dtype = str(saved_as).removeprefix("torch.")  # from_pretrained loads in this dtype
            config.save_pretrained(path)


def _to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter once, by the first of its names, and the buffers that are saved."""
    first = {id(param) for param in model.parameters()}
    found = {}
    for name, tensor in saved_tensors(model).items():
        if not isinstance(tensor, nn.Parameter) or id(tensor) in first:
            first.discard(id(tensor))
            found[name] = tensor
    return found


def _groups(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[_Group]:
    """Return the groups to write, with the names, dtypes and shapes of their entries in the folder."""
    like = {name: torch.empty(one.shape, dtype=cast_to(dtype, one), device="meta") for name, one in tensors.items()}
    groups = []
    for members in groups_of_entries(model, like):
        made = as_saved(model, {name: like[name] for name in members})
        for name, one in made.items():
            name_of(one.dtype, name)
        groups.append(_Group(members, {name: (one.dtype, tuple(one.shape)) for name, one in made.items()}))
    return groups


def _split(groups: Sequence[_Group], most: int) -> list[list[_Group]]:
    """Split groups, in order, into files of at most ``most`` bytes; a larger group has a file of its own."""
    files: list[list[_Group]] = [[]]
    filled = 0
    for group in groups:
        if files[-1] and filled + group.num_bytes > most:
            files.append([])
            filled = 0
        files[-1].append(group)
        filled += group.num_bytes
    return files


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
