"""Streams the full weights of a sharded model, and loads them, with few of them in memory at a time.

    stream_full_params     shards --one window at a time--> wholes, one after another --> the caller
    load_full_params       wholes, from one rank or from each --this rank's part--> shards

    names                  those in the state dict of the model that was never sharded, without wrappers

Before a window is launched, ranks ask each other whether all of them still read the stream (together.py): if one left,
all end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.parts import write_part
from ..core.unit import saved_tensors, units_in
from ..passes.budget.budget import bytes_of
from . import adapters
from .exchange import Slab, Whole, as_whole, landed, send_values, this_rank, windows_of
from .fitting import require_module
from .full_params import require_shards
from .together import Ranks

_LOADED_BYTES = 64 << 20  # of full tensors that one rank sends at a time


def stream_full_params(
    model: nn.Module,
    *,
    max_bytes: int | str = "256MiB",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: Sequence[str] | None = None,
    dst: int | None = None,
    pieces: bool = False,
    merge_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the names and full tensors of ``model``; no rank holds more than ``max_bytes`` of them.

    for name, tensor in stream_full_params(model, dtype=torch.bfloat16):
        engine.load_weights([(name, tensor)])

    These are the parameters, and the buffers that are saved, under the names of the model that was never sharded. Tied
    ones are gathered once, and the same tensor comes under each of their names. What one rank has all of, as in a model
    on a single rank, comes as it is, and shares the model's memory unless it is cast.

    **max_bytes** counts the tensor that the caller has, the next one, and what is on its way, which takes half of it.
    So a parameter of more than a quarter takes more; with **pieces**, it comes in pieces along dim 0 instead, of a row
    or more, one after another under its name. **dtype** casts floating-point tensors before they are sent. **device**
    is where tensors go, by default where they are gathered. **names** chooses some, in an order of their own. With
    **dst**, that rank alone gets values, and they are sent to it alone; tensors of other ranks are on the meta device.
    With **merge_adapters**, a model of PEFT comes as its base model, with its active adapters merged. The model itself
    stays as it is. Weights with an adapter are gathered on all ranks, whole, one at a time.

    Every rank must call this between steps, with the same arguments, and read all of the stream before the next step.
    If a rank leaves its loop early, the ranks that read on raise. A rank has left when Python closes the iterator, so
    iterate over the call itself.
    """
    require_module("stream_full_params", model)
    ranks = Ranks.of(model, "stream_full_params")
    with ranks.raise_together():
        most = bytes_of("max_bytes", max_bytes)
        if dst is not None and (isinstance(dst, bool) or dst not in ranks.members):
            raise ValueError(f"stream_full_params: dst={dst!r} is none of the model's ranks, {ranks.members}.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"stream_full_params: dtype is {dtype!r}. Pass a floating-point dtype of torch.")
        require_shards(units_in(model), "stream weights")
        tensors, merges = saved_tensors(model), {}
        if merge_adapters:
            tensors, merges = adapters.merged_names(model, tensors), adapters.merges(model)
        wholes = [
            as_whole(some, tensor, dtype, dst, *merges.get(id(tensor), ())) for some, tensor in _named(tensors, names)
        ]
    stream = stream_wholes(wholes, ranks, most, pieces)
    return _by_name(stream, None if device is None else torch.device(device))


def _named(tensors: Mapping[str, Tensor], names: Sequence[str] | None) -> list[tuple[list[str], Tensor]]:
    """Return each tensor once, with the names under which it was asked for."""
    if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise TypeError(f"names is a {type(names).__name__}. Pass a list: its order is the same on all ranks.")
    missing = [name for name in names or () if name not in tensors]
    if missing:
        raise ValueError(f"names has {missing[0]}, which the model lacks. Its names are those of its state dict.")
    named: dict[int, list[str]] = {}
    for name in tensors if names is None else names:
        named.setdefault(id(tensors[name]), []).append(name)
    return [(some, tensors[some[0]]) for some in named.values()]


def _by_name(
    stream: Iterator[tuple[Slab, Tensor | None]], device: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    for slab, made in stream:
        whole = slab.whole
        if made is None:
            made = torch.empty(slab.shape, dtype=whole.dtype, device="meta")
        elif device is not None:
            made = made.to(device)
        for name in whole.names:
            yield name, made
        del made  # before the next one is there


def stream_wholes(
    wholes: Sequence[Whole], ranks: Ranks, max_bytes: int, in_pieces: bool = False
) -> Iterator[tuple[Slab, Tensor | None]]:
    """Return an iterator over tensors that became whole, or pieces of them; None where they are not sent."""
    half = max_bytes // 2  # for two windows, on their way or used; with two ranks, they send half as much as they bring
    windows = list(windows_of(wholes, half // 3, in_pieces))
    ranks.require_same(
        [[(one.whole.names, one.whole.dtype, one.whole.dst, one.piece, one.shape) for one in some] for some in windows]
    )
    stream = _stream(windows, half, ranks)
    next(stream)  # from here on, a stream that is dropped says so, though nobody read it
    return stream


def _stream(windows: list[list[Slab]], most: int, ranks: Ranks) -> Iterator[Any]:
    try:
        yield None
        for slab, made in landed(windows, most, ranks.ask):
            if slab.piece.start == 0 and slab.whole.has_changed():  # who reads pieces may write to those that came
                raise RuntimeError(
                    f"{ranks.function}: {slab.whole.names[0]} was written to while the stream was read, so what comes "
                    "would be of two steps. Read all of it between two steps."
                )
            yield slab, made
            del made  # before the next one is there
        ranks.ask()
    except BaseException:
        ranks.leave()
        raise
    ranks.part()


@torch.no_grad()
def load_full_params(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, src: int | None = None) -> list[str]:
    """Write full tensors into the shards of ``model``; return the names that did not come.

    load_full_params(model, stream_full_params(other))
    load_full_params(model, state_dict.items() if rank == 0 else (), src=0)

    **tensors** are pairs of a name and a full tensor, one after another; of pieces along dim 0, a name has several.
    Each rank passes all of them, and takes its own part; nothing is sent. With **src**, that rank alone passes them,
    and sends them to the others, some rows at a time. Values are cast to the parameters' dtype. One name of tied
    weights is enough. What does not come stays as it is. Every rank must call this between steps. If one rank raises,
    all do.
    """
    require_module("load_full_params", model)
    ranks = Ranks.of(model, "load_full_params")
    with ranks.raise_together():
        require_shards(units_in(model), "load weights")
        if src is not None and getattr(tensors, "gi_code", None) is _by_name.__code__:
            raise ValueError(
                f"load_full_params: with src={src}, that rank alone reads what it passes, and every rank must read a "
                "stream. Leave out src, and dst of the stream."
            )
        if src is not None and src not in ranks.members:
            raise ValueError(f"load_full_params: src={src!r} is none of the model's ranks, {ranks.members}.")
        found = saved_tensors(model)
        loader = Loader(found)
    ranks.require_same(([(name, one.shape) for name, one in found.items()], src))
    with ranks.raise_together():
        try:
            for name, value in tensors if src is None or ranks.group is None else _from_one(tensors, src, ranks):
                loader.write(name, value)
            loader.require_whole()
        except BaseException:
            ranks.end_others()  # so that no rank waits for this one in a stream that it was given
            raise
    if src is None:
        ranks.require_same(loader.missing)
    ranks.part()
    return loader.missing


class Loader:
    """Writes this rank's parts of full tensors, whole or piece by piece, into the tensors of a model."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._rows: dict[str, int] = {}  # that came, of tensors that come in pieces
        self._came: set[int] = set()

    @property
    def missing(self) -> list[str]:
        return [name for name, tensor in self._tensors.items() if id(tensor) not in self._came]

    def require_whole(self) -> None:
        """Raise for a tensor of which some rows came, and not the others."""
        for name, rows in self._rows.items():
            if rows:
                raise ValueError(
                    f"load_full_params: {rows} of the {self._tensors[name].shape[0]} rows of {name} came, and the "
                    "others did not. Pass full tensors, or all pieces along dim 0."
                )

    def write(self, name: str, value: Tensor) -> None:
        """Copy this rank's part of a full tensor, or of its next rows."""
        if name not in self._tensors:
            raise ValueError(f"load_full_params: the model has no {name}. Its names are those of its state dict.")
        _require_value(name, value)
        tensor = self._tensors[name]
        first = 0
        if value.shape != tensor.shape:
            first = self._rows.get(name, 0)
            fits = value.ndim == tensor.ndim > 0 and value.shape[1:] == tensor.shape[1:]
            if not fits or first + value.shape[0] > tensor.shape[0]:
                behind = f" after {first} rows" if first else ""
                raise ValueError(
                    f"{name} has the shape {tuple(tensor.shape)}, and what came{behind} has {tuple(value.shape)}. Pass "
                    "full tensors, or pieces along dim 0, one after another."
                )
            self._rows[name] = (first + value.shape[0]) % tensor.shape[0]
        self._came.add(id(tensor))
        write_part(tensor, value, first)


def _require_value(name: str, value: Any) -> None:
    """Raise for what is no full tensor with values."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        raise TypeError(
            f"load_full_params: {name} came as a {type(value).__name__}. Pass a full tensor, as of full_tensor()."
        )
    if value.is_meta:
        raise ValueError(
            f"load_full_params: {name} came on the meta device, without values. Every rank needs them: leave out "
            "dst of the stream, or pass src, the rank that has them."
        )


def _from_one(tensors: Iterable[tuple[str, Tensor]], src: int, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Yield on all ranks what rank ``src`` passes, in pieces if it is large."""
    given = _cut(tensors) if this_rank() == src else iter(())
    is_over = False
    while not is_over:
        held: list[tuple[str, Tensor]] = []
        error: Exception | None = None
        try:
            while not is_over and sum(value.nbytes for _, value in held) < _LOADED_BYTES:
                one = next(given, None)
                is_over = one is None
                held += [] if one is None else [one]
        except Exception as raised:
            error, is_over = raised, True
        said: list[Any] = [([(name, value.shape, value.dtype) for name, value in held], is_over)]
        dist.broadcast_object_list(said, src, ranks.group)
        described, is_over = said[0]
        if this_rank() != src:
            held = [(name, torch.empty(shape, dtype=dtype, device=ranks.device)) for name, shape, dtype in described]
        for name, value in held:
            value = value.to(ranks.device)
            send_values(value, ranks.members.index(src), ranks.group)
            yield name, value
        if error is not None:
            raise error


def _cut(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in tensors:
        _require_value(name, value)
        num_pieces = min(-(-value.nbytes // _LOADED_BYTES), value.shape[0] if value.ndim else 1)
        for piece in value.detach().chunk(num_pieces) if num_pieces > 1 else [value.detach()]:
            yield name, piece
