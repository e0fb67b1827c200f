"""Compile caches: a second start hits them, changed options do not, and ranks need not agree on what is cached."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compile.passes import Plan
from fsdp_compile.workers import Workers
from tests.ranks import PRELOAD


def start(caches: list[Path], **options: str) -> list[dict[str, Any]]:
    """A job with one rank for each cache folder; what each rank sent."""
    folder = caches[0].parent
    rendezvous = f"file://{folder}/rendezvous-{uuid.uuid4().hex}"
    settings = {"caches": caches, "options": options, "rendezvous": rendezvous}
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


@pytest.mark.parametrize(
    "options",
    [pytest.param({"bucketing": "none"}, marks=pytest.mark.more), pytest.param({"reshard": "yes"}, marks=pytest.mark.slow)],
)
def test_changed_options_never_reuse_a_graph(cold: Cold, options: dict[str, str]) -> None:
    cache, first_start = cold
    for before, after in zip(first_start, start([cache, cache], **options)):
        assert after["graph_hits"] == 0 and "backward" in after["passes_ran_on"]
        torch.testing.assert_close(after["norms"], before["norms"])


@pytest.mark.more
def test_one_rank_hits_and_the_other_compiles(cold: Cold, tmp_path: Path) -> None:
    """Also what no cache has, behind that: what one rank was served is no difference between plans."""
    hit, compiled = start([cold[0], tmp_path / "cold"], then="group")  # which no other test has put into that cache
    assert hit["passes_ran_on"] and len(compiled["passes_ran_on"]) > len(hit["passes_ran_on"])
    assert (hit["graph_misses"], compiled["graph_misses"]) == (2, 4)
    assert hit["norms"] == compiled["norms"]
