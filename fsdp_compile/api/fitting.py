"""Has all ranks raise if one does, and checks that the values for a model fit it on every rank before anything is sent.

Ranks raise together because one that went on would wait for the others.

    state dict of rank 0   --names, shapes-->  the same as the model's, or a ValueError everywhere
    parameters of a rank   --names, shapes-->  the same as those of the rank that sends
    memory                 --marked-->         written by an initialization, or a ValueError everywhere
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.parts import local_of
from ..passes.ir.module_paths import plain_name
from .exchange import this_rank

# Bit patterns that no initialization writes: as floats, they are NaNs that no computation produces.
_MARKS = {2: (torch.int16, 0x7FDE), 4: (torch.int32, 0x7FDEADDE), 8: (torch.int64, 0x7FFDEADDEADDEADD)}


@contextmanager
def raised_on_all(function: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """At the end of the block, raise on every rank if one raised: there its own error, elsewhere a RuntimeError."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    raise_on_all(function, error, group=group)


def raise_on_all(
    function: str, error: Exception | None, where: str = "", group: dist.ProcessGroup | None = None
) -> None:
    """Raise this rank's error, or a RuntimeError that names another rank and its error; return if no rank has one."""
    said = from_all_ranks(None if error is None else f"{where}{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for place, text in enumerate(said):
        if text is not None:
            rank = place if group is None else dist.get_global_rank(group, place)
            raise RuntimeError(f"{function}: rank {rank} raised {text}")


def from_all_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every rank passes as ``mine``, in the order of ranks; without a process group, only this one's."""
    if not dist.is_initialized():
        return [mine]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said


def require_module(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} takes a module, but got {type(model).__name__}.")


def loaded_from_first(model: nn.Module, state_dict: Any) -> dict[str, Any] | None:
    """Return what this rank passes to the loading of rank 0's state dict, None without one; raise on a misfit."""
    is_first, is_given = this_rank() == 0, state_dict is not None
    here = _misfit(model, state_dict) if is_first and is_given else None
    (is_given, misfit), *others = from_all_ranks((is_given, here))
    if misfit is not None:
        raise ValueError(f"materialize: state_dict {misfit}")
    if not is_given:
        for other, (is_given_there, _) in enumerate(others, 1):
            if is_given_there:
                raise ValueError(
                    f"materialize: rank {other} passes state_dict, and rank 0, whose values are sent, does not. Load "
                    "it on rank 0."
                )
        return None
    return _with_tied(model, state_dict) if is_first else {}


def _misfit(model: nn.Module, state_dict: Any) -> str | None:
    if not isinstance(state_dict, Mapping):
        return f"is a {type(state_dict).__name__}. Pass what model.state_dict() of the unsharded model returns."
    expected = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    given = _with_tied(model, state_dict)
    missing = [name for name in expected if name not in given]
    if missing:
        return f"lacks {listed(missing)}. Add what they shall be, or leave state_dict out to initialize all."
    unexpected = [name for name in given if name not in expected]
    if unexpected:
        return f"has {listed(unexpected)}, which the model does not have. Take that out."
    for name, value in given.items():
        tensor = expected[name]
        if not isinstance(tensor, Tensor):
            continue
        if not isinstance(value, Tensor):
            return f"has a {type(value).__name__} for {name}. Pass a tensor."
        if isinstance(value, DTensor):
            return f"has a DTensor for {name}. Pass full tensors, such as value.full_tensor()."
        if value.shape != tensor.shape:
            return f"has shape {tuple(value.shape)} for {name}, whose shape in the model is {tuple(tensor.shape)}."
    return None


def _with_tied(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with all names of each tied weight in it: Hugging Face's files keep only one."""
    given = dict(state_dict)
    value_of: dict[int, Any] = {}
    named = [(plain_name(name), one) for name, one in model.state_dict(keep_vars=True).items()]
    for name, tensor in named:
        if name in given:
            value_of.setdefault(id(tensor), given[name])
    for name, tensor in named:
        if id(tensor) in value_of:
            given.setdefault(name, value_of[id(tensor)])
    return given


def listed(names: Sequence[str], most: int = 5) -> str:
    """Join names for a message. If there are more than ``most``, the message counts the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def require_alike(named: Sequence[tuple[str, Tensor]], src: int, group: Any) -> None:
    """Raise on every rank if one has other tensors than the rank that sends."""
    mine = [(name, tuple(one.shape), str(one.dtype)) for name, one in named]
    of_ranks = from_all_ranks(mine, group)
    expected = of_ranks[dist.get_group_rank(group, src)]
    for index, theirs in enumerate(of_ranks):
        for here, there in itertools.zip_longest(expected, theirs):
            if here != there:
                raise ValueError(
                    f"sync_module_states: rank {src} has {_described(here)}, and rank "
                    f"{dist.get_global_rank(group, index)} has {_described(there)}. Build the same model on every rank."
                )


def _described(tensor: tuple[str, tuple[int, ...], str] | None) -> str:
    return "nothing there" if tensor is None else "{} of shape {} in {}".format(*tensor)


def _as_bits(tensor: Tensor) -> tuple[Tensor, int] | None:
    local = local_of(tensor).detach()
    if type(local) is not Tensor or local.element_size() not in _MARKS or local.is_sparse:
        return None  # one byte has no bit pattern to spare
    dtype, mark = _MARKS[local.element_size()]
    return local.view(dtype), mark


@torch.no_grad()
def mark_unwritten(tensor: Tensor) -> bool:
    """Fill a tensor with a mark that no initialization writes; return whether its dtype has one."""
    bits = _as_bits(tensor)
    if bits is not None:
        bits[0].fill_(bits[1])
    return bits is not None


@torch.no_grad()
def require_written(model: nn.Module, names: Sequence[str]) -> None:
    """Raise on every rank if one of the tensors of these names still has its mark on any rank."""
    now = dict([*model.named_parameters(), *model.named_buffers()])
    mine = []
    for name in names:
        bits = _as_bits(now[name])
        if bits is not None and bits[0].numel() and bool((bits[0] == bits[1]).all()):
            mine.append(name)
    left = list(dict.fromkeys(name for some in from_all_ranks(mine) for name in some))
    if left:
        raise ValueError(
            f"materialize: {listed(left)} got no values: what initializes the modules did not write to them. Write "
            "them in init_fn, or in reset_parameters()."
        )
