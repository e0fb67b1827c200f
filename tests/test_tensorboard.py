"""What TensorBoard with torch-tb-profiler shows of our traces: each view, its figures beside those of the traces.

Server and frontend are the real ones, in Chromium. What the frontend loads from other servers is not in any package that
may be used here, so tests/google_charts.js and tests/web_components.js stand in for it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fsdp_compile.profiling.summary import Summary, summarize
from tests.browser import Browser, Page
from tests.ranks import Ranks
from tests.test_profile import ranges, record, traces_in

pytestmark = pytest.mark.browser

HERE = Path(__file__).parent
PLUGIN = "data/plugin/pytorch_profiler"
STAND_INS = {
    "https://www.gstatic.com/charts/loader.js": "google_charts.js",
    "https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js": "web_components.js",
}
#: What the trace viewer says of itself in any Chromium of today.
ITS_AGE = ("Trace Viewer is running with WebComponentsV0 polyfill", "The keyword 'slider-vertical'")

Table = list[dict[str, str]]


class Run(NamedTuple):
    """A compiled training on two ranks."""

    folder: Path
    traces: list[dict[str, Any]]
    workers: list[str]  # as the plugin calls them: what stands before the first point of a trace's name
    summary: Summary


@pytest.fixture(scope="module")
def run(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tensorboard") / "traces"
    two_ranks.run(record, str(folder), "inductor")
    two_ranks.stop()
    workers = sorted(path.name.partition(".")[0] for path in folder.iterdir())
    return Run(folder, traces_in(folder), workers, summarize(folder))


@pytest.fixture(scope="module")
def address(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A TensorBoard that has read the traces."""
    pytest.importorskip("torch_tb_profiler")
    scratch = tmp_path_factory.mktemp("server")
    # --load_fast=false: no server of data beside it. The process group is what is ended, for it reads with children.
    command = ["-m", "tensorboard.main", "--logdir", str(run.folder), "--host", "127.0.0.1", "--port", "0"]
    with open(scratch / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--load_fast=false"], stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
    try:
        yield _serving(process, scratch / "log")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _serving(process: subprocess.Popen[bytes], log: Path) -> str:
    """Its address, once it has read the traces."""
    offline = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < end:
        said = re.search(r"at (http://127\.0\.0\.1:\d+/)", log.read_text())
        if said is not None:
            with offline.open(f"{said[1]}{PLUGIN}/runs", timeout=30) as answer:
                state = json.load(answer)
            if state["runs"] and not state["loading"]:
                return said[1]
        time.sleep(0.2)
    raise AssertionError(f"TensorBoard does not serve the traces:\n{log.read_text()}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


class Plugin:
    """The plugin's page, with its menus."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.wait("document.querySelector('[data-chart]') !== null")

    def choices(self, menu: str, choose: str | None = None) -> list[str]:
        """What a menu offers, by the words before it; it is closed by a choice, by default of what is chosen already."""
        heads = "[...document.querySelectorAll('.MuiListSubheader-root, .MuiInputLabel-root')]"
        head = f"{heads}.find(one => one.textContent === {json.dumps(menu)})"
        behind = "one => head.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING"
        chosen = f"(head => head && [...document.querySelectorAll('.MuiSelect-root')].find({behind}))({head})"
        before = self.page.wait(f"{chosen}?.textContent")
        self.page.press(chosen)
        options = "[...document.querySelectorAll('li[role=option]')]"
        self.page.wait(f"{options}.length > 0")
        offered: list[str] = self.page.run(f"{options}.map(one => one.textContent)")
        self.page.run(f"{options}.find(one => one.textContent === {json.dumps(choose or before)}).click()")
        self.page.wait(f"{options}.length === 0 && {chosen}.textContent === {json.dumps(choose or before)}")
        return offered

    def table(self, *columns: str) -> Table:
        """Of the first chart that has these columns, when it is there: a row each."""
        find = (
            "[...document.querySelectorAll('[data-chart]')].map(one => [...one.rows].map(row =>"
            " [...row.cells].map(cell => cell.textContent)))"
            f".find(one => {json.dumps(columns)}.every(column => one[0].includes(column)))"
        )
        header, *rows = self.page.wait(find)
        return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.fixture
def plugin(browser: Browser, address: str) -> Iterator[Plugin]:
    """A page of its own; of other servers it may ask for the two scripts alone, and nothing fails in it."""
    answers = {url: (HERE / name).read_text() for url, name in STAND_INS.items()}
    page = browser.visit(f"{address}{PLUGIN}/index.html", {**answers, f"{address}favicon.ico": ""})
    yield Plugin(page)
    assert [said for said in page.errors if not any(words in said for words in ITS_AGE)] == []


def on_the_wire_us(trace: dict[str, Any]) -> dict[str, float]:
    """By the number of a step: how long at least one collective ran in it."""
    found = {}
    for step in ranges(trace, "ProfilerStep#"):
        end, covered, total = step["ts"] + step["dur"], step["ts"], 0.0
        for one in ranges(trace, "FSDP::gather", "FSDP::reduce"):
            begin, until = max(one["ts"], covered), min(one["ts"] + one["dur"], end)
            total, covered = total + max(until - begin, 0), max(until, covered)
        found[step["name"].partition("#")[2]] = total
    return found


def test_tensorboard_opens_the_plugin_with_our_run(browser: Browser, address: str, run: Run) -> None:
    page = browser.visit(address, {url: (HERE / name).read_text() for url, name in STAND_INS.items()})
    inside = "document.querySelector('iframe')?.contentDocument"
    page.wait(f"{inside}?.querySelector('[data-chart]')?.tagName")
    assert page.run(f"{inside}.location.pathname") == f"/{PLUGIN}/index.html"
    assert page.run(f"[...{inside}.querySelectorAll('.MuiSelect-root')].slice(0, 3).map(one => one.textContent)") == [
        "traces", "Overview", run.workers[0],
    ]  # fmt: skip


def test_the_overview_breaks_our_steps_down(plugin: Plugin, run: Run) -> None:
    assert plugin.choices("Runs") == ["traces"]
    assert plugin.choices("Views") == ["Overview", "Operator", "Trace", "Distributed"]  # and "GPU Kernel" where one is
    for rank, worker, trace in zip(run.summary.ranks, run.workers, run.traces, strict=True):
        assert plugin.choices("Workers", worker) == run.workers
        sums = {name: dur for name, dur in ((one["name"].partition("#")[2], one["dur"]) for one in ranges(trace, "ProfilerStep#"))}
        mean = sum(sums.values()) / len(sums)
        plugin.page.wait(f"document.querySelector('[data-chart=Table]')?.textContent.includes({json.dumps(str(round(mean)))})")
        steps = plugin.table("Step", "Communication", "CPU Exec", "Other")
        assert [step.pop("Step") for step in steps] == list(sums) == ["2", "3"]
        for step, whole, communication in zip(steps, sums.values(), on_the_wire_us(trace).values(), strict=True):
            assert sum(map(float, step.values())) == pytest.approx(whole, abs=1)
            assert float(step["Communication"]) == pytest.approx(communication, abs=1) and communication > 0
        shares = {row.pop("Category"): row for row in plugin.table("Category", "Percentage (%)")}
        assert float(shares["Average Step Time"]["Time Duration (us)"]) == pytest.approx(rank.step_s * 1e6, abs=1)
        communication_us = float(shares["Communication"]["Time Duration (us)"])
        assert communication_us == pytest.approx(rank.communication_s * 1e6, abs=1)
        assert float(shares["Communication"]["Percentage (%)"]) == pytest.approx(100 * communication_us / mean, abs=0.1)
    environment = plugin.page.run("document.body.innerText")
    assert re.search(r"Number of Worker\(s\)\s+2\s+Device Type\s+CPU\s", environment)


def test_the_trace_shows_our_ranges_by_name(plugin: Plugin, run: Run) -> None:
    plugin.choices("Views", "Trace")
    page, viewer = plugin.page, "document.querySelector('iframe')?.contentDocument"
    for worker, trace in zip(run.workers, run.traces, strict=True):
        plugin.choices("Workers", worker)
        pid = ranges(trace, "ProfilerStep#")[0]["pid"]
        page.wait(f"{viewer}?.body?.innerText.includes('(pid {pid})')")
        rows = page.run(f"{viewer}.body.innerText")
        assert "fsdp_compile: collectives 0" in rows and f"thread {pid}" in rows
        events = [one["name"] for one in trace["traceEvents"] if one["ph"] == "X"]
        for words in ("FSDP::gather", "FSDP::reduce", "FSDP::wait for", "FSDP::forward graph", "FSDP::backward graph"):
            _find(page, viewer, words)
            num = len([name for name in events if name.startswith(words)])
            assert num > 0 and page.run(f"{viewer}.querySelector('#hitCount').textContent") == f"0 of {num}", words
        _find(page, viewer, "FSDP::reduce")
        page.run(f"{viewer}.querySelectorAll('tr-ui-find-control tr-ui-b-toolbar-button')[1].click()")  # the next one
        page.wait(f"{viewer}.querySelector('#hitCount').textContent.startsWith('1 of')")
        details = page.wait(f"{viewer}.querySelector('tr-ui-a-analysis-view').innerText")
        title = re.search(r"Title\s+(FSDP::reduce .*)", details)
        assert title is not None, details
        args = next(one["args"] for one in ranges(trace, "FSDP::reduce") if one["name"] == title[1])
        assert re.search(rf"bytes\s+{args['bytes']}\s", details) and re.search(r"step\s+[23]\s", details)
        assert all(f'"{parameter}"' in details for parameter in args["parameters"])


def _find(page: Page, viewer: str, words: str) -> None:
    """Write into the viewer's field for words, and wait for what it finds."""
    page.run(f"(() => {{ const field = {viewer}.querySelector('tr-ui-find-control #filter'); field.focus(); field.select(); }})()")
    page.call("Input.insertText", text=words)
    page.wait(f"{viewer}.querySelector('#hitCount').textContent.includes(' of ')")


def test_the_distributed_view_sets_the_ranks_beside_one_another(plugin: Plugin, run: Run) -> None:
    """Its tables of calls and bytes are what test_profile.py reads from the plugin's own parser."""
    plugin.choices("Views", "Distributed")
    assert plugin.choices("Workers") == ["All"]
    shares = plugin.table("Worker", "Computation", "Overlapping", "Communication", "Other")
    sending = plugin.table("Worker", "Data Transfer Time", "Synchronizing Time")
    assert [one.pop("Worker") for one in shares] == [one.pop("Worker") for one in sending] == run.workers
    for rank, share, sent in zip(run.summary.ranks, shares, sending, strict=True):
        communication_us = rank.communication_s * 1e6
        assert sum(map(int, share.values())) == pytest.approx(rank.step_s * 1e6, abs=5)  # each is cut to a whole number
        assert int(share["Overlapping"]) + int(share["Communication"]) == pytest.approx(communication_us, abs=3)
        assert sum(map(int, sent.values())) == pytest.approx(communication_us, abs=3)
        assert int(sent["Data Transfer Time"]) > 0 and int(share["Computation"]) > 0
