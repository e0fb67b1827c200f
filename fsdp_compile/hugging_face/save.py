"""save_pretrained: shards, written as the folder of a model that was never sharded.

    parameters, in order     a  b  c  d  e
    files, by size           [a  b  c]  [d  e]        00001-of-00002 is rank 0's to write, 00002-of-00002 is rank 1's
    each parameter           gathered on all ranks, written by one, freed

One whole parameter is in a rank's memory at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensors
from ..api.full_params import gathered, require_idle
from ..core.param import ShardedParam
from ..core.unit import original_class, units_in
from ..passes.budget import Budget
from .names import as_saved, plain_model, saved_tensors, sharded_params
from .safetensors import Writer, name_of

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_INDEX = "model.safetensors.index.json"


@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of ``model``, and its configuration, to a folder that ``from_pretrained`` and ours read.

    Names are those of the model that was never sharded, compiled or not; tied weights are written once.
    **max_shard_size** is that of a file, **dtype** another one than the parameters'. Ranks share the files out among
    them, so all of them call it and see the folder. Until the last step, which puts one file into its place, there is
    nothing in the folder that loads.
    """
    inner = plain_model(model)
    if inner is not getattr(model, "_orig_mod", model):
        raise ValueError(
            "save_pretrained: the model has adapters of PEFT, and base weights alone would be written. Give "
            "model.save_pretrained(folder, state_dict=...) what get_model_state_dict gives with "
            "StateDictOptions(full_state_dict=True), on every rank; or merge the adapters before sharding."
        )
    try:
        require_idle(units_in(model), "save weights")
    except AssertionError as error:
        raise RuntimeError(*error.args) from None
    path = Path(folder)
    most = _num_bytes(max_shard_size)
    tensors = _to_save(model)
    sharded = sharded_params(model)
    pieces = {name: _as_announced(inner, name, tensor, dtype) for name, tensor in tensors.items()}
    files = _split(pieces, most)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        for old in (path / _INDEX, *path.glob("model*.safetensors"), *path.glob("model*.safetensors.partial")):
            old.unlink(missing_ok=True)
        _write_configuration(inner, path)
    _wait()
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for number, members in enumerate(files):
        writer = None
        if number % world == rank:
            announced = {name: said for member in members for name, said in pieces[member].items()}
            writer = Writer(path / f"{names[number]}.partial", announced)
        for member in members:
            tensor = tensors[member]
            whole = _whole(tensor, sharded.get(member))
            if writer is not None:
                cast = whole.to(_cast(whole, dtype))
                for one in as_saved(inner, _plain(member), cast).values():
                    writer.write(one)
            del whole
        if writer is not None:
            writer.close()
    _wait()
    if rank == 0:
        _put_in_place(path, names, files, pieces)
    _wait()


def _put_in_place(path: Path, names: list[str], files: list[list[str]], pieces: Mapping[str, Sizes]) -> None:
    """Give the files their names; the index, or the only file, last."""
    for name in names:
        os.replace(path / f"{name}.partial", path / name)
    if len(names) == 1:
        return
    weight_map = {
        name: names[number] for number, members in enumerate(files) for one in members for name in pieces[one]
    }
    total = sum(_bytes_of(said) for one in pieces.values() for said in one.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    partial = path / f"{_INDEX}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, path / _INDEX)


def _write_configuration(model: nn.Module, path: Path) -> None:
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if config is not None and hasattr(config, "save_pretrained"):
            if name == "config":
                config.architectures = [original_class(model).__name__]
            config.save_pretrained(path)


def _to_save(model: nn.Module) -> dict[str, Tensor]:
    """Parameters once, by the first of their names, and the buffers that are saved."""
    first = {id(param) for param in model.parameters()}
    found = {}
    for name, tensor in saved_tensors(model).items():
        if not isinstance(tensor, nn.Parameter) or id(tensor) in first:
            first.discard(id(tensor))
            found[name] = tensor
    return found


def _whole(tensor: Tensor, param: ShardedParam | None) -> Tensor:
    """All of a tensor, which every rank asks for at once."""
    if param is not None and param.dtensor is None:
        return gathered(param, dtensors.local_tensor(tensor))  # type: ignore[arg-type]
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(name: str) -> str:
    return name.removeprefix("_orig_mod.")


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _as_announced(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Sizes:
    """Names, dtypes and shapes of what a tensor becomes."""
    like = torch.empty(tensor.shape, dtype=_cast(tensor, dtype), device="meta")
    made = as_saved(model, _plain(name), like)
    for one in made.values():
        name_of(one.dtype, name)
    return {saved: (one.dtype, tuple(one.shape)) for saved, one in made.items()}


def _split(pieces: Mapping[str, Sizes], most: int) -> list[list[str]]:
    """Tensors in files of at most so many bytes, in their order; a larger tensor has one of its own."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, made in pieces.items():
        size = sum(map(_bytes_of, made.values()))
        if files[-1] and filled + size > most:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _bytes_of(said: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(said[1]) * said[0].itemsize


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


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
