"""The memory of full parameters, which is given back while nobody computes with them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from .._torch_compat import subclasses


class Memory:
    """The storages of tensors, and of tensors inside them: a wrapper subclass has none of its own."""

    def __init__(self, *tensors: Tensor) -> None:
        self._storages = [one.untyped_storage() for one in subclasses.plain_tensors_in(*tensors)]
        self._num_bytes = [storage.nbytes() for storage in self._storages]

    def take(self) -> None:
        """Have storages as large as they were."""
        for storage, num_bytes in zip(self._storages, self._num_bytes):
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)

    def give_back(self, but: Collection[int] = ()) -> None:
        """Give them back to the allocator, but those at some addresses."""
        for storage in self._storages:
            if not but or storage.data_ptr() not in but:
                storage.resize_(0)
