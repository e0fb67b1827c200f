"""The pages in docs/: their blocks run as they stand, what they name is there, and the site builds without a warning."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile
import fsdp_compile.fsdp1.wrap
import fsdp_compile.passes
from tests.comparing import full, mine
from tests.compiling import num_graphs
from tests.models import Block, Stack, shard
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
Setup = Callable[[], Any]


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def blocks_of(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), flags=re.DOTALL | re.MULTILINE)


def _plain() -> Any:
    torch.manual_seed(0)
    return Stack(1)


def _compiled() -> Any:
    return torch.compile(shard(_plain()), fullgraph=True)


# What a page's blocks find under the name ``model``, and whether each finds a new one, or all share their names.
EACH_ALONE: dict[str, Setup] = {
    page: _plain
    for page in (
        "index.md",
        "troubleshooting.md",
        "passes.md",
        *(f"migrate/{one}.md" for one in ("ddp", "deepspeed", "fsdp1", "fsdp2", "simple_fsdp")),
    )
}
IN_TURN: dict[str, Setup] = {
    "guide/inspect.md": _compiled,
    "guide/budget.md": _compiled,
    "guide/graphs.md": _compiled,
    "guide/eager.md": lambda: shard(_plain()),
}
ELSEWHERE = {
    "recipes.md": "tests/test_recipes.py",
    "tutorial.md": "test_the_tutorial_is_the_scripts_text, and tests/test_examples.py",
}


def _is_sharded(names: dict[str, Any], printed: str) -> None:
    assert isinstance(names["model"]._orig_mod, fsdp_compile.FSDPModule)


def _is_saved_and_edited(names: dict[str, Any], printed: str) -> None:
    assert list(Path("graphs").glob("*backward*/*.py")) and list(Path("graphs").glob("*/plan.json"))
    assert "head.weight" in names["plan"].keep and "head.weight" not in names["plan"].regather
    assert "all_gather" in printed


def _is_predicted(names: dict[str, Any], printed: str) -> None:
    assert printed.startswith("predicted on 'cpu': forward ") and " waiting; peak " in printed
    assert "of compute stand beside it" in printed and "Residency(becomes=" in printed
    with fsdp_compile.inspect(names["model"]) as report:
        names["model"](names["batch"]).sum().backward()
    assert report.joint.plan.choice.budget_bytes == 70 << 30


def _is_one_graph(names: dict[str, Any], printed: str) -> None:
    assert names["report"] and "1 graph, 0 breaks" in printed


def _is_the_same(names: dict[str, Any], printed: str) -> None:
    assert names["parity"] and "eager and aot_eager agree" in printed


AFTERWARDS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "index.md": _is_sharded,
    "guide/inspect.md": _is_saved_and_edited,
    "guide/budget.md": _is_predicted,
    "guide/graphs.md": _is_one_graph,
    "guide/eager.md": _is_the_same,
}


def check_page(page: str) -> None:
    """Every block runs, on two ranks, and does what the page is about."""
    setup = EACH_ALONE.get(page) or IN_TURN[page]
    printed = io.StringIO()
    with _names(setup()) as names:
        for block in blocks_of(page):
            if page in EACH_ALONE:
                torch._dynamo.reset()
                names["model"] = setup()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(block, names)
            except Exception as error:
                raise AssertionError(f"{page}: a block does not run:\n{block}") from error
            finally:
                torch._dynamo.config.compiled_autograd = False
        if page in AFTERWARDS:
            AFTERWARDS[page](names, printed.getvalue())


@contextmanager
def _names(model: Any) -> Iterator[dict[str, Any]]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    batches = [mine(0), mine(1)]
    before = Path.cwd()
    os.chdir(tempfile.mkdtemp())
    compiled = partial(torch.compile, backend="passes")
    try:
        with mock.patch.object(torch, "compile", compiled):
            yield {
                "torch": torch,
                "nn": nn,
                "Block": Block,
                "model": model,
                "batch": batches[0],
                "batches": batches,
                "folder": Path(str(folder[0])),
            }
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "page",
    [page if page == "index.md" else pytest.param(page, marks=pytest.mark.more) for page in (*EACH_ALONE, *IN_TURN)],
)
def test_the_blocks_of_a_page_run(two_ranks: Ranks, page: str) -> None:
    """With the graphs that Inductor gets, and none of its code: what kernels compute is for the rows of tests/matrix."""
    assert blocks_of(page)
    two_ranks.run(check_page, page)


def check_migration(page: str) -> None:
    """The first two blocks, theirs and ours, give one batch the same gradients; ours in one graph."""
    theirs, ours, *_ = blocks_of(page)
    grads = []
    for block in (theirs, ours):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with _names(_plain()) as names:
            exec(block, names)
        wrapped = names.get("wrapped", names["model"])
        with _whole_gradients(wrapped):
            found = {name.rpartition("module.")[2]: param.grad for name, param in wrapped.named_parameters()}
            grads.append({name: full(grad).clone() for name, grad in found.items() if grad is not None})
    assert num_graphs() == 1 and len(grads[0]) == len(list(_plain().parameters()))
    torch.testing.assert_close(grads[1], grads[0], atol=1e-4, rtol=1e-4)


@contextmanager
def _whole_gradients(model: Any) -> Iterator[None]:
    """torch's FSDP1 has them in flat shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, FullyShardedDataParallel):
        yield
        return
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        yield


