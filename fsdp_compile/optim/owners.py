"""Share sharded tensors out over their ranks, for a computation that needs each of them whole.

            parts           owners have wholes           parts of the results
    rank 0  a0 b0   ----->  a0 a1   compute(a)   ----->  r(a)0 r(b)0
    rank 1  a1 b1   ----->  b0 b1   compute(b)   ----->  r(a)1 r(b)1

Each tensor has one owner among all ranks of its mesh, replicas included, so that no two ranks compute the same. The
tensors travel in buckets: the parts of the next bucket are on their way while the owners compute, and results are on
their way back. Every rank works out the same table from shapes and placements alone.

What an owner holds from one step to the next is cut into rows for a checkpoint (``publish``), for any number of ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .._torch_compat import dtensors
from ..core.containers import map_tensors
from ..core.mesh import device_of_type
from ..core.parts import Part, cut_dims, group_over, part_at, ranks_beside

# Computes the results of the tensors at these places, from their wholes, input by input; each has its tensor's shape.
Compute = Callable[..., Sequence[Tensor]]

_BUCKET_ELEMENTS = 8 << 20  # that one rank sends of a bucket; a bucket has at least a tensor for each rank


class Owners:
    """Who owns which of ``params``; ``cost`` weighs a shape, so that every rank gets an equal share of the work.

    All ranks make this together, and copy it together. ``mine`` has the places of those that this rank owns.
    """

    def __init__(self, params: Sequence[Tensor], cost: Callable[[torch.Size], float] = torch.Size.numel) -> None:
        self.params, self._cost = params, cost
        on_mesh: dict[DeviceMesh, list[int]] = {}
        self._whole: dict[int, torch.device] = {}  # tensors that each rank has whole, and computes itself, and where
        for place, param in enumerate(params):
            if isinstance(param, DTensor) and param.device_mesh.size() > 1:
                on_mesh.setdefault(param.device_mesh, []).append(place)
            else:
                self._whole[place] = owners_device(param)
        self._meshes = [
            _OnMesh(mesh, {place: params[place] for place in places}, cost) for mesh, places in on_mesh.items()
        ]
        self.mine = sorted([*self._whole, *(place for mesh in self._meshes for place in mesh.mine)])

    def __reduce__(self) -> Any:
        return Owners, (self.params, self._cost)  # a copy is made anew, of copied parameters

    def run(self, compute: Compute, *inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return this rank's parts of what the owners compute.

        Each input has this rank's part of a tensor for each of ``params``, or None, for which the result is None. All
        ranks call this together, with parts of the same tensors. Each rank calls ``compute(places, *wholes)`` once a
        bucket, with those tensors that it owns. A result gets the dtype and device of its part in the first input.
        """
        results: list[Tensor | None] = [None] * len(inputs[0])
        given: dict[int, Any] = {
            place: [one[place] for one in inputs] for place, part in enumerate(inputs[0]) if part is not None
        }
        whole = [place for place in self._whole if place in given]
        if whole:
            wholes = zip(*([part.to(self._whole[place]) for part in given[place]] for place in whole))
            for place, result in zip(whole, compute(whole, *wholes), strict=True):
                results[place] = result.to(given[place][0])
        for mesh in self._meshes:
            for place, result in mesh.run(given, compute):
                results[place] = result
        return results

    def publish(self, held: Mapping[int, Any]) -> dict[int, Any]:
        """Return on every rank what the owners hold, by place, as a state dict may have it.

        A rank gives what it holds at places that are its own: numbers, tensors, and lists, tuples and dicts of them. Of
        a tensor that one rank holds, each rank gets a DTensor, cut into rows over all ranks of the mesh. All ranks call
        this together.
        """
        published = {place: held[place] for place in self._whole if place in held}
        for mesh in self._meshes:
            published |= mesh.publish({place: held[place] for place in mesh.mine if place in held})
        return published


