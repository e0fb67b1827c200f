"""What the README, and the pages that stood in it, say can be typed works as it stands there."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_compile
from fsdp_compile import FSDPModule, fully_shard
from tests.compiling import no_kernels_built
from tests.models import Block, Stack, shard
from tests.pages import pattern, plain
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
#: Pages whose blocks this module runs, in the order in which they run.
PAGES = ("inspect.md", "costs.md", "memory-budget.md", "accumulate.md", "one-graph.md", "eager.md")


def _code(language: str, *files: str) -> list[str]:
    """The blocks of these files, one file after the other."""
    texts = [(ROOT / file).read_text() for file in files]
    return [code for text in texts for code in re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)]


@no_kernels_built()  # what a step computes is for the recipes' rows in tests/matrix
def _run_examples(folder: str) -> None:
    shard_and_compile, fsdp1 = _code("python", "README.md")
    of_pages = _code("python", *(f"docs/{page}" for page in PAGES))
    inspect, edit, page, why, costs, budget, again, accumulate, explain, whole_step, compare = of_pages
    batch = torch.zeros(2, 5, dtype=torch.long)
    names = {"torch": torch, "fsdp_compile": fsdp_compile, "model": Stack(1), "batch": batch, "batches": [batch, batch]}
    exec(shard_and_compile, names)
    assert isinstance(names["model"]._orig_mod, FSDPModule)
    if dist.get_rank() == 0:
        os.chdir(folder)
    exec(inspect if dist.get_rank() == 0 else "import fsdp_compile; model(batch).sum().backward()", names)
    if dist.get_rank() == 0:
        exec(edit, names)
        exec(page, names)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(costs, names)
        assert printed.getvalue().startswith("predicted on 'cpu': forward ") and " waiting; peak " in printed.getvalue()
        assert "of compute stand beside it" in printed.getvalue() and "Residency(becomes=" in printed.getvalue()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(why, names)
    [shown] = re.findall(r"^## Why it waits$.*?^```text\n(.*?)^```$", (ROOT / "docs/inspect.md").read_text(), re.DOTALL | re.MULTILINE)
    assert pattern(shown).search(plain(printed.getvalue())), printed.getvalue()
    budgeted = names | {"model": fully_shard(Stack(1))}
    exec(budget, budgeted)
    torch.compile(budgeted["model"])(batch).sum().backward()
    planned = shard(Stack(1))
    with fsdp_compile.inspect(planned) as report:
        torch.compile(planned)(batch).sum().backward()
    exec(again, {"fsdp_compile": fsdp_compile, "model": planned, "report": report})
    with fsdp_compile.inspect(planned) as report:
        torch.compile(planned)(batch).sum().backward()
    assert report.joint.plan.recompute == ("layers.0.up.weight",)
    exec(accumulate, names)
    exec(explain, names)
    assert names["report"]
    try:
        exec(whole_step, names)
    finally:
        torch._dynamo.config.compiled_autograd = False
    exec(compare, names)
    names |= {"model": Stack(1), "Block": Block}
    exec(fsdp1, names)
    assert names["model"](batch).shape == (2, 5, 31)


@pytest.mark.more
def test_the_examples_run_as_they_stand(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_run_examples, str(tmp_path))
    assert list((tmp_path / "graphs").glob("*backward*/*.py"))
    assert (tmp_path / "step.html").exists() and (tmp_path / "step.json").exists()


def test_two_commands_set_up_all_they_need_and_are_those_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    (demo,), (test,) = (block.splitlines() for block in _code("sh", "README.md")[:2])
    for line, end in ((demo, ".venv/bin/fsdp-compile demo"), (test, ".venv/bin/pytest")):
        environment, install, run = line.split(" && ")
        assert environment == "python3 -m venv .venv"
        assert install.startswith(".venv/bin/pip install -e ")
        assert run == end
        assert f'$(in_readme "{line}")' in ci
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".venv*/", "*.egg-info/"} <= set(ignored), "what the two commands create"
