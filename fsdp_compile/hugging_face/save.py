"""save_pretrained: write shards as the folder of a model that was never sharded.

    parameters, in order     a  b  c  d  e
    files, by size           [a  b  c]  [d  e]        00001-of-00002 is rank 0's to write, 00002-of-00002 is rank 1's
    each parameter           gathered on all ranks, written by one, freed

A rank has one whole parameter in memory at a time, or the few that transformers merges into one entry.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensors
from ..api.fitting import raised_on_all, told
from ..api.full_params import gathered_together
from ..core.param import ShardedParam
from ..core.unit import original_class
from ..passes.budget.budget import Budget
from .names import (
    adapters_of,
    as_built,
    as_saved,
    groups_of,
    plain_model,
    require_shards,
    saved_tensors,
    sharded_params,
)
from .safetensors import Writer, name_of

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
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
    path, inner = Path(folder), as_built(plain_model(model))
    with raised_on_all("save_pretrained"):
        _refuse_adapters(model, inner)
        require_shards(model, "save weights")
        tensors = _to_save(model)
        files = _split(_groups(inner, tensors, dtype), _num_bytes(max_shard_size))
    _require_one_model([group.entries for members in files for group in members])
    with raised_on_all("save_pretrained"):
        if _rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    names = [_SINGLE] if len(files) == 1 else names
    with raised_on_all("save_pretrained"):
        _write(path, inner, names, files, tensors, sharded_params(model), dtype)
    with raised_on_all("save_pretrained"):
        if _rank() == 0:
            _put_in_place(path, inner, names, files)


def _refuse_adapters(model: nn.Module, inner: nn.Module) -> None:
    if adapters_of(model) or adapters_of(inner):
        raise ValueError(
            "save_pretrained: the model has adapters of PEFT, and base weights alone would be written. Give "
            "model.save_pretrained(folder, state_dict=...) what get_model_state_dict gives with "
            "StateDictOptions(full_state_dict=True), on every rank; or merge the adapters before sharding."
        )


def _require_one_model(entries: list[Sizes]) -> None:
    for rank, theirs in enumerate(told(entries)):
        if theirs != entries:
            raise ValueError(
                f"save_pretrained: ranks {_rank()} and {rank} have different models, of which one folder would be "
                "written. Of pipeline stages, save get_model_state_dict(...) with torch.distributed.checkpoint."
            )


def _write(
    path: Path,
    model: nn.Module,
    names: Sequence[str],
    files: Sequence[Sequence[_Group]],
    tensors: Mapping[str, Tensor],
    sharded: Mapping[int, ShardedParam],
    dtype: torch.dtype | None,
) -> None:
    """Gather every tensor on all ranks; the rank that its file belongs to writes it. Raise after the last gather."""
    failed: Exception | None = None
    for number, groups in enumerate(files):
        writer: Writer | None = None
        try:
            if number % _world() == _rank() and failed is None:
                announced = {name: said for one in groups for name, said in one.entries.items()}
                writer = Writer(path / f"{names[number]}.partial", announced)
        except OSError as error:
            failed = error
        for group in groups:
            wholes = {name: _whole(tensors[name], sharded.get(id(tensors[name]))) for name in group.members}
            try:
                if writer is not None and failed is None:
                    _write_group(writer, group, wholes, model, dtype)
            except Exception as error:
                failed = error
            del wholes  # before the next ones are gathered
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _write_group(
    writer: Writer, group: _Group, wholes: Mapping[str, Tensor], model: nn.Module, dtype: torch.dtype | None
) -> None:
    made = as_saved(model, {name: one.to(_cast(one, dtype)) for name, one in wholes.items()})
    for name in group.entries:
        writer.write(made[name])


def _put_in_place(path: Path, model: nn.Module, names: Sequence[str], files: Sequence[Sequence[_Group]]) -> None:
    """Rename the files to their final names; the index, or the only file, comes last."""
    for before in (_INDEX, *([_SINGLE] if len(names) > 1 else [])):
        (path / before).unlink(missing_ok=True)
    _write_configuration(model, path, files)
    for name in names:
        os.replace(path / f"{name}.partial", path / name)
    for old in path.iterdir():
        if _WRITTEN.fullmatch(old.name) and old.name not in names:
            old.unlink()
    if len(names) == 1:
        return
    weight_map = {name: names[number] for number, groups in enumerate(files) for one in groups for name in one.entries}
    total = sum(one.num_bytes for groups in files for one in groups)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    partial = path / f"{_INDEX}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, path / _INDEX)


def _write_configuration(model: nn.Module, path: Path, files: Sequence[Sequence[_Group]]) -> None:
    dtypes = [dtype for groups in files for one in groups for dtype, _ in one.entries.values()]
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


def _whole(tensor: Tensor, param: ShardedParam | None) -> Tensor:
    """Return the whole of a tensor; every rank must call this for it."""
    if param is not None and param.dtensor is None:
        return gathered_together([(param, dtensors.local_tensor(tensor))])[0]  # type: ignore[arg-type]
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _groups(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[_Group]:
    """Return the groups to write, with the names, dtypes and shapes of their entries in the folder."""
    like = {name: torch.empty(one.shape, dtype=_cast(one, dtype), device="meta") for name, one in tensors.items()}
    groups = []
    for members in groups_of(model, like):
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


def _num_bytes(said: int | str) -> int:
    if isinstance(said, bool) or not isinstance(said, (int, str)):
        raise TypeError(f"max_shard_size is {said!r}. Give bytes, or text such as '5GB'.")
    try:
        num_bytes = Budget.of(said).num_bytes
    except ValueError:
        num_bytes = None
    if num_bytes is None:
        raise ValueError(f"max_shard_size={said!r} is no number of bytes. Give bytes, or text such as '5GB'.")
    return num_bytes


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
