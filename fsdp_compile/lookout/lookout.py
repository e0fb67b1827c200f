"""The lookout: if ranks issue different collectives, every rank raises an error that says what each of them does.

    training            appends to the ledger (passes/wire/ledger.py)
    a thread beside it  every half a second:
                        drains the ledger into one chain a group, publishes its hashes, reads those of its neighbours
                        a hash differs, or it waits for too long  ->  asks all ranks  ->  judge.py  ->  verdict
    every rank          raises RanksParted at its next launch, or in the wait that it is in

The thread reads counters only. It reads no frames of other threads, because Python may change or free a frame while
another thread reads it.

The thread starts with the first collective, in worlds of more than one rank, and ends with the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist

from .._torch_compat import interrupting, process_groups
from ..core.unit import Unit
from ..passes import _torch_compat as passes_compat
from ..passes.ranks.worlds import world_of
from ..passes.wire.ledger import Called, Issued, ledger
from .chain import Chain, Hash
from .judge import HAS_LEFT, SAYS_NOTHING, Answer, Group, Verdict, judge
from .names import Namer
from .post import At, Post, Question

log = logging.getLogger("fsdp_compile")

ENVIRONMENT = "FSDP_COMPILE_WATCH_S"
DEFAULT_S = 60.0
_PAUSE_S = 0.5
_ANSWERS_S = 4.0  # how long to wait for answers; a rank without one says nothing
_HEARD_S = 2.0  # how long others have to read the verdict before this rank's waits are ended
_LAST = 64  # collectives of a group that an answer lists if nothing else is asked for
_SHOWN = 20_000  # collectives of a group that an answer lists at most


class RanksParted(RuntimeError):
    """Ranks issue different collectives, or wait for one another."""


class Lookout:
    """Compares what this rank issued with what other ranks issued, in a thread beside training."""

    def __init__(self) -> None:
        self.timeout_s = float(os.environ.get(ENVIRONMENT, DEFAULT_S))
        self._namer = Namer()
        self._watch: _Watch | None = None
        self.failure: Exception | None = None  # the error that ended the comparing early

    def know(self, unit: Unit) -> None:
        """Take note of a unit that was made, and have the next collective start the thread.

        It starts once a world: after an early end on this rank it would compare what other ranks have long left behind.
        """
        self._namer.know(unit)
        if self._watch is None or not self._watch.is_in_this_world():
            ledger.alarm = self._start

    def namer(self) -> Namer:
        """Return what names the collectives of this process, for another thread than the one that compares."""
        return Namer(self._namer.units)

    def _start(self) -> None:
        ledger.alarm = None
        if self.timeout_s <= 0 or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        store = None if "fake" in dist.get_backend_config() else interrupting.default_store()
        if store is None:
            return
        ledger.forget()
        world = world_of(passes_compat.default_store()).number
        self._watch = watch = _Watch(self, self._namer, Post(store, world, dist.get_rank()))
        ledger.is_kept = True
        ledger.explain = watch.explain
        atexit.register(watch.stop)
        threading.Thread(target=watch.run, name="fsdp_compile lookout", daemon=True).start()

    def forget(self) -> None:
        """Stop: the world or its store is gone. A program that sets up another one shards anew, and calls ``know``."""
        ledger.forget()
        ledger.explain = None
        if ledger.alarm != self._start:  # which belongs to that other world, if it is there already
            ledger.alarm = None

    def is_current(self, watch: _Watch) -> bool:
        """Whether no world has begun since that of this watch, so that what is issued belongs to it."""
        return self._watch is watch


class _Watch:
    """What the thread does in one world."""

    def __init__(self, lookout: Lookout, namer: Namer, post: Post) -> None:
        self._lookout, self._namer, self._post = lookout, namer, post
        self._process = os.getpid()
        self._world: Any = weakref.ref(passes_compat.default_store())  # weak: it is to end when it is destroyed
        self._rank, self._ranks = dist.get_rank(), range(dist.get_world_size())
        self._chains: dict[str, Chain] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._counters: dict[str, Any] = {}
        self._agreed: dict[tuple[int, str], int] = {}  # by (rank, group): about how many collectives
        self._nameless: set[str] = set()  # groups whose ranks call the same parameters differently
        self._last_issued: dict[str, int] = {}
        self._since = time.monotonic()  # it has been that
        self._question = 0
        self._ask_again_at = 0.0
        self._stop = threading.Event()
        self._done = threading.Event()
        self._parted = ""  # how the ranks have parted
        self._raised = False
        if "gloo" in dist.get_backend_config():
            interrupting.linger_in_abort()

    def run(self) -> None:
        try:
            while not self._parted and not self._stop.wait(_PAUSE_S) and self.is_in_this_world():
                self._look()
            if not self._parted:
                self._leave()
        except Exception as error:
            # The store is gone, with the process that kept it; or this is a mistake of ours, which must not hurt.
            if self.is_in_this_world():  # else its groups may be gone while they were looked at
                self._lookout.failure = error
            log.debug("ranks are not compared any more", exc_info=True)
        finally:
            self._done.set()
            # A store that is gone ends this thread, but the ranks have parted as long as their world is there.
            if self._lookout.is_current(self) and not (self._parted and self.is_in_this_world()):
                self._lookout.forget()

    def stop(self) -> None:
        """End the thread at the end of the process, before Python tears down what it uses; a fork has no thread."""
        self._stop.set()
        if os.getpid() == self._process:
            self._done.wait(2 * _ANSWERS_S)

    def is_in_this_world(self) -> bool:
        return passes_compat.default_store() is self._world() is not None

    def explain(self, error: RuntimeError) -> None:
        """Raise RanksParted, on the thread whose wait failed, if the ranks find out that they have parted."""
        deadline = time.monotonic() + _ANSWERS_S
        while not self._parted and time.monotonic() < deadline and not self._done.wait(0.05):
            pass
        if self._parted and self.is_in_this_world():
            self._raise(error)

    def _look(self) -> None:
        self._drain()
        self._post.write_at(self._at())
        if self._post.asked(self._question) is None:
            question = self._doubt()
            if question is None:
                return
            if self._post.ask(self._question, question):
                self._decide(question)
                return
        self._be_asked()

    def _at(self, left: bool = False) -> At:
        return At({group: chain.now for group, chain in self._chains.items()}, self._issued(left), left)

    def _issued(self, left: bool = False) -> dict[str, int]:
        """Return how many collectives each group was handed; the groups of a rank that ``left`` may be gone."""
        return {
            group: chain.now.count if left else chain.issued(self._counters[group]())
            for group, chain in self._chains.items()
        }

    def _drain(self) -> None:
        if not self._lookout.is_current(self):
            return
        entries = ledger.entries
        self._namer.forget_addresses()
        for _ in range(len(entries)):
            try:
                self._append(entries.popleft())
            except RuntimeError:
                if self.is_in_this_world():
                    raise  # else its group is gone: nobody is to be told of it

    def _append(self, entry: Issued | Called) -> None:
        if isinstance(entry, Called):
            pieces = self._namer.of_call(entry)
            for (group, piece), sequence in zip(pieces.items(), entry.sequence):
                self._chain(group).append(piece, sequence)
        else:
            self._chain(entry.group).append(self._namer.of_launch(entry))

    def _chain(self, group: str) -> Chain:
        if group not in self._chains:
            self._members[group] = process_groups.group_ranks(group)
            self._counters[group] = passes_compat.counter_of(group)
            self._chains[group] = Chain()
        return self._chains[group]

    def _idle_s(self) -> float:
        """Return for how many seconds this rank has issued nothing, as far as was looked."""
        issued = self._issued()
        if issued != self._last_issued:
            self._last_issued, self._since = issued, time.monotonic()
        return time.monotonic() - self._since

    def _doubt(self) -> Question | None:
        """Return a question to all ranks if a neighbour differs or has left, or has been behind for long."""
        if self._lookout.timeout_s <= 0:
            return None  # switched off since
        idle_s, is_ahead = self._idle_s(), False
        read: dict[int, At] = {}
        for group, chain in self._chains.items():
            for other in self._neighbours(group):
                if other not in read:
                    read[other] = self._post.read_at(other)
                theirs = read[other].hashes.get(group, Hash())
                is_behind = read[other].issued.get(group, 0) < self._last_issued[group]
                is_ahead |= is_behind
                ours = chain.at(theirs.count)
                if ours is None:
                    continue  # the neighbour is ahead, and compares
                if ours.wire != theirs.wire or (ours.named != theirs.named and group not in self._nameless):
                    return Question(self._rank, {group: self._agreed.get((other, group), 0)})
                self._agreed[other, group] = theirs.count
                if read[other].left and is_behind and idle_s > _PAUSE_S:
                    return Question(self._rank, idle_s=_PAUSE_S)
        if is_ahead and idle_s > self._lookout.timeout_s and time.monotonic() > self._ask_again_at:
            return Question(self._rank, idle_s=self._lookout.timeout_s / 2)
        return None

    def _answer(self, question: Question, left: bool = False) -> Answer:
        groups, all_issued = {}, self._issued(left)
        for group, chain in self._chains.items():
            first, found = chain.since(question.since.get(group, chain.now.count - _LAST), _SHOWN)
            links, sources = tuple(link for link, _ in found), tuple(source for _, source in found)
            groups[group] = Group(self._members[group], first, links, sources, all_issued[group])
        return Answer(HAS_LEFT if left else "", self._idle_s(), groups)

    def _leave(self) -> None:
        """Publish that this rank leaves; if a neighbour waits for what it will not issue, stay until all know of it.

        Ranks that end together end at once; a rank that ends alone waits for its neighbours' next message. What they
        then need may end with this process: the store, and connections, whose end would be all that they hear.
        """
        self._drain()
        self._post.write_at(self._at(left=True))
        self._post.leave(self._answer(Question(self._rank), left=True))
        deadline = time.monotonic() + 1.2 * _PAUSE_S
        while self._post.gone() < len(self._ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
        ahead = any(
            self._post.read_at(other).hashes.get(group, Hash()).count > chain.now.count
            for group, chain in self._chains.items()
            for other in self._neighbours(group)
        )
        deadline = time.monotonic() + _ANSWERS_S
        while ahead and time.monotonic() < deadline:
            verdict = self._post.read_verdict(self._question)
            if verdict is not None and verdict.text:
                self._wait_until_heard(self._question)
                return
            self._question += verdict is not None
            time.sleep(0.05)

    def _neighbours(self, group: str) -> set[int]:
        members = self._members[group]
        place = members.index(self._rank)
        return {members[place - 1], members[(place + 1) % len(members)]} - {self._rank}

    def _be_asked(self) -> None:
        question = self._post.asked(self._question)
        assert question is not None
        self._post.write_answer(self._question, self._answer(question))
        deadline = time.monotonic() + 2 * _ANSWERS_S
        verdict = None
        while verdict is None and time.monotonic() < deadline and not self._stop.wait(0.05):
            verdict = self._post.read_verdict(self._question)
        self._believe(verdict or Verdict())

    def _decide(self, question: Question) -> None:
        """Collect the answers of all ranks, judge them, and publish the verdict."""
        answers = {self._rank: self._answer(question)}
        deadline = time.monotonic() + _ANSWERS_S
        while len(answers) < len(self._ranks) and time.monotonic() < deadline and not self._stop.wait(0.05):
            for rank in self._ranks:
                answer = None if rank in answers else self._post.read_answer(self._question, rank)
                if answer is not None:
                    answers[rank] = answer
        for rank in self._ranks:
            answers.setdefault(rank, Answer(SAYS_NOTHING))
        verdict = judge(answers, None if question.since else self._rank, question.idle_s)
        self._post.write_verdict(self._question, verdict)
        self._ask_again_at = time.monotonic() + self._lookout.timeout_s / 4
        if verdict.slow:
            log.warning(verdict.slow)
        self._believe(verdict)

    def _believe(self, verdict: Verdict) -> None:
        number, self._question = self._question, self._question + 1
        self._nameless.update(verdict.nameless)
        if verdict.text and not self._parted:
            self._part(number, verdict.text)

    def _part(self, number: int, text: str) -> None:
        """Have every later launch and wait on this rank raise, and end the wait that it is in."""
        self._parted = text
        ledger.alarm = self._raise
        log.error(text)
        with contextlib.suppress(RuntimeError):  # the store is gone, with a rank that has heard
            self._wait_until_heard(number)
        while not self._stop.wait(0.2) and self.is_in_this_world() and not self._raised:
            with contextlib.suppress(RuntimeError):
                interrupting.end_waits()

    def _raise(self, cause: RuntimeError | None = None) -> None:
        self._raised = True
        raise RanksParted(self._parted) from cause

    def _wait_until_heard(self, number: int) -> None:
        """Wait, but not for long, until all ranks have read the verdict: what this one does next ends their waits."""
        heard = self._post.heard(number, 1)
        deadline = time.monotonic() + _HEARD_S
        while heard < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            heard = self._post.heard(number)


lookout = Lookout()
