"""Tensors become whole from the parts that ranks have: windows of a few bytes, the next on its way while one is used.

    even parts, in order    one slab: what arrives is the whole
    other parts             slabs of some rows of every part, as many rows of each; they are copied into the whole
    in pieces               the same for some rows of the whole, which may be on a few ranks alone
    window                  slabs, one behind the other; small ones of one group, dtype and destination travel packed

    to all ranks            one all-gather, padded to the longest part. If padding would double the bytes, each rank
                            that has a part broadcasts it
    to one rank             one all-to-all, in which only that rank receives

All of it follows from shapes, dtypes and placements, so every rank launches the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._torch_compat import dtensors, process_groups, subclasses
from ..core.mesh import device_of_type
from ..core.parts import Part, cut_dims, group_over, inside, local_of, parts_of_whole

_ALONE_BYTES = 1 << 20  # from which on a slab travels alone: packing it takes longer than a launch
_WINDOW_BYTES = 64 << 20  # of full tensors on their way at a time, if nobody says how many


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor that becomes whole on all ranks or on ``dst`` alone, and what this rank has of it."""

    names: tuple[str, ...]  # several if it is tied
    shape: torch.Size
    dtype: torch.dtype  # in which it travels
    local: Tensor
    device: torch.device  # where it becomes whole
    dst: int | None = None
    parts: Mapping[int, Part] = field(default_factory=dict)  # by rank, of those that send; none if ``local`` is whole
    group: dist.ProcessGroup | None = None
    make: Callable[[], Tensor] | None = None  # what is taken in place of ``local``; all ranks call it together
    has_changed: Callable[[], bool] = lambda: False  # whether it was written to since

    @property
    def is_here(self) -> bool:
        return self.dst in (None, this_rank())

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def slabs(self, most: int, in_pieces: bool) -> Iterator[Slab]:
        """Cut it into slabs of at most ``most`` bytes, or of one row of each part, unless it arrives as it is."""
        num_rows = self.shape[0] if self.shape else 1
        row_bytes = self.num_bytes // max(num_rows, 1)
        step = max(1, most // max(row_bytes, 1)) if in_pieces and not self.make else max(num_rows, 1)
        for first in range(0, max(num_rows, 1), step):
            piece = range(first, min(first + step, num_rows))
            rows = {rank: _overlap(part[0], piece) for rank, part in self.parts.items()}
            longest = max(map(len, rows.values()), default=0)
            stride = max(1, longest * min(most, len(piece) * row_bytes) // max(len(piece) * row_bytes, 1))
            if stride < longest and Slab(self, piece, rows, is_last=True).is_in_order([*rows]):
                stride = longest
            for start in range(0, max(longest, 1), stride):
                some = {rank: own[start : start + stride] for rank, own in rows.items()}
                yield Slab(self, piece, some, is_last=start + stride >= longest)

    def own_rows(self, rows: range) -> Tensor:
        """Return these rows of the whole, which are in this rank's part."""
        first = self.parts[this_rank()][0].start if self.parts else 0
        return self.local[rows.start - first : rows.stop - first] if rows else self.local[:0]


def _overlap(one: slice, piece: range) -> range:
    start = max(one.start, piece.start)
    return range(start, max(start, min(one.stop, piece.stop)))


def cast_to(dtype: torch.dtype | None, tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor after a cast to ``dtype``, which leaves integers as they are."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def as_whole(
    names: Sequence[str],
    tensor: Tensor,
    dtype: torch.dtype | None = None,
    dst: int | None = None,
    make: Callable[[], Tensor] | None = None,
    made_of: Sequence[Tensor] = (),
) -> Whole:
    """Return how a tensor becomes whole; ``dtype`` casts it before it is sent."""
    cast, sources = cast_to(dtype, tensor), made_of or [tensor]
    before = [*map(dtensors.versions_of, sources)]

    def has_changed() -> bool:
        return before != [*map(dtensors.versions_of, sources)]

    whole = functools.partial(Whole, tuple(names), tensor.shape, cast, dst=dst, make=make, has_changed=has_changed)
    if make is not None or not isinstance(tensor, DTensor):
        return whole(tensor.detach(), tensor.device)
    known = [type(one) in (Shard, Replicate, dtensors.StridedShard) for one in tensor.placements]
    local = inside(dtensors.local_tensor(tensor).detach())
    if not all(known) or type(local) is not Tensor:
        raise NotImplementedError(
            f"{names[0]} is a {type(local).__name__} with placements {tensor.placements}. Only parts of plain tensors "
            "become whole by putting them together. Leave it out, or convert it before."
        )
    mesh = tensor.device_mesh
    device = device_of_type(mesh.device_type)
    cut = cut_dims(mesh, tensor.placements)
    if not cut:
        return whole(local, device)
    group = group_over(mesh, cut)  # made by all ranks, whoever sends
    # ``dst`` may be on another mesh, with parameters of the same names: then nobody sends here.
    sends = this_rank() if dst is None or dst not in mesh.mesh else dst
    parts = parts_of_whole(mesh, tensor.placements, tensor.shape, sends)
    return whole(local, device, parts=parts, group=group)


def gathered(named: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """Yield a copy of each tensor as a whole, on its mesh's device; all ranks read this together, and each gets it."""
    windows = windows_of([as_whole([name], tensor) for name, tensor in named], _WINDOW_BYTES, in_pieces=False)
    for slab, made in landed(list(windows), 2 * _WINDOW_BYTES):
        assert made is not None
        full = made.to(slab.whole.device)
        yield full.clone() if subclasses.share_storage(full, slab.whole.local) else full
        del made, full  # before the next one is there


@torch.no_grad()
def send_values(tensor: Tensor, src: int, group: dist.ProcessGroup | None) -> None:
    """Give a tensor on all ranks of a group the values that it has on the group's rank ``src``."""
    local = inside(local_of(tensor))
    accelerator = torch.accelerator.current_accelerator()
    by_accelerator = local.device.type == "cpu" and accelerator is not None and not process_groups.takes_cpu(group)
    sent = (local.to(accelerator) if by_accelerator else local).contiguous()
    if sent.numel():
        dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=src)  # whatever dtypes backends know
    if sent.data_ptr() != local.data_ptr():
        local.copy_(sent)


@dataclass(frozen=True, eq=False)
class Slab:
    """Rows of each rank's part that travel at once, towards a piece of the whole."""

    whole: Whole
    piece: range  # rows of the whole; all of them, unless it comes in pieces
    rows: Mapping[int, range]  # by rank, as rows of the whole
    is_last: bool  # of its piece

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its piece."""
        return (len(self.piece), *self.whole.shape[1:]) if self.whole.shape else ()

    def numel(self, rank: int) -> int:
        return math.prod([len(self.rows[rank]), *(one.stop - one.start for one in self.whole.parts[rank][1:])])

    @property
    def num_bytes(self) -> int:
        """What arrives, padding included."""
        lengths = [self.numel(rank) for rank in self.rows]
        numel = max(lengths) * len(lengths) if _is_padded(lengths) else sum(lengths)
        return numel * self.whole.dtype.itemsize

    def is_in_order(self, ranks: Sequence[int]) -> bool:
        """Whether the parts of these ranks, one behind the other, are its piece."""
        starts = [self.rows[rank].start for rank in ranks]
        numel, num_rows = math.prod(self.shape), len(self.piece) // len(ranks)
        is_cut_evenly = all(self.numel(rank) * len(ranks) == numel for rank in ranks)
        return is_cut_evenly and starts == [*range(self.piece.start, self.piece.stop, max(num_rows, 1))]

    def place(self, made: Tensor, rank: int) -> Tensor:
        """Return where the rows of ``rank`` belong in the piece."""
        rows, first = self.rows[rank], self.piece.start
        place = slice(rows.start - first, rows.stop - first), *self.whole.parts[rank][1:]
        return made[place]


def _is_padded(lengths: Sequence[int]) -> bool:
    """Whether parts of these lengths are padded to the longest one: not if that would double what travels."""
    return max(lengths, default=0) * len(lengths) < 2 * sum(lengths)


def windows_of(wholes: Iterable[Whole], most: int, in_pieces: bool) -> Iterator[list[Slab]]:
    """Yield the slabs in lists, in order. A list has slabs of at most ``most`` bytes together, or one larger slab."""
    window: list[Slab] = []
    filled = 0
    for slab in (slab for whole in wholes for slab in whole.slabs(most, in_pieces)):
        if window and filled + slab.num_bytes > most:
            yield window
            window, filled = [], 0
        window.append(slab)
        filled += slab.num_bytes
    if window:
        yield window


@torch.no_grad()
def landed(
    windows: Sequence[Sequence[Slab]], most: int, ask: Callable[[], None] = lambda: None
) -> Iterator[tuple[Slab, Tensor | None]]:
    """Yield tensors that became whole, or their pieces; None where they are not sent. ``ask`` runs before a launch.

    While the caller uses one window, the next one is on its way, if the two have at most ``most`` bytes together.
    """
    flights: list[WindowInFlight] = []
    made: Tensor | None = None
    sizes = [sum(slab.num_bytes for slab in window) for window in windows]
    try:
        for number, window in enumerate(windows):
            end = number + 2 if sum(sizes[number : number + 2]) <= most else number + 1
            for launched in windows[number + len(flights) : end]:
                ask()
                flights.append(WindowInFlight(launched))
            flights[0].wait()
            for slab in window:
                if slab.whole.is_here or slab.whole.make is not None:
                    made = flights[0].put(slab, made)
                if slab.is_last:
                    whole, made = made if slab.whole.is_here else None, None
                    yield slab, whole
                    del whole  # before the next one is made
            del flights[0]
    finally:
        for flight in flights:  # it lands, as it does on the other ranks
            flight.wait()


class WindowInFlight:
    """A window on its way."""

    def __init__(self, window: Sequence[Slab]) -> None:
        self._arriving: dict[int, dict[int, Tensor]] = {}  # by the slab's id, what comes from each rank
        self._whole: dict[int, Tensor] = {}  # by the slab's id, what arrives as the piece that it makes
        self._works: list[Any] = []
        together: dict[Any, list[Slab]] = {}
        for slab in window:
            dst = slab.whole.dst
            if this_rank() in slab.rows and (dst is None or dst in slab.rows):
                alone = slab if slab.num_bytes >= _ALONE_BYTES else None
                key = slab.whole.group, slab.whole.dtype, dst, tuple(slab.rows), alone
                together.setdefault(key, []).append(slab)
        self._sent = [self._launch(slabs) for slabs in together.values()]  # lives until it is sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []

    def put(self, slab: Slab, made: Tensor | None) -> Tensor:
        """Write a slab into its piece, which the first one makes; return the piece."""
        whole = slab.whole
        if whole.make is not None:
            return whole.make().to(whole.dtype)
        if not whole.parts:
            return (whole.own_rows(slab.piece) if whole.shape else whole.local).to(whole.dtype)
        if id(slab) in self._whole:
            return self._whole.pop(id(slab)).view(slab.shape)
        if made is None:
            made = torch.empty(slab.shape, dtype=whole.dtype, device=whole.device)
        for rank, came in self._arriving.pop(id(slab), {}).items():
            place = slab.place(made, rank)
            place.copy_(came.view(place.shape))
        return made

    def _launch(self, slabs: list[Slab]) -> Tensor:
        whole, rank = slabs[0].whole, this_rank()
        assert whole.group is not None
        ranks = dist.get_process_group_ranks(whole.group)
        lengths = [sum(slab.numel(one) for slab in slabs) for one in ranks]

        empty = functools.partial(torch.empty, dtype=whole.dtype, device=whole.device)

        def start(collective: Any, *tensors: Tensor, **settings: Any) -> None:
            as_bytes = [one.view(torch.uint8) for one in tensors]  # whatever dtypes the backend knows
            self._works.append(collective(*as_bytes, group=whole.group, async_op=True, **settings))

        longest, total = max(lengths), sum(lengths)
        is_padded = whole.dst is None and _is_padded(lengths)
        own = [slab.whole.own_rows(slab.rows[rank]) for slab in slabs]
        flat = [part.to(whole.device, whole.dtype).reshape(-1) for part in own]
        padding = (longest if is_padded else lengths[ranks.index(rank)]) - sum(map(len, flat))
        sent = flat[0] if len(flat) == 1 and not padding else torch.cat([*flat, empty(padding)])
        arrived: Sequence[Tensor]
        if total == 0:
            return sent
        if is_padded:
            every = empty(longest * len(ranks))
            start(dist.all_gather_into_tensor, every, sent)
            arrived = [one[:length] for one, length in zip(every.split(longest), lengths)]
        elif whole.dst is None:
            arrived = [sent if one == rank else empty(length) for one, length in zip(ranks, lengths)]
            for one, tensor in zip(ranks, arrived):
                if tensor.numel():
                    start(dist.broadcast, tensor, src=one)
        else:
            itemsize = whole.dtype.itemsize
            received = [length * itemsize if whole.is_here else 0 for length in lengths]
            sends = [sent.nbytes if one == whole.dst else 0 for one in ranks]
            every = empty(sum(received) // itemsize)
            start(dist.all_to_all_single, every, sent, output_split_sizes=received, input_split_sizes=sends)
            arrived = every.split(lengths) if whole.is_here else []
        if len(slabs) == 1 and slabs[0].is_in_order(ranks):  # so the parts are of one length, and in one tensor
            self._whole[id(slabs[0])] = every
            return sent
        for one, tensor in zip(ranks, arrived):
            for slab, came in zip(slabs, tensor.split([slab.numel(one) for slab in slabs])):
                self._arriving.setdefault(id(slab), {})[one] = came
        return sent
