"""The safetensors format: files are read by mapping them into memory, and written tensor by tensor.

    8 bytes     length of the header, little-endian
    header      JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest    the tensors' bytes, one behind the other

The format holds no code, and headers are not trusted: one that does not describe its file is refused. The package
safetensors copies what it reads. A mapped file gives views, and only the pages that are read are ever loaded.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..api.fitting import listed

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_BYTES = 100 << 20  # of a header


@dataclass(frozen=True)
class Entry:
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the begin of the file
    end: int


class File:
    """One file, mapped; its tensors are views of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.entries = _entries(path, file)
            # torch asks for memory that it may write to, so this is copy-on-write: only pages written to are copied.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def like(self, name: str) -> Tensor:
        """Return a tensor of the entry's dtype and shape on the meta device."""
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def tensor(self, name: str) -> Tensor:
        """Return a view of the file; do not write to it."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.begin % entry.dtype.itemsize:  # the writer did not align it, so it is copied
            piece = bytearray(self._bytes[entry.begin : entry.end])
            return torch.frombuffer(piece, dtype=entry.dtype).view(entry.shape)
        count = math.prod(entry.shape)
        return torch.frombuffer(self._bytes, dtype=entry.dtype, count=count, offset=entry.begin).view(entry.shape)


def _entries(path: Path, file: BinaryIO) -> dict[str, Entry]:
    """Parse a header, and check it against the size of its file."""
    size, length = os.fstat(file.fileno()).st_size, file.read(8)
    num_bytes = int.from_bytes(length, "little")
    if len(length) < 8 or num_bytes > min(_MOST_BYTES, size - 8):
        raise ValueError(f"{path} is no safetensors file: its header would be longer than it.")
    try:
        header = json.loads(file.read(num_bytes))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file: its header is no JSON ({error}).") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file: its header is a {type(header).__name__}.")
    header.pop("__metadata__", None)
    first = 8 + num_bytes
    entries = {}
    for name, said in header.items():
        try:
            dtype = _DTYPES[said["dtype"]]
            shape = tuple(int(length) for length in said["shape"])
            begin, end = (first + int(offset) for offset in said["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} says of {name} what is no tensor: {said!r}.") from error
        if min(shape, default=0) < 0 or not first <= begin <= end <= size:
            raise ValueError(f"{path} says that {name} is outside of the file: {said!r}.")
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{path} says that {name} has {end - begin} bytes, which {said['dtype']} {shape} has not.")
        entries[name] = Entry(dtype, shape, begin, end)
    spans = sorted((entry.begin, entry.end, name) for name, entry in entries.items())
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"{path} says that {name} and {other} overlap.")
    return entries


class Writer:
    """Writes a file tensor by tensor, in the order in which they were announced."""

    def __init__(self, path: Path, announced: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in announced.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": name_of(dtype, name), "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)  # without a copy

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def name_of(dtype: torch.dtype, fqn: str) -> str:
    """Return the format's name for a dtype."""
    if dtype not in _NAMES:
        raise TypeError(f"{fqn} is {dtype}, which safetensors has no name for. Cast it before.")
    return _NAMES[dtype]


def files_in(folder: Path) -> list[Path]:
    """Return the files with a folder's weights: those that its index names, or the single one."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} has no weight_map that says which file each tensor is in.") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"{index} names {outside[0]}, which is outside of its folder.")
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise FileNotFoundError(f"{folder} lacks {listed(missing)}, which {index.name} names.")
        return [folder / name for name in names]
    if single.exists():
        return [single]
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file. Pass the folder that it is in.")
    if not folder.exists():
        raise FileNotFoundError(
            f"There is no folder {folder}. A model of the Hub is downloaded first: "
            "huggingface_hub.snapshot_download(name) returns its folder."
        )
    there = [path.name for path in sorted(folder.glob("*.bin"))]
    old = f" It has {listed(there)}: convert it with from_pretrained and save_pretrained." if there else ""
    raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}.{old}")