def owners_device(param: Tensor) -> torch.device:
    """Return where a parameter's owner computes, which is not the CPU if the shards are offloaded."""
    return device_of_type(param.device_mesh.device_type) if isinstance(param, DTensor) else param.device


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
        self._mesh, self._device = mesh, device_of_type(mesh.device_type)
        self._group = group_over(mesh, range(mesh.ndim))
        ranks = dist.get_process_group_ranks(self._group)
        self._rank, self._num_ranks = ranks.index(dist.get_rank()), len(ranks)
        at = ranks_beside(dist.get_rank(), mesh, range(mesh.ndim))
        self._coordinates = [at[rank] for rank in ranks]
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
            parts = tuple(part_at(mesh, param.placements, param.shape, at) for at in self._coordinates)
            senders = ranks_beside(ranks[owner], mesh, cut_dims(mesh, param.placements))
            self._buckets[-1][place] = _Shared(param.shape, owner, parts, frozenset(map(ranks.index, senders)))
        self.mine = [
            place for bucket in self._buckets for place, shared in bucket.items() if shared.owner == self._rank
        ]

    def run(self, given: Mapping[int, Sequence[Tensor]], compute: Compute) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's part of each result, with the place of its tensor; ``given`` has parts, input by input."""
        present = [{place: shared for place, shared in one.items() if place in given} for one in self._buckets]
        buckets = [bucket for bucket in present if bucket]
        going = [self._to_owners(bucket, given) for bucket in buckets[:1]]
        returning = []
        for bucket, following in itertools.zip_longest(buckets, buckets[1:]):
            if following is not None:
                going.append(self._to_owners(following, given))
            wholes = self._wholes(bucket, going.pop(0), given)
            results = compute([*wholes], *zip(*wholes.values())) if wholes else []
            typed = [result.to(given[place][0].dtype) for place, result in zip(wholes, results, strict=True)]
            returning.append(self._to_holders(bucket, dict(zip(wholes, typed)), given))
        for bucket, flight in zip(buckets, returning):
            # They arrive owner by owner.
            arriving = sorted(bucket, key=lambda place: bucket[place].owner)
            lengths = [(bucket[place].numel(self._rank), given[place][0].dtype) for place in arriving]
            for place, piece in zip(arriving, flight.land(lengths)):
                yield place, piece.view(given[place][0].shape).to(given[place][0].device)

    def publish(self, held: Mapping[int, Any]) -> dict[int, Any]:
        described: list[Any] = [None] * self._num_ranks
        shapes = {
            place: map_tensors(value, lambda one: one.to("meta") if one.ndim else one.cpu())
            for place, value in held.items()
        }
        dist.all_gather_object(described, shapes, self._group)
        published = {}
        for owner, places in enumerate(described):
            for place, shapes in places.items():
                value = held[place] if owner == self._rank else shapes
                published[place] = map_tensors(value, functools.partial(self._in_rows, owner))
        return published

    def _in_rows(self, owner: int, tensor: Tensor) -> Tensor:
        """Return a tensor of one rank, which is on meta elsewhere, cut into rows over all, or a number as it is."""
        if not tensor.ndim:
            return tensor
        size, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
        placements = (Shard(0),) * self._mesh.ndim
        parts = [part_at(self._mesh, placements, size, at) for at in self._coordinates]
        shared = _Shared(size, owner, tuple(parts), frozenset())
        received = [0] * self._num_ranks
        received[owner] = shared.numel(self._rank) * tensor.itemsize
        flight = self._launch([[tensor[part]] if owner == self._rank else [] for part in parts], received)
        [piece] = flight.land([(shared.numel(self._rank), tensor.dtype)])
        rows = [one.stop - one.start for one in parts[self._rank]]
        return dtensors.dtensor_of(piece.view(rows), self._mesh, placements, size, stride)

    def _to_owners(self, bucket: dict[int, _Shared], given: Mapping[int, Sequence[Tensor]]) -> _Flight:
        sent: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        received = [0] * self._num_ranks
        for place, shared in bucket.items():
            if self._rank in shared.senders:
                sent[shared.owner].extend(given[place])
            if shared.owner == self._rank:
                for rank in shared.senders:
                    received[rank] += shared.numel(rank) * sum(part.itemsize for part in given[place])
        return self._launch(sent, received)

    def _wholes(
        self, bucket: dict[int, _Shared], flight: _Flight, given: Mapping[int, Sequence[Tensor]]
    ) -> dict[int, list[Tensor]]:
        """Put the tensors that this rank owns together, from the parts that arrive rank by rank."""
        owned = {place: shared for place, shared in bucket.items() if shared.owner == self._rank}
        wholes = {
            place: [torch.empty(shared.size, dtype=part.dtype, device=self._device) for part in given[place]]
            for place, shared in owned.items()
        }
        arriving = [
            (whole, shared.parts[rank], shared.numel(rank))
            for rank in range(self._num_ranks)
            for place, shared in owned.items()
            if rank in shared.senders
            for whole in wholes[place]
        ]
        pieces = flight.land([(numel, whole.dtype) for whole, _, numel in arriving])
        for (whole, part, _), piece in zip(arriving, pieces):
            whole[part].copy_(piece.view(whole[part].shape))
        return wholes

    def _to_holders(
        self, bucket: dict[int, _Shared], results: dict[int, Tensor], given: Mapping[int, Sequence[Tensor]]
    ) -> _Flight:
        sent = [
            [result[bucket[place].parts[rank]] for place, result in results.items()] for rank in range(self._num_ranks)
        ]
        received = [0] * self._num_ranks
        for place, shared in bucket.items():
            received[shared.owner] += shared.numel(self._rank) * given[place][0].itemsize
        return self._launch(sent, received)

    def _launch(self, sent: Sequence[Sequence[Tensor]], received: list[int]) -> _Flight:
        """Send tensors to each rank; they travel as bytes, so that dtypes may differ."""
        flat = [[_bytes(one.to(self._device)) for one in to_rank] for to_rank in sent]
        counts = [sum(map(len, to_rank)) for to_rank in flat]
        none = torch.empty(0, dtype=torch.uint8, device=self._device)
        out = torch.cat([none, *itertools.chain(*flat)])
        arrived = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        work = dist.all_to_all_single(arrived, out, received, counts, self._group, async_op=True)
        return _Flight(arrived, out, work)


@dataclass
class _Flight:
    """An exchange on its way."""

    arrived: Tensor
    sent: Tensor  # lives until the exchange is over
    work: Any

    def land(self, lengths: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Wait for the exchange, and return what arrived as tensors of these numbers of elements and dtypes."""
        self.work.wait()
        pieces = self.arrived.split([numel * dtype.itemsize for numel, dtype in lengths])
        return [
            (piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()).view(dtype)
            for piece, (_, dtype) in zip(pieces, lengths)
        ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
