"""Run Dynamo and AOTAutograd up to the joint graph, and no further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class _JointGraphIsThere(Exception):
    """Raised to leave AOTAutograd before it cuts, compiles or runs anything."""


def trace_joint_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace a call of ``model`` as Inductor has it traced, and stop when the passes on its joint graph have run.

    ``torch._dynamo.backends.common.aot_autograd``, ``torch._inductor.decomposition.select_decomp_table``,
    ``torch._dynamo.reset``: 2.11 to 2.15.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def stop(*inputs: Any, **settings: Any) -> Any:
        raise _JointGraphIsThere

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        traced: Any = aot_autograd(
            fw_compiler=stop, bw_compiler=stop, partition_fn=stop, decompositions=select_decomp_table()
        )
        try:
            traced(module, inputs)
        except _JointGraphIsThere:
            return stop
        raise RuntimeError("no gradient is asked for in this call, so there is no backward to plan")

    torch._dynamo.reset()  # else it remembers models of other sizes, and after a few of them gives up on this one
    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except _JointGraphIsThere:
        pass
    finally:
        torch._dynamo.reset()
