"""Ranks that part raise, all of them, and say what each of them does; ranks that only differ train on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_compile.lookout.chain import Chain, Link, Piece
from fsdp_compile.lookout.judge import Answer, Group, Verdict, judge
from fsdp_compile.lookout.lookout import ENVIRONMENT, Lookout, _Watch
from fsdp_compile.passes.wire.ledger import ledger
from tests import parting
from tests.ranks import PRELOAD

WATCH_S = 3.0


Outcome = tuple[int, dict[str, str], str]
Part = Callable[..., list[Outcome]]


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """Runs a case; gives the exit status, last words and errors of each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))

    def run(case: str, mode: str, world: int = 2) -> list[Outcome]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        files = [(tmp_path / f"said-{rank}", tmp_path / f"log-{rank}") for rank in range(world)]
        processes = [
            context.Process(target=parting.main, args=(case, mode, rank, world, port, WATCH_S, *files[rank]), daemon=True)
            for rank in range(world)
        ]
        end = time.monotonic() + 200
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            logs = [log.read_text() for _, log in files]
            assert all(process.exitcode is not None for process in processes), logs
            last_words = [json.loads(said.read_text()) if said.exists() else {} for said, _ in files]
            return list(zip([process.exitcode for process in processes], last_words, logs))
        finally:
            for process in processes:
                process.kill()

    return run


@pytest.mark.parametrize(("mode", "world"), [("eager", 3), pytest.param("inductor", 2, marks=pytest.mark.more)])
def test_other_parameters_of_equal_shapes(part: Part, mode: str, world: int) -> None:
    """Which train wrong, without a word, where nobody compares: all ranks raise."""
    for status, said, err in part("equal", mode, world):
        assert (status, said["raised"]) == (0, "RanksParted"), err
        rank_0, *others = _lines(said["text"])
        assert rank_0.startswith("rank 0: ") and "a.weight" in rank_0, said["text"]
        assert others and all("b.weight" in other for other in others), said["text"]
        assert said["text"] in err  # logged as well


@pytest.mark.more
def test_other_parameters_of_other_shapes(part: Part) -> None:
    """Gloo aborts the rank that receives more than it expects; it says why before it dies, and the others raise."""
    outcomes = part("sizes", "eager")
    assert {status for status, _, _ in outcomes} <= {0, -signal.SIGABRT}
    assert {said["raised"] for status, said, _ in outcomes if status == 0} <= {"RanksParted"}
    for _, _, err in outcomes:
        assert "rank 0: " in err and "rank 1: " in err and "b.weight" in err, err


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "mode", "words"),
    [
        ("one", "eager", ("rank 1: ", "a.weight")),
        ("one", "inductor", ("rank 1: ", "a.weight")),
        ("alone", "aot_eager", ("rank 1: eager, all_gather of ",)),
    ],
)
def test_a_rank_that_launches_what_others_do_not(part: Part, case: str, mode: str, words: tuple[str, ...]) -> None:
    """One uses a parameter alone; one runs eagerly, while the other compiles where no pass makes buckets."""
    for status, said, err in part(case, mode):
        assert all(one in err for one in ("rank 0: ", *words)), err
        assert (status, said.get("raised")) == (0, "RanksParted") or status == -signal.SIGABRT, err


@pytest.mark.more
@pytest.mark.parametrize(("case", "mode"), [("fewer", "eager"), ("first run", "inductor")])
def test_a_rank_that_ends_earlier(part: Part, case: str, mode: str) -> None:
    """Also where another one runs a graph for the first time."""
    (_, raised, err), (_, ended, _) = part(case, mode)
    assert ended["raised"] == ""
    assert raised["raised"] == "RanksParted", err
    rank_0, rank_1 = _lines(raised["text"])
    assert "the last that it launched is the " in rank_0 and "front.weight" in rank_0, raised["text"]
    assert "issues nothing more -- has left" in rank_1, raised["text"]


@pytest.mark.more
def test_a_slow_rank_with_other_lengths_is_none_that_parted(part: Part) -> None:
    outcomes = part("slow", "aot_eager")
    for status, said, err in outcomes:
        assert (status, said["raised"]) == (0, ""), err
    assert "it waits for rank 1, which has launched nothing for " in outcomes[0][2]


def test_what_was_switched_off_after_the_first_step_says_nothing(part: Part) -> None:
    for status, said, err in part("off", "eager"):
        assert (status, said["raised"], "waits for" in err) == (0, "", False), err


def test_the_environment_says_how_long_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "7")
    assert Lookout().timeout_s == 7


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()[1:-1]]


