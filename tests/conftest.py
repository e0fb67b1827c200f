"""Fixtures that every test module shares: worker processes, started once a module. What a run sets for Inductor."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version

import pytest

_GIVEN_CACHE_DIR = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # before torch puts its default there

from tests.building import build_graphs_at_once  # noqa: E402
from tests.compiling import no_kernels_built  # noqa: E402
from tests.ranks import Ranks, filters_of_test  # noqa: E402

_CACHE_DIR = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Inductor's settings for all processes of a run: they inherit the environment of the first one.

    One cache directory, new for each run: equal kernels are compiled once, and no result depends on an old run.
    Kernels without vector instructions: g++ takes 0.7 s for one and not 1.0, Inductor's own Python a fifth less, and
    nobody compiles probes of the processor. And all kernels of a graph in one call of g++ (building.py), which does not
    optimize: it takes a third less so, of kernels that run for microseconds.
    tests/test_matrix.py has a test of kernels as users have them (``-m more``).
    """
    if _GIVEN_CACHE_DIR is None:
        config.stash[_CACHE_DIR] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fsdp_compile_tests_")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    os.environ.setdefault("AOT_INDUCTOR_DEBUG_COMPILE", "1")  # -O0, of all that Inductor builds: torch 2.11 to 2.15
    build_graphs_at_once()


# torch 2.11 uses what it says is deprecated: treespecs, instances of autograd functions.
_TORCH_WARNS_OF_ITSELF = version("torch").startswith("2.11")

# What takes longest comes first, so that no worker has a long file left at the end: here, or with ``-m more``.
_LONG_FILES = (
    "test_matrix", "test_fuzz", "test_frameworks", "test_docs", "test_lookout", "test_transformers_fsdp",
    "test_gpu_benchmark", "test_cuda_code", "test_recipes", "test_cache", "test_demo", "test_models",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if _TORCH_WARNS_OF_ITSELF:
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the ranks of a test treat warnings as pytest does around it: the mark that is closest comes last."""
    marks = [text for mark in item.iter_markers("filterwarnings") for text in mark.args]
    filters_of_test[:] = [*item.config.getini("filterwarnings"), *reversed(marks)]


def pytest_collection_finish() -> None:
    gc.freeze()  # as ranks.py does: modules stay


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    if _CACHE_DIR in config.stash:
        shutil.rmtree(config.stash[_CACHE_DIR], ignore_errors=True)


def _ranks(num_ranks: int) -> Iterator[Ranks]:
    ranks = Ranks(num_ranks)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Two workers: shards are even where a size is."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    """Three workers: most shards are uneven, and the last one is often empty."""
    yield from _ranks(3)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four workers: two meshes of two."""
    yield from _ranks(4)


@pytest.fixture
def fake_group_of_four() -> Iterator[None]:
    """Rank 0 of a group that moves no data: for errors, shapes and graphs. No kernel is built to compute with none."""
    yield from _fake_group(4)


@pytest.fixture
def fake_group_of_eight() -> Iterator[None]:
    """Likewise, for meshes of which more than one can be cut into smaller groups."""
    yield from _fake_group(8)


def _fake_group(num_ranks: int) -> Iterator[None]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch._dynamo.reset()  # or what other tests compiled counts towards the limit of recompilations
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    with no_kernels_built():
        yield
    dist.destroy_process_group()


@pytest.fixture
def limits_for_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matrices of small models be large enough to travel alone, as those of real models are."""
    from fsdp_compile.passes.wire import layout

    for backend in ("gloo", "nccl"):
        monkeypatch.setitem(layout._LIMITS, backend, (0, 300, 4, 2400))
