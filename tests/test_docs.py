"""What README.md and docs/ say runs as it stands there, says what is shown, and is a site without a broken link."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile
from fsdp_compile import FSDPModule, cli, fully_shard
from fsdp_compile.core.unit import units_in
from tests.comparing import assert_same_grads, assert_same_params, batches, full, mine, reference_backward
from tests.compiling import num_graphs
from tests.models import Block, BreakBlock, Stack, pair, shard, twins
from tests.pages import DOCS, blocks, has_in_order, pieces, play
from tests.ranks import Ranks
from tests.test_recipes import shared_folder

ROOT = DOCS.parent
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
#: Pages whose blocks run behind those of README.md, in this order.
WITH_README = ("inspect.md", "costs.md", "memory-budget.md", "accumulate.md", "one-graph.md", "eager.md")
# Each section of the recipes has a check of its own, and blocks of the tutorial are pieces of a script.
PLAYED = [one for one in PAGES if one not in ("recipes.md", "tutorial.md", *WITH_README) and blocks(one, "python")]
QUICK = ("index.md",)


def _compiling_as_needed() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="as needed"))


def _play(page: str) -> None:
    names = {
        "torch": torch, "nn": nn, "dist": dist, "fsdp_compile": fsdp_compile, "device": "cpu",
        "Block": Block, "BreakBlock": BreakBlock, "Stack": Stack, "shard": shard, "twins": twins, "pair": pair,
        "mine": mine, "batches": batches, "full": full, "num_graphs": num_graphs, "same_grads": assert_same_grads,
        "same_params": assert_same_params, "reference_backward": reference_backward,
    }  # fmt: skip
    folder = shared_folder()
    try:
        with _compiling_as_needed():
            play(page, folder=folder, **names)
        dist.barrier()  # not where a rank failed: the others would wait for it
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


@pytest.mark.parametrize("page", [one if one in QUICK else pytest.param(one, marks=pytest.mark.more) for one in PLAYED])
def test_a_page_does_what_it_says(two_ranks: Ranks, page: str) -> None:
    """Its blocks run in order, and say what is shown behind them."""
    two_ranks.run(_play, page)


def test_the_tutorial_shows_what_its_scripts_are() -> None:
    scripts = {path.name: path.read_text() for path in (ROOT / "examples" / "tutorial").glob("*.py")}
    shown = blocks("tutorial.md", "python")
    assert shown
    for block in shown:
        assert any(block in script for script in scripts.values()), f"in no script of examples/tutorial:\n{block}"
    left = scripts["sharded.py"].split('"""', 2)[2]
    for block in shown:
        left = left.replace(block, "")
    assert not left.strip(), f"not in the tutorial:\n{left}"


