"""A unit's full parameters on the eager path: gathered, freed, and gathered again into the same storages.

    launch     pack the shards and start the all-gathers; compute may run beside them
    wait       the full parameters are there
    free       give the storages back to the allocator; tensors that autograd saved still alias them
    launch     ... and gather again, into the storages that those tensors alias

One object serves every forward call of the unit (but see ``route``). ``reads`` has what the calls read, ``backward``
what happens to gradients. The bytes on the wire are those of ``passes.lower``, as in a compiled graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, subclasses
from ..core.extension import has_extension
from ..core.param import ShardedParam, Slot
from ..core.spec import spec_of
from ..core.unit import Unit
from ..passes import ParamSpec, lower
from ..passes.buckets import gather_buckets, reduce_buckets
from ..passes.markers import require_data, require_on_cpu
from ..passes.slices import inner_spec
from .collectives import Caller
from .extension import Extension
from .memory import Memory


class Gathered:
    """The full parameters of one unit: gathered, in flight or freed."""

    route: Any = None  # the ``Route`` that gathers it, in the subclass ``Routed``

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
        # The eager path copies shards to the device before it packs them, and gradients from it when shards get them.
        self.specs: list[ParamSpec] = [spec_of(unit, param).on_device() for param in self.params]
        self._extensions = {
            index: Extension(unit, param, shard, self.specs[index])
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
        self.fulls: list[Any] | None = None  # None for a parameter that was never gathered
        self._memory: dict[int, Memory] = {}  # by index; a parameter with an extension has its own
        self._in_flight: list[tuple[list[int], list[ParamSpec], Any, Caller]] | None = None
        self._versions: list[int] = []
        # The parameters that a call read, and the buckets of their gradients.
        self._together: tuple[frozenset[int], Mapping[int, frozenset[int]]] = (frozenset(), {})
        # Addresses, when gathered, of shards that one rank holds whole: the full parameter may be the shard itself.
        self._shard_at: dict[int, set[int]] = {}
        # After a forward with reshard_after_forward=n: this rank's one of n slices of each full parameter.
        self._slices: list[Tensor] | None = None
        self.is_full = False

    def serves(self, unit: Unit) -> bool:
        """Whether these are still the unit's parameters, set up as they were when this object was made."""
        now, then = ([(id(slot), id(shard)) for _, slot, shard in some] for some in (_places_of(unit), self._places))
        return self._version == unit.version and now == then

    @property
    def launched(self) -> bool:
        return self._in_flight is not None

    def free_if_stale(self) -> None:
        """Free when a shard was written to since it was gathered."""
        has_some = self.is_full or self.launched or self._slices is not None
        if has_some and self._versions != self._current_versions():
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

    def reduced_together(self, read: Collection[int]) -> Mapping[int, frozenset[int]]:
        """Return, for each of these parameters, those among them that are in one bucket of a reduction with it."""
        asked = frozenset(read)
        if asked != self._together[0]:  # mostly, each step reads the same
            indices = sorted(asked)
            buckets = reduce_buckets([self.specs[index] for index in indices])
            members = [frozenset(indices[place] for place in bucket) for bucket in buckets]
            self._together = asked, {index: bucket for bucket in members for index in bucket}
        return self._together[1]

    def launch(self) -> None:
        """Start the all-gathers, unless they have been started or are done."""
        if self.is_full or self.launched:
            return
        in_flight: list[tuple[list[int], list[ParamSpec], Any, Caller]] = []
        self._in_flight = in_flight
        try:
            self._launch(in_flight)
        except BaseException:
            self._drop()
            raise
        self._versions = self._current_versions()

    def _launch(self, in_flight: list[tuple[list[int], list[ParamSpec], Any, Caller]]) -> None:
        # Autograd may record a later read, and one may be outside of the torch.func transform that this one is in.
        with without_autograd():
            for extension in self._extensions.values():
                extension.ask()  # first: if it raises on this rank alone, nothing is launched that others do not join
            sources, specs = self._sources()
            plain = [index for index in range(len(specs)) if index not in self._extensions]
            for places in gather_buckets([specs[index] for index in plain]):
                bucket = [plain[place] for place in places]
                members = [specs[index] for index in bucket]
                call = self._caller(bucket, members)
                launched = lower.launch_gather(call, [sources[index] for index in bucket], members)
                in_flight.append((bucket, members, launched, call))
            for extension in self._extensions.values():
                extension.launch()

    def wait(self) -> list[Tensor]:
        """Wait for the all-gathers, launching them if need be, and return the full parameters."""
        self.launch()
        if self._in_flight is not None:
            try:
                with without_autograd():
                    self._land(self._in_flight)
            except BaseException:
                self._drop()
                raise
            self._in_flight, self._slices = None, None
            self.is_full = True
        assert self.fulls is not None
        return self.fulls

    def full(self, index: int) -> Tensor:
        """Return one full parameter, gathered if need be."""
        return self.wait()[index]

    def free(self) -> None:
        """Free the storages, after waiting for a gather that is in flight."""
        if self.launched:
            self._drop()
        self._slices = None
        if self.is_full:
            self.is_full = False
            self._give_back()

    def give_up(self) -> None:
        """Free, because the step is given up."""
        self.free()

    def _drop(self) -> None:
        """Wait for the gathers in flight and discard what they gathered, as if they had not been launched."""
        in_flight, self._in_flight = self._in_flight or [], None
        with without_autograd():
            for _, specs, launched, call in in_flight:
                lower.finish_gather(call, launched, specs)
            for extension in self._extensions.values():
                extension.drop()
        self._give_back()

    def _give_back(self, indices: Collection[int] | None = None) -> None:
        if self.unit.settings.keep_storage:
            return
        for extension in self._extensions.values():
            extension.free()
        for index, memory in self._memory.items():
            if indices is None or index in indices:
                memory.give_back(but=self._shard_at.get(index, ()))

    def unalias(self, grads: dict[int, Tensor]) -> None:
        """Copy those of ``grads`` that share memory with a parameter: a user's autograd function may return them."""
        addresses = self._addresses()
        for index, grad in grads.items():
            if addresses & subclasses.addresses_in(grad):
                grads[index] = grad.clone()

    def free_but_a_slice(self) -> None:
        """Free all but this rank's slice for ``unit.post_forward``: backward then gathers over its few ranks."""
        assert self.unit.post_forward is not None and self.fulls is not None
        slices = [slice_of(full, spec) for full, spec in zip(self.fulls, self.specs)]
        self.free()
        self._slices = slices

    def give_away(self, tensors: list[Tensor]) -> None:
        """Leave storages that ``tensors``, outputs of a module, share to the user; the next gather makes new ones."""
        if self.fulls is None:
            return
        if subclasses.addresses_in(*tensors) & self._addresses():
            # Tensors that autograd saved keep the storages that they alias; only our references go.
            self.fulls, self.is_full, self._memory = None, False, {}
            for extension in self._extensions.values():
                extension.forget()

    def take_places_back(self) -> None:
        """Register the shards again where a module registered other tensors in its forward."""
        for param, slot, shard in self._places:
            if not param.is_cut(slot.param) and not param.is_full:
                slot.register(shard)

    def _addresses(self) -> set[int]:
        """Return the addresses of the full parameters' storages."""
        fulls = [(index, full) for index, full in enumerate(self.fulls or ()) if full is not None]
        plain = [full for index, full in fulls if index not in self._extensions]
        of_extensions = [extension.addresses() for extension in self._extensions.values()]
        return subclasses.addresses_in(*plain).union(*of_extensions)

    def _sources(self) -> tuple[list[Tensor], list[ParamSpec]]:
        """Return what this rank sends in the gather, with the specs."""
        if self._slices is not None:
            return self._slices, [inner_spec(spec) for spec in self.specs]
        return [self.source(index) for index in range(len(self.shards))], self.specs

    def source(self, index: int) -> Tensor:
        """Return this rank's shard of one parameter, on the device of the gather."""
        device, shard = self.unit.mesh.device, dtensors.local_tensor(self.shards[index]).detach()
        if self.specs[index].num_shards == 1:
            self._shard_at[index] = subclasses.addresses_in(shard)
        return shard if shard.device == device else shard.to(device, non_blocking=True)

    def _caller(self, bucket: list[int], members: list[ParamSpec]) -> Caller:
        """Return the ``Caller`` of one bucket; a parameter alone in it may be gathered right into its old storage."""
        out = None
        spec = members[0]
        lands_there = spec.dim == 0 and spec.layout.even and spec.num_shards > 1
        full = self.fulls[bucket[0]] if self.fulls is not None and len(bucket) == 1 and lands_there else None
        if type(full) is Tensor:
            self._memory[bucket[0]].take()
            # ``.data`` makes no new version for autograd: the values are those that it saved.
            out = lower.as_sent(lower.run, full.data)
        return Caller(self.unit, out)

    def _land(self, in_flight: list[tuple[list[int], list[ParamSpec], Any, Caller]]) -> None:
        fulls: dict[int, Tensor] = {}
        for bucket, specs, launched, call in in_flight:
            fulls.update(zip(bucket, lower.finish_gather(call, launched, specs)))
        fulls.update({index: extension.land() for index, extension in self._extensions.items()})
        self._keep(fulls)

    def _keep(self, arrived: Mapping[int, Tensor]) -> None:
        """Keep parameters that were gathered the first time, and copy those gathered again into their old storages."""
        if self.fulls is None:
            self.fulls, self._memory = [None] * len(self.shards), {}
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
