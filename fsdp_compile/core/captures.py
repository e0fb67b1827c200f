"""Refuse captures that a sharded model does not support, when it reads a parameter or begins a forward.

A capture that is to outlive the process, or to run without it, would hold one rank's shards and collectives with the
other ranks. A capture that traces a backward into its forward's graph cannot hold gradients back.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from .._torch_compat import dynamo, inductor
from .accumulation import Mode

_UNSHARDED = (
    "an unsharded model that has loaded the full state dict "
    "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True)"
)


def refuse_traced(fqn: str, mode: Mode) -> None:
    """Raise when Dynamo traces a read for such a capture; return for a compiled step."""
    if dynamo.traces_export():
        raise _not_possible(fqn, "torch.export.export", "export")
    if inductor.freezes_parameters():
        raise RuntimeError(
            f"{fqn} is sharded: torch._inductor.config.freezing would make this rank's shard a constant. Set it to "
            f"False, or freeze {_UNSHARDED}."
        )
    if torch.is_grad_enabled() and dynamo.in_compiled_region():
        # Seen on Inductor: of a sharded model in 2.11 and 2.15, of an unsharded one in 2.15.
        raise RuntimeError(
            f"{fqn} is read in a torch.compiler.nested_compile_region, where gradients of what is gathered are wrong "
            "(in torch 2.15 those of unsharded models too). Compile each block by itself, with block.compile(): "
            "equal blocks share their graphs. Under torch.no_grad a region may stay."
        )
    if dynamo.traces_backward() and mode in ("hold", "resume_over_shards"):
        raise RuntimeError(
            f"{fqn}: torch._dynamo.config.trace_autograd_ops traces backward into the graph of forward, where a "
            "gradient cannot be held back. Set it to False for steps without set_requires_gradient_sync or "
            "set_requires_all_reduce, or let each step synchronize."
        )


def refuse_run(name: str) -> NoReturn:
    """Raise because an eager forward runs for ``torch.export`` or ``torch.jit.trace`` to record it."""
    if torch.compiler.is_exporting():
        raise _not_possible(name, "torch.export.export", "export")
    raise _not_possible(name, "torch.jit.trace", "trace")


def refuse_script(name: str) -> NoReturn:
    """Raise because ``torch.jit.script`` was called."""
    raise _not_possible(name, "torch.jit.script", "script")


def _not_possible(name: str, capture: str, verb: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is sharded: {capture} would record this rank's shards and its collectives with other ranks. "
        f"{verb.capitalize()} {_UNSHARDED}."
    )