def _tutorial(*command: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _losses(printed: str) -> list[float]:
    return [float(one) for one in re.findall(r"^step \d+  loss (\S+)$", printed, flags=re.MULTILINE)]


@pytest.mark.slow
def test_the_tutorial_trains_and_resumes(tmp_path: Path) -> None:
    """On Inductor, in two processes: the losses of the unsharded script, across a restart, and what the page shows."""
    scripts = ROOT / "examples" / "tutorial"
    two = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    sharded = (*two, str(scripts / "sharded.py"), "--folder", str(tmp_path / "saved"))
    unsharded = _losses(_tutorial(str(scripts / "unsharded.py"), folder=tmp_path))
    first = _tutorial(*sharded, "--steps", "4", "--inspect", folder=tmp_path)
    rest = _tutorial(*sharded, "--resume", folder=tmp_path)
    assert len(unsharded) == 8 and unsharded[-1] < unsharded[0] - 2
    assert _losses(first) == pytest.approx(unsharded[:4], abs=2e-4)
    assert _losses(rest) == pytest.approx(unsharded[4:], abs=2e-4)
    assert "Model: 3 graphs, 12 collectives" in first
    shown = " ".join(" ".join(blocks("tutorial.md", "text")).split())
    for line in [*first.splitlines(), *rest.splitlines()]:
        if re.match(r"\s*\d+\s+(all_gather|all_to_all)\b", line):  # what is predicted depends on torch's version
            assert " ".join(line.split()) in shown


COMMANDS = [(page, line) for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]


@pytest.mark.parametrize("page, line", COMMANDS, ids=[f"{page}-{place}" for place, (page, _) in enumerate(COMMANDS)])
def test_a_command_exists_with_its_options(page: str, line: str) -> None:
    for command in line.split("#")[0].split(" && "):
        _check_command(shlex.split(command))


def _check_command(words: list[str]) -> None:
    while "=" in words[0]:  # a variable of the environment
        words = words[1:]
    name, *arguments = words
    name = name.removeprefix(".venv/bin/")
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(arguments)
        _check_program(["-m"] * given.module + [given.training_script, *given.training_script_args])
    elif name in ("python", "python3"):
        _check_program(arguments)
    elif name == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
        assert arguments[0] == "install"
        for wanted in re.findall(r"\[(.*?)\]", " ".join(arguments)):
            assert set(wanted.split(",")) <= set(extras)
    elif name == "fsdp-compile":
        assert cli._parser().parse_args(arguments).run is not None
    else:
        assert name in ("mkdocs", "pytest") and shutil.which(name), f"no such command: {name}"


def _check_program(arguments: list[str]) -> None:
    if arguments[0] == "-m" and arguments[1] != "venv":
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None and spec.origin is not None, arguments[1]
        if not arguments[1].endswith(".run"):  # which hands its options on
            _require_options(arguments[2:], list(Path(spec.origin).parent.glob("*.py")))
    elif arguments[0] != "-m" and arguments[0] != "train.py":  # the reader's own
        assert (ROOT / arguments[0]).exists(), arguments[0]
        _require_options(arguments[1:], [ROOT / arguments[0]])


def _require_options(arguments: list[str], sources: list[Path]) -> None:
    texts = "".join(path.read_text() for path in sources)
    for option in itertools.takewhile(lambda one: one != "--", arguments):  # behind it, those of a reader's script
        if option.startswith("--"):
            name = option[2:].replace("-", "_")  # or a field that options are made from
            said = f'"{option}"' in texts or re.search(rf"^    {name}: \w+ = ", texts, flags=re.MULTILINE)
            assert said, f"{option} is in none of {[path.name for path in sources]}"


def _public(path: Path) -> set[str]:
    """Names that a module gives out: what it imports ``x as x``."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {one.asname for node in imports for one in node.names if one.asname and one.asname == one.name}


@pytest.mark.parametrize(
    "page, modules",
    [
        ("reference/fsdp_compile.md", {"fsdp_compile": "fsdp_compile/__init__.py"}),
        ("reference/fsdp1.md", {"fsdp_compile.fsdp1": "fsdp_compile/fsdp1/__init__.py",
                                "fsdp_compile.fsdp1.wrap": "fsdp_compile/fsdp1/wrap.py"}),
        ("reference/optim.md", {"fsdp_compile.optim": "fsdp_compile/optim/__init__.py"}),
        ("reference/passes.md", {"fsdp_compile.passes": "passes/__init__.py"}),
    ],
)  # fmt: skip
def test_every_public_name_is_on_a_page(page: str, modules: dict[str, str]) -> None:
    text = (DOCS / page).read_text()
    for module, path in modules.items():
        names = _public(ROOT / path)
        assert names
        # Ours with their docstrings, torch's own in a table.
        described = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", text, flags=re.MULTILINE))
        listed = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
        assert names <= described | listed, f"not on {page}: {sorted(names - described - listed)}"
        given = importlib.import_module(module)
        theirs = {name for name in names if getattr(getattr(given, name), "__module__", "").startswith("torch.")}
        assert names - theirs <= described


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("from-")])
def test_our_side_of_a_table_is_in_blocks_that_run(page: str) -> None:
    """Each name and each keyword of the second column; on that page, or in the recipe that a row refers to."""
    run = "\n".join([*blocks(page, "python"), *blocks("recipes.md", "python")])
    rows = [line.split(" | ") for line in (DOCS / page).read_text().split("## Differences")[0].splitlines() if line[:2] == "| "]
    assert len(rows) > 5
    for row in rows[1:]:
        for code in re.findall(r"`([^`]+)`", row[1]):
            for word in re.findall(r"[A-Za-z_]\w+(?=[=(.,)]|$)", code):
                assert re.search(rf"\b{word}\b", run), f"{page}: {word} of {row[1]} is in no block"


def _described() -> list[tuple[str, str]]:
    """What the pages take from docstrings: names, and the docstrings of their public members too."""
    found = []
    for page in PAGES:
        for name in re.findall(r"^::: ([\w.]+)$", (DOCS / page).read_text(), flags=re.MULTILINE):
            given = pkgutil.resolve_name(name)
            members = dict(vars(given)) if isinstance(given, type) else {}
            for one, thing in {"": given, **members}.items():
                if not one.startswith("_") and isinstance(getattr(thing, "__doc__", None), str):
                    found.append((f"{name} {one}", inspect.cleandoc(thing.__doc__)))
    return found


def test_pictures_in_docstrings_are_preformatted() -> None:
    """A docstring is Markdown on the site: what is laid out with spaces is indented, or becomes a paragraph."""
    described = _described()
    assert len(described) > 100
    for name, text in described:
        laid_out = [line for line in text.splitlines() if re.search(r"\S {3,}\S", line)]
        assert all(line.startswith("    ") for line in laid_out), f"{name}: {laid_out}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(re.findall(r"^ +- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert navigation == set(PAGES)


def test_each_pass_has_its_section_in_the_order_in_which_they_run() -> None:
    from fsdp_compile.passes import JOINT_PASSES, POST_GRAD_PASSES
    from fsdp_compile.passes.manager import WHOLE_PASSES

    sections = re.findall(r"^## `(\w+)`", (DOCS / "passes.md").read_text(), flags=re.MULTILINE)
    run = [one.__name__ for one in (*JOINT_PASSES, *POST_GRAD_PASSES)]
    assert sections[: len(run)] == run
    assert {one.__name__ for one in WHOLE_PASSES} <= {*sections, "follow"}


def test_no_comment_of_a_page_is_misspelled() -> None:
    """One that the runner does not know would check nothing."""
    for page in PAGES:
        comments = (DOCS / page).read_text().count("<!--")
        assert comments == sum(piece.kind in ("run", "prints", "raises", "warns") for piece in pieces(page)), page


@pytest.mark.more
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page).with_suffix(".html").exists()
    reference = (tmp_path / "site" / "reference" / "passes.html").read_text()
    assert "<pre>" in reference or "<pre " in reference  # pictures are preformatted


# --- README.md, and the pages that stood in it ------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.usefixtures("fake_group_of_four")
def test_the_examples_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step computes is for the rows of tests/matrix."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # as wide as what pages show
    with _compiling_as_needed():
        _run_examples()
    assert list(Path("graphs").glob("*backward*/*.py"))
    assert Path("step.html").exists() and Path("step.json").exists()


def _run_examples() -> None:
    shard_and_compile, fsdp1 = blocks("../README.md", "python")
    of_pages = [code for page in WITH_README for code in blocks(page, "python")]
    inspect, edit, page, why, costs, budget, again, away, states, shards, *others = of_pages
    accumulate, once, explain, whole_step, compare = others
    batch = torch.zeros(2, 5, dtype=torch.long)
    names = {"torch": torch, "fsdp_compile": fsdp_compile, "model": Stack(1), "batch": batch, "batches": [batch, batch]}
    exec(shard_and_compile, names)
    assert isinstance(names["model"]._orig_mod, FSDPModule)
    for code in (inspect, edit, page):
        exec(code, names)
    printed = _printed(costs, names)
    assert printed.startswith("predicted on 'cpu': forward ") and " waiting; peak " in printed
    assert "of compute stand beside it" in printed and "Residency(becomes=" in printed
    section = (DOCS / "inspect.md").read_text().split("\n## Why it waits\n")[1]
    shown = re.findall(r"^```text\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[0]
    printed = _printed(why, names)
    assert has_in_order(printed, shown), printed
    for code in (budget, away, states):
        budgeted = fully_shard(Stack(1))
        exec(code, names | {"model": budgeted})
        torch.compile(budgeted, backend="passes")(batch).sum().backward()
    exec(shards, of_shards := names | {"model": Stack(6)})
    torch.compile(of_shards["model"])(batch).sum().backward()
    of_shards["optim"].step()
    assert [unit.offload for unit in units_in(of_shards["model"])] == [*3 * [False], *4 * [True]]
    planned = shard(Stack(1))
    exec(again, {"fsdp_compile": fsdp_compile, "model": planned, "report": names["report"]})
    with fsdp_compile.inspect(planned) as report:
        torch.compile(planned)(batch).sum().backward()
    assert report.joint.plan.recompute == ("layers.0.up.weight",)
    exec(accumulate, names)
    exec(once, names)
    exec('configure(model, gather="for each micro-batch")', names | {"configure": fsdp_compile.configure})
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


def _printed(code: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue()


def test_two_commands_set_up_all_they_need_and_are_those_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    (demo,), (test,) = (block.splitlines() for block in blocks("../README.md", "sh")[:2])
    for line, end in ((demo, ".venv/bin/fsdp-compile demo"), (test, ".venv/bin/pytest")):
        environment, install, run = line.split(" && ")
        assert environment == "python3 -m venv .venv"
        assert install.startswith(".venv/bin/pip install -e ")
        assert run == end
        assert f'$(in_readme "{line}")' in ci
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".venv*/", "*.egg-info/"} <= set(ignored), "what the two commands create"
