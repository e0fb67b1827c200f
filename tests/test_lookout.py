"""Ranks that part say so, all of them, with what each of them does, and raise; ranks that only differ train on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compile.lookout.chain import NOTHING, Chain, ChainLink, GroupProgress
from fsdp_compile.lookout.judge import (
    ADVICE,
    HAS_DIED,
    HAS_LEFT,
    IS_LOST,
    NEVER_HEARD,
    SAYS_NOTHING,
    Judgement,
    Said,
    judge,
)
from fsdp_compile.lookout.lookout import ENVIRONMENT, Lookout, LookoutThread, RanksParted
from fsdp_compile.lookout.names import Namer
from fsdp_compile.passes import _torch_compat as compat
from fsdp_compile.passes.ranks.worlds import World
from fsdp_compile.passes.wire.ledger import Meeting, ledger
from tests import parting
from tests.processes import wait_until
from tests.ranks import PRELOAD

WATCH_S = 3.0


@dataclass
class Outcome:
    """What became of a rank."""

    status: int | None  # None if it still waited in gloo when it was killed
    log: str
    raised: str = ""
    text: str = ""

    @property
    def told(self) -> str:
        """What it said of how ranks parted."""
        return self.log + self.text


Part = Callable[..., list[Outcome]]


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """Runs a case; gives what became of each rank. Ranks that wait in gloo are killed when they have said why."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))

    def run(case: str, mode: str, world: int = 2) -> list[Outcome]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        if case == "lost":  # a rank keeps it there
            del store
        files = [(tmp_path / f"said-{rank}", tmp_path / f"log-{rank}") for rank in range(world)]
        processes = [
            context.Process(target=parting.main, args=(case, mode, rank, world, port, WATCH_S, *files[rank]), daemon=True)
            for rank in range(world)
        ]

        def has_said(rank: int) -> bool:
            said, log = files[rank]
            logs_it = log.exists() and "This rank raises this at its next collective" in log.read_text()
            return processes[rank].exitcode is not None or said.exists() or logs_it

        try:
            for process in processes:
                process.start()
            wait_until(lambda: all(map(has_said, range(world))), "all ranks have ended, or said why not", 200)
            for process in processes:  # a rank that waits in gloo does not end, unless the other one has died
                process.join(30 if case in ("sizes", "lost") else 3)
            words = [json.loads(said.read_text()) if said.exists() else {} for said, _ in files]
            logs = [log.read_text() for _, log in files]
            return [Outcome(process.exitcode, log, **one) for process, log, one in zip(processes, logs, words)]
        finally:
            for process in processes:
                process.kill()

    return run


@pytest.mark.parametrize(("mode", "world"), [("eager", 3), pytest.param("inductor", 2, marks=pytest.mark.slow)])
def test_other_parameters_of_equal_shapes(part: Part, mode: str, world: int) -> None:
    """Which train wrong, without a word, where nobody compares: all ranks say so, and none trains to the end."""
    for rank in part("equal", mode, world):
        assert rank.raised == "RanksParted" or rank.status is None, rank
        rank_0, *others = _lines(rank.log)
        assert rank_0.startswith("rank 0: ") and "a.weight" in rank_0, rank.log
        assert others and all("b.weight" in other for other in others), rank.log
        assert "or for 300 s, the group's timeout. init_process_group(timeout=...) sets that" in rank.log


@pytest.mark.parametrize("case", ["sizes", pytest.param("lost", marks=pytest.mark.more)])
def test_other_parameters_of_other_shapes(part: Part, case: str) -> None:
    """Gloo aborts the rank that receives more than it expects. The other one says where, also if the store is gone."""
    died, raised = part(case, "eager")
    assert died.status == -signal.SIGABRT
    assert (raised.status, raised.raised) == (0, "RanksParted"), raised
    rank_0, rank_1, on_death = _lines(raised.text)
    assert rank_0 == f"rank 0: {NEVER_HEARD if case == 'sizes' else IS_LOST}"
    assert "b.weight" in rank_1 and on_death.startswith("Gloo ends a process to which")


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "mode", "words"),
    [
        ("one", "eager", ("rank 1: ", "a.weight")),
        pytest.param("one", "inductor", ("rank 1: ", "a.weight"), marks=pytest.mark.slow),
        ("alone", "aot_eager", ("rank 1: eager, all_gather of ",)),
    ],
)
def test_a_rank_that_launches_what_others_do_not(part: Part, case: str, mode: str, words: tuple[str, ...]) -> None:
    """One uses a parameter alone; one runs eagerly, while the other compiles where no pass makes buckets."""
    outcomes = part(case, mode)
    for rank in outcomes:
        if rank.status != -signal.SIGABRT:
            assert rank.raised == "RanksParted" or rank.status is None, rank
            assert all(one in rank.told for one in ("rank 0: ", *words)), rank
    assert any(rank.told for rank in outcomes)


