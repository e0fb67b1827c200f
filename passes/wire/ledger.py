"""Record what this rank issued, in order, so that ranks can be compared: one entry per collective, or per graph.

    eagerly     note(kind, specs, group, shard)   before each launch: passes/wire/lower.py calls it where it launches
    compiled    begin(shards, text)               before a graph's first launch: the text lists all launches of the
                                                  graph, and is part of its code, so graphs from a cache have it too;
                                                  the shards tell whose they are: equal graphs share code and names

    between steps   meet(meeting, ...)            while this rank waits for others to come to the same place

Nothing is computed, looked up or sent here: the lookout drains the entries on a thread of its own. ``alarm`` is called
before anything is issued: once to start the comparison, and every time, to raise, once ranks were found to have parted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch_compat as compat
from . import kept
from .spec import ParamSpec, define_op

_DIGEST = 16  # letters in front of a graph's text, which identify it
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.1  # between two looks whether others are there
_MOST = 4096  # graphs to remember; some of them may belong to models that are gone


class Issued(NamedTuple):
    """One collective that was issued eagerly."""

    kind: str
    specs: Sequence[ParamSpec]
    group: str
    address: int  # of the shard of the first parameter, which tells whose it is; 0 if unknown
    memory: object  # the storage there, held until the entry is drained, so that nothing else gets the address
    unit: Callable[[], Any]  # a weak reference to the parameters' unit, if it is known


class Called(NamedTuple):
    """One call of a compiled graph."""

    text: GraphText
    addresses: tuple[int, ...]  # of one shard of each unit
    # Storages and not shards: a shard would keep alive what autograd has of it, and ``swap_tensors`` refuses a tensor
    # of which that is left.
    memory: Sequence[object]
    sequence: tuple[int, ...]  # how many collectives each group of the graph had been given before


class Meeting(NamedTuple):
    """What a rank waits for between steps, until all of ``ranks``, of which it is one, have come to it."""

    what: str
    ranks: tuple[int, ...]
    number: tuple[int, ...] = (0,)  # larger than that of the meeting of these ranks before

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.what, self.ranks


class Member(NamedTuple):
    """A parameter in a graph's text."""

    unit: str  # the unit's name in the graph, and in all graphs that are cut from the same joint graph
    fqn: str  # in its unit; followed by a colon and the number of the part, if an extension sends parts


class ListedLaunch(NamedTuple):
    """One collective of a graph, as the graph's text lists it."""

    kind: str
    group: str
    dtype: str  # on the wire
    num_bytes: int  # that one rank contributes (gather) or receives (reduction)
    names: tuple[str, ...]  # of its parameters
    members: tuple[Member, ...]  # the same parameters
    key: str = ""  # the bucket's, if it may be here already and the launch sends nothing (kept.py)


@dataclass(frozen=True)
class GraphText:
    """All collectives of one graph, in the order of launch."""

    stage: str
    step: str  # the id of the plan of the step
    units: tuple[str, ...]  # those that are gathered; ``begin`` is given a shard of each
    launches: tuple[ListedLaunch, ...]
    plan: str = ""  # the packed plan of the step, or of a graph that was planned for itself

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(launch.group for launch in self.launches))

    def dumps(self) -> str:
        rows = [self.stage, self.step, self.units, self.launches, self.plan]
        said = json.dumps(rows, separators=(",", ":"))
        return hashlib.sha256(said.encode()).hexdigest()[:_DIGEST] + said

    @classmethod
    def loads(cls, text: str) -> GraphText:
        stage, step, units, rows, plan = json.loads(text[_DIGEST:])
        return cls(stage, step, tuple(units), _launches(rows), plan)


def _launches(rows: Iterable[Any]) -> tuple[ListedLaunch, ...]:
    return tuple(
        ListedLaunch(kind, group, dtype, num_bytes, tuple(names), tuple(starmap(Member, members)), key)
        for kind, group, dtype, num_bytes, names, members, key in rows
    )


class _Text:
    """A graph's text once it is parsed, and the counters of its groups."""

    def __init__(self, read: GraphText) -> None:
        self.read = read
        self._counters: tuple[Callable[[], int], ...] | None = None
        # The buckets that may be here already, by the place of their launch: key, and places of their units' shards.
        place_of = {unit: place for place, unit in enumerate(read.units)}
        self._may_be_here = {
            place: (launch.key, [place_of[unit] for unit in dict.fromkeys(one.unit for one in launch.members)])
            for place, launch in enumerate(read.launches)
            if launch.key
        }
        self._without: dict[tuple[int, ...], _Text] = {}

    def that_sends(self, addresses: Sequence[int]) -> _Text:
        """Return the text of the launches that will send something, as the buckets of the others are here."""
        if not self._may_be_here:
            return self
        kept.free_stale(addresses)
        here = tuple(
            launch
            for launch, (key, shards) in self._may_be_here.items()
            if kept.find([addresses[place] for place in shards], key) is not None
        )
        if here and here not in self._without:
            launches = tuple(one for place, one in enumerate(self.read.launches) if place not in here)
            self._without[here] = _Text(dataclasses.replace(self.read, launches=launches))
        return self._without[here] if here else self

    def sequence(self) -> tuple[int, ...]:
        """Return how many collectives each group of the graph was given so far."""
        if self._counters is None:
            self._counters = tuple(map(compat.counter_of, self.read.groups))
        return tuple([count() for count in self._counters])


