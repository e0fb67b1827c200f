"""What the README says can be typed works as it stands there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_compile
from fsdp_compile import FSDPModule
from tests.compiling import no_kernels_built
from tests.models import Stack
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def _code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@no_kernels_built()  # what a step computes is for the recipes' rows in tests/matrix
def _run_examples() -> None:
    shard_and_compile, inspect = _code("python")
    batch = torch.zeros(2, 5, dtype=torch.long)
    names = {"torch": torch, "fsdp_compile": fsdp_compile, "model": Stack(1), "batch": batch}
    exec(shard_and_compile, names)
    assert isinstance(names["model"]._orig_mod, FSDPModule)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(inspect if dist.get_rank() == 0 else "model(batch).sum().backward()", names)
    if dist.get_rank() == 0:
        assert "launched behind" in printed.getvalue() and "all_gather" in printed.getvalue()


@pytest.mark.more
def test_the_examples_run_as_they_stand(two_ranks: Ranks) -> None:
    """Those of the pages in docs/ run in test_docs.py."""
    two_ranks.run(_run_examples)


def test_two_commands_set_up_all_they_need_and_are_those_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    (demo,), (test,) = (block.splitlines() for block in _code("sh")[:2])
    for line, end in ((demo, ".venv/bin/fsdp-compile demo"), (test, ".venv/bin/pytest")):
        environment, install, run = line.split(" && ")
        assert environment == "python3 -m venv .venv"
        assert install.startswith(".venv/bin/pip install -e ")
        assert run == end
        assert f'$(in_readme "{line}")' in ci
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".venv*/", "*.egg-info/"} <= set(ignored), "what the two commands create"
