"""The page in a browser, offline: what it shows, sorts, filters and opens; and that names are never markup.

Needs Chromium, so plain ``pytest`` leaves those out that open it; CI installs it, where it can, and runs them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile.page.page import embedded, page_of
from fsdp_compile.page.picture import (
    Picture,
    PicturedChanges,
    PicturedCollective,
    PicturedGraph,
    PicturedMemory,
    PicturedStep,
    PicturedWork,
)
from fsdp_compile.page.trace import trace_events
from fsdp_compile.passes.cost.owners import Owned
from tests.browser import Browser, Page

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><!--"
MS = 1e-3


def collective(kind: str, fqns: tuple[str, ...], start_ms: float, end_ms: float, num_bytes: int, exposed_ms: float) -> PicturedCollective:
    cause, verdict = ("compute", "only 1 ms beside it") if exposed_ms else ("hidden", "hidden behind 2 ms of compute")
    return PicturedCollective(
        kind, "layers.0 (Block)", fqns, "bf16", num_bytes, 2 * num_bytes, "g", start_ms * MS, start_ms * MS, end_ms * MS,
        (end_ms - exposed_ms) * MS, (end_ms - start_ms) * MS, 1 * MS, exposed_ms * MS, cause, verdict,
        ("begin", fqns[0], "begin", fqns[-1]),
    )  # fmt: skip


def graph(stage: str, start_ms: float, collectives: tuple[PicturedCollective, ...], peak: int) -> PicturedGraph:
    work = PicturedWork(f"mm_{stage}", "mm", "layers.0", (start_ms + 3) * MS, (start_ms + 9) * MS, "compute")
    kinds = {"parameter shard": (100, 100), "gathered": (0, peak - 100)}
    owners = (Owned("gather", EVIL, "gathered", peak - 100), Owned("p", "w", "parameter shard", 100))
    memory = PicturedMemory((start_ms * MS, (start_ms + 3) * MS), kinds, (start_ms + 3) * MS, "mm", peak, owners)
    return PicturedGraph(stage, start_ms * MS, 10 * MS, 2 * MS, (work,), collectives, (), memory)


def made(name: str = EVIL) -> Picture:
    """Two graphs of 10 ms, four collectives, with a model's names as bad as they come."""
    forward = (
        collective("all_gather", ("layers.0.up", "layers.0.down"), 0, 3, 4096, exposed_ms=2),
        collective("all_gather", (f"layers.1.{name}",), 3, 6, 1 << 20, exposed_ms=0),
    )
    backward = (
        collective("reduce_scatter", ("layers.1.up",), 13, 15, 512, exposed_ms=0),
        collective("reduce_scatter", ("layers.0.up",), 16, 20, 2048, exposed_ms=1),
    )
    bucket = {"unit": f"Block:{name}", "fqns": [name], "dtype": "bfloat16", "num_bytes": 8, "num_ranks": 2}
    half = {"stage": "forward", "gathers": [bucket], "reduces": [], "order": [["gather", 0]]}
    plan = {"stage": "joint", "again": [name], "keep": [], "forward": half, "backward": None}
    step = PicturedStep(
        "step 1", "toy", 20 * MS, 3 * MS, 900, 100, (graph("forward", 0, forward, 800), graph("backward", 10, backward, 900)),
        params=((name, "kept", "memory budget"),), plan=plan, plan_id="abc", choice=f"budget {name}",
        differences=(
            PicturedChanges("forward", "insert", 2, 1 * MS, ("@@ -1,2 +1,2 @@", f"-w = unshard({name})  # {name}", "+g = all_gather(x)")),
            PicturedChanges("forward", "check", 0, 1 * MS, ()),
        ),
    )  # fmt: skip
    return Picture(name, "2.15", (f"read {name}",), (step,))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model as Hugging Face names them, with more rows than a screen has."""
    whole = made("Net")
    sent = tuple(
        collective("all_gather", (f"model.layers.{place}.self_attn.q_proj.weight", "more"), place, place + 1, 4096, 0.718)
        for place in range(30)
    )
    verdict = "only 0.118 ms of compute stand beside it; queued 1.106 ms behind all_gather of model.layers.0.w.weight +8"
    sent = tuple(dataclasses.replace(one, verdict=verdict) for one in sent)
    owners = tuple(Owned(f"cat_{place}", f"packed shards of {one.fqns[0]} +8", "gathered", 512) for place, one in enumerate(sent))
    [step] = whole.steps
    memory = dataclasses.replace(step.graphs[0].memory, owners=owners, peak_bytes=1 << 20)
    forward = dataclasses.replace(step.graphs[0], collectives=sent, memory=memory)
    step = dataclasses.replace(step, graphs=(forward, *step.graphs[1:]))
    path = tmp_path_factory.mktemp("page") / "long.html"
    path.write_text(page_of(dataclasses.replace(whole, steps=(step,))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "step.html"
    path.write_text(page_of(made()), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Page:
    return browser.open(file)


@pytest.mark.browser
def test_names_that_a_model_gives_are_text(page: Page) -> None:
    assert page.run("document.querySelector('img')") is None
    assert page.run("document.title") == f"{EVIL}: planned step"
    assert page.texts("h1") == [EVIL]
    everywhere = page.run("document.body.innerText + [...document.querySelectorAll('details')].map(one => one.textContent)")
    for place in (f"layers.1.{EVIL}", f"-w = unshard({EVIL})", f"read {EVIL}", f"gather {EVIL}", f"budget {EVIL}"):
        assert place in everywhere
    assert page.errors == []


def test_the_data_holds_nothing_that_ends_its_element() -> None:
    value = {"name": f"{EVIL} & \u2028 ]]>"}
    assert not set("<>&\u2028") & set(embedded(value)) and json.loads(embedded(value)) == value


@pytest.mark.browser
def test_it_opens_offline_without_a_word_on_the_console(browser: Browser, file: Path) -> None:
    for width, dark in ((1280, False), (390, False), (390, True)):
        one = browser.open(file, width=width, dark=dark)
        assert one.run("document.documentElement.scrollWidth") == width, "the page is wider than its window"
        ground = one.run("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 27)" if dark else "rgb(246, 247, 249)")
        one.click("#theme")
        assert one.run("getComputedStyle(document.body).backgroundColor") != ground
        assert one.errors == []


@pytest.mark.browser
@pytest.mark.parametrize("width", (1280, 1200, 1024, 390))
def test_every_cell_is_on_the_screen_and_no_row_is_cut(browser: Browser, long_file: Path, width: int) -> None:
    page = browser.open(long_file, width=width)
    for table in ("collectives", "owners"):
        box, rows, cells = page.run(
            f"(() => {{ const table = document.getElementById('{table}'), box = table.parentElement;"
            " const at = (one) => { const box = one.getBoundingClientRect(); return [box.left, box.right, box.bottom]; };"
            " return [[...at(box), box.clientWidth, box.scrollWidth],"
            " [...table.tBodies[0].rows].map(at), [...table.tBodies[0].querySelectorAll('td')].map(at)]; })()"
        )
        left, right, bottom, inside, whole = box
        assert whole <= inside and all(left <= one[0] and one[1] <= right + 1 for one in cells), table
        assert bottom < rows[-1][2] and min(abs(bottom - one[2]) for one in rows) <= 5, "a row is cut"
    # Times are written as verdicts write them.
    assert "0.718 ms" in page.texts("#collectives tbody tr")[0] and "µs" not in page.run("document.body.innerText")


@pytest.mark.browser
def test_labels_can_be_read_on_their_bars(browser: Browser, file: Path) -> None:
    for dark in (False, True):
        page = browser.open(file, dark=dark)
        contrasts = page.run(
            "['compute', 'copy', 'wait', 'gather', 'reduce', 'other'].map((name) => {"
            " const space = 'http://www.w3.org/2000/svg', root = document.querySelector('#chart svg');"
            " const fill = (tag, said) => { const one = document.createElementNS(space, tag); one.setAttribute('class', said);"
            " root.append(one); return getComputedStyle(one).fill.match(/[\\d.]+/g).slice(0, 3).map(Number); };"
            " const light = (color) => color.map((one) => one / 255)"
            ".map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)"
            ".reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0.05);"
            " const both = [light(fill('rect', `bar f-${name}`)), light(fill('text', `in on-f-${name}`))];"
            " return Math.max(...both) / Math.min(...both); })"
        )
        assert min(contrasts) >= 4.5, contrasts
        drawn = page.run("[...document.querySelectorAll('#chart text.in')].map(one => one.getAttribute('class'))")
        assert {"in on-f-wait", "in on-f-gather", "in on-f-reduce"} <= {*drawn}


@pytest.mark.browser
def test_a_script_that_is_not_the_pages_does_not_run(page: Page) -> None:
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    page.run("new Promise(done => setTimeout(done, 100))")
    assert page.run("document.title") != "1"
    assert any("Content Security Policy" in said for said in page.errors)


def rows(page: Page) -> list[int]:
    return page.run("[...document.querySelectorAll('#collectives tbody tr')].map(one => +one.dataset.number)")


@pytest.mark.browser
def test_the_table_filters_and_its_columns_sort_both_ways(page: Page) -> None:
    def sort(title: str) -> list[int]:
        place = page.texts("#collectives th").index(title) + 1
        page.click(f"#collectives th:nth-child({place}) button")
        assert page.run("document.querySelectorAll('#collectives th[aria-sort$=ending]').length") == 1
        return rows(page)

    assert rows(page) == [0, 1, 2, 3]
    for words, left in (("reduce", [2, 3]), ("layers.0 all_gather", [0, 1]), ("compute", [0, 3]), ("DOWN", [0]), ("none", [])):
        page.type("#filter", words)
        assert rows(page) == left, words
        assert page.texts("#shown")[0].startswith(f"{len(left)} of 4")
    page.type("#filter", "")
    assert rows(page) == [0, 1, 2, 3]

    assert sort("bytes a rank") == [1, 0, 3, 2]  # 1 MiB, 4 KiB, 2 KiB, 512 B: by number, not by letters
    assert sort("bytes a rank") == [2, 3, 0, 1]
    assert sort("exposed") == [0, 3, 1, 2]
    assert sort("kind") == [0, 1, 2, 3]
    assert sort("#") == [0, 1, 2, 3] and sort("#") == [3, 2, 1, 0]


@pytest.mark.browser
def test_what_is_clicked_shows_its_parameters_its_memory_and_its_change(page: Page) -> None:
    assert page.texts("#picked") == [""]
    page.click('[data-collective="0"]')
    assert page.texts("#picked .names span") == ["layers.0.up", "layers.0.down"]
    assert "only 1 ms beside it" in page.texts("#picked")[0]
    page.click('[data-collective="1"]')
    assert page.texts("#picked .names span") == [f"layers.1.{EVIL}"]
    assert page.run("document.querySelector('#collectives tr.chosen').dataset.number") == "1"
    page.click('#collectives tr[data-number="3"]')
    assert page.texts("#picked .names span") == ["layers.0.up"] and "reduce_scatter" in page.texts("#picked h3")[0]
    page.click(".f-compute.bar")
    assert page.texts("#picked h3") == ["mm"] and "layers.0" in page.texts("#picked")[0]

    page.click("[data-memory]")  # the middle of the step, where forward ends and backward begins
    assert page.texts("#picked h3")[0].startswith(("800 B alive at", "100 B alive at"))
    assert page.texts("#owners tbody tr td:first-child") == [f"{EVIL}  (gather)", "w  (p)"]
    assert "900 B in backward" in page.texts("#peak-at")[0]

    assert page.texts("#difference .del") == [f"-w = unshard({EVIL})  # {EVIL}"]
    assert page.texts("#difference .add") == ["+g = all_gather(x)"]
    page.click('[data-pass="forward check"]')
    assert "The graph stayed as it was." in page.texts("#difference")[0]


@pytest.mark.browser
def test_the_time_line_zooms_and_moves(page: Page) -> None:
    def width() -> float:
        return page.run("document.querySelector('[data-collective=\"0\"]').getBBox().width")

    whole = width()
    page.run("document.getElementById('chart').focus()")
    page.click("#zoom-in")
    assert page.run("document.querySelector('[data-collective=\"3\"]')") is None, "what lies beside the window is drawn"
    for _ in range(3):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37)
    page.run("document.getElementById('chart').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))")
    page.run("document.getElementById('chart').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))")
    assert width() == pytest.approx(2 * whole)
    page.click("#zoom-all")
    assert width() == pytest.approx(whole)


@pytest.mark.browser
def test_a_report_of_nothing_opens(browser: Browser, tmp_path: Path) -> None:
    for steps in ((), (PicturedStep("step 1"),)):
        path = tmp_path / "empty.html"
        path.write_text(page_of(dataclasses.replace(made("Net"), steps=steps)))
        page = browser.open(path)
        assert page.texts("h1") == ["Net"] and page.errors == []


def test_the_trace_has_lanes_waits_arrows_and_memory() -> None:
    trace: dict[str, Any] = json.loads(json.dumps(trace_events(made("Net"))))
    events = trace["traceEvents"]
    lanes = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert list(lanes.values()) == ["graphs", "compute", "communication, group g"]
    spans = {(lanes[one["pid"], one["tid"]], one["name"]): (one["ts"], one["dur"]) for one in events if one["ph"] == "X"}
    assert spans["graphs", "forward"] == (0, 10_000) and spans["graphs", "backward"] == pytest.approx((10_000, 10_000))
    assert spans["communication, group g", "all_gather layers.0.up +1"] == pytest.approx((0, 3000))
    assert spans["compute", "wait for all_gather layers.0.up +1"] == pytest.approx((1000, 2000))
    arrows = [one for one in events if one["ph"] in "sf"]
    assert sorted(one["ph"] for one in arrows) == list("ffffssss")
    assert len({one["id"] for one in arrows}) == 4
    counted = [(one["ts"], sum(one["args"].values())) for one in events if one["ph"] == "C"]
    assert counted == [(0, 100), (pytest.approx(3000), 800), (pytest.approx(10_000), 100), (pytest.approx(13_000), 900)]


def test_the_trace_has_whole_nanoseconds_so_that_perfetto_drops_no_operator() -> None:
    """Perfetto cuts times to nanoseconds, and of two spans of a thread that overlap then it drops the second."""
    ends = [0.0]
    for step in range(2000):
        ends.append(ends[-1] + 1e-7 + step * 1.7e-7 / 3)
    work = tuple(PicturedWork(f"mm_{n}", "mm", "", start, end, "compute") for n, (start, end) in enumerate(pairwise(ends)))
    picture = made("Net")
    drawn = dataclasses.replace(picture.steps[0].graphs[0], compute=work, collectives=())
    step = dataclasses.replace(picture.steps[0], graphs=(drawn,))
    events = trace_events(dataclasses.replace(picture, steps=(step,)))["traceEvents"]
    shown = [(one["ts"] * 1000, one["dur"] * 1000) for one in events if one["ph"] == "X" and one["cat"] == "compute"]
    assert len(shown) == len(work)
    assert all(at.is_integer() and lasts.is_integer() for at, lasts in shown)
    assert all(at + lasts <= after for (at, lasts), (after, _) in pairwise(shown))