@pytest.mark.more
@pytest.mark.parametrize(("case", "mode"), [("fewer", "eager"), ("first run", "inductor")])
def test_a_rank_that_ends_earlier(part: Part, case: str, mode: str) -> None:
    """Also where another one runs a graph for the first time."""
    waits, ended = part(case, mode)
    assert (ended.status, ended.raised) == (0, "")
    assert waits.raised == "RanksParted", waits
    rank_0, rank_1 = _lines(waits.text)
    assert "the last that it launched is the " in rank_0 and "front.weight" in rank_0, waits.text
    assert "issues nothing more -- has left" in rank_1, waits.text


@pytest.mark.more
def test_a_slow_rank_with_other_lengths_is_none_that_parted(part: Part) -> None:
    outcomes = part("slow", "aot_eager")
    for rank in outcomes:
        assert (rank.status, rank.raised) == (0, ""), rank
    assert "it waits for rank 1, which has launched nothing for " in outcomes[0].log


@pytest.mark.parametrize("case", ["streams alone", "reads alone"])
def test_a_rank_that_waits_in_a_stream_for_one_that_trains(part: Part, case: str) -> None:
    trains, streams = part(case, "eager")
    assert (streams.status, streams.raised) == (0, "RanksParted"), streams
    for rank in (trains, streams):
        rank_0, rank_1 = _lines(rank.told)
        assert rank_0.startswith("rank 0: eager, all_gather of front.weight"), rank
        assert rank_1.startswith("rank 1: waits for all ranks of the model to go on with stream_full_params -- the last"), rank


@pytest.mark.more
def test_ranks_that_are_at_different_places_of_streams(part: Part) -> None:
    """One begins another stream, while the other one reads on."""
    for rank in part("two streams", "eager"):
        assert (rank.status, rank.raised) == (0, "RanksParted"), rank
        assert rank.text.startswith("Ranks 0 and 1 wait for one another:\n  ranks 0 and 1: waits for all ranks of"), rank


@pytest.mark.more
def test_a_rank_that_waits_for_a_choice_which_the_first_one_does_not_make(part: Part) -> None:
    trains, adopts = part("chooses alone", "aot_eager")
    assert (adopts.status, "RanksParted" in adopts.text + adopts.raised) == (0, True), adopts
    for rank in (trains, adopts):
        rank_0, rank_1 = _lines(rank.told)
        assert rank_0.startswith("rank 0: eager, all_gather of front.weight"), rank
        assert rank_1.startswith("rank 1: waits for what rank 0 chooses for memory_budget in a graph of 8 parameters ("), rank


def test_a_rank_that_leaves_a_stream_waits_for_nobody(part: Part) -> None:
    """The other one trains on with it, holds the stream and never reads it; or reads it when the one has ended."""
    for rank in part("closes alone", "eager"):
        assert (rank.status, rank.raised) == (0, ""), rank
    reads, ended = part("raises alone", "eager")
    assert (ended.status, ended.raised, ended.text) == (0, "ArithmeticError", "the engine is full")
    assert (reads.status, reads.raised) == (0, "RuntimeError"), reads
    assert "stream_full_params: rank 1 left its loop" in reads.text


def test_what_was_switched_off_after_the_first_step_says_nothing(part: Part) -> None:
    for rank in part("off", "eager"):
        assert (rank.status, rank.raised, "waits for" in rank.log) == (0, "", False), rank


def test_the_environment_says_how_long_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "7")
    assert Lookout().timeout_s == 7


def _lines(text: str) -> list[str]:
    """What ranks do, in a log or an error."""
    shown = text[text.index("(process group") : text.index(ADVICE)]
    return [line.strip() for line in shown.splitlines()[1:]]


def links(*names: str) -> tuple[ChainLink, ...]:
    return tuple(ChainLink("all_gather float32 8 bytes a rank, 1 parameter", (name,)) for name in names)


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not() -> None:
    """At its exit it joins the thread, and Python knows that a fork has none: ``LookoutThread`` is a ``threading.Thread``."""
    goes_on = threading.Event()
    watch: Any = threading.Thread(target=goes_on.wait, daemon=True)
    watch._ends = threading.Event()
    watch.start()
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        LookoutThread.end(watch)
        os._exit(time.monotonic() - began > 1)
    assert os.waitpid(child, 0)[1] == 0
    goes_on.set()
    watch.join()


