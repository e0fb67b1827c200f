"""Compile caches: a second start hits them, changed options do not, and ranks need not agree on what is cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def start(caches: list[Path], **options: str) -> list[dict[str, Any]]:
    """A job with one rank for each cache folder; what each rank printed."""
    rendezvous = caches[0].parent / f"rendezvous-{uuid.uuid4().hex}"
    workers = []
    for rank, cache in enumerate(caches):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.cache_worker", str(rank), str(len(caches)), str(rendezvous)]
        workers.append(
            subprocess.Popen(
                [*command, json.dumps(options)],
                cwd=ROOT,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    printed = []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=300)
            assert worker.returncode == 0, err
            printed.append(json.loads(out.splitlines()[-1]))
    finally:
        for worker in workers:
            worker.kill()
    return printed


def test_a_second_start_compiles_from_the_cache(tmp_path: Path) -> None:
    shared = [tmp_path / "cache"] * 2
    cold, warm = start(shared), start(shared)
    for first, second in zip(cold, warm):
        assert "forward" in first["passes_ran_on"] and "backward" in first["passes_ran_on"]
        assert second["norms"] == first["norms"]
        if torch.__version__ >= "2.15":
            assert second["autograd_hits"] == 1 and second["autograd_misses"] == second["autograd_bypasses"] == 0
            assert second["passes_ran_on"] == []
        else:  # 2.11 bypasses AOTAutograd's cache for DTensor inputs (prim_to_local); Inductor's still hits
            assert second["graph_hits"] == 2 and second["graph_misses"] == 0

    changed = start(shared, bucketing="none")
    resharding = start(shared, reshard="yes")
    for rank in range(2):
        assert changed[rank]["graph_hits"] == resharding[rank]["graph_hits"] == 0
        assert "backward" in changed[rank]["passes_ran_on"] and "backward" in resharding[rank]["passes_ran_on"]
        for norms in (changed[rank]["norms"], resharding[rank]["norms"]):
            torch.testing.assert_close(norms, cold[rank]["norms"])


def test_one_rank_hits_and_the_other_compiles(tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    start([warm, warm])
    hit, compiled = start([warm, tmp_path / "cold"])
    assert compiled["passes_ran_on"] and compiled["graph_misses"] == 2
    assert hit["graph_misses"] == 0
    assert hit["norms"] == compiled["norms"]
