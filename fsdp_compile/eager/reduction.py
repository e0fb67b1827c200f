"""Gradients on the eager path: from full parameters to their shards.

    a backward without sync     full gradients wait in ``held.pending``, in the reduction's dtype
    sync without all-reduce     reduced shards wait in ``held.partials`` (replicated meshes)
    a backward with both        pending + gradients -> reduce-scatter -> + partials -> all-reduce -> shard.grad
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import autograd
from ..core.grads import brought_to, give, give_through_hooks
from ..core.unit import Unit
from ..passes import ParamSpec
from ..passes.schedule.buckets import reduce_buckets
from ..passes.wire import lower, streams
from .collectives import Caller
from .gathered import Gathered


def hold_back(gathered: Gathered, grads: Mapping[int, Tensor]) -> None:
    """Keep full gradients for a later backward that synchronizes."""
    held = gathered.unit.accumulation.held
    pending = held.pending
    with torch.no_grad():
        for index, grad in grads.items():
            fqn, dtype = gathered.params[index].fqn, gathered.spec_for(index, grad).reduce_dtype
            held.note(fqn, fqn in pending)
            if fqn in pending:
                pending[fqn] = _sum(pending[fqn], grad, gathered.asks_for_any_dtype(index))
            else:
                # Copy it even if the dtype is right: autograd may pass the same tensor to others.
                pending[fqn] = grad.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def with_pending(
    gathered: Gathered, grads: Mapping[int, Tensor], only: Collection[int] | None = None
) -> dict[int, Tensor]:
    """Return ``grads`` plus what earlier backwards held back, of all parameters or of ``only`` some."""
    held = gathered.unit.accumulation.held
    total = dict(grads)
    with torch.no_grad():
        for fqn in [*held.pending]:
            index = gathered.index.get(fqn)
            if index is not None and (only is None or index in only):
                total[index] = held.take(fqn)
                if index in grads:
                    total[index] = _sum(total[index], grads[index], gathered.asks_for_any_dtype(index))
    return total


def _sum(held: Tensor, more: Tensor, in_any_dtype: bool) -> Tensor:
    """Return ``held`` plus ``more``, added in place unless the sum is to have the wider dtype of the two."""
    if in_any_dtype and torch.promote_types(held.dtype, more.dtype) != held.dtype:
        return held + more
    return held.add_(more)


class Reduction:
    """A reduction of a unit's gradients; unless it is ``alone``, all sums that wait for the replicas join it."""

    def __init__(
        self, gathered: Gathered, grads: Mapping[int, Tensor], alone: bool = False, joins_partials: bool = True
    ) -> None:
        self.gathered = gathered
        self._fqns = {gathered.params[index].fqn for index in grads} if alone else None
        self._in_flight: list[tuple[list[int], list[ParamSpec], Any, Caller]] = []
        self.has_advanced = False
        self.more_come = False  # from other uses of the unit, in this backward
        # What launches the next reduction, and so waits for this one, may run on another stream.
        self._stream = streams.accelerator.current(gathered.unit.mesh.device)
        accumulation = gathered.unit.accumulation
        self._replicated_later = joins_partials and (bool(accumulation.held.partials) or not accumulation.all_reduce)
        self.add(grads)

    def add(self, grads: Mapping[int, Tensor]) -> None:
        """Launch the collectives of more gradients."""
        gathered, indices = self.gathered, sorted(grads)
        with torch.no_grad():
            each = {index: self._spec(gathered.spec_for(index, grads[index])) for index in indices}
            for bucket in reduce_buckets([each[index] for index in indices]):
                members = [indices[place] for place in bucket]
                specs = [each[index] for index in members]
                num_waits = specs[0].num_reductions
                call = Caller(gathered.unit, num_waits_before_hook=num_waits)
                launched = lower.launch_reduce(call, [grads[index] for index in members], specs)
                if num_waits == 0:
                    if len(members) == 1:
                        launched = launched.clone()  # no collective made it anew, and autograd may pass it to others
                    call.show_to_hook(launched)
                self._in_flight.append((members, specs, launched, call))

    @property
    def replicates(self) -> bool:
        """Whether another collective follows, over the replicas."""
        return any(specs[0].num_replicas > 1 for _, specs, _, _ in self._in_flight)

    def advance(self) -> None:
        """Start the reduction over the replicas, where there are any."""
        if self.has_advanced:
            return
        with torch.no_grad(), streams.Aside(self._stream):
            self._in_flight = [
                (members, specs, lower.launch_all_reduce(call, launched, specs), call)
                for members, specs, launched, call in self._in_flight
            ]
        self.has_advanced = True

    def finish(self) -> dict[int, Tensor]:
        """Wait, and return the gradients of the local shards by index of the parameter, without those still partial."""
        self.advance()
        reduced: dict[int, Tensor] = {}
        with torch.no_grad(), streams.Aside(self._stream) as aside:
            for members, specs, launched, call in self._in_flight:
                reduced.update(zip(members, lower.finish_all_reduce(call, launched, specs)))
            self._in_flight = []
            if self._replicated_later:
                reduced = self._over_replicas(reduced)
        aside.join()
        return reduced

    def complete(self) -> None:
        """Wait, and give the shards their gradients."""
        for index, local in self.finish().items():
            deliver(self.gathered, index, local, self.more_come)

    def _spec(self, spec: ParamSpec) -> ParamSpec:
        twin = self.gathered.unit.settings.reduce_groups.get(spec.group)
        if twin is not None:
            spec = dataclasses.replace(spec, group=twin)
        # The rest is done once partial sums are complete.
        return spec.over_shards() if self._replicated_later and spec.num_replicas > 1 else spec

    def _over_replicas(self, reduced: dict[int, Tensor]) -> dict[int, Tensor]:
        accumulation = self.gathered.unit.accumulation
        held = accumulation.held
        done: dict[int, Tensor] = {}
        partial: dict[int, Tensor] = {}
        for index, local in reduced.items():
            (partial if self.gathered.specs[index].num_replicas > 1 else done)[index] = local
        for fqn in [fqn for fqn in held.partials if self._fqns is None or fqn in self._fqns]:
            index = self.gathered.index[fqn]
            waited = held.partials.pop(fqn)
            held.note(fqn, is_there=True)
            if index in partial:
                waited = _sum(waited, partial[index], self.gathered.asks_for_any_dtype(index))
            partial[index] = waited
        if not accumulation.all_reduce:
            for index, local in partial.items():
                fqn = self.gathered.params[index].fqn
                if index in reduced:
                    held.note(fqn, is_there=False)
                held.partials[fqn] = local
            return done
        done.update(self._all_reduced(partial))
        return done

    def _all_reduced(self, partial: dict[int, Tensor]) -> dict[int, Tensor]:
        """Sum partial sums over the replicas, with one collective per mesh, dtype and divisor."""
        by_key: dict[tuple[object, ...], list[int]] = {}
        specs = {index: _over_replicas_alone(self.gathered.spec_for(index, partial[index])) for index in partial}
        for index in sorted(partial):
            spec = specs[index]
            key = (spec.replicate_group, partial[index].dtype, spec.reduce_op, spec.postdivide)
            by_key.setdefault(key, []).append(index)
        done: dict[int, Tensor] = {}
        for members in by_key.values():
            call, sent = Caller(self.gathered.unit, num_waits_before_hook=1), [specs[index] for index in members]
            launched = lower.launch_reduce(call, [partial[index] for index in members], sent)
            done.update(zip(members, lower.finish_reduce(call, launched, sent)))
        return done