def test_a_store_that_is_gone_does_not_let_ranks_that_parted_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that keeps the store may end while another one still compiles its backward."""

    class Gone:
        def add(self, key: str, more: int) -> int:
            raise RuntimeError("connection refused")

    store: Any = Gone()
    monkeypatch.setattr(compat, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ledger, "alarm", None)
    world = World(lambda: store, "")
    watch = LookoutThread(Lookout(), Namer(), world, world)
    watch._part("they differ")
    watch.run()
    with pytest.raises(RanksParted, match="they differ"):
        ledger.note("all_gather", [], "0")


def test_hashes_are_compared_at_any_place_whatever_was_issued_at_once() -> None:
    whole, parts = Chain(), Chain()
    whole.append(links("a", "b", "c"), 0)
    for link in links("a", "b", "c"):
        parts.append([link])
    assert [whole.at(count) for count in range(4)] == [parts.at(count) for count in range(4)]
    assert whole.at(4) is None
    other = Chain()
    other.append(links("a", "c", "b"))
    assert whole.at(1) == other.at(1) and whole.at(2) != other.at(2)


def test_a_graph_has_issued_what_its_group_was_given_since_it_began() -> None:
    given = iter((7, 8, 12))
    chain = Chain((0, 1), lambda: next(given))
    chain.append(links("a", "b"))
    assert chain.issued() == 2
    chain.append(links("a", "b", "c"), 7)
    assert [chain.issued() for _ in range(3)] == [2, 3, 5]


def group(*names: str, issued: int | None = None) -> GroupProgress:
    made = links(*names)
    return GroupProgress((0, 1), len(made), NOTHING, len(made) if issued is None else issued, made)


def test_who_waits_for_one_that_is_busy_is_not_told_to_raise() -> None:
    ahead, behind = Said({"0": group("a", "b")}, 70), Said({"0": group("a")}, 90)
    verdict = judge({0: ahead, 1: behind}, waiting=0, idle_s=30)
    assert verdict.text == ""
    assert "waits for rank 1, which has launched nothing for 90 s" in verdict.slow


def test_who_waits_for_one_that_waits_in_another_group_is() -> None:
    first = Said({"0": group("a", "b"), "1": group()}, 70)
    other = Said({"0": group("a"), "1": group("c")}, 70)
    text = judge({0: first, 1: other}, waiting=0, idle_s=30).text
    assert "wait for one another (process group 0)" in text
    assert "rank 0: eager, all_gather of b" in text
    assert "rank 1: issues nothing more -- the last that it launched is the all_gather of a" in text
    went_on = Said(other.groups)  # it issued something a moment ago
    assert judge({0: first, 1: went_on}, waiting=0, idle_s=30).text == ""


def test_three_ranks_that_wait_in_a_circle_are() -> None:
    def of(ahead: str, behind: str) -> Said:
        ranks = {"0": (0, 1), "1": (1, 2), "2": (2, 0)}
        return Said({name: GroupProgress(ranks[name], 1, NOTHING, int(name == ahead), links("a")) for name in (ahead, behind)}, 70)

    assert "wait for one another" in judge({0: of("0", "2"), 1: of("1", "0"), 2: of("2", "1")}, waiting=0, idle_s=30).text


def test_ranks_that_wait_for_different_things_part_and_for_one_thing_do_not() -> None:
    streams, loads = (Said({}, 70, meeting=Meeting(what, (0, 1))) for what in ("a stream", "a load"))
    assert judge({0: streams, 1: loads}, waiting=0, idle_s=30).text == (
        f"Ranks 0 and 1 wait for one another:\n  rank 0: waits for a stream\n  rank 1: waits for a load\n{ADVICE}"
    )
    assert judge({0: streams, 1: streams}, waiting=0, idle_s=30) == Judgement()
    later = Said({}, 70, meeting=Meeting("a stream", (0, 1), (1,)))
    assert judge({0: later, 1: streams}, waiting=0, idle_s=30).text != ""
    goes_on = Said({}, 70, HAS_LEFT, met={("a stream", (0, 1)): (1,)})
    assert judge({0: later, 1: goes_on}, waiting=0, idle_s=30) == Judgement()
    slow = judge({0: streams, 1: Said({}, 70)}, waiting=0, idle_s=30).slow
    assert slow == "rank 0: waits for a stream; it waits for rank 1, which has launched nothing for 70 s"


def test_who_said_that_it_waits_before_the_other_went_on_is_not() -> None:
    waited, went_on = Said({"0": group("a", issued=1)}, 70), Said({"0": group("a", "b")})
    assert judge({0: waited, 1: went_on}, waiting=0, idle_s=30).text == ""


def test_a_slow_network_is_no_difference() -> None:
    same = Said({"0": group("a", "b")}, 70)
    assert judge({0: same, 1: same}, waiting=0, idle_s=30) == Judgement()


def test_a_rank_that_says_nothing_has_died_only_if_a_wait_failed() -> None:
    """Else it may be held up, in C code that does not let its thread run."""
    ahead, last_heard = Said({"0": group("a", "b")}, 70), GroupProgress((0, 1), 1, NOTHING, 1)
    for state in (SAYS_NOTHING, HAS_DIED):
        verdict = judge({0: ahead, 1: Said({"0": last_heard}, state=state)}, waiting=0, idle_s=30)
        assert bool(verdict.slow) == (state == SAYS_NOTHING) and bool(verdict.text) == (state == HAS_DIED)
        assert f"rank 1, {state}" in verdict.slow or f"rank 1: {state}" in verdict.text


def test_names_that_are_not_sure_are_no_difference() -> None:
    unsure = GroupProgress((0, 1), 1, NOTHING, 1, (ChainLink(links("b")[0].wire, ("b",), sure=False),))
    verdict = judge({0: Said({"0": group("a")}), 1: Said({"0": unsure})})
    assert verdict.text == "" and verdict.nameless == ("0",)
