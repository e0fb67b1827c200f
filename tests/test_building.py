"""What tests/building.py builds computes what Inductor's own building does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.building import as_inductor_builds


def _several_kernels(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A row's softmax, a product, and a sum over the other dimension, with a number among the arguments."""
    y = torch.softmax(x, -1) @ x
    return torch.relu(y).sum(0), y * n


def _compiled(x: Tensor, folder: Path) -> tuple[Any, int]:
    """What it gives, with a cache of its own, and how many libraries were built."""
    torch._dynamo.reset()
    folder.mkdir()
    with torch._inductor.utils.fresh_cache(dir=str(folder)):
        result = torch.compile(_several_kernels, dynamic=True)(x, 3)
        return result, len(list(folder.rglob("*.main.so")))


@pytest.mark.more
def test_one_library_has_the_kernels_of_a_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 12)
    at_once, num = _compiled(x, tmp_path / "at_once")
    with as_inductor_builds():
        one_by_one, num_of_inductor = _compiled(x, tmp_path / "one_by_one")
    assert num == 1 < num_of_inductor, (num, num_of_inductor)
    assert all(torch.equal(*pair) for pair in zip(at_once, one_by_one))

