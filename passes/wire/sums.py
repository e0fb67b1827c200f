"""Sum and divide what an all_to_all brought, one part per rank, with an op of ours: on the CPU in rank order.

    received [2 * 4, 3]    rank 0's part | rank 1's part          returned [4, 3]    (one + other) / divisor

Inductor does not generate this kernel: it would make another one for each size of a bucket, a second of the first step
each, and no work would be saved, since what follows are views.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from .spec import define_op

# A block is summed and divided while it is in the processor's cache. Smaller blocks take more calls than that saves:
# two parts of 8 MiB take 1.9 ms in blocks of 128 KiB, 1.3 of 512 and 1.2 of these.
_BLOCK_BYTES = 1 << 20

# From this many received bytes on it matters when what was sent is freed; and how long that takes at most.
_LARGE_BYTES = 2 << 20
_LET_GO_S = 20e-6


def _one_of(received: Tensor, num_parts: int, divisor: float = 1.0) -> Tensor:
    del divisor
    return received.new_empty((received.shape[0] // num_parts, *received.shape[1:]))


def _sum_of_parts_kernel(received: Tensor, num_parts: int, divisor: float) -> Tensor:
    on_cpu = received.device.type == "cpu"
    if on_cpu and received.nbytes >= _LARGE_BYTES:
        _let_other_threads_run()
    summed = _one_of(received, num_parts)
    out, parts = summed.view(-1), received.reshape(num_parts, summed.numel())
    if on_cpu:
        _sum_in_rank_order(parts, out, divisor)
    else:
        _sum_at_once(parts, out, divisor)
    return summed


def _let_other_threads_run() -> None:
    """Sleep for a moment, so that gloo's thread frees what was sent before more is allocated.

    gloo's thread still holds what was sent when it reports that all has arrived. If it shares the core with this one,
    it would often free that much later: the peak of a step whose largest gradient is reduced last was higher by half of
    that gradient. To yield is not enough: the operating system may well choose this thread again.
    """
    time.sleep(_LET_GO_S)


def _sum_in_rank_order(parts: Tensor, out: Tensor, divisor: float) -> None:
    """Sum in rank order. ``torch.sum`` adds up every fourth part by itself, in some columns, of more than four."""
    exact = _exact(out.dtype)
    length = _BLOCK_BYTES // exact.itemsize
    scratch = None if exact == out.dtype else out.new_empty(min(length, out.numel()), dtype=exact)
    for start in range(0, out.numel(), length):
        block = out[start : start + length]
        into = block if scratch is None else scratch[: block.numel()]
        first, *others = parts[:, start : start + length].unbind(0)
        into.copy_(first)
        for other in others:
            into.add_(other)
        if divisor != 1.0:
            into.div_(divisor)
        if into is not block:
            block.copy_(into)


def _sum_at_once(parts: Tensor, out: Tensor, divisor: float) -> None:
    """Sum in one kernel: half precision in single precision, in an order that depends on the shape alone."""
    exact = _exact(out.dtype)
    into = out if divisor == 1.0 or exact == out.dtype else torch.empty_like(out, dtype=exact)
    torch.sum(parts, 0, dtype=into.dtype, out=into)
    if divisor != 1.0:
        torch.div(into, divisor, out=out)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in until the division: half precision in single precision, as fp16 overflows early."""
    return torch.float32 if dtype.itemsize < 4 else dtype


sum_of_parts = define_op(
    "sum_of_parts(Tensor received, int num_parts, float divisor) -> Tensor", _sum_of_parts_kernel, _one_of
)
