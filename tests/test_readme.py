"""What the README says can be typed works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from fsdp_compile import FSDPModule
from tests.ranks import Ranks
from tests.toy import Stack

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def _code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def _run_example(code: str) -> None:
    names = {"torch": torch, "model": Stack()}
    exec(code, names)
    model = names["model"]
    assert isinstance(model._orig_mod, FSDPModule)


def test_the_example_shards_and_compiles(two_ranks: Ranks) -> None:
    (example,) = _code("python")
    two_ranks.run(_run_example, example)


def test_every_command_is_one_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    commands = [line for block in _code("sh") for line in block.splitlines()]
    assert commands == ["pip install -e .", "fsdp-compile demo", "pip install -e '.[dev]'", "pytest"]
    for command in commands[1:]:
        assert f'$(in_readme "{command}")' in ci
