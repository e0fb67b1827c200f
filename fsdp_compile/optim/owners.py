"""Share sharded tensors out over their ranks, for a computation that needs each of them whole.

            parts           owners have wholes           parts of the results
    rank 0  a0 b0   ----->  a0 a1   compute(a)   ----->  r(a)0 r(b)0
    rank 1  a1 b1   ----->  b0 b1   compute(b)   ----->  r(a)1 r(b)1

Each tensor has one owner among all ranks of its mesh, replicas included, so that no two ranks compute the same. The
tensors travel in buckets: the parts of the next bucket are on their way while the owners compute, and results are on
their way back. Every rank works out the same table from shapes and placements alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..core.mesh import device_of_type
from ..core.parts import Part, coordinate_of, group_over, holders, part_at

# Computes the results of the tensors at these places; each result has its tensor's shape.
Compute = Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor]]

_BUCKET_ELEMENTS = 8 << 20  # that one rank sends of a bucket; a bucket has at least a tensor for each rank


class Owners:
    """Who owns which of ``params``; ``cost`` weighs a shape, so that every rank gets an equal share of the work."""

    def __init__(self, params: Sequence[Tensor], cost: Callable[[torch.Size], float] = torch.Size.numel) -> None:
        on_mesh: dict[DeviceMesh, list[int]] = {}
        self._whole: list[int] = []  # tensors that each rank has whole, and computes itself
        for place, param in enumerate(params):
            if isinstance(param, DTensor) and param.device_mesh.size() > 1:
                on_mesh.setdefault(param.device_mesh, []).append(place)
            else:
                self._whole.append(place)
        self._meshes = [
            _OnMesh(mesh, {place: params[place] for place in places}, cost) for mesh, places in on_mesh.items()
        ]

    def run(self, parts: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        """Return this rank's parts of what the owners compute; ``parts`` are local tensors of one dtype, in order.

        All ranks call this together. Each rank calls ``compute`` once a bucket, with those tensors that it owns.
        """
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            raise ValueError(f"Owners exchange tensors of one dtype, not of {dtypes}. Cast them first.")
        results: list[Any] = list(parts)
        if self._whole:
            computed = compute(self._whole, [parts[place] for place in self._whole])
            for place, result in zip(self._whole, computed):
                results[place] = result
        for mesh in self._meshes:
            for place, result in mesh.run(parts, compute):
                results[place] = result
        return results


@dataclass(frozen=True)
class _Shared:
    """A tensor, and which part of it each rank of the group holds."""

    size: torch.Size
    owner: int
    parts: tuple[Part, ...]
    senders: frozenset[int]  # ranks whose parts make up the whole, of the replica that the owner is in

    def numel(self, rank: int) -> int:
        return math.prod(one.stop - one.start for one in self.parts[rank])


class _OnMesh:
    """The tensors of one mesh, in buckets."""

    def __init__(self, mesh: DeviceMesh, params: dict[int, Tensor], cost: Callable[[torch.Size], float]) -> None:
        self._device = device_of_type(mesh.device_type)
        self._group = group_over(mesh, range(mesh.ndim))
        ranks = dist.get_process_group_ranks(self._group)
        self._rank, self._num_ranks = ranks.index(dist.get_rank()), len(ranks)
        coordinates = [coordinate_of(mesh, rank) for rank in ranks]
        load = [0.0] * len(ranks)
        self._buckets: list[dict[int, _Shared]] = []
        limit, elements = _BUCKET_ELEMENTS * len(ranks), 0
        # The most expensive first, each to the rank that has the least to do.
        for place in sorted(params, key=lambda place: -cost(params[place].shape)):
            param = params[place]
            assert isinstance(param, DTensor)
            owner = load.index(min(load))
            load[owner] += cost(param.shape)
            if not self._buckets or (elements >= limit and len(self._buckets[-1]) % len(ranks) == 0):
                self._buckets.append({})
                elements = 0
            elements += param.numel()
            parts = tuple(part_at(param, at) for at in coordinates)
            senders = frozenset(ranks.index(rank) for rank in holders(param, ranks[owner]))
            self._buckets[-1][place] = _Shared(param.shape, owner, parts, senders)

    def run(self, parts: Sequence[Tensor], compute: Compute) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's part of each result, with the place of its tensor."""
        going = [self._to_owners(self._buckets[0], parts)]
        returning = []
        for bucket, following in itertools.zip_longest(self._buckets, self._buckets[1:]):
            if following is not None:
                going.append(self._to_owners(following, parts))
            wholes = self._wholes(bucket, going.pop(0))
            results = compute([*wholes], [*wholes.values()]) if wholes else []
            returning.append(self._to_holders(bucket, dict(zip(wholes, results, strict=True)), parts[0].dtype))
        for bucket, flight in zip(self._buckets, returning):
            # They arrive owner by owner.
            arriving = sorted(bucket, key=lambda place: bucket[place].owner)
            pieces = flight.land([bucket[place].numel(self._rank) for place in arriving])
            for place, piece in zip(arriving, pieces):
                yield place, piece.view(parts[place].shape).to(parts[place].device)

    def _to_owners(self, bucket: dict[int, _Shared], parts: Sequence[Tensor]) -> _Flight:
        sent: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        received = [0] * self._num_ranks
        for place, shared in bucket.items():
            if self._rank in shared.senders:
                sent[shared.owner].append(parts[place])
            if shared.owner == self._rank:
                for rank in shared.senders:
                    received[rank] += shared.numel(rank)
        return self._launch(sent, received, parts[0].dtype)

    def _wholes(self, bucket: dict[int, _Shared], flight: _Flight) -> dict[int, Tensor]:
        """Put the tensors that this rank owns together, from the parts that arrive rank by rank."""
        owned = {place: shared for place, shared in bucket.items() if shared.owner == self._rank}
        wholes = {
            place: torch.empty(shared.size, dtype=flight.arrived.dtype, device=self._device)
            for place, shared in owned.items()
        }
        arriving = [
            (place, rank) for rank in range(self._num_ranks) for place in owned if rank in owned[place].senders
        ]
        pieces = flight.land([owned[place].numel(rank) for place, rank in arriving])
        for (place, rank), piece in zip(arriving, pieces):
            part = wholes[place][owned[place].parts[rank]]
            part.copy_(piece.view(part.shape))
        return wholes

    def _to_holders(self, bucket: dict[int, _Shared], results: dict[int, Tensor], dtype: torch.dtype) -> _Flight:
        sent = [
            [result[bucket[place].parts[rank]] for place, result in results.items()] for rank in range(self._num_ranks)
        ]
        received = [0] * self._num_ranks
        for shared in bucket.values():
            received[shared.owner] += shared.numel(self._rank)
        return self._launch(sent, received, dtype)

    def _launch(self, sent: Sequence[Sequence[Tensor]], received: list[int], dtype: torch.dtype) -> _Flight:
        counts = [sum(one.numel() for one in to_rank) for to_rank in sent]
        flat = [one.to(self._device, dtype).reshape(-1) for to_rank in sent for one in to_rank]
        out = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)
        arrived = torch.empty(sum(received), dtype=dtype, device=self._device)
        work = dist.all_to_all_single(arrived, out, received, counts, self._group, async_op=True)
        return _Flight(arrived, out, work)


@dataclass
class _Flight:
    """An exchange on its way."""

    arrived: Tensor
    sent: Tensor  # lives until the exchange is over
    work: Any

    def land(self, lengths: Sequence[int]) -> Sequence[Tensor]:
        """Wait for the exchange, and return the tensor that arrived, cut into pieces of these lengths."""
        self.work.wait()
        return self.arrived.split(list(lengths))
