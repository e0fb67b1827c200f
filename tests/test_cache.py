"""Compile caches: a second start hits them, changed options do not, and ranks need not agree on what is cached."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config
from torch._inductor.utils import fresh_cache

import fsdp_compile
from fsdp_compile.passes import Plan
from fsdp_compile.workers import Workers
from tests.comparing import assert_same_grads
from tests.compiling import no_kernels_built
from tests.models import Block, twins
from tests.on_ranks import on_two_ranks
from tests.ranks import PRELOAD


def start(caches: list[Path]) -> list[dict[str, Any]]:
    """A job with one rank for each cache folder; what each rank sent."""
    folder = caches[0].parent
    rendezvous = f"file://{folder}/rendezvous-{uuid.uuid4().hex}"
    settings = {"caches": caches, "rendezvous": rendezvous}
    with Workers("tests.cache_worker:work", settings, num_ranks=len(caches), log_dir=folder, preload=PRELOAD) as workers:
        sent = dict(workers.messages(silence_s=300))
    return [sent[rank] for rank in range(len(caches))]


Cold = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Cold:
    """A cache that both ranks share, filled by a first start, and what that start sent."""
    cache = tmp_path_factory.mktemp("caches") / "shared"
    return cache, start([cache, cache])


@pytest.fixture(scope="module")
def warm(cold: Cold) -> list[dict[str, Any]]:
    """What a second start from that cache sent."""
    cache, _ = cold
    return start([cache, cache])


def test_a_second_start_compiles_from_the_cache(cold: Cold, warm: list[dict[str, Any]]) -> None:
    _, first_start = cold
    for first, second in zip(first_start, warm):
        assert "forward" in first["passes_ran_on"] and "backward" in first["passes_ran_on"]
        assert second["norms"] == first["norms"]
        if torch.__version__ >= "2.15":
            assert second["autograd_hits"] == 1 and second["autograd_misses"] == second["autograd_bypasses"] == 0
            assert second["passes_ran_on"] == []
        else:  # 2.11 bypasses AOTAutograd's cache for DTensor inputs (prim_to_local); Inductor's still hits
            assert second["graph_hits"] == 2 and second["graph_misses"] == 0


def test_the_plan_comes_with_a_graph_from_the_cache(cold: Cold, warm: list[dict[str, Any]]) -> None:
    _, first_start = cold
    for first, second in zip(first_start, warm):
        assert [first["plan_of"]] == first["planned"], "not the plan that the passes followed"
        assert "forward" not in second["passes_ran_on"] and "backward" not in second["passes_ran_on"]
        if torch.__version__ >= "2.15":
            assert second["planned"] == []
        assert (second["plan_of"], second["plan_id"]) == (first["plan_of"], first["plan_id"])
        assert Plan.from_json(second["plan_of"]).id == first["plan_id"]
    assert len({one["plan_id"] for one in (*first_start, *warm)}) == 1


def _trained(**options: Any) -> tuple[Any, Any]:
    """The model, compiled and sharded anew, behind one step that its unsharded twin takes as well."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    unsharded, model = twins(lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)))
    reshard = options.pop("reshard_after_forward", None)
    fsdp_compile.configure(fsdp_compile.fully_shard(model, reshard_after_forward=reshard), **options)
    run = torch.compile(model, fullgraph=True)
    _step(unsharded, run)
    return unsharded, run


def _step(unsharded: nn.Module, run: Any) -> None:
    batches = torch.randn(dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(1))
    run(batches[dist.get_rank()]).pow(2).mean().backward()
    unsharded(batches.flatten(0, 1)).pow(2).mean().backward()


def _misses() -> int:
    return torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.more
@pytest.mark.usefixtures("fake_group_of_four")
def test_changed_options_never_reuse_a_graph() -> None:
    with fresh_cache(), no_kernels_built():
        _trained()
        assert _misses() == 2
        _trained()
        assert _misses() == 0, "what is not changed is found"
        for option in ({"bucketing": "none"}, {"reduction": "all_to_all"}, {"reshard_after_forward": True}):
            _trained(**option)
            assert _misses() == 2, option


@pytest.mark.more
@on_two_ranks
def test_one_rank_hits_and_the_other_compiles() -> None:
    """Also what no cache has, behind that: what one rank was served is no difference between plans."""
    with fresh_cache():
        _trained()
        with fresh_cache() if dist.get_rank() == 1 else contextlib.nullcontext():
            unsharded, run = _trained()
            assert _misses() == (2 if dist.get_rank() == 1 else 0)
            fsdp_compile.configure(run._orig_mod, bucketing="group")
            _step(unsharded, run)
            assert _misses() == (4 if dist.get_rank() == 1 else 2)
    assert_same_grads(run._orig_mod, unsharded)


@pytest.mark.more
@on_two_ranks
def test_a_backward_that_may_run_twice_is_not_one_that_writes_over_what_forward_saved() -> None:
    with fresh_cache():
        for may_write in (True, False):
            torch._dynamo.reset()
            unsharded, model = twins(lambda: nn.Sequential(nn.Linear(6, 16), Block(16), Block(16)).double())
            for part in (*model, model):
                fsdp_compile.fully_shard(part)
            batches = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).double()
            with patch.object(config, "donated_buffer", may_write):
                for run, batch in ((unsharded, batches.flatten(0, 1)), (torch.compile(model), batches[dist.get_rank()])):
                    out = run(batch)
                    out.pow(2).mean().backward(retain_graph=not may_write)
                    if not may_write:
                        out.sin().mean().backward()
            assert_same_grads(model, unsharded)