@pytest.mark.more
@pytest.mark.parametrize("page", ["migrate/ddp.md", "migrate/fsdp2.md", "migrate/fsdp1.md"])
def test_their_block_and_ours_have_the_same_gradients(two_ranks: Ranks, page: str) -> None:
    two_ranks.run(check_migration, page)


def test_the_tutorial_is_the_scripts_text() -> None:
    script = (ROOT / "examples" / "tutorial.py").read_text()
    blocks = blocks_of("tutorial.md")
    assert len(blocks) >= 7
    for block in blocks:
        assert block in script, block


def test_every_page_with_blocks_is_run_by_a_test() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    with_blocks = {page for page in pages if blocks_of(page)}
    assert with_blocks == {*EACH_ALONE, *IN_TURN, *ELSEWHERE}
    unknown = {language for page in pages for language in re.findall(r"^```(\S+)", text_of(page), flags=re.MULTILINE)}
    assert unknown <= {"python", "sh", "text"}


def test_commands_in_pages_are_there() -> None:
    """Scripts and modules that are started, and their options."""
    lines = [line for page in DOCS.rglob("*.md") for line in "".join(blocks_of(str(page.relative_to(DOCS)), "sh")).splitlines()]
    assert len(lines) >= 4
    for script in re.findall(r"\S*examples/\S+\.py", "\n".join(lines)):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"-m (fsdp_compile\.\S+|benchmarks\.\S+)", "\n".join(lines)):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def _exported(package: types.ModuleType) -> set[str]:
    return {
        f"{package.__name__}.{name}"
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def test_the_reference_has_every_public_name() -> None:
    pages = {
        "reference/index.md": [fsdp_compile],
        "reference/fsdp1.md": [fsdp_compile.fsdp1, fsdp_compile.fsdp1.wrap],
        "reference/passes.md": [fsdp_compile.passes],
    }
    for page, packages in pages.items():
        named = set(re.findall(r"^(?:::: |\| `)(fsdp_compile[\w.]+)", text_of(page), flags=re.MULTILINE))
        assert named == set().union(*map(_exported, packages)), page


def test_pages_in_the_repository_link_to_pages_and_headings_that_exist() -> None:
    """Of README; links between pages are for the strict build."""
    for target in re.findall(r"\]\(((?:docs|tests|examples)/[^)]+)\)", (ROOT / "README.md").read_text()):
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.more
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """And pictures in docstrings stay drawn."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    ran = subprocess.run(
        [*build, "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0 and "WARNING" not in ran.stderr, ran.stderr
    passes = (tmp_path / "passes" / "index.html").read_text()
    drawn = "".join(re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<pre>.*?</pre>", passes, flags=re.DOTALL))
    assert "w1 = unshard(shard)                      w  = unshard(shard)" in drawn
    assert "g0 = all_gather(s0)" in drawn and "G1 G2 w1 C1    G3 w2 C2" in drawn
    assert (tmp_path / "troubleshooting" / "index.html").exists()
