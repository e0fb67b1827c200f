"""Compiling in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._inductor.async_compile import AsyncCompile


@contextlib.contextmanager
def no_kernels_built() -> Iterator[None]:
    """Inductor makes its graphs and its code, and calls in it that compute nothing: g++ is most of what it costs.

    For tests of graphs, plans and code. Results, and saved tensors, are whatever memory held.
    """

    def left_out(self: AsyncCompile, argtypes: list[str], source_code: str) -> Callable[..., Any]:
        return lambda *args: None

    with mock.patch.object(AsyncCompile, "cpp_pybinding", left_out):
        yield
