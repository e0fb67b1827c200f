"""CheckedReader: what a checkpoint's files ask for beyond data is refused before it runs."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_compile import CheckedReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Touches:
    """What, unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mknod, (self.path,)


def load(state: dict[str, Any], folder: Path) -> None:
    dcp.load(state, storage_reader=CheckedReader(folder), no_dist=True)


def later(folder: Path) -> CheckedReader:
    """A reader that was made before there was anything in the folder."""
    reader = CheckedReader(folder / "empty")
    reader.reset(folder)
    return reader


def test_every_kind_of_entry_is_read(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)}
    tensors["8 bits"] = torch.ones(4).to(torch.float8_e4m3fn)
    tensors["channels last"] = torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last)
    other = {"step": 3, "name": "x", "none": None, "list": [1, 2.5], "ordered": OrderedDict(a=1), "size": torch.Size([2])}
    dcp.save({**tensors, "other": other}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    empty = {"step": 0, "name": "", "none": 1, "list": [0, 0], "ordered": OrderedDict(a=0), "size": torch.Size([])}
    loaded: dict[str, Any] = {**{name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, "other": empty}
    load(loaded, tmp_path / "saved")
    assert loaded.pop("other") == other
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].float(), tensor.float()), name


def test_metadata_that_asks_for_more_runs_nothing(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    ran = tmp_path / "ran"
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Touches(ran)))
    with pytest.raises(pickle.UnpicklingError, match=r"asks for posix.mknod, which no checkpoint needs.*FileSystemReader"):
        CheckedReader(tmp_path / "saved")
    with pytest.raises(CheckpointException):
        dcp.load({"a": torch.zeros(2)}, storage_reader=later(tmp_path / "saved"), no_dist=True)
    assert not ran.exists()
    with pytest.raises(CheckpointException):  # torch's own reader runs it, and then finds that it is no metadata
        dcp.load({"a": torch.zeros(2)}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    assert ran.exists()
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="holds a dict, and is not the metadata of a checkpoint"):
        CheckedReader(tmp_path / "saved")


def test_an_entry_that_is_more_than_data_is_named(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    dcp.save({"a": torch.ones(2), "extra": {"x": Touches(ran)}}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    with pytest.raises(CheckpointException, match=r"extra.x in .* is more than data"):
        load({"a": torch.zeros(2), "extra": {"x": 0}}, tmp_path / "saved")
    assert not ran.exists()
    state = {"a": torch.zeros(2)}
    load(state, tmp_path / "saved")  # what is not asked for is not looked at
    assert torch.equal(state["a"], torch.ones(2))


@pytest.mark.parametrize("place", ["../elsewhere.distcp", "/elsewhere.distcp"])
def test_files_outside_of_the_folder_are_not_opened(tmp_path: Path, place: str) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    path = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for storage in metadata.storage_data.values():
        storage.relative_path = place
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=f"a is in {place}, outside of the folder"):
        CheckedReader(tmp_path / "saved")
    with pytest.raises(CheckpointException):
        dcp.load({"a": torch.zeros(2)}, storage_reader=later(tmp_path / "saved"), no_dist=True)
