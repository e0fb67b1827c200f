"""A unit's full parameters on the eager path: gathered, freed, and gathered again into the same storages.

    launch     pack the shards of some buckets and start their all-gathers; compute may run beside them
    wait       the full parameters are there
    free       give the storages back to the allocator; tensors that autograd saved still alias them
    launch     ... and gather again, into the storages that those tensors alias

One object serves every use of the unit. ``reads`` has what forwards read, ``backward`` what happens to
gradients. The buckets, their order and the bytes on the wire are those of a compiled graph
(passes/schedule/buckets.py, passes/wire/lower.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, subclasses
from ..core.extension import has_extension
from ..core.param import ShardedParam, Slot
from ..core.spec import spec_of
from ..core.unit import Unit
from ..passes import ParamSpec
from ..passes.ir.markers import require_data, require_on_cpu
from ..passes.schedule.buckets import gather_buckets, reduce_buckets
from ..passes.schedule.slices import inner_spec
from ..passes.wire import lower
from ..passes.wire.layout import sends_members
from .collectives import Caller
from .extension import Extension
from .memory import Memory

Bucket = Sequence[int]  # parameters that travel together, by their indices in the unit


@dataclass(eq=False)
class Flight:
    """The all-gather of one bucket, in flight."""

    bucket: Bucket
    land: Callable[[], Sequence[Any]]  # wait for it, and return the full parameters
    drop: Callable[[], object]  # wait for it alone


class Gathered:
    """The full parameters of one unit: gathered, in flight or freed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._version = unit.version
        for param in unit.params:
            param.require_shard()
        self.params: list[ShardedParam] = [param for param in unit.params if param.is_cut(param.param)]
        self.shards: list[DTensor] = [param.param for param in self.params]
        self._places = _places_of(unit)
        for param, shard in zip(self.params, self.shards):
            require_data(param.fqn, shard)
            if unit.offload:
                require_on_cpu(param.fqn, dtensors.local_tensor(shard))
        self.specs: list[ParamSpec] = [spec_of(unit, param) for param in self.params]
        self._extensions = {
            index: Extension(unit, param, shard, self.specs[index].on_device())
            for index, (param, shard) in enumerate(zip(self.params, self.shards))
            if has_extension(param.fqn, shard)
        }
        if self._extensions and unit.post_forward is not None:
            fqn = self.params[next(iter(self._extensions))].fqn
            raise NotImplementedError(
                f"{fqn} has an all-gather extension, which gathers over all ranks: that is not supported when "
                f"reshard_after_forward is an int ({unit.post_forward.num_shards}). Use True or False for its module."
            )
        self.index = {param.fqn: index for index, param in enumerate(self.params)}
        # All of the unit's buckets in the order of forward, and the one of each parameter.
        self.buckets = self._split(range(len(self.params)))
        self.bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        # Backward does not gather these again: autograd saves the rows' numbers, or holds the table itself.
        self.tables = {index for index, spec in enumerate(self.specs) if spec.is_table}
        self.fulls: list[Any] = [None] * len(self.shards)  # None for a parameter that was never gathered
        self._here: set[int] = set()  # those that are gathered now
        self._memory: dict[int, Memory] = {}  # by index; a parameter with an extension has its own
        self._in_flight: list[Flight] = []
        self._versions: list[int] = []
        # The parameters that a backward gathers, and their buckets.
        self._again: tuple[frozenset[int], list[Bucket]] = (frozenset(), [])
        # The parameters that a use read, and the buckets of their gradients.
        self._together: tuple[frozenset[int], list[frozenset[int]]] = (frozenset(), [])
        # Addresses, when gathered, of shards that one rank holds whole: the full parameter may be the shard itself.
        self._shard_at: dict[int, set[int]] = {}
        # After a forward with reshard_after_forward=n: this rank's one of n slices of each full parameter.
        self._slices: dict[int, Tensor] = {}

    def serves(self, unit: Unit) -> bool:
        """Whether these are still the unit's parameters, set up as they were when this object was made."""
        now, then = ([(id(slot), id(shard)) for _, slot, shard in some] for some in (_places_of(unit), self._places))
        return self._version == unit.version and now == then

    @property
    def is_here(self) -> bool:
        """Whether something is gathered."""
        return bool(self._here)

    @property
    def is_full(self) -> bool:
        return len(self._here) == len(self.shards)

    def free_if_stale(self) -> None:
        """Free when a shard was written to since it was gathered."""
        if (self._here or self._in_flight or self._slices) and self._versions != self._current_versions():
            self.free()

    def _current_versions(self) -> list[int]:
        return [version for shard in self.shards for version in dtensors.versions_of(shard)]

    def spec_for(self, index: int, grad: Tensor) -> ParamSpec:
        """Return the spec for a gradient's reduction; with ``grad_dtype=None`` it has the dtype of ``grad``."""
        spec = self.specs[index]
        if self._version != self.unit.version:  # changed since forward: a new divisor holds at once
            now = spec_of(self.unit, self.params[index])
            spec = dataclasses.replace(
                spec, reduce_op=now.reduce_op, predivide=now.predivide, postdivide=now.postdivide
            )
        if not self.asks_for_any_dtype(index):
            return spec
        travels = spec.reduce_dtype if self.unit.mp_policy.reduce_dtype else grad.dtype
        return dataclasses.replace(spec, reduce_dtype=travels, grad_dtype=grad.dtype)

    def asks_for_any_dtype(self, index: int) -> bool:
        return self.shards[index].grad_dtype is None and self.specs[index].dtype.is_floating_point

    def reduced_together(self, read: Collection[int]) -> list[frozenset[int]]:
        """Return the buckets of the gradients of these parameters, in the order of backward."""
        asked = frozenset(read)
        if asked != self._together[0]:  # mostly, each step reads the same
            indices = sorted(asked)
            buckets = reduce_buckets([self.specs[index] for index in indices])
            self._together = asked, [frozenset(indices[place] for place in bucket) for bucket in buckets]
        return self._together[1]

    def gathered_again(self, indices: Collection[int]) -> list[Bucket]:
        """Return the buckets of the parameters that a backward gathers, in its order."""
        asked = frozenset(indices)
        if asked != self._again[0]:
            self._again = asked, self._split(sorted(asked))[::-1]
        return self._again[1]

    def _split(self, indices: Sequence[int]) -> list[Bucket]:
        """Return the buckets of these parameters; those with an extension travel alone, behind the others."""
        plain = [index for index in indices if index not in self._extensions]
        buckets: list[Bucket] = [
            [plain[place] for place in bucket] for bucket in gather_buckets([self.specs[index] for index in plain])
        ]
        return buckets + [[index] for index in indices if index in self._extensions]

    def launch(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Start the all-gathers of these buckets, or of all, but for what is in flight or gathered."""
        flying = {index for flight in self._in_flight for index in flight.bucket}
        away = [one for one in (self.buckets if buckets is None else buckets) if not flying.union(self._here) >= {*one}]
        if not away:
            return
        if not self._here and not flying:
            self._versions = self._current_versions()
        try:
            # Autograd may record a later read, and one may be outside of the torch.func transform that this one is in.
            with without_autograd():
                for (index,) in (bucket for bucket in away if bucket[0] in self._extensions):
                    self._extensions[index].ask()  # first: if it raises on this rank alone, others wait for nothing
                for bucket in away:
                    pool = self.unit.settings.comms.pools.get(self.specs[bucket[0]].group)
                    with nullcontext() if pool is None else pool.use():
                        self._launch(bucket)
        except BaseException:
            self.drop()
            self._give_back({index for bucket in away for index in bucket} - self._here)
            raise

    def _launch(self, bucket: Bucket) -> None:
        extension = self._extensions.get(bucket[0])
        if extension is not None:
            self._in_flight.append(Flight(bucket, lambda: [extension.land()], extension.drop))
            extension.launch()
            return
        is_cut = self._slices.keys() >= {*bucket} and autograd.backward_task() is not None
        sources = [self._slices[one] if is_cut else self._source(one) for one in bucket]
        specs = [inner_spec(self.specs[one]) if is_cut else self.specs[one] for one in bucket]
        call = self._caller(bucket, specs)
        land = functools.partial(lower.finish_gather, call, lower.launch_gather(call, sources, specs), specs)
        self._in_flight.append(Flight(bucket, land, land))

    def wait(self, buckets: Iterable[Bucket] | None = None) -> list[Any]:
        """Wait for the all-gathers of these buckets, or of all, launching them if need be; return the parameters."""
        self.launch(buckets)
        if self._in_flight:
            wanted = None if buckets is None else {index for bucket in buckets for index in bucket}
            self._land([one for one in self._in_flight if wanted is None or not wanted.isdisjoint(one.bucket)])
        return self.fulls

    def land(self) -> None:
        """Wait for what is in flight."""
        self._land([*self._in_flight])

    def full(self, index: int) -> Any:
        """Return one full parameter, gathered if need be."""
        if index not in self._here:
            self.wait([self.buckets[self.bucket_of[index]]])
        return self.fulls[index]

    def free(self, and_slices: bool = True) -> None:
        """Free the storages, after waiting for a gather that is in flight."""
        self.drop()
        if and_slices:
            self._slices = {}
        self._give_back(self._here)
        self._here = set()

    def drop(self) -> None:
        """Wait for the gathers in flight and discard what they gathered, as if they had not been launched."""
        if not self._in_flight:
            return
        in_flight, self._in_flight = self._in_flight, []
        with without_autograd():
            for flight in in_flight:
                flight.drop()
        self._give_back({index for flight in in_flight for index in flight.bucket} - self._here)

    def _give_back(self, indices: Collection[int]) -> None:
        if self.unit.settings.keep_storage:
            return
        for index in indices:
            if index in self.tables:  # who holds a table may still read it
                self._forget(index)
            elif index in self._extensions:
                self._extensions[index].free()
            elif index in self._memory:
                self._memory[index].give_back(but=self._shard_at.get(index, ()))

    def unalias(self, grads: dict[int, Tensor]) -> None:
        """Copy those of ``grads`` that share memory with a parameter: a user's autograd function may return them."""
        addresses = self._addresses()
        for index, grad in grads.items():
            if addresses & subclasses.addresses_in(grad):
                grads[index] = grad.clone()

    def free_but_a_slice(self) -> None:
        """Free all but this rank's slice for ``unit.post_forward``: backward then gathers over its few ranks."""
        assert self.unit.post_forward is not None
        slices = {index: slice_of(self.fulls[index], self.specs[index]) for index in self._here - self.tables}
        self.free()
        self._slices = slices

    def give_away(self, tensors: list[Tensor]) -> None:
        """Leave storages that ``tensors``, outputs of a module, share to the user; the next gather makes new ones."""
        if self._here and subclasses.addresses_in(*tensors) & self._addresses():
            # Tensors that autograd saved keep the storages that they alias; only our references go.
            for index in self._here:
                self._forget(index)
            self._here = set()

    def _forget(self, index: int) -> None:
        """Drop our reference to a full parameter. Whoever holds it keeps it, and the next gather makes another one."""
        self.fulls[index] = None
        self._memory.pop(index, None)
        if index in self._extensions:
            self._extensions[index].forget()

    def take_places_back(self) -> None:
        """Register the shards again where a module registered other tensors in its forward."""
        for param, slot, shard in self._places:
            if not param.is_cut(slot.param) and not param.is_full:
                slot.register(shard)

    def _addresses(self) -> set[int]:
        """Return the addresses of the full parameters' storages."""
        fulls = [(index, full) for index, full in enumerate(self.fulls) if full is not None]
        plain = [full for index, full in fulls if index not in self._extensions]
        of_extensions = [extension.addresses() for extension in self._extensions.values()]
        return subclasses.addresses_in(*plain).union(*of_extensions)

    def _source(self, index: int) -> Tensor:
        """Return this rank's shard of one parameter, on the device of the gather unless that copies it."""
        device, shard = self.unit.mesh.device, dtensors.local_tensor(self.shards[index]).detach()
        if self.specs[index].num_shards == 1:
            self._shard_at[index] = subclasses.addresses_in(shard)
        return shard if self.specs[index].device else shard.to(device)

    def _caller(self, bucket: Bucket, members: list[ParamSpec]) -> Caller:
        """Return the ``Caller`` of one bucket; parameters that are not copied out of it land in their old storages."""
        if len(bucket) > 1 and not sends_members(members[0].backend):
            return Caller(self.unit)
        return Caller(self.unit, [self._landing(index, spec) for index, spec in zip(bucket, members)])

    def _landing(self, index: int, spec: ParamSpec) -> Tensor | None:
        """Return the old memory of a parameter, if its gather can write right into that."""
        full = self.fulls[index]
        if type(full) is not Tensor or spec.dim or not spec.layout.even or spec.num_shards == 1:
            return None
        self._memory[index].take()
        # ``.data`` makes no new version for autograd: the values are those that it saved.
        return lower.as_sent(lower.run, full.data)  # type: ignore[no-any-return]

    def _land(self, flights: Sequence[Flight]) -> None:
        try:
            with without_autograd():
                for flight in flights:
                    self._keep(dict(zip(flight.bucket, flight.land())))
                    self._in_flight.remove(flight)
                    self._here.update(flight.bucket)
        except BaseException:
            self.drop()
            raise

    def _keep(self, arrived: Mapping[int, Tensor]) -> None:
        """Keep parameters that were gathered the first time, and copy those gathered again into their old storages."""
        for index, again in arrived.items():
            full = self.fulls[index]
            if full is None:
                self.fulls[index] = again
                if index not in self._extensions:
                    self._memory[index] = Memory(again)
            elif index not in self._extensions:
                if index in self._shard_at and subclasses.addresses_in(again) & self._shard_at[index]:
                    # It is the shard itself. The old memory may be another tensor's by now: ``param.data`` was set.
                    self.fulls[index], self._memory[index] = again, Memory(again)
                    continue
                self._memory[index].take()
                if not subclasses.share_storage(again, full):
                    full.data.copy_(again)


def _places_of(unit: Unit) -> list[tuple[ShardedParam, Slot, Any]]:
    """Return where the unit's shards are registered now, without places where the user put something else."""
    return [
        (param, slot, registered)
        for param in unit.params
        for slot in param.slots
        if param.is_cut(registered := slot.param)
    ]


def slice_of(full: Tensor, spec: ParamSpec) -> Tensor:
    """Return a copy of this rank's slice of a full parameter, for ranks to gather from as ``inner_spec`` says."""
    start, stop = inner_spec(spec).layout.span(spec.inner_rank)
    with torch.inference_mode(False), torch.no_grad():
        return full.narrow(spec.dim, start, stop - start).clone()


@contextmanager
def without_autograd() -> Iterator[None]:
    """Run collectives outside of autograd, inference mode and torch.func, whatever surrounds the read."""
    with torch.inference_mode(False), torch.no_grad(), autograd.without_functorch():
        yield
