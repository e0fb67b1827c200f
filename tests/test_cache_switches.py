"""Caches are off as long as somebody needs them off, and on again afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from fsdp_compile._torch_compat import inductor

pytestmark = pytest.mark.compat


def _are_on() -> bool:
    on = {inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache}
    assert len(on) == 1
    return on.pop()


@pytest.fixture(autouse=True)
def caches_on() -> Iterator[None]:
    with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True):
        yield


def _found_elsewhere() -> bool:
    """What a thread finds that never set anything."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_are_on()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("threads", [(False, False), (True, True), (False, True), (True, False)])
def test_uses_that_overlap_leave_caches_as_they_were(threads: tuple[bool, bool]) -> None:
    """Two uses, each on a thread of its own or on this one."""
    pools = [ThreadPoolExecutor(1) if elsewhere else None for elsewhere in threads]
    first, second = (inductor.no_compile_caches() for _ in pools)

    def run(place: int, fn: Callable[..., Any], *args: Any) -> Any:
        pool = pools[place]
        return fn(*args) if pool is None else pool.submit(fn, *args).result()

    before = _found_elsewhere()
    seen = [run(place, _are_on) for place in range(2)]
    for place, use in enumerate((first, second)):
        run(place, use.__enter__)
        assert run(place, _are_on) is False
    assert _found_elsewhere() is False
    run(0, first.__exit__, None, None, None)
    assert run(1, _are_on) is False
    assert _found_elsewhere() is False
    run(1, second.__exit__, None, None, None)
    assert [run(place, _are_on) for place in range(2)] == seen
    assert _are_on() is True
    assert _found_elsewhere() == before


def test_what_the_environment_forces_on_is_off_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    # As config.py has it from TORCHINDUCTOR_FX_GRAPH_CACHE=1.
    monkeypatch.setattr(inductor_config._config["fx_graph_cache"], "env_value_force", True)
    with inductor.no_compile_caches():
        assert inductor_config.fx_graph_cache is False
    assert inductor_config.fx_graph_cache is True


def test_a_use_inside_another_and_one_that_raises() -> None:
    with inductor.no_compile_caches():
        with contextlib.suppress(KeyError), inductor.no_compile_caches():
            raise KeyError
        assert not _are_on()
    assert _are_on()
