"""Runs a row on each rank, and says what did not hold."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.matrix.meter import Meter
from tests.matrix.rows import ROWS
from tests.matrix.train import Row


def measure(name: str, backend: str) -> dict[str, Any]:
    """Run the row of that name on this rank."""
    (row,) = (row for row in ROWS if row.name == name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    meter = Meter(backend, backward_inside=row.compiled_autograd)
    begin = time.perf_counter()
    with (
        warnings.catch_warnings(record=True) as caught,
        torch._dynamo.config.patch(compiled_autograd=row.compiled_autograd),
        torch._inductor.config.patch(fallback_random=not row.own_random, compile_threads=1),
        meter.watching_reads(),
    ):
        warnings.simplefilter("always")
        row.run(meter)
    dist.barrier()
    return {**meter.result(), "warnings": _ours(caught), "seconds": time.perf_counter() - begin}


def problems(row: Row, ranks: Sequence[dict[str, Any]], tolerance: float) -> list[str]:
    """What does not hold of a row that all ``ranks`` measured; empty where all does."""
    first = ranks[0]
    found = list(dict.fromkeys(problem for one in ranks for problem in one["problems"]))
    worst = max(ranks, key=lambda one: one["difference"])
    if not 0 <= worst["difference"] <= max(tolerance, row.tolerance):
        found.append(f"{worst['of']} are off by {worst['difference']:.1e} at {worst['where']}")
    for what, count, limit in (
        ("graphs", first["num_graphs"], row.num_graphs),
        ("compiled regions in backward", first["num_backwards"], row.num_backwards),
    ):
        if limit is not None and count > limit:
            found.append(f"{count} {what}, and not {limit}")
    texts = list(dict.fromkeys(text for one in ranks for text in one["warnings"]))
    found += [f"no warning says {words!r}" for words in row.warns if not any(re.search(words, text) for text in texts)]
    found += [f"a warning: {text}" for text in texts if not any(re.search(words, text) for words in row.warns)]
    return found


def _ours(caught: list[warnings.WarningMessage]) -> list[str]:
    """What this package warned of; each text once."""
    words = ("inside compiled code", "has no effect where", "fsdp_compile", "collectives in this", "has a new name")
    texts = [str(one.message) for one in caught if issubclass(one.category, (UserWarning, FutureWarning))]
    return list(dict.fromkeys(text for text in texts if any(word in text for word in words)))
