"""The lookout: if ranks issue different collectives, every rank says what each of them does, and raises.

    training            appends to the ledger (passes/wire/ledger.py)
    a thread beside it  every half a second:
                        drains the ledger into one chain a group, says where it is, reads where its neighbours are
                        a hash differs, or it waits for too long  ->  asks all ranks  ->  judge.py  ->  verdict
    every rank          logs the verdict, and raises RanksParted at its next launch, or when its wait ends

A wait ends early where the process group can end it: NCCL's ``abort`` does, gloo's wait goes on to its own timeout. The
thread starts with the first collective, in worlds of more than one rank, and ends with the process group. In the store
of the world (passes/ranks/worlds.py) ranks have these keys:

    said/RANK     where it is in each group, and in which meeting; if somebody asked, or it leaves, with the last
                  collectives of each group
    asks/K        counts those who ask as number K: the first one judges
    verdict/K     what it makes of what all say: everybody believes it, so all raise or none
    heard/K       counts those who have read it
    left          counts those who have left
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from .._torch_compat import process_groups
from ..core.unit import Unit
from ..passes import _torch_compat as passes_compat
from ..passes.ranks.worlds import World, current_world
from ..passes.wire.ledger import Called, Meeting, ledger
from .chain import KEPT, NOTHING, Chain, GroupProgress
from .judge import HAS_DIED, HAS_LEFT, IS_LOST, NEVER_HEARD, SAYS_NOTHING, Judgement, Said, judge
from .names import Namer

log = logging.getLogger("fsdp_compile")

T = TypeVar("T")

ENVIRONMENT = "FSDP_COMPILE_WATCH_S"
DEFAULT_S = 60.0
_PAUSE_S = 0.5
_ANSWERS_S = 4.0  # how long to wait for what others say
_HEARD_S = 2.0  # how long others have to read the verdict before this rank's waits are ended
_LAST = 256  # collectives of a group that a rank lists when it leaves


class RanksParted(RuntimeError):
    """Ranks issue different collectives, or wait for one another."""


class Doubt(NamedTuple):
    """Why a rank asks all ranks: it differs from a neighbour, or waits for one."""

    idle_s: float | None = None  # if it waits: a rank that has issued nothing for so long may wait for it
    silent: str = SAYS_NOTHING  # the state of a rank that does not answer


class Lookout:
    """Compares what this rank issued with what other ranks issued, in a thread beside training."""

    def __init__(self) -> None:
        self.timeout_s = float(os.environ.get(ENVIRONMENT, DEFAULT_S))
        self._namer = Namer()
        self._world: World | None = None
        self.failure: Exception | None = None  # the error that ended the comparing early

    def know(self, unit: Unit) -> None:
        """Take note of a unit that was made, and have the next collective start the thread.

        It starts once a world: after an early end on this rank it would compare what other ranks have long left behind.
        """
        self._namer.know(unit)
        if self._world is not (world := current_world()):
            self._world = world
            ledger.alarm = self._start

    def namer(self) -> Namer:
        """Return what names the collectives of this process, for another thread than the one that compares."""
        return Namer(self._namer.units)

    def _start(self) -> None:
        ledger.alarm = None
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1 or "fake" in dist.get_backend_config()
        if self.timeout_s <= 0 or self._world is None or is_alone:
            return
        beside = self._world.beside()
        if beside is not None:
            ledger.forget()
            watch = LookoutThread(self, self._namer, self._world, beside)
            ledger.is_kept, ledger.explain = True, watch.explain
            atexit.register(watch.end)
            watch.start()


class LookoutThread(threading.Thread):
    """The thread, in one world."""

    def __init__(self, lookout: Lookout, namer: Namer, world: World, beside: World) -> None:
        super().__init__(name="fsdp_compile lookout", daemon=True)
        self._lookout, self._namer, self._world, self._store = lookout, namer, world, beside
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._chains: dict[str, Chain] = {}
        self._issued: dict[str, int] = {}
        self._meeting: Meeting | None = None
        self._since = time.monotonic()  # it has been that
        self._heard: dict[int, Said] = {}  # what others last said
        self._nameless: set[str] = set()  # groups whose ranks call the same parameters differently
        self._number = 0  # of the next question
        self._ask_again_at = 0.0
        self._failed = False  # a wait did, and nobody has asked since
        self._ends = threading.Event()
        self._parted = ""  # how the ranks have parted

    def run(self) -> None:
        try:
            while not self._parted and not self._ends.wait(_PAUSE_S) and self._world.is_current():
                self._look()
            if not self._parted:
                self._leave()
        except Exception as error:
            # The store is gone, with the process that kept it; or this is a mistake of ours, which must not hurt.
            if self._world.is_current():  # else its groups may be gone while they were looked at
                self._lookout.failure = error
            log.debug("ranks are not compared any more", exc_info=True)
        finally:
            atexit.unregister(self.end)
            if self._has_ledger():
                ledger.forget()
                if not self._world.is_current():
                    ledger.explain = None

    def end(self) -> None:
        """End the thread at the end of the process, before Python tears down what it uses; a fork has no thread."""
        self._ends.set()
        self.join(2 * _ANSWERS_S)

    def explain(self, error: RuntimeError) -> None:
        """Raise RanksParted, on the thread whose wait failed, if the ranks find out that they have parted."""
        self._failed = True
        _poll(lambda: self._parted or not self._failed or not self.is_alive(), 3 * _ANSWERS_S)
        if not self._parted and isinstance(self._lookout.failure, dist.DistError):  # with the rank that kept the store
            self._parted = self._judge(Doubt(_PAUSE_S, IS_LOST)).text
        if self._parted:
            self._raise(error)

    def _raise(self, cause: RuntimeError | None = None) -> None:
        if self._world.is_current():
            raise RanksParted(self._parted) from cause

    def _has_ledger(self) -> bool:
        """Whether no other world has begun since, so that what is issued belongs to this one."""
        return ledger.explain == self.explain

    def _look(self, state: str = "") -> None:
        """Say where this rank is, and settle a question, if there is one."""
        self._drain()
        asks = f"lookout/asks/{self._number}"
        doubt = None if state else self._doubt()
        judges = doubt is not None and self._store.count(asks, 1) == 1
        is_asked = judges or self._store.count(asks) > 0
        said = self._said(KEPT if is_asked else _LAST if state else 0, state, self._number - (not is_asked))
        self._store.put(f"lookout/said/{self._rank}", pickle.dumps(said))
        if is_asked:
            self._settle(doubt if judges else None)

    def _drain(self) -> None:
        entries = ledger.entries
        self._namer.forget_addresses()
        for _ in range(len(entries) if self._has_ledger() else 0):
            try:
                entry = entries.popleft()
                if isinstance(entry, Called):
                    for (group, links), sequence in zip(self._namer.of_call(entry).items(), entry.sequence):
                        self._chain(group).append(links, sequence)
                else:
                    self._chain(entry.group).append([self._namer.of_launch(entry)])
            except RuntimeError:
                if self._world.is_current():
                    raise  # else its group is gone: nobody is to be told of it
        if self._world.is_current():  # else the groups know no numbers any more
            issued = {group: chain.issued() for group, chain in self._chains.items()}
        else:
            issued = {group: chain.count for group, chain in self._chains.items()}
        meeting = ledger.meeting
        if (issued, meeting) != (self._issued, self._meeting):
            self._issued, self._meeting, self._since = issued, meeting, time.monotonic()

    def _chain(self, group: str) -> Chain:
        if group not in self._chains:
            self._chains[group] = Chain(process_groups.group_ranks(group), passes_compat.counter_of(group))
        return self._chains[group]

    def _said(self, num_links: int, state: str, answers: int) -> Said:
        groups = {name: chain.place(self._issued[name], num_links) for name, chain in self._chains.items()}
        return Said(groups, time.monotonic() - self._since, state, answers, self._meeting, dict(ledger.met))

    def _hear(self, rank: int) -> Said:
        found = self._store.get(f"lookout/said/{rank}")
        self._heard[rank] = Said() if found is None else pickle.loads(found)
        return self._heard[rank]

    def _neighbours(self) -> Iterator[tuple[str, Chain, Said, GroupProgress]]:
        """Yield each group with the two ranks beside this one, and where these are in it."""
        heard: dict[int, Said] = {}
        for name, chain in self._chains.items():
            for other in self._beside(chain.ranks):
                said = heard[other] = heard.get(other) or self._hear(other)
                yield name, chain, said, said.groups.get(name, GroupProgress(chain.ranks, 0, NOTHING, 0))

    def _beside(self, ranks: Sequence[int]) -> set[int]:
        """Return the two ranks beside this one, or the only other one."""
        place = ranks.index(self._rank)
        return {ranks[place - 1], ranks[(place + 1) % len(ranks)]} - {self._rank}

    def _doubt(self) -> Doubt | None:
        """Return a doubt if a neighbour differs or has left, if a wait failed, or if a neighbour is behind for long."""
        if self._lookout.timeout_s <= 0:
            return None  # switched off since
        idle_s, is_ahead = time.monotonic() - self._since, self._meeting is not None
        if self._meeting is not None and idle_s > _PAUSE_S:
            for said in map(self._hear, self._beside(self._meeting.ranks)):
                if said.state == HAS_LEFT and said.lacks_in(self._meeting):
                    return Doubt(_PAUSE_S)
        for group, chain, said, theirs in self._neighbours():
            is_behind = theirs.issued < self._issued[group]
            is_ahead |= is_behind
            ours = chain.at(theirs.count)
            if ours is None:
                continue  # the neighbour is ahead, and compares
            if ours != theirs.hash and (ours[0] != theirs.hash[0] or group not in self._nameless):
                return Doubt()
            if said.state == HAS_LEFT and is_behind and idle_s > _PAUSE_S:
                return Doubt(_PAUSE_S)
        if self._failed:
            return Doubt(_PAUSE_S, HAS_DIED)
        if is_ahead and idle_s > self._lookout.timeout_s and time.monotonic() > self._ask_again_at:
            return Doubt(self._lookout.timeout_s / 2)
        return None

    def _settle(self, doubt: Doubt | None) -> None:
        """Believe what the rank that asks makes of what all say; it is this one if it has a ``doubt``."""
        key = f"lookout/verdict/{self._number}"
        if doubt is not None:
            verdict = self._judge(doubt)
            self._store.put(key, pickle.dumps(verdict))
            self._ask_again_at = time.monotonic() + self._lookout.timeout_s / 4
            if verdict.slow:
                log.warning(verdict.slow)
        else:
            found = _poll(lambda: self._store.get(key), 2 * _ANSWERS_S)
            verdict = Judgement() if found is None else pickle.loads(found)
        self._nameless.update(verdict.nameless)
        if verdict.text:
            self._part(verdict.text)
        self._number += 1
        if doubt is not None and doubt.silent == HAS_DIED:  # else a wait that failed meanwhile is not explained yet
            self._failed = False

    def _judge(self, doubt: Doubt) -> Judgement:
        said = {self._rank: self._said(KEPT, "", self._number)}
        others = set(range(self._num_ranks)) - {self._rank}

        def have_answered() -> bool:
            for rank in others - {*said}:
                one = self._hear(rank)
                if one.answers >= self._number or one.state:
                    said[rank] = one
            return len(said) == self._num_ranks

        with contextlib.suppress(dist.DistError):  # the store is gone
            _poll(have_answered, _ANSWERS_S)
        for rank in others - {*said}:
            last = self._heard.get(rank, Said())
            state = NEVER_HEARD if doubt.silent == HAS_DIED and not last.groups else doubt.silent
            said[rank] = dataclasses.replace(last, state=state)
        return judge(said, None if doubt.idle_s is None else self._rank, doubt.idle_s or 0.0)

    def _part(self, text: str) -> None:
        """Have every later launch and wait on this rank raise, and end the wait that it is in, if that can be done."""
        self._parted = text
        if self._world.is_current():
            ledger.alarm = self._raise
            log.error(text if self._ends.is_set() else f"{text}\n{process_groups.how_waits_end()}")
        with contextlib.suppress(RuntimeError):  # the store is gone, with a rank that has heard
            self._meet(f"heard/{self._number}", _HEARD_S)  # what this rank does next ends the waits of the others
        if self._world.is_current():
            process_groups.abort_all()

    def _leave(self) -> None:
        """Say that this rank leaves; if a neighbour waits for what it will not issue, stay until all know of it.

        Ranks that end together end at once; a rank that ends alone waits for its neighbours' next message. What they
        then need may end with this process: the store, and connections, whose end would be all that they hear.
        """
        self._look(HAS_LEFT)
        if self._parted or self._meet("left", 1.2 * _PAUSE_S):
            return
        deadline = time.monotonic() + _ANSWERS_S
        while not self._parted and time.monotonic() < deadline:
            is_awaited = any(theirs.count > chain.count for _, chain, _, theirs in self._neighbours())
            mine = self._said(0, HAS_LEFT, self._number)
            meetings = [said.meeting for said in self._heard.values() if said.meeting is not None]
            if not is_awaited and not any(self._rank in one.ranks and mine.lacks_in(one) for one in meetings):
                return
            time.sleep(0.05)
            self._look(HAS_LEFT)

    def _meet(self, where: str, limit_s: float) -> bool:
        """Wait, but not for long, until all ranks are there; return whether they are."""
        where = f"lookout/{where}"
        self._store.count(where, 1)
        return _poll(lambda: self._store.count(where) == self._num_ranks, limit_s)


def _poll(look: Callable[[], T], limit_s: float) -> T:
    """Return what ``look`` finds when it finds something, or finds at the end."""
    deadline = time.monotonic() + limit_s
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


lookout = Lookout()