def _over_replicas_alone(spec: ParamSpec) -> ParamSpec:
    """Return the spec with which a shard's sum over the ranks that shard the parameter is reduced over its replicas."""
    return dataclasses.replace(spec, size=spec.local_size, num_shards=1, predivide=1.0)


def deliver(gathered: Gathered, index: int, local: Tensor, more_come: bool = False) -> None:
    """Give a shard its gradient; with ``more_come``, a shard with hooks waits for the gradients of its other uses."""
    shard, fqn, held = gathered.shards[index], gathered.params[index].fqn, gathered.unit.accumulation.held
    waiting = held.for_hooks
    if fqn in waiting:
        before, local = (brought_to(shard, one, read_at_once=True) for one in (waiting.pop(fqn), local))
        local = _sum(before, local, gathered.asks_for_any_dtype(index))
    if more_come and any(autograd.hooks_of(shard)):
        waiting[fqn] = local
        return
    if autograd.tensor_hooks(shard):
        give_through_hooks(fqn, shard, local)
    else:
        give(shard, local)
    held.note_arrival(fqn)


class Traffic:
    """The reductions in flight, oldest first: the first may have advanced to its sum over the replicas."""

    def __init__(self) -> None:
        self._reductions: deque[Reduction] = deque()

    def reduce(
        self, gathered: Gathered, grads: Mapping[int, Tensor], cap: int, begun: Reduction | None = None
    ) -> Reduction:
        """Add to the reduction that was ``begun``, if none came after it; else start one, once ``cap`` allows it.

        Fewer than ``cap`` sums over shards are in flight when another one starts. Return what has the gradients.
        """
        over_shards = [one for one in self._reductions if not one.has_advanced]
        if begun is not None and over_shards and over_shards[-1] is begun:
            begun.add(grads)
            return begun
        while len(over_shards) >= cap:
            oldest = over_shards.pop(0)
            oldest.advance()
            while self._reductions[0] is not oldest:
                self._reductions.popleft().complete()
            if not oldest.replicates:
                self._reductions.popleft().complete()
        self._reductions.append(Reduction(gathered, grads))
        return self._reductions[-1]

    def finish(self) -> None:
        """Wait for all reductions, and give the shards their gradients."""
        while self._reductions:
            self._reductions.popleft().complete()
        streams.wait_on_cpu()

    def forget(self, units: Collection[Unit]) -> None:
        """After an error, wait for the reductions of ``units`` that are in flight, and drop their gradients."""
        for reduction in [one for one in self._reductions if one.gathered.unit in units]:
            reduction.finish()
            self._reductions.remove(reduction)