def links(*names: str) -> tuple[Link, ...]:
    return tuple(Link("all_gather float32 8 bytes a rank, 1 parameter", (name,)) for name in names)


def test_steps_that_issue_the_same_keep_it_once() -> None:
    chain = Chain()
    for _ in range(3):
        chain.append(Piece((Link("gather", ("w",)), Link("reduce", ("w",))), "forward graph"))
    assert len({id(step.piece) for step in chain.steps}) == 1


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not() -> None:
    watch: Any = SimpleNamespace(_stop=threading.Event(), _done=threading.Event(), _process=os.getpid() + 1)
    began = time.monotonic()
    _Watch.stop(watch)
    assert watch._stop.is_set() and time.monotonic() - began < 1


def test_a_store_that_is_gone_does_not_let_ranks_that_parted_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that keeps the store may end while another one still compiles its backward."""
    current, alarm = Lookout(), lambda: None
    gone: Any = SimpleNamespace(
        _parted="they differ", _lookout=current, _done=threading.Event(), is_in_this_world=lambda: True
    )
    current._watch = gone
    monkeypatch.setattr(ledger, "alarm", alarm)
    _Watch.run(gone)
    assert gone._done.is_set() and ledger.alarm is alarm


def test_a_chain_is_the_same_however_it_was_cut_into_pieces() -> None:
    whole, parts = Chain(), Chain()
    whole.append(Piece(links("a", "b", "c"), "graph"))
    for link in links("a", "b", "c"):
        parts.append(Piece((link,), "eager"))
    assert [whole.at(count) for count in range(4)] == [parts.at(count) for count in range(4)]
    assert whole.at(4) is None
    other = Chain()
    other.append(Piece(links("a", "c", "b"), "graph"))
    assert whole.at(1) == other.at(1) and whole.at(2) != other.at(2)


def group(*names: str, issued: int | None = None) -> Group:
    made = links(*names)
    return Group((0, 1), 0, made, ("eager",) * len(made), len(made) if issued is None else issued)


def test_who_waits_for_one_that_is_busy_is_not_told_to_raise() -> None:
    ahead, behind = Answer("", 70, {"0": group("a", "b")}), Answer("", 90, {"0": group("a")})
    verdict = judge({0: ahead, 1: behind}, waiting=0, idle_s=30)
    assert verdict.text == ""
    assert "waits for rank 1, which has launched nothing for 90 s" in verdict.slow


def test_who_waits_for_one_that_waits_in_another_group_is() -> None:
    first = Answer("", 70, {"0": group("a", "b"), "1": group()})
    other = Answer("", 70, {"0": group("a"), "1": group("c")})
    text = judge({0: first, 1: other}, waiting=0, idle_s=30).text
    assert "wait for one another (process group 0)" in text
    assert "rank 0: eager, all_gather of b" in text
    assert "rank 1: issues nothing more -- the last that it launched is the all_gather of a" in text
    went_on = Answer("", 0, other.groups)  # it issued something a moment ago
    assert judge({0: first, 1: went_on}, waiting=0, idle_s=30).text == ""


def test_three_ranks_that_wait_in_a_circle_are() -> None:
    def of(ahead: str, behind: str) -> Answer:
        ranks = {"0": (0, 1), "1": (1, 2), "2": (2, 0)}
        groups = {name: Group(ranks[name], 0, links("a"), ("eager",), int(name == ahead)) for name in (ahead, behind)}
        return Answer("", 70, groups)

    assert "wait for one another" in judge({0: of("0", "2"), 1: of("1", "0"), 2: of("2", "1")}, waiting=0, idle_s=30).text


def test_who_said_that_it_waits_before_the_other_went_on_is_not() -> None:
    waited, went_on = Answer("", 70, {"0": group("a", issued=1)}), Answer("", 0, {"0": group("a", "b")})
    assert judge({0: waited, 1: went_on}, waiting=0, idle_s=30).text == ""


def test_a_slow_network_is_no_difference() -> None:
    same = Answer("", 70, {"0": group("a", "b")})
    assert judge({0: same, 1: same}, waiting=0, idle_s=30) == Verdict()


def test_names_that_are_not_sure_are_no_difference() -> None:
    unsure = Group((0, 1), 0, (Link(links("b")[0].wire, ("b",), sure=False),), ("graph",), 1)
    verdict = judge({0: Answer(groups={"0": group("a")}), 1: Answer(groups={"0": unsure})})
    assert verdict.text == "" and verdict.nameless == ("0",)
