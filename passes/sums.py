"""What an all_to_all brought, one part a rank, is summed and divided by an op of ours.

    received [2 * 4, 3]    rank 0's part | rank 1's part          returned [4, 3]    (one + other) / divisor

Not a kernel that Inductor generates: that would be another one for each size of a bucket, a second of the first step
each, and no work would be saved, since what follows are views.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import NAMESPACE, library

library.define("sum_of_parts(Tensor received, int num_parts, float divisor) -> Tensor")
sum_of_parts = torch.ops.fsdpc.sum_of_parts.default

# Summed and divided while it is in the processor's cache: with the parts of a few ranks some hundred kilobytes.
_BLOCK_BYTES = 128 << 10


def _one_of(received: Tensor, num_parts: int) -> Tensor:
    return received.new_empty((received.shape[0] // num_parts, *received.shape[1:]))


@torch.library.register_fake(f"{NAMESPACE}::sum_of_parts")
def _sum_of_parts_fake(received: Tensor, num_parts: int, divisor: float) -> Tensor:
    del divisor
    return _one_of(received, num_parts)


def _sum_of_parts_kernel(received: Tensor, num_parts: int, divisor: float) -> Tensor:
    summed = _one_of(received, num_parts)
    out, parts = summed.view(-1), received.reshape(num_parts, summed.numel())
    # Of half precision the sum is exact until it is divided: fp16 overflows early.
    exact = torch.float32 if summed.dtype.itemsize < 4 else summed.dtype
    length = max(out.numel(), 1) if out.device.type != "cpu" else _BLOCK_BYTES // exact.itemsize
    scratch = None if exact == summed.dtype else out.new_empty(min(length, out.numel()), dtype=exact)
    for start in range(0, out.numel(), length):
        block = out[start : start + length]
        into = block if scratch is None else scratch[: block.numel()]
        torch.sum(parts[:, start : start + length], 0, dtype=exact, out=into)
        if divisor != 1.0:
            into.div_(divisor)
        if into is not block:
            block.copy_(into)
    return summed


library.impl("sum_of_parts", _sum_of_parts_kernel, "CompositeExplicitAutograd")
