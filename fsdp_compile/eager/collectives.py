"""How the eager path executes a collective: ours, or the user's own.

The lowering programs execute each op as ``call(op, ...)``; a ``Caller`` is that ``call``. It runs the op as it is, but
replaces a collective by the user's ``AllGather`` or ``ReduceScatter``, gathers into storages that exist already, and
passes reduced gradients to the user's hook. A custom collective has FSDP2's protocol: ``allocate(size, dtype=,
device=)``, and ``(output, input, group[, op], async_op)`` returning a work or None. What is gathered is copied out of
the memory that ``allocate`` returned, as in FSDP2: the user may have one buffer for many gathers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .._torch_compat import process_groups
from ..core.unit import Unit
from ..passes import _torch_compat as passes_compat
from ..passes.wire import lower, streams
from ..passes.wire.collectives import (
    all_gather_members,
    all_gather_members_out,
    c10d,
    gloo_all_gather,
    reduce_scatter_members,
    wait_tensor,
)
from ..passes.wire.copies import copy_to_host, to_host
from ..passes.wire.ledger import ledger, note
from ..passes.wire.packing import pack

_GATHERS = (gloo_all_gather, c10d.all_gather_into_tensor.default)
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


class Caller:
    """Executes the ops of one bucket, with the collectives that the unit's user set."""

    def __init__(self, unit: Unit, outs: Sequence[Tensor | None] = (), num_waits_before_hook: int = 0) -> None:
        self._unit = unit
        self._comms = unit.settings.comms
        self._outs = outs  # for each member of a bucket, the tensor that it is gathered into, if there is one
        self._work: Any = None
        self._copy_out: Callable[[Tensor], Any] | None = None  # of the memory of a custom collective
        self._num_waits_before_hook = num_waits_before_hook

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if op in _GATHERS:
            return _launched(self._gather(op, *args))
        if op is all_gather_members:
            return _launched(self._gather_members(*args))
        if op is c10d.reduce_scatter_tensor.default and self._comms.reduce_scatter is not None:
            return self._custom_reduce_scatter(*args)
        if op is reduce_scatter_members and self._comms.reduce_scatter is not None:
            grads, op_name, num_ranks, group = args
            packed = pack(grads, num_ranks, grads[0].dtype)
            return self._custom_reduce_scatter(packed, op_name, num_ranks, group)
        if op is c10d.all_reduce.default and self._comms.all_reduce is not None:
            return self._comms.all_reduce(args[0])
        if op is wait_tensor:
            return self._wait(args[0])
        if op is to_host:
            reduced, pinned = args
            return copy_to_host(reduced, pinned, wait=False)
        if op is lower.gather_offloaded:
            return lower.launch_beside(self, *args)
        if op is note:
            kind, specs, group = args[:3]
            return note(kind, specs, group, unit=self._unit)
        return lower.run(op, *args, **kwargs)

    def _gather(self, op: Callable[..., Any], packed: Tensor, num_ranks: int, group: str) -> Tensor:
        size = [num_ranks * packed.shape[0], *packed.shape[1:]]
        if self._comms.all_gather is not None:
            return self._custom_gather(packed, [size], num_ranks, group)
        if (not self._outs or self._outs[0] is None) and group not in self._comms.pools:
            return lower.run(op, packed, num_ranks, group)
        out = self._out(0, packed, size)
        self._register([out], group)
        gather = c10d.all_gather_into_tensor_out.default
        passes_compat.call_below_autograd(gather, packed.contiguous(), num_ranks, group, out=out)
        return out

    def _gather_members(self, shards: Sequence[Tensor], num_ranks: int, group: str) -> Any:
        """Gather each member into memory of its own, which is freed by itself."""
        sizes = [[num_ranks * shard.numel()] for shard in shards]
        if self._comms.all_gather is not None:
            return self._custom_gather(pack(shards, 1, shards[0].dtype), sizes, num_ranks, group)
        outs = [self._out(place, shards[0], size) for place, size in enumerate(sizes)]
        self._register(outs, group)
        passes_compat.call_below_autograd(all_gather_members_out, shards, num_ranks, group, outs)
        return outs

    def _out(self, place: int, sent: Tensor, size: list[int]) -> Tensor:
        """Return the tensor that one member of a bucket is gathered into."""
        there = self._outs[place] if self._outs else None
        # Eight-bit floats travel as bytes.
        return sent.new_empty(size) if there is None else there.view(sent.dtype).view(size)

    def _register(self, outs: Sequence[Tensor], group: str) -> None:
        pool = self._comms.pools.get(group)
        if pool is not None:
            for out in outs:
                pool.register(out)

    def _custom_gather(self, packed: Tensor, sizes: Sequence[list[int]], num_ranks: int, group: str) -> Tensor:
        custom = self._comms.all_gather
        output = custom.allocate((num_ranks * packed.numel(),), dtype=packed.dtype, device=packed.device)
        self._work = custom(output, packed.reshape(-1), process_groups.process_group(group), True)
        self._copy_out = functools.partial(self._copied_out, sizes, num_ranks)
        return output

    def _copied_out(self, sizes: Sequence[list[int]], num_ranks: int, gathered: Tensor) -> Any:
        """Copy the members of a bucket, of these sizes, out of what a custom collective gathered."""
        parts = gathered.view(num_ranks, -1).split([math.prod(size) // num_ranks for size in sizes], 1)
        outs = [self._out(place, gathered, size) for place, size in enumerate(sizes)]
        passes_compat.foreach_copy([out.view(num_ranks, -1) for out in outs], [*parts])
        return outs if len(outs) > 1 else outs[0]

    def _custom_reduce_scatter(self, packed: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
        custom = self._comms.reduce_scatter
        size = [packed.shape[0] // num_ranks, *packed.shape[1:]]
        output = custom.allocate((math.prod(size),), dtype=packed.dtype, device=packed.device)
        self._work = custom(output, packed.reshape(-1), process_groups.process_group(group), _REDUCE_OPS[op], True)
        return output.view(size)

    def _wait(self, launched: Any) -> Any:
        if isinstance(launched, list):
            return [lower.run(wait_tensor, one) for one in launched]
        if self._work is None:
            lower.run(wait_tensor, launched)
        else:
            ledger.wait(self._work.wait)
            streams.join(launched)
            self._work = None
        if self._copy_out is not None:
            return self._copy_out(launched)
        self._num_waits_before_hook -= 1
        if self._num_waits_before_hook == 0:
            self.show_to_hook(launched)
        return launched

    def show_to_hook(self, reduced: Tensor) -> None:
        """Let the user's all-reduce hook work on a reduced bucket, in place."""
        if self._comms.all_reduce_hook is None:
            return
        with streams.Aside(self._comms.all_reduce_hook_stream) as aside:
            self._comms.all_reduce_hook(reduced)
        aside.join()


def _launched(written: Any) -> Any:
    """Note on which stream a gather was launched: a user's prefetch and the forward may run on two streams."""
    for one in written if isinstance(written, list) else [written]:
        streams.launched(one)
    return written
