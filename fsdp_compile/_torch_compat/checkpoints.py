"""The classes and functions with which torch.distributed.checkpoint pickles the metadata of a checkpoint."""

from __future__ import annotations

import torch

# Those in what ``FileSystemWriter`` writes: 2.11 to 2.15. Paths of Python 3.13 name ``pathlib._local``.
_IN_METADATA = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata",
                "StorageMeta",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    }
)


def is_in_metadata(module: str, name: str) -> bool:
    """Whether metadata may be made of this class or function; none of these runs code from the file."""
    return (module, name) in _IN_METADATA or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
