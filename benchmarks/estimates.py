"""Estimate the time of a node for Inductor's overlap scheduling, whose own estimators need a GPU.

The figures of one CPU core and of the wire are rounded, and the same on every rank by construction. Only their
proportion counts: a scheduler that takes the wire for a hundred times faster than it is would hide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import fx

_FLOPS_PER_S = 9e10  # 44 GFLOP of a step of 28.8M parameters in 0.5 s, one core
_MEMORY_BYTES_PER_S = 1e10
_LATENCY_S = 2e-4

Estimate = Callable[..., "float | None"]


def estimator(wire_bytes_per_s: float) -> Estimate:
    """Return a `custom_runtime_estimation` for `aten_distributed_optimizations`: milliseconds of a node, or None."""

    def milliseconds(node: fx.Node, override_size: int | None = None) -> float | None:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return None
        if node.target.namespace == "_c10d_functional":
            if "wait" in node.target.__name__:
                return None
            size = max(map(_bytes, [node, *node.all_input_nodes])) if override_size is None else override_size
            return 1e3 * (_LATENCY_S + size / wire_bytes_per_s)
        flops = _matmul_flops(node)
        if flops is None and "attention" not in node.target.__name__:
            return None
        moved = sum(map(_bytes, [node, *node.all_input_nodes]))
        return 1e3 * max((flops or 0.0) / _FLOPS_PER_S, moved / _MEMORY_BYTES_PER_S)

    return milliseconds


def _matmul_flops(node: fx.Node) -> float | None:
    operands = {"mm": 0, "bmm": 0, "addmm": 1}
    name = str(node.target).split(".")[1]
    if name not in operands:
        return None
    left = node.args[operands[name]]
    if not isinstance(left, fx.Node):
        return None
    return 2.0 * float(prod(node.meta["val"].shape)) * float(left.meta["val"].shape[-1])


def _bytes(node: fx.Node) -> int:
    values = node.meta.get("val")
    tensors = values if isinstance(values, (list, tuple)) else [values]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
