"""The memory of full parameters, which is freed while nothing computes with them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from .._torch_compat import subclasses
from ..passes.wire import streams


class Memory:
    """The storages of tensors, and of the tensors inside wrapper subclasses, which have no storage of their own."""

    def __init__(self, *tensors: Tensor) -> None:
        self._storages = [one.untyped_storage() for one in subclasses.plain_tensors_in(*tensors)]
        self._num_bytes = [storage.nbytes() for storage in self._storages]

    def take(self) -> None:
        """Allocate freed storages again, at their old sizes."""
        for storage, num_bytes in zip(self._storages, self._num_bytes):
            if storage.nbytes() != num_bytes:
                streams.accelerator.resize(storage, num_bytes)

    def give_back(self, but: Collection[int] = ()) -> None:
        """Free the storages, except those at the addresses ``but``."""
        for storage in self._storages:
            if not but or storage.data_ptr() not in but:
                streams.accelerator.resize(storage, 0)