class Ledger:
    """The entries that were issued and not drained yet, and the callbacks of those who listen."""

    def __init__(self) -> None:
        self.entries: deque[Issued | Called] = deque()
        self.is_kept = False  # whether somebody drains it
        self.alarm: Callable[[], None] | None = None
        self.explain: Callable[[RuntimeError], None] | None = None  # raises if somebody knows why a wait failed
        self.on_text: Callable[[GraphText], None] | None = None  # called with each text when it is new; may raise
        # Called with each entry as it is issued, while a step is profiled.
        self.hear: Callable[[Issued | Called], None] | None = None
        self.meeting: Meeting | None = None  # in which this rank waits
        self.met: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}  # numbers of the last meetings, by their keys
        self.num_begun = 0  # calls of graphs
        self._texts: dict[str, _Text] = {}  # by their digests
        # Graphs that ran, the last one last, with the addresses of the shards that they were given; num_begun then.
        self._ran: dict[tuple[_Text, tuple[int, ...]], int] = {}

    def wait(self, op: Callable[..., Any], *args: Any) -> Any:
        """Wait for a collective with ``op(*args)``; raise what explains a failure, if somebody knows."""
        try:
            return op(*args)
        except RuntimeError as error:
            if self.explain is not None:
                self.explain(error)
            raise

    def meet(self, meeting: Meeting, are_there: Callable[[], bool], limit_s: float, advice: str) -> None:
        """Wait until ``are_there`` says that all ranks have come; raise if ranks were found to have parted."""
        began = time.monotonic()
        self.meeting = meeting
        try:
            while not self.wait(are_there):
                if self.alarm is not None:
                    self.alarm()
                waited_s = time.monotonic() - began
                if waited_s > limit_s:
                    raise RuntimeError(f"waited {limit_s:.0f} s for {meeting.what}. {advice}")
                # In Python, so that an interruption gets through; and so that the last pause adds little to the wait.
                time.sleep(min(max(_SHORTEST_PAUSE_S, waited_s / 8), _LONGEST_PAUSE_S))
            self.met[meeting.key] = meeting.number
        finally:
            self.meeting = None

    def forget(self) -> None:
        """Drop what was issued in a world that is gone."""
        self.is_kept = False
        self.entries.clear()
        self.met.clear()
        self._texts.clear()
        self._ran.clear()

    def note(self, kind: str, specs: Sequence[ParamSpec], group: str, shard: Any = None, unit: Any = None) -> None:
        """Record that a collective is launched now. This does not keep the ``unit`` alive."""
        if self.alarm is not None:
            self.alarm()
        if self.is_kept or self.hear is not None:
            address = 0 if shard is None else _address(shard)
            memory = shard.untyped_storage() if address else None
            self._write(Issued(kind, specs, group, address, memory, _nobody if unit is None else weakref.ref(unit)))

    def begin(self, shards: Sequence[Tensor], text: str) -> None:
        """Record that a graph is about to launch its first collective."""
        if self.alarm is not None:
            self.alarm()
        digest = text[:_DIGEST]  # hashing all of it would take as long as the rest
        known = self._texts.get(digest)
        if known is None:
            known = _Text(GraphText.loads(text))
            if self.on_text is not None:
                self.on_text(known.read)
            self._texts[digest] = known
        if not known.read.units:
            shards = ()
        ran = known, tuple([_address(shard) for shard in shards])
        self.num_begun += 1
        self._ran.pop(ran, None)  # the last one to run comes last
        if len(self._ran) >= _MOST:
            self._ran.clear()
        self._ran[ran] = self.num_begun
        sends = known.that_sends(ran[1])
        if self.is_kept or self.hear is not None:
            memory = [shard.untyped_storage() for shard, address in zip(shards, ran[1]) if address]
            self._write(Called(sends.read, ran[1], memory, sends.sequence() if self.is_kept else ()))

    def _write(self, entry: Issued | Called) -> None:
        if self.hear is not None:
            self.hear(entry)
        if self.is_kept:
            self.entries.append(entry)

    def ran(self, since: int = 0) -> Iterator[tuple[GraphText, tuple[int, ...]]]:
        """Yield the graphs that ran, the last one first, with the addresses of the first shards of their units.

        ``since`` is a value of ``num_begun``: graphs that did not run after it are left out. A graph that ran before a
        unit was made may have been given shards of a model that is gone, at the very addresses of the unit's shards.
        """
        for (known, addresses), number in reversed(list(self._ran.items())):  # backward may run on another thread
            if number > since:
                yield known.read, addresses


def _nobody() -> None:
    """Return None, as a weak reference to a unit that is gone would."""


def _address(shard: Tensor) -> int:
    try:
        return shard.data_ptr()
    except RuntimeError:
        return 0  # a subclass that has no memory of its own


ledger = Ledger()
note = ledger.note

def _begin_fake(shards: Sequence[Tensor], text: str) -> Tensor:
    return torch.empty(0)


def _begin_kernel(shards: Sequence[Tensor], text: str) -> Tensor:
    ledger.begin(shards, text)
    return torch.empty(0)  # order.py holds the first launch behind it


# It is kept out of CUDA graphs: there is nothing to repeat on the device, and each replay must be counted.
_TAGS = (torch.Tag.cudagraph_unsafe,)
begin = define_op("begin(Tensor[] shards, str text) -> Tensor", _begin_kernel, _begin_fake, _TAGS)
torch.fx.node.has_side_effect(begin)
compat.leave_all_to_python(_begin_kernel)
