"""CheckedReader reads a checkpoint from somebody else without running any code that is in it.

    .metadata   a pickle    ->  only the classes that torch's writer puts there, and files inside the folder
    tensors                 ->  torch.load(weights_only=True), by torch's reader
    other items a pickle    ->  torch.load(weights_only=True), before the planner loads it
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .._torch_compat import checkpoints

_REMEDY = "It may run code of whoever wrote it. If you trust them, load it with torch's own FileSystemReader."


class CheckedReader(FileSystemReader):
    """``dcp.load(state, storage_reader=CheckedReader(folder))`` for folders from others: refuses all but data."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        metadata = Path(path) / ".metadata"
        if metadata.exists():
            _metadata_in(metadata)  # checked here: torch 2.11 does not report what read_metadata raises

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        metadata = _metadata_in(Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata"))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        return super().read_data(plan, _CheckedPlanner(planner, Path(self.path)))  # type: ignore[arg-type]


def _metadata_in(path: Path) -> Metadata:
    metadata = _Unpickler(path).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} holds a {type(metadata).__name__}, and is not the metadata of a checkpoint.")
    for index, place in (metadata.storage_data or {}).items():
        if os.path.isabs(place.relative_path) or ".." in Path(place.relative_path).parts:
            raise ValueError(f"{path} says that {index.fqn} is in {place.relative_path}, outside of the folder.")
    return metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if not checkpoints.is_in_metadata(module, name):
            raise pickle.UnpicklingError(f"{self._path} asks for {module}.{name}, which no checkpoint needs. {_REMEDY}")
        return super().find_class(module, name)


class _CheckedPlanner:
    """Wraps a planner, and passes it no pickle that holds more than data."""

    def __init__(self, planner: Any, folder: Path) -> None:
        self._planner = planner
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            fqn = read_item.dest_index.fqn
            raise pickle.UnpicklingError(f"{fqn} in {self._folder} is more than data: {error} {_REMEDY}") from error
        value.seek(0)
        self._planner.load_bytes(read_item, value)
