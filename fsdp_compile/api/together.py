"""The ranks that have parts of one model do one thing together, beside whatever else they do: they read a stream.

    rank 0   meet   ask  ask  . . . . . . . . . .  ask  -> raises: rank 1 left
    rank 1   meet   ask  ask  leave, goes on

They meet through the store, so that no collective waits for a rank that does not come. What they ask goes through a
process group in which nothing else is sent until it is over on all ranks, so a rank that leaves need not wait either.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensors, process_groups
from ..core.mesh import device_of_type
from ..core.unit import saved_tensors, units_in
from ..passes.ranks.worlds import World, current_world
from ..passes.wire.ledger import Meeting, ledger
from .exchange import this_rank
from .fitting import from_all_ranks, raised_on_all


@dataclass
class _Meetings:
    """The meetings of the same ranks in one world: how many there were, and those that are not over on this rank."""

    count: int = 0
    going: list[Ranks] = field(default_factory=list)


_MEETINGS: weakref.WeakKeyDictionary[World, dict[tuple[int, ...], _Meetings]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Ranks:
    """The ranks that have parts of one model, while they do one thing together; one rank if nothing is sharded."""

    function: str
    members: list[int]
    device: torch.device
    group: dist.ProcessGroup | None = None  # None on a single rank
    _place: int = 0  # of the group, among those that were made for streams of these ranks
    _number: tuple[int, int] = (0, 0)  # of the meeting, and of the last question in it
    _world: World | None = None
    _answer: tuple[Tensor, Any] | None = None  # the last one, on its way
    _is_over: bool = False

    @classmethod
    def of(cls, model: nn.Module, function: str) -> Ranks:
        """Wait until all ranks of a model have called this, and return them."""
        meshes = {one.device_mesh for one in saved_tensors(model).values() if isinstance(one, DTensor)}
        meshes |= {param.shard.device_mesh for unit in units_in(model) for param in unit.params}  # type: ignore[attr-defined]
        members = _ranks_in(meshes)
        if all(_ranks_in([mesh]) != members for mesh in meshes):  # then other ranks know meshes that this one does not
            members = _ranks_in(map(dtensors.root_mesh, meshes))
        if len(members) < 2:
            return cls(function, [this_rank()], torch.device("cpu"))
        ranks = cls(function, members, device_of_type(next(iter(meshes)).device_type))
        ranks._meet()
        return ranks

    def _meet(self) -> None:
        """Wait until all have come, and take the first group that is free on all of them."""
        self._world = world = current_world()
        assert world is not None
        met = _MEETINGS.setdefault(world, {}).setdefault(tuple(self.members), _Meetings())
        met.going = [one for one in met.going if one._is_going()]
        self._number = met.count, 0
        key = f"meetings/{hashlib.sha256(repr(self.members).encode()).hexdigest()}/{met.count}"
        for one in met.going:
            world.count(f"{key}/{one._place}", 1)
        world.count(key, 1)
        try:
            self._wait(lambda: world.count(key) >= len(self.members))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store is gone
                world.count(key, -1)
            raise
        met.count += 1
        self._place = next(place for place in itertools.count() if not world.count(f"{key}/{place}"))
        self.group = process_groups.group_for(f"streams, number {self._place}", self.members)
        met.going.append(self)

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Have all ranks raise at the end of a block if one raised in it; then it is over on all."""
        try:
            with contextlib.nullcontext() if self.group is None else raised_on_all(self.function, self.group):
                yield
        except BaseException:
            self.part()
            raise

    def require_same(self, asked: Any) -> None:
        """Raise on all ranks if one asks for something else; then it is over on all."""
        digest = hashlib.sha256(repr((self.function, asked)).encode()).hexdigest()
        for rank, theirs in zip(self.members, [digest] if self.group is None else from_all_ranks(digest, self.group)):
            if theirs != digest:
                self.part()
                raise ValueError(
                    f"{self.function}: ranks {this_rank()} and {rank} name different tensors, or pass other "
                    "arguments. Call it on every rank with the same model and arguments."
                )

    def ask(self) -> None:
        """Raise if a rank has left, once all ranks ask or have left."""
        if self.group is None:
            return
        if self._is_over or self._world is not current_world():
            raise RuntimeError(f"{self.function}: the stream ended on this rank. Begin another one.")
        said, work = self._say(0)
        self._number = self._number[0], self._number[1] + 1
        self._wait(work.is_completed)
        ledger.wait(work.wait)
        left = int(said.item())
        if left:
            self.part()
            raise RuntimeError(
                f"{self.function}: rank {left - 1} left its loop, by a break or an exception, before the stream was at "
                "its end; so it ends here. Read all of it on every rank."
            )

    def _wait(self, are_there: Callable[[], bool]) -> None:
        meeting = Meeting(f"all ranks of the model to go on with {self.function}", tuple(self.members), self._number)
        timeout = process_groups.world_timeout()
        limit_s = math.inf if timeout is None else timeout.total_seconds()
        ledger.meet(meeting, are_there, limit_s, "Call it on all of them.")

    def leave(self) -> None:
        """Have the others raise when they ask. It is over on this rank, which does not wait until they do."""
        if self.group is not None and not self._is_over and self._world is current_world():
            with contextlib.suppress(RuntimeError):  # where ranks have parted, all know, and groups may be aborted
                if ledger.alarm is not None:
                    ledger.alarm()
                self._say(this_rank() + 1)
        self.part()

    def end_others(self) -> None:
        """Leave all else that this rank has begun with others, as what raised here may have been reading it."""
        world = current_world()
        for met in _MEETINGS.get(world, {}).values() if world is not None else ():
            for one in met.going:
                if one is not self:
                    one.leave()

    def part(self) -> None:
        """Note that it is over on all ranks."""
        self._is_over = True

    def _say(self, left: int) -> tuple[Tensor, Any]:
        said = torch.tensor(left, dtype=torch.int32, device=self.device)
        self._answer = said, dist.all_reduce(said, dist.ReduceOp.MAX, self.group, async_op=True)
        return self._answer

    def _is_going(self) -> bool:
        """Whether the group may still be in use, on this rank or on one that has not answered."""
        return not self._is_over or (self._answer is not None and not self._answer[1].is_completed())


def _ranks_in(meshes: Iterable[DeviceMesh]) -> list[int]:
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
